"""Brings a `CostedServer` into the state that a case of `bench_scheduler` measures, and keeps it there.

monolith, decode: `num_running` requests decode, and `num_queued` ones wait for what the state is named after.
prefill: `num_running` prompts are computed and being sent, and every step computes four more, which end at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from benchmarks.costed_servers import (
    FAKE,
    NOWHERE,
    PAGE_TOKENS,
    PREFILL,
    CostedServer,
    Prompts,
    Sizes,
    instant_net,
)
from pdserve.config.schedule_group import SchedulePolicy
from pdserve.memory.layout import pages_for
from pdserve.sim.network import SimNet
from pdserve.transfer.events import Address

RoleName = Literal["null", "prefill", "decode"]
POLICIES: dict[RoleName, bool] = {"null": True, "prefill": True, "decode": False}
"""The roles, and whether they have a queue with a policy."""
PROMPT_TOKENS, MAX_NEW_TOKENS = 64, 400
GROWTH_TOKENS = 224
"""Tokens per running request that a case's steps may add: 5 to warm up, 200 timed, some to spare."""
PREFILL_TOKENS, PREFILL_CHUNK = 512, 2048
CHUNK, ALL_AT_ONCE = 8192, 1 << 30
MAX_STEPS = 20_000


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured. `state` says what the queued requests wait for."""

    role: RoleName
    state: str
    policy: SchedulePolicy
    num_running: int
    num_queued: int


@dataclasses.dataclass
class State:
    """A server in its state. `feed` is called before every step, `check` after it."""

    server: CostedServer
    queues: dict[str, int]
    """What `check` expects."""
    feed: Callable[[], None] = lambda: None

    @staticmethod
    def is_first(role: RoleName, state: str) -> bool:
        """Whether this is the first state of its role, in which numbers of running requests are compared."""
        return next(name for other, name in STATES if other == role) == state

    def check(self) -> None:
        """Raises RuntimeError when the server has left its state."""
        found = self.server.queues()
        if any(found[name] != count for name, count in self.queues.items()):
            raise RuntimeError(f"left its state: {found}, expected {self.queues}")


def monolith(case: Case) -> State:
    """`rows`: all rows are taken. `memory`: there are rows, but not the memory that the running ones will want."""
    num_rows = case.num_running + (0 if case.state == "rows" else 8)
    server = CostedServer("null", _sizes(case, num_rows=num_rows), instant_net())
    prompts = Prompts(PROMPT_TOKENS, MAX_NEW_TOKENS)
    state = State(server, {"num_running_reqs": case.num_running, "num_queue_reqs": 0})
    _post(server, prompts, case.num_running)
    _until(state)
    server.limit(reserved_decode_tokens=0, chunk_tokens=CHUNK)
    if case.state == "memory":
        server.ballast(case.num_running * pages_for(GROWTH_TOKENS, PAGE_TOKENS))
    _post(server, prompts, case.num_queued)
    state.queues["num_queue_reqs"] = case.num_queued
    return state


def decode(case: Case) -> State:
    """`session`: the prefill server does not answer. `memory`: it does, but pages are short. `transfer`: bytes have not
    come.
    """
    net = instant_net()
    sizes = _sizes(case, num_rows=case.num_running, num_aux=max(case.num_running, case.num_queued))
    server = CostedServer("decode", sizes, net)
    prompts = Prompts(PROMPT_TOKENS, MAX_NEW_TOKENS)
    state = State(server, {"num_running_reqs": case.num_running})
    _post(server, prompts, case.num_running)
    _until(state)
    if case.state == "memory":
        server.ballast(case.num_running * pages_for(GROWTH_TOKENS, PAGE_TOKENS))
        server.limit(reserved_decode_tokens=512, chunk_tokens=CHUNK)
    queue = "num_decode_transfer_queue_reqs" if case.state == "transfer" else "num_decode_prealloc_queue_reqs"
    state.queues[queue] = case.num_queued
    if case.state == "transfer":
        peer = CostedServer("prefill", _sizes(case, num_rows=1), net)
        _until(state, _pair(server, peer, prompts, case.num_queued, net))
    else:
        _post(server, prompts, case.num_queued, NOWHERE if case.state == "session" else FAKE)
    return state


def prefill(case: Case) -> State:
    """`receiver`: decode has not told its pages. `step`: they wait for their turn."""
    net = instant_net()
    num_aux = case.num_running + 16
    pages = pages_for(PROMPT_TOKENS, PAGE_TOKENS) * case.num_running + 200 * pages_for(PREFILL_TOKENS, PAGE_TOKENS)
    sizes = Sizes(
        num_rows=case.num_running + 16,
        num_pages=pages,
        max_pages_per_row=64,
        num_aux=num_aux,
        chunk_tokens=ALL_AT_ONCE,
        policy=case.policy,
    )
    server = CostedServer("prefill", sizes, net)
    short, prompts = Prompts(PROMPT_TOKENS, 1), Prompts(PREFILL_TOKENS, 1, first=10_000_000)
    state = State(server, {"num_prefill_inflight_queue_reqs": case.num_running})
    peer = CostedServer("decode", _sizes(case, num_rows=1, num_aux=case.num_running), net)
    _until(state, _pair(server, peer, short, case.num_running, net))
    server.limit(reserved_decode_tokens=0, chunk_tokens=PREFILL_CHUNK)
    per_step = PREFILL_CHUNK // PREFILL_TOKENS
    state.queues = {}
    _post(server, prompts, case.num_queued if case.state == "step" else 0)
    _post(server, prompts, case.num_queued if case.state == "receiver" else 0, NOWHERE)
    state.feed = lambda: _post(server, prompts, per_step)
    return state


STATES: dict[tuple[RoleName, str], Callable[[Case], State]] = {
    ("null", "rows"): monolith,
    ("null", "memory"): monolith,
    ("prefill", "step"): prefill,
    ("prefill", "receiver"): prefill,
    ("decode", "memory"): decode,
    ("decode", "session"): decode,
    ("decode", "transfer"): decode,
}
"""The first of each role is the one in which numbers of running requests are compared."""


def _sizes(case: Case, *, num_rows: int, num_aux: int = 0) -> Sizes:
    """Room for all that the case has."""
    per_request = pages_for(PROMPT_TOKENS + MAX_NEW_TOKENS, PAGE_TOKENS)
    num_pages = per_request * (case.num_running + 8) + pages_for(PROMPT_TOKENS, PAGE_TOKENS) * case.num_queued
    return Sizes(
        num_rows=num_rows,
        num_pages=num_pages,
        max_pages_per_row=per_request,
        num_aux=num_aux,
        chunk_tokens=ALL_AT_ONCE,
        policy=case.policy,
    )


def _post(server: CostedServer, prompts: Prompts, count: int, address: Address = FAKE) -> None:
    for _ in range(count):
        server.mailbox.post(prompts.make(address))


@dataclasses.dataclass(frozen=True)
class Pump:
    """The other half of a pair, and the network between them."""

    net: SimNet
    peer: CostedServer

    def step(self) -> None:
        """Deliver, let the peer answer, deliver."""
        self.net.deliver()
        self.peer.step()
        self.net.deliver()


def _pair(server: CostedServer, peer: CostedServer, prompts: Prompts, count: int, net: SimNet) -> Pump:
    """Post `count` requests to both halves."""
    for _ in range(count):
        request = prompts.make(PREFILL)
        server.mailbox.post(request)
        peer.mailbox.post(request)
    return Pump(net, peer)


def _until(state: State, pump: Pump | None = None) -> None:
    """Step until the queues are as expected. Raises RuntimeError when they do not get there."""
    for _ in range(MAX_STEPS):
        state.server.step()
        if pump is not None:
            pump.step()
        found = state.server.queues()
        if all(found[name] == count for name, count in state.queues.items()):
            return
    raise RuntimeError(f"not there after {MAX_STEPS} steps: {found}, expected {state.queues}")
