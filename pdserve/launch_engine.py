"""Starts and ends the engine's processes on this host. Called by `launch_server` and `launch_offline`.

    replica 0: rank 0 (scheduler) <── channel ──> API process          --dp-size such replicas
               rank 1, 2, ...     <── input log of rank 0              --tp-size x --pp-size ranks each

With DP attention the replicas have --tp-size ranks together and share one rendezvous. With several hosts, each runs an
equal share of the ranks of every replica, in order; node 0 runs every rank 0. The death of any process ends all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

from pdserve.base.cpu_affinity import cores_of, granted_cores, pin_process
from pdserve.base.env import control_token, keep_openmp_from_spinning
from pdserve.base.log import setup_logging
from pdserve.base.log_ring import LogRing, keep_lines_in, ring_of_child
from pdserve.base.native_stderr import StderrReader, redirect_native_stderr
from pdserve.base.process import ENDING, die_with_parent, raise_if_signalled
from pdserve.base.startup_progress import StartupProgress
from pdserve.base.startup_times import IMPORTS, StartupTimes, process_age_s
from pdserve.config import DisaggMode, ServerConfig
from pdserve.errors import ConfigError, PdserveError, RankError
from pdserve.protocol.channel import (
    ChannelAddress,
    ZmqSchedulerChannel,
    create_channel_address,
    remove_channel_address,
)

log = logging.getLogger(__name__)

ROLES: dict[DisaggMode, str] = {"null": "monolith", "prefill": "prefill", "decode": "decode"}
REFUSED = 2
"""Exit status of a process with a wrong configuration."""
LOST = 1
"""Exit status of a process that lost another rank."""
FAILED = 1
"""Exit status after an error that nothing handles, as multiprocessing gives it."""
STOP_S = 5.0
"""Seconds that all processes together have for each way to end: on request, SIGTERM, SIGKILL."""
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStartInfo:
    """Start arguments of a rank's process.

    `rendezvous` is None for a rank that is alone. `cores` are pinned; None: any core.
    """

    config: ServerConfig
    address: ChannelAddress
    server: str
    bootstrap_port: int | None
    dp_rank: int
    rank: int
    rendezvous: str | None
    parent_pid: int
    cores: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The process name in logs."""
        return self.name_in(ROLES[self.config.disagg.disaggregation_mode])

    def log_as(self, mode: DisaggMode) -> None:
        """Name this process after a role in its log lines."""
        observe = self.config.observe
        setup_logging(observe.log_level, self.name_in(ROLES[mode]), observe.log_format)

    def name_in(self, role: str) -> str:
        """Return the process name in a role."""
        parallel, name = self.config.parallel, role
        name += f" {self.dp_rank}" if parallel.dp_size > 1 else ""
        return f"{name} scheduler" if self.rank == 0 else f"{name} rank {self.rank}"


