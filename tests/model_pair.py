"""Monolith and pair in one process, with the real executor, memory, scheduler and transfer manager: no HTTP, no router.

The schedulers run in threads, over zmq control sockets and a transport that copies memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import SINGLE
from pdserve.config import ServerConfig
from pdserve.config.groups import DisaggConfig, DisaggMode, KernelConfig, MemoryConfig, ModelConfig, ScheduleConfig
from pdserve.engine.assemble import make_memory, make_scheduler
from pdserve.executor.factory import build_executor
from pdserve.protocol.messages import (
    AbortRequest,
    EngineState,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    RoomAddress,
    Shutdown,
    StateQuery,
    StateReply,
    ToApi,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.scheduler import Event
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address, PeerListens, PrefillFound
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from tests.waiting import wait_until

DEADLINE_S = 120.0
NUM_ROWS = 8
ADDRESS: Address = ("prefill", 1)
Served = dict[Address, tuple[str, str]]


class _LocalDirectory:
    """The prefill server is where `served` says, and listens."""

    def __init__(self, served: Served, post: Callable[[Event], None]) -> None:
        self._served, self._post = served, post

    def find(self, address: Address) -> None:
        self._post(PrefillFound(address, (self._served[address],)))

    def probe(self, instance: str, endpoint: str) -> None:
        self._post(PeerListens(instance))


class ModelServer:
    """One scheduler in a thread, over a model of a checkpoint.

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
        model_impl: str,
        num_slots: int | None,
        dtype: str = "float32",
    ) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finish: dict[str, FinishReason] = {}
        self._states: list[EngineState] = []
        self._heard = threading.Condition()
        self._stack = contextlib.ExitStack()
        config = ServerConfig(
            model=ModelConfig(model_path=str(path), dtype=dtype, model_impl=model_impl),  # type: ignore[arg-type]
            memory=MemoryConfig(page_size=16, max_total_tokens=max_total_tokens, max_mamba_cache_size=num_slots),
            kernels=KernelConfig(device="cpu", cpu_threads=1),
            schedule=ScheduleConfig(
                chunked_prefill_size=chunk,
                disable_overlap_schedule=True,
                schedule_conservativeness=0.1,
                num_reserved_decode_tokens=8,
            ),
            disagg=DisaggConfig(
                disaggregation_mode=mode,
                disaggregation_decode_enable_offload_kvcache=offload and mode == "decode",
                disaggregation_layerwise_transfer=layerwise,
            ),
        )
        self.built = build_executor(config, max_rows=NUM_ROWS)
        self._stack.callback(self.built.executor.close)
        memory = make_memory(config, self.built, self._stack)
        self.mailbox: Mailbox[Event] = Mailbox()
        clock = MonotonicClock()
        kv = None if mode == "null" else self._transfer(mode, memory.aux.num_total, hub, served, clock)
        scheduler = make_scheduler(
            config,
            self.built,
            self.built.executor,
            memory,
            kv,
            None,
            self.mailbox,
            clock,
            self._hear,
            profile_name=mode,
        )
        self._thread = threading.Thread(target=scheduler.run, name=mode, daemon=True)
        self._thread.start()

    def _transfer(self, mode: str, num_aux: int, hub: MemoryHub, served: Served, clock: MonotonicClock) -> KVManager:
        executor = self.built.executor
        aux = MetadataBuffers(num_aux, shareable=False)
        transport = MemoryTransport(hub)
        transport.register([MemoryRegion(*buffer) for buffer in (*executor.buffers, aux.buffer)])
        socket = ZmqControlSocket("127.0.0.1")
        self.mailbox.attach(socket)
        workers = CopyWorkers(transport, self.mailbox.post, num_threads=2)
        for close in (transport.close, workers.close, socket.close):
            self._stack.callback(close)
        args = KVArgs(
            instance=mode,
            layout=executor.layout,
            ranks=(rank_memory(executor.layout, SINGLE, "", executor.buffers),),
            aux=aux,
            facts={"model": self.built.spec.digest(), "weights": executor.weights_fingerprint},
            token="t",
            secret=mode,
        )
        if mode == "prefill":
            served[ADDRESS] = (mode, socket.endpoint)
        return KVManager(args, socket, workers, _LocalDirectory(served, self.mailbox.post), clock, TransferTimes())

    def state(self) -> EngineState:
        """Ask, and wait for the answer."""
        with self._heard:
            count = len(self._states)
            self.mailbox.post(StateQuery(query_id="q"))
            assert self._heard.wait_for(lambda: len(self._states) > count, DEADLINE_S), "the scheduler is dead"
            return self._states[-1]

    def wait_for(self, rids: Sequence[str]) -> None:
        """Until these requests have ended."""
        with self._heard:
            ended = self._heard.wait_for(lambda: all(rid in self.finish for rid in rids), DEADLINE_S)
        assert ended, f"{len(self.finish)} of {len(rids)} requests have ended"

    def leaks(self) -> dict[str, int]:
        """Memory that is not free, and rooms that live, by name."""
        memory = self.state().memory
        names = [name.removesuffix("_total") for name in memory if name.endswith("_total")]
        lost = {name: memory[f"{name}_total"] - memory[f"{name}_free"] for name in names}
        lost["pages"] -= memory["pages_evictable"]
        lost["slots"] = lost.get("slots", 0) - memory.get("slots_cached", 0)
        lost |= {name: memory[name] for name in ("rooms_live", "reqs_live", "keys_writing") if name in memory}
        return {name: count for name, count in lost.items() if count}

    def close(self) -> None:
        """End the scheduler and free what it has."""
        self.mailbox.post(Shutdown())
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._stack.close()

    def _hear(self, message: ToApi) -> None:
        with self._heard:
            if isinstance(message, StateReply):
                self._states.append(message.state)
            elif isinstance(message, OutputBatch):
                for output in message.outputs:
                    self.tokens[output.rid] += output.token_ids
                    if output.finish is not None:
                        self.finish[output.rid] = output.finish
            self._heard.notify_all()


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
        self, prompts: Sequence[Sequence[int]], num_new: int, aborted: Mapping[int, int] | None = None
    ) -> list[list[int]]:
        """Return greedy tokens of `prompts`, which run at once. `aborted`: by index, tokens after which it is aborted;
        its tokens are those that came.
        """
        rids = []
        for prompt in prompts:
            self._num_sent += 1
            rid = f"r{self._num_sent}"
            rids.append(rid)
            for server in self.servers:
                server.mailbox.post(
                    GenerateRequest(
                        rid=rid,
                        input_ids=list(prompt),
                        sampling=CoreSamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True),
                        room=None
                        if self.prefill is None
                        else RoomAddress(host=ADDRESS[0], port=ADDRESS[1], room=self._num_sent),
                    )
                )
        for index, count in (aborted or {}).items():
            rid = rids[index]
            wait_until(lambda rid=rid, count=count: len(self.answering.tokens[rid]) >= count, "tokens", DEADLINE_S)  # type: ignore[misc]
            for server in self.servers:
                server.mailbox.post(AbortRequest(rid=rid))
        for server in self.servers:
            server.wait_for(rids)
        return [self.answering.tokens[rid] for rid in rids]

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
    prefill_impl: str = "transformers",
    model_impl: str = "transformers",
    max_total_tokens: int = 4096,
    chunk: int = 96,
    offload: bool = False,
    layerwise: bool = True,
    dtype: str = "float32",
    num_slots: int | None = None,
) -> Iterator[ModelPair]:
    """A monolith or a pair over the checkpoint at `path`; `max_total_tokens` is the memory where text is generated."""
    served: Served = {}
    hub = MemoryHub()

    def start(mode: DisaggMode, tokens: int, impl: str) -> ModelServer:
        return ModelServer(
            path, mode, hub, served, max_total_tokens=tokens, chunk=chunk, offload=offload, layerwise=layerwise,
            model_impl=impl, num_slots=num_slots, dtype=dtype,
        )  # fmt: skip

    with contextlib.ExitStack() as stack:
        prefill = start("prefill", 4096, prefill_impl) if pair else None
        if prefill is not None:
            stack.callback(prefill.close)
        answering = start("decode" if pair else "null", max_total_tokens, model_impl)
        stack.callback(answering.close)
        yield ModelPair(prefill, answering)
