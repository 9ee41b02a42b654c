"""Typed wrapper of the untyped `nixl`: receiving agents, and agents that send to one peer. Used by `nixl` only."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.config.transfer_engines import NIXL_HELP, NIXL_MODULES
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.host_info import place_of
from pdserve.transfer.transports.nixl_blocks import Ranges, Span, Spans, SpansByKind, block_indices, choose_block
from pdserve.transfer.transports.receiving import UNREACHABLE_HINT

FIRST_POLL_S = 0.00002
LONGEST_POLL_S = 0.0003
IDLE_SLEEP_US = 100_000
"""Longest sleep of the engine's idle thread, in microseconds; an incoming message wakes it at once."""
MAX_LISTS = 4
NO_CONNECTION = "nixlBackendError"
"""Name of the exception when UCX cannot connect."""


@dataclasses.dataclass(frozen=True, slots=True)
class KindOfMemory:
    """Where a region lies: NIXL's name for the kind, and the device number (0 for host memory)."""

    name: str
    device: int


def kind_of(address: int) -> KindOfMemory:
    """Return the kind of memory at an address of this process."""
    place = place_of(address)
    return KindOfMemory("DRAM", 0) if place.device is None else KindOfMemory("VRAM", place.device)


def is_installed() -> bool:
    """Return whether a module can be loaded. Imports nothing."""
    return any(importlib.util.find_spec(name) is not None for name in NIXL_MODULES)


def load_native() -> Any:
    """Load the engine's module, and send its log lines to our log. Raises ConfigError when no module is installed."""
    debugs = logging.getLogger(__name__).isEnabledFor(logging.DEBUG)
    os.environ.setdefault("NIXL_LOG_LEVEL", "INFO" if debugs else "ERROR")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # both print to stdout, which is reserved for our own output
    raise_exceptions = logging.raiseExceptions
    try:
        native = _import_first(NIXL_MODULES)
    finally:
        logging.raiseExceptions = raise_exceptions
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.setLevel(logging.INFO if debugs else logging.WARNING)
    log.propagate = True
    exit_without_unloading()
    let_idle_threads_sleep(importlib.import_module("._bindings", native.nixl_agent.__module__.rpartition(".")[0]))
    return native


@functools.cache
def exit_without_unloading() -> None:
    """End the process without finalising its shared libraries, which would be its last action.

    The wheel's own copy of libnl-route crashes in its finaliser, and a finished process would end with signal 11.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.on_exit(
            ctypes.cast(libc._exit, ctypes.c_void_p), None
        )  # called with the exit status, after Python has ended


@functools.cache
def let_idle_threads_sleep(bindings: Any) -> None:
    """Make the engine's progress thread sleep while idle.

    The engine supports this, but its Python layer has no such argument and always configures no sleep, which costs
    every server one core. So the configuration class is replaced by one that keeps `IDLE_SLEEP_US`.
    """
    config: Any = bindings.nixlAgentConfig

    class PatientConfig(config):  # type: ignore[misc]
        """The engine's configuration with a fixed `pthrDelay`."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, IDLE_SLEEP_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = PatientConfig


def _import_first(names: Sequence[str]) -> Any:
    errors = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
    raise ConfigError(
        f"transfer backend nixl cannot be loaded ({'; '.join(errors)}); install it: {NIXL_HELP}",
        field="disaggregation_transfer_backend",
    )


