"""A follower's process: loads its part of the model, then computes and copies what the leader orders, until it stops.

    thread "ranks"   takes orders: those to copy are obeyed at once, those to compute are queued
    main thread      loads, then computes (`computing`)
    "kv-copy-0" ...  copy (`copying`), in prefill and decode servers

`run_follower` is called by the process that the launcher starts for each rank but the first.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from pdserve.base.parallel import Place
from pdserve.base.process import die_with_parent
from pdserve.config.groups import ServerConfig
from pdserve.errors import PdserveError, RankError
from pdserve.executor.factory import Built, build_executor, join_replica
from pdserve.executor.kv_hasher import PoolHasher
from pdserve.model.parallel import Parallel
from pdserve.ranks.computing import Computer, Orders
from pdserve.ranks.copying import Copier
from pdserve.ranks.links import Links, end_process
from pdserve.ranks.meeting import Facts, Introduction, facts_of, own_host, rank_names, secret_of, transfer_host
from pdserve.ranks.orders import (
    Agreed,
    Alive,
    Cancel,
    Expect,
    Forget,
    Order,
    RankFailed,
    RankReady,
    Report,
    Sized,
    Stop,
    Submit,
    Trouble,
    order_codec,
    report_codec,
)
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S, open_stores
from pdserve.ranks.steps import StepLog
from pdserve.ranks.watch import LinkTimes
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import MemoryRegion, Transport
from pdserve.transfer.wire import RankMemory, Region
from pdserve.transfer.workers import CopyWorkers

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
_VERDICT_S = 3.0
_LEADER = 0


class Leader:
    """A follower's door to its leader. `on_lost` is called on the link thread when the leader is gone, or says that
    the replica is: it should end the process.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        token: str,
        *,
        host: str,
        facts: Facts | None = None,
        on_lost: Callable[[PdserveError], None] = end_process,
        times: LinkTimes | None = None,
        timeout_s: float = MEET_TIMEOUT_S,
    ) -> None:
        self.orders: Orders = queue.SimpleQueue()
        self._agreed: queue.SimpleQueue[int | PdserveError] = queue.SimpleQueue()
        self._copier: Copier | None = None
        self._end = on_lost
        self._lost = threading.Event()
        self._links: Links[Report, Order] = Links(place.rank, host, report_codec(), order_codec(), times)
        with contextlib.ExitStack() as stack:
            stack.callback(self._links.close)
            introduction = Introduction(rank_names(place.shape), place.rank, store, token, facts or {}, timeout_s)
            introduction.publish(self._links.endpoint)
            peer, nonce = introduction.lookup(_LEADER)
            self._links.connect(
                [peer],
                secret_of(token, nonce),
                alive=Alive(),
                on_message=self._take,
                on_lost=self._give_up,
                last_words=lambda error: RankFailed(Trouble.of(error)),
            )
            stack.pop_all()

    def report(self, report: Report) -> None:
        """Any thread; never blocks."""
        self._links.send(_LEADER, report)

    def agree(self, num_pages: int) -> int:
        """The pages that every rank shall have, `num_pages` being the most that we can hold. Blocks.

        Raises:
            PdserveError: why the replica ends.
        """
        self.report(Sized(num_pages))
        match self._agreed.get():
            case int() as agreed:
                return agreed
            case error:
                raise error

    def copy_with(self, copier: Copier) -> None:
        """Orders to copy go to `copier` from now on. Before `RankReady` is reported."""
        self._copier = copier

    def wait_lost(self, timeout_s: float) -> bool:
        """An exchange with other ranks failed here: wait for the leader to say who is lost, or to be lost itself."""
        return self._lost.wait(timeout_s)

    def close(self, error: BaseException | None = None) -> None:
        """End the link; `error` are our last words. Not from the link thread; may be called again."""
        self._links.close(None if error is None else RankFailed(Trouble.of(error)))

    def _take(self, rank: int, order: Order) -> None:
        """Link thread."""
        match order:
            case Alive():
                pass
            case Agreed(num_pages=num_pages):
                self._agreed.put(num_pages)
            case Submit() | Cancel() | Forget() | Expect():
                if self._copier is not None:
                    self._copier.obey(order)
            case Stop(trouble=None):
                self._links.expect_end()
                self._agreed.put(RankError("the leader ended before all ranks had loaded"))
                self.orders.put(order)
            case Stop(trouble=trouble):
                assert trouble is not None
                self._links.fail(trouble.error())
            case _:
                self.orders.put(order)

    def _give_up(self, error: PdserveError) -> None:
        """Link thread."""
        self._lost.set()
        self._agreed.put(error)
        self.orders.put(Stop())
        self._end(error)


