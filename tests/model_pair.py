"""Monolith and pair in one process, with the real executor, memory, scheduler and transfer manager: no HTTP, no router.

The schedulers run in threads, over zmq control sockets and a transport that copies memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.base.clock import MonotonicClock
from pdserve.config import ServerConfig
from pdserve.config.groups import (
    DisaggConfig,
    DisaggMode,
    DType,
    KernelConfig,
    KVCacheDType,
    MemoryConfig,
    ModelConfig,
    ModelImpl,
    ScheduleConfig,
)
from pdserve.config.lora_group import LoraConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.engine.assemble import make_context, make_memory, make_role, make_scheduler
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ConfigError
from pdserve.executor.factory import build_executor
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import AbortRequest, GenerateRequest, RoomAddress, SwitchRole, TokenLogprob
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.role_switcher import OpenedRole, RoleSwitcher
from pdserve.transfer.transports.memory import MemoryHub
from tests.scheduler_threads import ADDRESS, DEADLINE_S, SchedulerThread, Served
from tests.waiting import wait_until

NUM_ROWS = 8
PLAIN = SpeculativeConfig()
NO_LORA = LoraConfig()


class ModelServer(SchedulerThread):
    """A scheduler in a thread, over a model of a checkpoint.

    `max_total_tokens`: tokens of the pool; `num_slots`: state slots, None: by memory. `layerwise`: prefill sends by
    groups of layers while it computes.
    """

    def __init__(
        self,
        path: Path,
        mode: DisaggMode,
        hub: MemoryHub,
        served: Served,
        *,
        max_total_tokens: int,
        chunk: int,
        offload: bool,
        layerwise: bool,
        model_impl: ModelImpl,
        num_slots: int | None,
        dtype: DType,
        speculative: SpeculativeConfig,
        kv_cache_dtype: KVCacheDType = "auto",
        lora: LoraConfig = NO_LORA,
    ) -> None:
        super().__init__(mode)
        config = ServerConfig(
            model=ModelConfig(model_path=str(path), dtype=dtype, model_impl=model_impl),
            memory=MemoryConfig(
                page_size=16,
                max_total_tokens=max_total_tokens,
                max_mamba_cache_size=num_slots,
                kv_cache_dtype=kv_cache_dtype,
            ),
            kernels=KernelConfig(device="cpu", cpu_threads=1),
            schedule=ScheduleConfig(
                chunked_prefill_size=chunk,
                disable_overlap_schedule=True,
                schedule_conservativeness=0.1,
                num_reserved_decode_tokens=8,
            ),
            disagg=DisaggConfig(
                disaggregation_mode=mode,
                disaggregation_decode_retraction_backup="cpu_tensor" if offload and mode == "decode" else "none",
                disaggregation_layerwise_transfer=layerwise,
            ),
            speculative=speculative,
            lora=lora,
        )
        self.built = built = build_executor(config, max_rows=NUM_ROWS)
        executor = built.executor
        self.stack.callback(executor.close)
        memory = make_memory(config, built, self.stack)
        kv = None
        if mode != "null":
            facts = {"model": built.spec.digest(), "weights": executor.weights_fingerprint}
            kv = self.make_kv(
                executor, memory.aux.num_total, hub, served, facts,
                draft_facts=ReplicaEngine(built, executor, None).draft_facts(),
                draft_hidden_bytes=built.draft_hidden_bytes,
            )  # fmt: skip
        clock = MonotonicClock()
        context = make_context(config, built, executor, memory, clock, self.hear)
        opened = OpenedRole(role=make_role(config, context, kv, None), kv=kv, profile_name=mode)
        self.start(make_scheduler(config, context, opened, self.mailbox, RoleSwitcher(_OneRole(), clock, self.hear)))


class _OneRole:
    """Implements `RoleOpener` for servers that keep their role."""

    is_quiet = True

    @property
    def present(self) -> SwitchRole:
        """Refuse."""
        raise ConfigError("the role stays")

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """Refuse."""
        raise ConfigError("the role stays")

    def announce(self) -> None:
        """Do nothing: the facts do not change."""


class ModelPair:
    """A pair, or with `prefill` None a monolith, which answers as `answering`."""

    def __init__(self, prefill: ModelServer | None, answering: ModelServer) -> None:
        self.prefill, self.answering = prefill, answering
        self._num_sent = 0

    @property
    def servers(self) -> tuple[ModelServer, ...]:
        """All servers."""
        return (self.answering,) if self.prefill is None else (self.prefill, self.answering)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        aborted: Mapping[int, int] | None = None,
        loras: Sequence[str | None] | None = None,
    ) -> list[list[int]]:
        """Return greedy tokens of `prompts`, which run at once. `aborted`: by index, tokens after which it is aborted;
        its tokens are those that came. `loras`: see `send`.
        """
        rids = self.send(prompts, num_new, loras)
        self._wait_for(rids, aborted)
        return [self.answering.tokens[rid] for rid in rids]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[CoreSamplingParams],
        logprobs: Logprobs | None = None,
        aborted: Mapping[int, int] | None = None,
    ) -> list[tuple[list[int], list[TokenLogprob]]]:
        """Return the tokens of `prompts`, which run at once, with what `logprobs` asks of each token.

        `samplings`: of each prompt. `aborted`: see `generate`.
        """
        rids = self.send(prompts, 0, samplings=samplings, logprobs=logprobs)
        self._wait_for(rids, aborted)
        return [(self.answering.tokens[rid], self.answering.logprobs[rid]) for rid in rids]

    def _wait_for(self, rids: Sequence[str], aborted: Mapping[int, int] | None) -> None:
        for index, count in (aborted or {}).items():
            rid = rids[index]
            wait_until(lambda rid=rid, count=count: len(self.answering.tokens[rid]) >= count, "tokens", DEADLINE_S)  # type: ignore[misc]
            for server in self.servers:
                server.mailbox.post(AbortRequest(rid=rid))
        for server in self.servers:
            server.wait_for(rids)

    def send(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        loras: Sequence[str | None] | None = None,
        samplings: Sequence[CoreSamplingParams] | None = None,
        logprobs: Logprobs | None = None,
    ) -> list[str]:
        """Send requests to all servers, and return their ids. `loras`: the adapter of each; None: none has one.

        `samplings`: those of each; None: all give `num_new` greedy tokens.
        """
        rids = []
        greedy = CoreSamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
        adapters, each = loras or [None] * len(prompts), samplings or [greedy] * len(prompts)
        for prompt, lora, sampling in zip(prompts, adapters, each, strict=True):
            self._num_sent += 1
            rid = f"r{self._num_sent}"
            rids.append(rid)
            for server in self.servers:
                server.mailbox.post(
                    GenerateRequest(
                        rid=rid,
                        input_ids=list(prompt),
                        lora=lora,
                        sampling=sampling,
                        logprobs=logprobs,
                        room=None
                        if self.prefill is None
                        else RoomAddress(host=ADDRESS[0], port=ADDRESS[1], room=self._num_sent),
                    )
                )
        return rids

    def assert_idle(self) -> None:
        """Everything comes free, and the audit finds nothing."""
        for server in self.servers:
            wait_until(lambda server=server: not server.leaks(), "idle", DEADLINE_S)  # type: ignore[misc]
            assert not server.state().audit, server.state().audit


@contextlib.contextmanager
def running_models(
    path: Path,
    *,
    pair: bool,
    prefill_impl: ModelImpl = "transformers",
    model_impl: ModelImpl = "transformers",
    max_total_tokens: int = 4096,
    chunk: int = 96,
    offload: bool = False,
    layerwise: bool = True,
    dtype: DType = "float32",
    num_slots: int | None = None,
    speculative: SpeculativeConfig = PLAIN,
    prefill_speculative: SpeculativeConfig = PLAIN,
    kv_cache_dtype: KVCacheDType = "auto",
    lora: LoraConfig = NO_LORA,
    prefill_lora: LoraConfig | None = None,
    prefill_path: Path | None = None,
) -> Iterator[ModelPair]:
    """A monolith or a pair over the checkpoint at `path`; `max_total_tokens` is the memory where text is generated.

    `speculative` is for the server that generates text, `prefill_speculative` for the other one; so are `lora` and
    `prefill_lora`, which is `lora` when None. `prefill_path`: the other one's checkpoint, None: the same one.
    """
    served: Served = {}
    hub = MemoryHub()

    def start(
        mode: DisaggMode, tokens: int, impl: ModelImpl, drafter: SpeculativeConfig, adapters: LoraConfig
    ) -> ModelServer:
        own = path if prefill_path is None or mode != "prefill" else prefill_path
        return ModelServer(
            own, mode, hub, served, max_total_tokens=tokens, chunk=chunk, offload=offload, layerwise=layerwise,
            model_impl=impl, num_slots=num_slots, dtype=dtype, speculative=drafter, kv_cache_dtype=kv_cache_dtype,
            lora=adapters,
        )  # fmt: skip

    with contextlib.ExitStack() as stack:
        prefill = start("prefill", 4096, prefill_impl, prefill_speculative, prefill_lora or lora) if pair else None
        if prefill is not None:
            stack.callback(prefill.close)
        answering = start("decode" if pair else "null", max_total_tokens, model_impl, speculative, lora)
        stack.callback(answering.close)
        yield ModelPair(prefill, answering)