class EngineProcesses:
    """All processes of the engine on this host. Main thread only, except `died`.

    `starts`: what each rank's process is given. `cores_left`: with `--cpu-pin`, the cores of the API process; empty:
    any.
    """

    def __init__(self, config: ServerConfig, bootstrap_port: int | None) -> None:
        parallel = config.parallel
        shape = parallel.shape
        per_node = shape.num_ranks // parallel.nnodes
        if parallel.nnodes > 1 and not control_token():
            raise ConfigError(
                "several hosts need one secret in PDSERVE_CONTROL_TOKEN, equal on all: without it any process that "
                "reaches a rank's port could send it steps to compute",
                field="nnodes",
            )
        ranks = range(parallel.node_rank * per_node, (parallel.node_rank + 1) * per_node)
        config, cores, self.cores_left = _divide_cores(config, len(ranks) * parallel.dp_size)
        self.addresses = [create_channel_address() for _ in range(parallel.dp_size)]
        server = uuid.uuid4().hex
        sharing = parallel.num_sharing > 1
        meets = sharing or shape.num_ranks > 1
        self.starts = [
            RankStartInfo(
                config=config,
                address=address,
                server=server,
                bootstrap_port=bootstrap_port,
                dp_rank=dp_rank,
                rank=rank,
                rendezvous=_rendezvous(config, self.addresses[0] if sharing else address) if meets else None,
                parent_pid=os.getpid(),
                cores=cores[dp_rank * len(ranks) + index],
            )
            for dp_rank, address in enumerate(self.addresses)
            for index, rank in enumerate(ranks)
        ]
        self._processes: list[BaseProcess] = []
        self._stderrs: dict[BaseProcess, StderrReader] = {}
        self._rings: list[LogRing] = []

    def start(self) -> None:
        """Spawn all processes; a signal that arrives meanwhile is raised at the end.

        With `--cpu-pin`, this process moves to the cores that no rank has, if there are any.
        """
        context = multiprocessing.get_context("spawn")
        with _signals_deferred():
            for start in self.starts:
                stderr, ring = StderrReader(start.name), ring_of_child(start.name)
                handle = ring.handle
                args = (start, stderr.write_end, handle)
                process = context.Process(target=rank_main, args=args, name=start.name)
                try:
                    process.start()
                except BaseException:
                    stderr.close()
                    raise
                finally:
                    handle.close()
                stderr.begin(process.pid or 0)
                self._processes.append(process)
                self._stderrs[process] = stderr
                self._rings.append(ring)
        if self.cores_left:
            pin_process(self.cores_left)

    def died(self) -> str | None:
        """Return a sentence about a process that has ended; None while all live. Any thread."""
        for process in self._processes:
            if process.exitcode is not None:
                return f"the {process.name} process has ended with status {process.exitcode}"
        return None

    @property
    def runs(self) -> bool:
        """True when the processes were started and none has ended."""
        return bool(self._processes) and self.died() is None

    def rename(self, role: str) -> None:
        """Name the processes after the role that they have taken."""
        for process, ring, start in zip(self._processes, self._rings, self.starts, strict=True):
            process.name = ring.name = start.name_in(role)

    @property
    def refused(self) -> bool:
        """True when a process has refused its configuration."""
        return any(process.exitcode == REFUSED for process in self._processes)

    def wait(self) -> int:
        """Wait until any process ends; 0 when all exit statuses are 0, else 1.

        Raises at once if `exit_on_signals` has noted a signal.
        """
        raise_if_signalled()
        multiprocessing.connection.wait([process.sentinel for process in self._processes])
        for process in self._processes:
            process.join(STOP_S if process.exitcode in (None, 0) else 0)
        return int(any(process.exitcode != 0 for process in self._processes))

    def end(self, *, told: bool) -> None:
        """End all processes and remove their channels.

        `told`: `Shutdown` was sent through the channels, so the processes get `STOP_S` seconds first. If one has died,
        all are killed at once: the remaining ranks may be in a collective with it and still write into a peer's memory.
        """
        if any(process.exitcode not in (None, 0) for process in self._processes):
            self._log_last_lines()
            self._signal("kill")
        if told:
            self._join_all()
        for stop in ("terminate", "kill"):
            self._signal(stop)
            self._join_all()
        for address in self.addresses:
            remove_channel_address(address)

    def _log_last_lines(self) -> None:
        """Log what native libraries printed last in each process that has crashed or lost another rank. Once."""
        for process in self._processes:
            if process.exitcode not in (None, 0, REFUSED) and (stderr := self._stderrs.pop(process, None)) is not None:
                for line in stderr.last_lines():
                    log.error("last output of the %s process: %s", process.name, line)

    def _signal(self, stop: Literal["terminate", "kill"]) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.terminate() if stop == "terminate" else process.kill()

    def _join_all(self) -> None:
        """Wait for all, `STOP_S` seconds together."""
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))


