"""`python -m pdserve.launch_server --model-path M [--disaggregation-mode prefill|decode]`: one server.

    this process      HTTP (uvicorn), tokenizer, and for a prefill server its bootstrap server in a thread
    child processes   the engine (`launch_engine`): model, KV memory, transfers

Prints one `PDSERVE_READY` line on stdout when it can serve. The death of any of them ends all. On further hosts
(`--node-rank` above 0) there is no HTTP: the ranks there follow the leader at node 0.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from pdserve.base.env import control_token
from pdserve.base.exposure import url_host, warn_open, warn_unsealed
from pdserve.base.log import setup_logging
from pdserve.base.process import Ready, announce_ready
from pdserve.config import ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import resolve
from pdserve.errors import PdserveError
from pdserve.launch_engine import ENDING, REFUSED, ROLES, Engine
from pdserve.protocol.channel import ApiChannel, ZmqApiChannel
from pdserve.protocol.replicas import ReplicatedChannel


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until a signal; the exit status is 0, 1 when the engine died, 2 for a wrong configuration."""
    for number in ENDING:  # until the HTTP server takes them over
        signal.signal(number, _leave)
    try:
        config = parse_server_args(sys.argv[1:] if argv is None else argv)
        setup_logging(config.observe.log_level, ROLES[config.disagg.disaggregation_mode])
        config = resolve(config)
        return launch(config) if config.parallel.node_rank == 0 else join(config)
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return REFUSED


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Not KeyboardInterrupt: where that passes through `exec`, CPython ends with the signal's status, though caught."""
    raise SystemExit(0)


def launch(config: ServerConfig) -> int:
    """Start the parts, serve, and end them in order."""
    from pdserve.server.run import run_api
    from pdserve.server.tls import server_tls
    from pdserve.transfer.bootstrap import BootstrapServer

    mode = config.disagg.disaggregation_mode
    role = ROLES[mode]
    bootstrap: BootstrapServer | None = None
    engine: Engine | None = None
    served = False
    try:
        server_tls(config.access)  # these first, for they refuse what is wrong at once
        tokenizer_dir = tokenizer_dir_of(config)
        check_split(config)
        _warn(config)
        if mode == "prefill":
            port = config.disagg.disaggregation_bootstrap_port
            bootstrap = BootstrapServer(config.serving.host, port, token=control_token())
            disagg = dataclasses.replace(config.disagg, disaggregation_bootstrap_port=bootstrap.port)
            config = dataclasses.replace(config, disagg=disagg)
        bootstrap_port = None if bootstrap is None else bootstrap.port
        engine = started = Engine(config, bootstrap_port)
        engine.start()

        def announce(port: int) -> None:
            url = f"{config.access.scheme}://{url_host(config.serving.host)}:{port}"
            announce_ready(Ready(role=role, url=url, bootstrap_port=bootstrap_port))

        status = run_api(
            config,
            lambda: _open_channel(started, named=mode == "prefill"),
            tokenizer_dir=tokenizer_dir,
            engine_died=engine.died,
            on_ready=announce,
            own_counters=lambda: {} if bootstrap is None else {"bootstrap_routes_refused": float(bootstrap.rejected)},
            registered=lambda: bootstrap is None or bootstrap.complete,
        )
        served = True
    finally:
        if engine is not None:
            engine.end(told=served)
        if bootstrap is not None:
            bootstrap.close()
    return REFUSED if engine.refused else status


def join(config: ServerConfig) -> int:
    """On a host that is not node 0: run its ranks until the leader tells them to stop."""
    check_split(config)
    engine = Engine(config, None)
    try:
        engine.start()
        status = engine.wait()
    finally:
        engine.end(told=False)
    return REFUSED if engine.refused else status


def _warn(config: ServerConfig) -> None:
    """Of what others can reach."""
    warn_open(config.serving.host, has_key=config.access.api_key is not None)
    if config.disagg.disaggregation_mode != "null" and not control_token():
        warn_unsealed(config.serving.host, config.disagg.disaggregation_host or config.serving.host)


def _open_channel(engine: Engine, *, named: bool) -> ApiChannel:
    channels = [ZmqApiChannel(address) for address in engine.addresses]
    return channels[0] if len(channels) == 1 else ReplicatedChannel(channels, named=named)


def check_split(config: ServerConfig) -> None:
    """Refuse in a moment what every rank would refuse once it has started; of a gguf file each rank finds out."""
    from pdserve.model.config import read_model_spec
    from pdserve.model.paths import resolve_model_path
    from pdserve.model.split import check_spec

    parallel = config.parallel
    path = resolve_model_path(config.model.model_path)
    if parallel.tp_size * parallel.pp_size > 1 and path.suffix != ".gguf":
        check_spec(read_model_spec(path), parallel.shape, parallel.ep_size, parallel.num_sharing)


def tokenizer_dir_of(config: ServerConfig) -> str:
    from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

    if config.model.tokenizer_path is not None:
        return config.model.tokenizer_path
    return str(resolve_tokenizer_path(resolve_model_path(config.model.model_path)))


if __name__ == "__main__":
    status = main()
    assert threading.current_thread() is threading.main_thread()
    sys.exit(status)