def run_follower(
    config: ServerConfig,
    place: Place,
    rendezvous: str,
    token: str,
    *,
    dp_rank: int = 0,
    parent_pid: int | None = None,
) -> None:
    """Be rank `place` of replica `dp_rank` until the leader says stop. Main thread of its own process.

    The process ends with status 1 when the leader or another rank is lost, with 2 when one of them refuses to start.
    With `parent_pid` it is also killed when that process dies.

    Raises:
        ConfigError, ModelError: what `build_executor` and transports raise; the leader has been told.
        RankError: the leader did not come, or has another token.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    store, own_store = open_stores(rendezvous, config.parallel, place, dp_rank)
    leader = Leader(place, own_store, token, host=own_host(config), facts=facts_of(config))
    with contextlib.ExitStack() as stack:
        stack.callback(leader.close)
        try:
            parallel = join_replica(config, place, store, host=own_host(config), dp_rank=dp_rank)
            stack.callback(parallel.close)
            _serve(config, place, parallel, leader, stack)
        except Exception as error:
            _say_why(place, leader, error)
            raise
        log.info("rank %d was told to stop", place.rank)
        _bound_the_end(RankError(f"rank {place.rank} has not ended within {END_TIMEOUT_S:g} s of being told to"))


def _serve(config: ServerConfig, place: Place, parallel: Parallel, leader: Leader, stack: contextlib.ExitStack) -> None:
    """Load, say that we are ready, and obey; `stack` ends what was opened."""
    max_rows = config.schedule.max_running_requests or 1
    built = build_executor(config, max_rows=max_rows, parallel=parallel, agree_num_pages=leader.agree, tells=False)
    stack.callback(built.executor.close)
    steps = StepLog(built.layout.groups[0].layers_of(place))
    memory, settle_s = None, 0.0
    if config.disagg.disaggregation_mode != "null":
        memory, settle_s = _open_copier(config, built, steps, leader, stack)
    samples = built.executor.weight_samples()
    leader.report(RankReady(num_pages=built.num_pages, memory=memory, samples=samples, settle_s=settle_s))
    overlap = built.device.type == "cuda" or config.schedule.disable_overlap_schedule is False
    computer = Computer(
        built.executor,
        built.table,
        steps,
        leader.report,
        overlap=overlap,
        reports_steps=reports_steps(place),
        experts=built.executor.experts,
        hasher=PoolHasher(built.executor.pools, built.layout, place),
    )
    computer.run(leader.orders)


def _say_why(place: Place, leader: Leader, error: Exception) -> None:
    """Our last words. An exchange may have failed because of another rank; then the leader says so, and that counts."""
    known = isinstance(error, PdserveError)
    leader.report(RankFailed(Trouble.of(error)))
    leader.wait_lost(_VERDICT_S)
    if not known:
        log.error("rank %d failed", place.rank, exc_info=error)
    _bound_the_end(Trouble.of(error).error())


def reports_steps(place: Place) -> bool:
    """Whether the leader waits for this rank's word that a step is computed; see `GroupExecutor`."""
    return place.shape.pp_size > 1 and place.is_last_stage


def _open_copier(
    config: ServerConfig, built: Built, steps: StepLog, leader: Leader, stack: contextlib.ExitStack
) -> tuple[RankMemory, float]:
    """Our transport and copy workers; where peers write to us, and the transport's `settle_s`."""
    disagg = config.disagg
    transport: Transport = open_transport(
        disagg.disaggregation_transfer_backend, transfer_host(config), disagg.disaggregation_ib_device
    )
    stack.callback(transport.close)
    buffers = built.executor.buffers
    transport.register([MemoryRegion(*buffer) for buffer in buffers])
    workers: list[CopyWorkers] = []

    def open_workers(post: Callable[..., None]) -> CopyWorkers:
        workers.append(CopyWorkers(transport, post, disagg.disaggregation_transfer_threads))
        return workers[0]

    leader.copy_with(Copier(open_workers, steps, leader.report))
    stack.callback(workers[0].close)
    return RankMemory(workers[0].address, tuple(Region(*buffer) for buffer in buffers)), transport.settle_s


def _bound_the_end(error: PdserveError) -> None:
    """What is closed from now on may wait for ranks that are gone."""
    timer = threading.Timer(END_TIMEOUT_S, end_process, (error,))
    timer.daemon = True
    timer.start()
