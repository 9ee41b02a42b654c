"""A server over a scripted scheduler: real application, real channel codec, real tokenizer, made-up tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pdserve.config.access_group import AccessConfig
from pdserve.config.embedding_group import EmbeddingConfig
from pdserve.config.groups import (
    DisaggConfig,
    DisaggMode,
    LoadFailurePolicy,
    ModelConfig,
    ObserveConfig,
    ServerConfig,
    ServingConfig,
)
from pdserve.config.lora_group import LoraConfig
from pdserve.config.pairing_group import PairingConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.errors import EngineDeadError, GrammarError
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.compile_jobs import Check, CompileResult, compile_one
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.observe.metrics import ServerMetrics
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.channel import MemoryApiChannel, memory_channel_pair
from pdserve.protocol.engine_memory import GetWeights, MemoryCommand, ReleaseMemory, ResumeMemory
from pdserve.protocol.engine_state import EngineReady, EngineState, PeerLoad, WaitsFor
from pdserve.protocol.failure import Failure
from pdserve.protocol.hidden_states import HiddenStates, Pooling
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.messages import (
    AbortRequest,
    ClearStorage,
    Command,
    CommandReply,
    ContinueGeneration,
    DeclarePeerDead,
    EndMigration,
    EngineCoreOutput,
    ExtractReply,
    ExtractRequest,
    FinishReason,
    FlushCache,
    GenerateRequest,
    KVPart,
    LoadLora,
    MigrateOut,
    MigrationCommand,
    OutputBatch,
    PauseGeneration,
    RequestTiming,
    SendPrefix,
    Shutdown,
    SpeculationStats,
    StartProfile,
    StateQuery,
    StateReply,
    StopProfile,
    SwitchRole,
    TokenLogprob,
    UnloadLora,
)
from pdserve.protocol.weights import (
    EndWeightsUpdate,
    HoldRequests,
    InstallWeights,
    JoinGroup,
    LeaveGroup,
    PrepareTensors,
    PrepareWeights,
    WeightsCommand,
)
from pdserve.server.app import create_app, make_metrics
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.engine_client.live_requests import NewPrefill, WaitingRequests
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.request.constraints import GrammarCheck
from pdserve.server.text.tokenizer import Tokenizer
from tests.waiting import until

OPEN = AccessConfig()
NO_EMBEDDING = EmbeddingConfig()
NO_LORA = LoraConfig()
NO_PAIRING = PairingConfig()
EOS = 0
CONTEXT = 128
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def tiny_hf_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so that characters fall apart into several."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(["hello world the quick brown fox"] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


def tiny_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of `tiny_hf_tokenizer`. `chat_template` replaces its own."""
    return Tokenizer(tiny_hf_tokenizer(), chat_template)