class Agent:
    """One NIXL agent with the UCX backend. Its calls are thread-safe."""

    def __init__(self, native: Any, *, answers: bool) -> None:
        """Create an agent. `answers`: its own thread serves writing peers; a sender needs none, since it polls while it
        waits.
        """
        config = native.nixl_agent_config(
            enable_prog_thread=answers, backends=["UCX"], sync_mode=native.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.name = f"pdserve-{uuid.uuid4().hex[:16]}"
        try:
            self.native = native.nixl_agent(self.name, config)
        except Exception as error:
            raise ConfigError(f"nixl does not start: {error!r}", field="disaggregation_transfer_backend") from error

    def register(self, region: MemoryRegion, kind: KindOfMemory) -> None:
        """Register one region. Raises TransferError."""
        failure = None
        try:
            self.native.register_memory([(region.address, region.num_bytes, kind.device, "")], kind.name)
        except Exception as error:
            failure = TransferError(f"nixl refuses {region}: {error!r}", code="bad_region", retryable=False)
        if failure is not None:
            raise failure  # without the engine's traceback, which would keep the agent alive

    def metadata(self) -> bytes:
        """Return the metadata that a sender needs to write here, with the regions registered so far."""
        return bytes(self.native.get_agent_metadata())

    def take_notifications(self) -> list[bytes]:
        """Return the notes of peers' writes since the last call, in the order of each peer."""
        found: dict[str, list[bytes]] = self.native.get_new_notifs()
        return list(itertools.chain.from_iterable(found.values()))

    def destroy(self) -> None:
        """Close all connections and end all threads: no byte moves after this. Takes some tenths of a second."""
        alive = weakref.ref(self.native.agent)
        self.native = None
        if alive() is not None:
            gc.collect()  # for example an exception's traceback
        assert alive() is None, "a reference to the destroyed agent is left"


class NixlReceiver:
    """An agent that peers write to, and its published address; empty before it is published."""

    def __init__(self, native: Any) -> None:
        self.agent = Agent(native, answers=True)
        self.address = ""

    def destroy(self) -> None:
        """See `Agent.destroy`."""
        self.agent.destroy()


class Sender:
    """An agent that writes to one peer, and its prepared lists of blocks. Several threads may call `run`."""

    def __init__(self, native: Any, regions: Sequence[tuple[MemoryRegion, KindOfMemory]]) -> None:
        """Create the agent. `connect` comes before the first `run`."""
        self._agent = Agent(native, answers=False)
        self._regions = regions
        self.peer = ""
        self._here = spans_by_kind(regions)
        self._there: SpansByKind = {}
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, str], dict[int, tuple[Any, Any]]] = {}

    def connect(self, metadata: bytes, there: SpansByKind) -> None:
        """Register our regions, and connect to the peer with these metadata and regions.

        Blocks while the peer's host does not answer.

        Raises:
            TransferError: `metadata` are invalid, or no peer answers.
        """
        for region, kind in self._regions:
            self._agent.register(region, kind)
        failure = None
        try:
            name = self._agent.native.add_remote_agent(metadata)
        except Exception as error:
            if type(error).__name__ == NO_CONNECTION:
                failure = TransferError(f"nixl cannot connect to the peer. {UNREACHABLE_HINT}", code="peer_unreachable")
            else:
                failure = TransferError(f"nixl refuses the peer: {error!r}", code="bad_address", retryable=False)
        if failure is not None:
            raise failure  # without the engine's traceback, which would keep the agent alive
        self.peer = name.decode() if isinstance(name, bytes) else str(name)
        self._there = there

    def run(
        self, ranges: Ranges, kinds: tuple[str, str], note: bytes, given_up: Callable[[], bool], deadline: float
    ) -> str | None:
        """Write `ranges` between memory of these kinds (here, peer), then `note`; sleep until the write ends.

        Returns None when every byte has landed (the engine has flushed the connection), else the failure. `deadline` is
        on the monotonic clock. After a failure bytes may still move until `destroy`.
        """
        native = self._agent.native
        try:
            handle = self._prepare(native, ranges, kinds, note)
        except Exception as error:
            return f"refused: {error!r}"
        try:
            return _await_end(native, handle, given_up, deadline)
        except Exception as error:
            return repr(error)
        finally:
            with contextlib.suppress(Exception):  # an active one that cannot be cancelled ends with the agent
                handle.release()

    def destroy(self) -> None:
        """See `Agent.destroy`. No thread may be in `run`."""
        self._lists.clear()  # the handles release themselves; a name for one here would keep the agent
        self._agent.destroy()

    def _prepare(self, native: Any, ranges: Ranges, kinds: tuple[str, str], note: bytes) -> Any:
        here, there = self._here[kinds[0]], self._there[kinds[1]]
        with self._lock:
            lists = self._lists.setdefault(kinds, {})
            block = choose_block(ranges, here, there, tuple(lists), MAX_LISTS)
            if block is not None and block not in lists:
                lists[block] = (
                    native.prep_xfer_dlist("NIXL_INIT_AGENT", here.blocks(block).astype("u8"), kinds[0]),
                    native.prep_xfer_dlist(self.peer, there.blocks(block).astype("u8"), kinds[1]),
                )
        if block is None:
            local = native.get_xfer_descs(here.rows(ranges.sources, ranges.lengths).astype("u8"), kinds[0])
            remote = native.get_xfer_descs(there.rows(ranges.destinations, ranges.lengths).astype("u8"), kinds[1])
            return native.initialize_xfer("WRITE", local, remote, self.peer, notif_msg=note)
        from_blocks, to_blocks = block_indices(ranges, here, there, block)
        return native.make_prepped_xfer(
            "WRITE", lists[block][0], from_blocks, lists[block][1], to_blocks, notif_msg=note
        )


def spans_by_kind(regions: Sequence[tuple[MemoryRegion, KindOfMemory]]) -> SpansByKind:
    """Group regions by kind of memory."""
    spans: dict[str, list[Span]] = {}
    for region, kind in regions:
        spans.setdefault(kind.name, []).append(Span(region.address, region.num_bytes, kind.device))
    return {name: Spans(found) for name, found in spans.items()}


def _await_end(native: Any, handle: Any, given_up: Callable[[], bool], deadline: float) -> str | None:
    state, poll_s = native.transfer(handle), FIRST_POLL_S
    while state == "PROC":
        if given_up():
            return "another write on the link failed"
        if time.monotonic() > deadline:
            return "no end within the time limit"
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, LONGEST_POLL_S)
        state = native.check_xfer_state(handle)
    return None if state == "DONE" else f"the engine reports {state}"
