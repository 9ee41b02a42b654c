"""`python -m pdserve.launch_server --model-path M [--disaggregation-mode prefill|decode]`: one server.

    this process    HTTP (uvicorn), tokenizer, and for a prefill server its bootstrap server in a thread
    child process   the scheduler: model, KV memory, transfers

Prints one `PDSERVE_READY` line on stdout when it can serve. Either process's death ends the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import NoReturn

from pdserve.base.env import control_token
from pdserve.base.log import setup_logging
from pdserve.base.process import Ready, announce_ready, die_with_parent
from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.protocol.channel import (
    ChannelAddress,
    ZmqApiChannel,
    ZmqSchedulerChannel,
    create_channel_address,
    remove_channel_address,
)

log = logging.getLogger(__name__)

ROLES: dict[DisaggMode, str] = {"null": "monolith", "prefill": "prefill", "decode": "decode"}
_ENDING = (signal.SIGINT, signal.SIGTERM)
_STOP_S = 5.0
_REFUSED = 2
"""Exit status of a process whose configuration was wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until a signal; the exit status is 0, 1 when the engine died, 2 for a wrong configuration."""
    for number in _ENDING:  # until the HTTP server takes them over
        signal.signal(number, _leave)
    try:
        config = parse_server_args(sys.argv[1:] if argv is None else argv)
        setup_logging(config.observe.log_level, ROLES[config.disagg.disaggregation_mode])
        return launch(resolve(config))
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return _REFUSED


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Not KeyboardInterrupt: where that passes through `exec`, CPython ends with the signal's status, though caught."""
    raise SystemExit(0)


def launch(config: ServerConfig) -> int:
    """Start the parts, serve, and end them in order."""
    from pdserve.server.run import run_api
    from pdserve.transfer.bootstrap import BootstrapServer

    mode = config.disagg.disaggregation_mode
    role = ROLES[mode]
    bootstrap: BootstrapServer | None = None
    address = create_channel_address()
    scheduler: BaseProcess | None = None
    served = False
    try:
        tokenizer_dir = _tokenizer_dir(config)  # first, for it refuses a wrong path at once
        if mode == "prefill":
            port = config.disagg.disaggregation_bootstrap_port
            bootstrap = BootstrapServer(config.serving.host, port, token=control_token())
            disagg = dataclasses.replace(config.disagg, disaggregation_bootstrap_port=bootstrap.port)
            config = dataclasses.replace(config, disagg=disagg)
        bootstrap_port = None if bootstrap is None else bootstrap.port
        with _signals_deferred():
            scheduler = _start_scheduler(config, address, bootstrap_port)
        watched = scheduler

        def announce(port: int) -> None:
            host = "127.0.0.1" if config.serving.host == "0.0.0.0" else config.serving.host
            announce_ready(Ready(role=role, url=f"http://{host}:{port}", bootstrap_port=bootstrap_port))

        status = run_api(
            config,
            lambda: ZmqApiChannel(address),
            tokenizer_dir=tokenizer_dir,
            engine_process_alive=lambda: watched.exitcode is None,
            on_ready=announce,
            own_counters=lambda: {} if bootstrap is None else {"bootstrap_routes_refused": float(bootstrap.rejected)},
        )
        served = True
    finally:
        if scheduler is not None:
            _end(scheduler, told=served)
        if bootstrap is not None:
            bootstrap.close()
        remove_channel_address(address)
    return _REFUSED if scheduler.exitcode == _REFUSED else status


def _tokenizer_dir(config: ServerConfig) -> str:
    from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

    if config.model.tokenizer_path is not None:
        return config.model.tokenizer_path
    return str(resolve_tokenizer_path(resolve_model_path(config.model.model_path)))


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """A signal that comes inside is raised at the end: a child half started would complain of its missing other half.

    What is started inside does not see Ctrl-C, which a terminal sends to every process of the group.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    resource_tracker.ensure_running()  # first, for it unblocks what is blocked here
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise SystemExit(0)


def _start_scheduler(config: ServerConfig, address: ChannelAddress, bootstrap_port: int | None) -> BaseProcess:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=scheduler_main, args=(config, address, bootstrap_port, os.getpid()), name="scheduler"
    )
    process.start()
    return process


def scheduler_main(config: ServerConfig, address: ChannelAddress, bootstrap_port: int | None, parent_pid: int) -> None:
    """The scheduler process. Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent_pid)
    setup_logging(config.observe.log_level, f"{ROLES[config.disagg.disaggregation_mode]} scheduler")
    from pdserve.scheduler.build import run_scheduler

    channel = ZmqSchedulerChannel(address)
    try:
        run_scheduler(config, channel, bootstrap_port, control_token())
    except PdserveError as error:
        log.error("%s", error)
        sys.exit(_REFUSED)
    finally:
        channel.close()


def _end(process: BaseProcess, *, told: bool) -> None:
    """End the scheduler. One that was told to stop through its channel gets time for it."""
    if told:
        process.join(_STOP_S)
    for stop in (process.terminate, process.kill):
        if process.exitcode is None:
            stop()
            process.join(_STOP_S)


if __name__ == "__main__":
    status = main()
    assert threading.current_thread() is threading.main_thread()
    sys.exit(status)