def rust_tokenizer(tokenizer: Tokenizer) -> RustTokenizer:
    """The library's tokenizer with the same vocabulary."""
    return RustTokenizer.from_str(tokenizer.as_json())


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`."""
    ids: list[int] = rust_tokenizer(tokenizer).encode(text).ids
    return ids


VOCAB = 320
"""Larger than the tokenizer's, as padded checkpoints are."""


def prompt_logprobs(request: GenerateRequest, logprob_params: Logprobs) -> PromptLogprobs:
    """Made up: -p of the token at position p, second best; -0.5 of the best ones, from token 2 on; -0.75 of picks."""
    start = (logprob_params.prompt_from or 0) + 1
    count = len(request.input_ids) - start
    own = -np.arange(start, start + count, dtype=np.float32)
    top_ids = np.tile(np.arange(2, 2 + logprob_params.top, dtype=np.int32), (count, 1))
    picked = np.full((count, len(logprob_params.token_ids)), -0.75, dtype=np.float32)
    ranks = np.full(count, 2, dtype=np.int32)
    return PromptLogprobs.pack(start, own, ranks, top_ids, np.full(top_ids.shape, -0.5, dtype=np.float32), picked)


class ScriptedScheduler:
    """Answers each request with `script(request)`: token ids (then EOS), or a finish reason at once.

    `hold` keeps requests open after their tokens. All seen messages are in `requests` and `aborts`.
    """

    def __init__(self, channel: Any, pooling: Pooling | None = None) -> None:
        self._channel = channel
        self.pooling = pooling
        self.script: Callable[[GenerateRequest], list[int] | FinishReason] = lambda request: [73, 74]
        self.hold = False
        self.silent_queries = False
        self.busy = False
        self.num_flushes = 0
        self.cached: Callable[[GenerateRequest], int] = lambda request: 3
        self.cached_details: Callable[[GenerateRequest], CachedTokensDetails | None] = lambda request: None
        self.tokens_per_output = 1
        self.peers: list[PeerLoad] = []
        self.probe_waits_for: WaitsFor = "peer"
        """What each probe that is held waits for."""
        self.queues: dict[str, int] = {}
        self.progress = self.progress_per_state = 0
        self.timing = RequestTiming(queue_s=0.5, kv_bytes=1024, kv_pages=2)
        self.logprob: Callable[[int], float] = lambda token_id: -0.25
        """Log probability of an output token."""
        self.takes_embeds = True
        self.first_hidden = 0
        """Position of the first hidden state that is sent."""
        self.picked: Callable[[GenerateRequest], list[float]] = lambda request: (
            [] if request.logprobs is None else [-0.75] * len(request.logprobs.token_ids)
        )
        """Log probabilities of the `token_ids` that a request asks for."""
        self.speculation: SpeculationStats | None = None
        """Sent with the last output of each request."""
        self.counters: dict[str, float] = {}
        self.facts: dict[str, float] = {}
        """Counters and facts of the state, beside those of all states."""
        self.requests: list[GenerateRequest] = []
        self.aborts: list[AbortRequest] = []
        self.commands: list[Command] = []
        self.on_migration: Callable[[MigrationCommand], CommandReply] = lambda command: CommandReply(
            query_id=command.query_id, ok=False, message="refused"
        )
        self.on_weights: Callable[[WeightsCommand | MemoryCommand], CommandReply] = lambda command: CommandReply(
            query_id=command.query_id, ok=True, message="ok"
        )
        """Answers commands about weights and memory."""
        self.switches: list[SwitchRole] = []
        self.on_switch: Callable[[SwitchRole], str | None] | None = lambda command: None
        """Why the scheduler keeps its role, None: it takes the new one. None instead of a function: it does not answer.
        """
        self.memory: dict[str, int] = {}
        """Counts of the state, beside those of all states."""
        self.shutdown = False
        self.kv: list[bytes] = []
        """KV of each group of an extracted request: two pages."""
        self.kv_parts: list[KVPart] = []
        self._held: dict[str, GenerateRequest] = {}
        self._answering = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._end = False

    def start(self) -> None:
        self._channel.send(self.ready())
        self._thread.start()

    def stop(self) -> None:
        self._end = True
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._end:
            message = self._channel.recv(0.01)
            match message:
                case GenerateRequest():
                    self.requests.append(message)
                    with self._answering:
                        self._answer(message)
                case AbortRequest():
                    self.aborts.append(message)
                    held = self._held.pop(message.rid or "", None)
                    if held is not None and message.reason == "abort":
                        finish = FinishReason(type="abort", message="aborted by request", status_code=499)
                        self._send(EngineCoreOutput(rid=held.rid, token_ids=[], finish=finish))
                case StateQuery() if not self.silent_queries:
                    self._channel.send(StateReply(query_id=message.query_id, state=self.state()))
                case FlushCache():
                    self.num_flushes += 1
                    text = "requests are running" if self.busy else "flushed"
                    self._channel.send(CommandReply(query_id=message.query_id, ok=not self.busy, message=text))
                case (
                    PauseGeneration()
                    | ContinueGeneration()
                    | StartProfile()
                    | StopProfile()
                    | DeclarePeerDead()
                    | LoadLora()
                    | UnloadLora()
                    | ClearStorage()
                ):
                    self.commands.append(message)
                    self._channel.send(CommandReply(query_id=message.query_id, ok=not self.busy, message="obeyed"))
                case MigrateOut() | EndMigration() | SendPrefix():
                    self.commands.append(message)
                    self._channel.send(self.on_migration(message))
                case (
                    GetWeights()
                    | ReleaseMemory()
                    | ResumeMemory()
                    | PrepareWeights()
                    | PrepareTensors()
                    | JoinGroup()
                    | LeaveGroup()
                    | HoldRequests()
                    | InstallWeights()
                    | EndWeightsUpdate()
                ):
                    self.commands.append(message)
                    self._channel.send(self.on_weights(message))
                case ExtractRequest():
                    self._extract(message)
                case KVPart():
                    self.kv_parts.append(message)
                case SwitchRole():
                    self._switch(message)
                case Shutdown():
                    self.shutdown = True

    def ready(self) -> EngineReady:
        return EngineReady(
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            vocab_size=VOCAB,
            context_length=CONTEXT,
            max_total_tokens=1024,
            eos_token_ids=[EOS],
            facts={"dtype": "float32", "weights_fingerprint": "w", "layout_fingerprint": "l", "page_tokens": 4},
            hidden_size=4,
            pooling=self.pooling,
            takes_embeds=self.takes_embeds,
        )

    def announce(self, **facts: Any) -> None:
        """Send new facts, as at an update of the weights."""
        ready = self.ready()
        self._channel.send(msgspec.structs.replace(ready, facts=ready.facts | facts))

    def _switch(self, command: SwitchRole) -> None:
        """As the scheduler: the role in which it is then is announced before the reply."""
        self.switches.append(command)
        if self.on_switch is None:
            return
        refusal = self.on_switch(command)
        self._channel.send(self.ready())
        self._channel.send(CommandReply(query_id=command.query_id, ok=refusal is None, message=refusal or "ok"))

    def state(self) -> EngineState:
        self.progress += self.progress_per_state
        return EngineState(
            queues={"waiting": 1, "num_prefill_bootstrap_queue_reqs": 2, "num_retracted_reqs": 4} | self.queues,
            memory={"pages_total": 64, "pages_free": 60, "pages_cached": 3, "rows_free": 8, "rooms_live": 1}
            | self.memory,
            counters={
                "kv_transfer_bytes": 5.0,
                "transfer_failed_reqs": 1.0,
                "control_frames_refused": 2.0,
                "requests_retracted": 6.0,
                "offloaded_pages": 7.0,
            }
            | self.counters,
            facts={"transport": "fake", "new_token_ratio": 0.5, **self.facts},
            audit=["page 7 has no owner", "room 9 has two"],
            num_running_reqs=len(self._held),
            num_queue_reqs=1,
            num_used_tokens=42,
            max_total_tokens=1024,
            peers=self.peers,
            progress=self.progress,
            probes={rid: self.probe_waits_for for rid, one in self._held.items() if one.probe},
        )

    def _extract(self, message: ExtractRequest) -> None:
        """Only held requests are live. Their KV is `kv`."""
        held = self._held.get(message.rid)
        if held is None:
            failure = Failure(code="not_live", message="the request has ended", status=404)
            self._channel.send(ExtractReply(query_id=message.query_id, rid=message.rid, failure=failure))
            return
        pages = tuple(2 for _ in self.kv) if message.with_kv else ()
        for group, data in enumerate(self.kv[: len(pages)]):
            for part in (data[:5], data[5:]):
                self._channel.send(KVPart(rid=message.rid, group=group, data=part))
        script = self.script(held)
        assert isinstance(script, list)
        if not message.keep:
            del self._held[message.rid]
            self._send(self._output(held, [], FinishReason(type="suspended", message="stopped")))
        kv_tokens = 4 if pages else 0
        reply = ExtractReply(query_id=message.query_id, rid=held.rid, output_ids=script, kv_tokens=kv_tokens)
        self._channel.send(msgspec.structs.replace(reply, cached_tokens=3, kv_pages=pages))

    def _send(self, *outputs: EngineCoreOutput) -> None:
        self._channel.send(OutputBatch(outputs=list(outputs)))

    def refuse(self, request: GenerateRequest, finish: FinishReason) -> None:
        """End a held request from the outside."""
        del self._held[request.rid]
        self._send(EngineCoreOutput(rid=request.rid, token_ids=[], finish=finish))

    def finish(self, request: GenerateRequest) -> None:
        """End a held request as it would end by itself, behind the last of its tokens."""
        with self._answering:
            del self._held[request.rid]
        self._send(self._output(request, [EOS], FinishReason(type="stop", matched=EOS), self.timing))

    def _answer(self, request: GenerateRequest) -> None:
        script = self.script(request)
        if isinstance(script, FinishReason):
            self._send(EngineCoreOutput(rid=request.rid, token_ids=[], finish=script))
            return
        logprob_params = request.logprobs
        if (
            logprob_params is not None
            and logprob_params.prompt_from is not None
            and logprob_params.prompt_from + 1 < len(request.input_ids)
        ):
            for part in prompt_logprobs(request, logprob_params).parts(64):
                self._send(EngineCoreOutput(rid=request.rid, token_ids=[], prompt_logprobs=part))
        num_output = min(len(script), request.sampling.max_new_tokens)
        for states in _hidden_states(request, num_output, self.first_hidden):
            self._send(EngineCoreOutput(rid=request.rid, token_ids=[], hidden=states))
        num_prior = len(request.prior_output_ids)
        script, limit = script[num_prior:], request.sampling.max_new_tokens - num_prior
        if limit == 0:
            self._send(self._output(request, [], FinishReason(type="length", length=0)))
            return
        tokens = [*script, EOS][:limit]
        size = self.tokens_per_output
        pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        hold = self.hold
        if hold:
            self._held[request.rid] = request  # before its tokens: a test may refuse it once it sees them
        for piece in pieces[:-1]:
            self._send(self._output(request, piece, timing=self.timing if piece is pieces[0] else None))
        if hold:
            return
        if tokens[-1] == EOS:
            finish = FinishReason(type="stop", matched=EOS)
        else:
            finish = FinishReason(type="length", length=num_prior + len(tokens))
        self._send(self._output(request, pieces[-1], finish, self.timing))

    def _output(
        self,
        request: GenerateRequest,
        tokens: list[int],
        finish: FinishReason | None = None,
        timing: RequestTiming | None = None,
    ) -> EngineCoreOutput:
        logprobs = None
        logprob_params = request.logprobs
        if logprob_params is not None and logprob_params.output:
            tops = [(token, -0.5) for token in range(2, 2 + logprob_params.top)]
            picked = self.picked(request)
            logprobs = [TokenLogprob(self.logprob(token_id), tops, picked) for token_id in tokens]
        return EngineCoreOutput(
            rid=request.rid,
            token_ids=tokens,
            logprobs=logprobs,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            cached_tokens=self.cached(request),
            cached_details=self.cached_details(request),
            timing=timing,
            speculation=None if finish is None else self.speculation,
        )


def _hidden_states(request: GenerateRequest, num_output: int, first: int) -> Iterator[HiddenStates]:
    """Made up: those of position p are p, 1, 0, 0; in parts of three tokens, from position `first` on."""
    if request.hidden is None:
        return
    start, end = max(first, request.hidden.start), len(request.input_ids) + max(0, num_output - 1)
    for first in range(start, end, 3):
        some = range(first, min(first + 3, end))
        rows = np.array([[position, 1, 0, 0] for position in some], dtype=np.float32)
        yield HiddenStates.pack(first, len(some), rows.sum(0, keepdims=True) if request.hidden.pooled else rows)


class CompileHere:
    """A `Compiler` without a process: for tests that bring harmless grammars."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None

    async def load(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> CompileResult:
        try:
            self._vocabulary = Vocabulary(tokenizer_json, vocab_size, eos_token_ids)
        except GrammarError as error:
            return CompileResult(job=0, reason="refused", message=str(error))
        return CompileResult(job=0)

    async def check(self, text: Check, client: str) -> CompileResult:
        return compile_one(text, JsonRules(), self._vocabulary)

    async def close(self) -> None:
        pass


@dataclasses.dataclass
class Bench:
    """One server under test; `http` speaks to it without a socket."""

    config: ServerConfig
    scheduler: ScriptedScheduler
    client: EngineClient
    channel: MemoryApiChannel
    waiting: WaitingRequests
    app: Any
    http: httpx.AsyncClient
    metrics: ServerMetrics
    drain_gate: DrainGate

    def die(self) -> None:
        self.client.fail(EngineDeadError("killed"))


def make_config(
    mode: DisaggMode = "null",
    *,
    observe: Mapping[str, Any] | None = None,
    access: AccessConfig = OPEN,
    backend: str = "mooncake",
    allowed_prefill: str | None = None,
    bootstrap_port: int | None = None,
    schedule: ScheduleConfig | None = None,
    lora: LoraConfig = NO_LORA,
    embedding: EmbeddingConfig = NO_EMBEDDING,
    pairing: PairingConfig = NO_PAIRING,
    load_failure_policy: LoadFailurePolicy = "fail",
    **serving: Any,
) -> ServerConfig:
    return ServerConfig(
        access=access,
        schedule=schedule or ScheduleConfig(),
        lora=lora,
        embedding=embedding,
        pairing=pairing,
        observe=ObserveConfig(**(observe or {})),
        model=ModelConfig(model_path="/models/tiny", served_model_name="tiny"),
        disagg=DisaggConfig(
            disaggregation_mode=mode,
            disaggregation_transfer_backend=backend,
            disaggregation_allowed_prefill=allowed_prefill,
            disaggregation_bootstrap_port=bootstrap_port,
            disaggregation_load_failure_policy=load_failure_policy,
        ),
        serving=ServingConfig(port=0, **serving),
    )


@contextlib.asynccontextmanager
async def bench(
    tokenizer: Tokenizer | None,
    mode: DisaggMode = "null",
    *,
    ready: bool = True,
    registered: Callable[[], bool] = lambda: True,
    observe: Mapping[str, Any] | None = None,
    access: AccessConfig = OPEN,
    backend: str = "mooncake",
    allowed_prefill: str | None = None,
    bootstrap_port: int | None = None,
    control_token: str = "",
    schedule: ScheduleConfig | None = None,
    lora: LoraConfig = NO_LORA,
    embedding: EmbeddingConfig = NO_EMBEDDING,
    pairing: PairingConfig = NO_PAIRING,
    load_failure_policy: LoadFailurePolicy = "fail",
    **serving: Any,
) -> AsyncIterator[Bench]:
    """A running server; at its end no stream is left in it. Without `tokenizer` it takes token ids only."""
    config = make_config(
        mode,
        observe=observe,
        access=access,
        backend=backend,
        allowed_prefill=allowed_prefill,
        bootstrap_port=bootstrap_port,
        schedule=schedule,
        lora=lora,
        embedding=embedding,
        pairing=pairing,
        load_failure_policy=load_failure_policy,
        **serving,
    )
    api, low = memory_channel_pair()
    scheduler = ScriptedScheduler(low, Pooling() if config.embedding.is_embedding else None)
    metrics = make_metrics(config)
    waiting = WaitingRequests.of(config)
    assert waiting is not None
    metrics.show(waiting.counters)
    client = EngineClient(
        api,
        tokenizer,
        metrics,
        match_stops=mode != "prefill",
        new_prefill=NewPrefill.of(config),
        waiting=waiting,
    )
    grammars = GrammarCheck(config.grammar, tokenizer, CompileHere())
    drain_gate = DrainGate(mode)
    app = create_app(
        config, client, tokenizer, metrics, registered=registered, grammars=grammars, drain_gate=drain_gate,
        control_token=control_token,
    )  # fmt: skip
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20.0) as http,
    ):
        if ready:
            scheduler.start()
            await client.wait_ready(5.0)
        try:
            yield Bench(config, scheduler, client, api, waiting, app, http, metrics, drain_gate)
            await until(lambda: client.num_live == 0)
        finally:
            await client.stop()
            if ready:
                scheduler.stop()


def sse(text: str) -> list[str]:
    """The data of each event."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]