def rank_main(
    start: RankStartInfo, native_stderr: Connection | None = None, log_ring: Connection | None = None
) -> None:
    """Main function of a rank's process. SIGINT is ignored: the parent handles Ctrl-C.

    `native_stderr`: pipe for what native libraries print; None: it stays on stderr. `log_ring`: the parent's ring for
    log lines; None: this process has its own.
    """
    if log_ring is not None:
        keep_lines_in(start.name, log_ring)
    if native_stderr is not None:
        redirect_native_stderr(native_stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(start.parent_pid)
    if start.cores is not None:
        pin_process(start.cores)  # before any thread starts: threads inherit cores and niceness
    start.log_as(start.config.disagg.disaggregation_mode)
    if start.config.kernels.device == "cpu":
        _give_way(start.config.kernels.cpu_nice)
    if may_compute_natively(start.config):
        keep_openmp_from_spinning()
    try:
        kernels, dp_size = start.config.kernels, start.config.parallel.dp_size
        if kernels.device == "cuda" and (dp_size > 1 or kernels.base_gpu_id):
            os.environ[CUDA_DEVICES] = own_devices(start, os.environ.get(CUDA_DEVICES))
        if start.rank == 0:
            _lead(start)
        else:
            _follow(start)
    except RankError as error:
        log.error("%s", error)
        sys.exit(LOST)
    except PdserveError as error:
        log.error("%s", error)
        sys.exit(REFUSED)
    except Exception:
        log.exception("the %s process has failed", start.name)
        sys.exit(FAILED)


def _give_way(niceness: int) -> None:
    """Raise the niceness by `niceness`; some sandboxes refuse the call, which is logged."""
    try:
        os.nice(niceness)
    except OSError as error:
        if niceness:
            log.warning("--cpu-nice %d is not possible here: %s", niceness, error)


def may_compute_natively(config: ServerConfig) -> bool:
    """Whether the native CPU kernels may compute the model. They have their own threads; otherwise torch's are used."""
    kernels, dtype = config.kernels, config.model.dtype
    torch_alone = kernels.cpu_kernels == "torch" or kernels.attention_backend != "auto"
    return kernels.device == "cpu" and not torch_alone and dtype in ("auto", "bfloat16")


def own_devices(start: RankStartInfo, visible: str | None) -> str:
    """Return the CUDA devices of this replica, one per rank on this host, from `--base-gpu-id` on, after those of lower
    replicas.

    `visible` is the given `CUDA_VISIBLE_DEVICES`; None: not set. The result must be set before torch is imported.

    Raises:
        ConfigError: there are too few devices.
    """
    parallel = start.config.parallel
    count = parallel.shape.num_ranks // parallel.nnodes
    base = start.config.kernels.base_gpu_id
    first = base + start.dp_rank * count
    if visible is None:
        return ",".join(str(first + index) for index in range(count))
    devices = [name.strip() for name in visible.split(",") if name.strip()]
    if len(devices) < first + count:
        needed, after = parallel.dp_size * count, f" from --base-gpu-id {base} on" if base else ""
        message = f"{needed} ranks need a CUDA device each{after}, {CUDA_DEVICES} has {visible!r}"
        raise ConfigError(message, field="base_gpu_id" if base else "dp_size")
    return ",".join(devices[first : first + count])


def _lead(start: RankStartInfo) -> None:
    startup = StartupProgress(log.info)
    from pdserve.engine.build import run_scheduler
    from pdserve.engine.build_transfer import ReplicaId

    startup.add(IMPORTS, process_age_s())
    replica = ReplicaId(
        server=start.server, dp_rank=start.dp_rank, bootstrap_port=start.bootstrap_port, rendezvous=start.rendezvous
    )
    channel = ZmqSchedulerChannel(start.address)
    try:
        run_scheduler(start.config, channel, replica, control_token(), startup, start.log_as)
    finally:
        startup.close()
        channel.close()


def _follow(start: RankStartInfo) -> None:
    parallel = start.config.parallel
    is_first_here = start.rank % (parallel.shape.num_ranks // parallel.nnodes) == 0
    startup = StartupProgress(log.info) if is_first_here else StartupTimes()
    from pdserve.engine.build_follower import run_follower

    startup.add(IMPORTS, process_age_s())
    assert start.rendezvous is not None
    coord = parallel.shape.coord(start.rank)
    try:
        run_follower(
            start.config,
            coord,
            start.rendezvous,
            control_token(),
            dp_rank=start.dp_rank,
            startup=startup,
            on_role=start.log_as,
        )
    finally:
        startup.close()


def _rendezvous(config: ServerConfig, address: ChannelAddress) -> str:
    if config.parallel.nnodes > 1:
        return f"tcp://{config.parallel.dist_init_addr}"
    return f"file://{address.directory}/store"


def _divide_cores(config: ServerConfig, num_ranks: int) -> tuple[ServerConfig, list[tuple[int, ...] | None], list[int]]:
    """Give each rank an equal share of the server's CPU threads, since more threads than cores wait for each other.

    Also returns the cores of each rank (None: any), and the cores that no rank has.

    Raises:
        ConfigError: `--cpu-pin` has fewer cores than there are threads.
    """
    kernels = config.kernels
    cores = None if kernels.cpu_pin is None else cores_of(kernels.cpu_pin)
    if num_ranks == 1 and cores is None:
        return config, [None], []
    threads = kernels.cpu_threads or len(granted_cores() if cores is None else cores)
    each = max(1, threads // num_ranks)
    config = dataclasses.replace(config, kernels=dataclasses.replace(kernels, cpu_threads=each))
    if cores is None:
        return config, [None] * num_ranks, []
    if each * num_ranks > len(cores):
        raise ConfigError(
            f"--cpu-pin {kernels.cpu_pin} has {len(cores)} cores, but {num_ranks} ranks of {each} threads need "
            f"{each * num_ranks}",
            field="cpu_pin",
        )
    dealt = [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(num_ranks)]
    return config, list(dealt), cores[num_ranks * each :]


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals until the end of the block, so that no child process is left half started.

    Children that start inside ignore Ctrl-C, which a terminal sends to every process of the group.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ENDING}
    resource_tracker.ensure_running()  # first: starting it unblocks the signals that are blocked below
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise SystemExit(0)
