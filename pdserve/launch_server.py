"""`python -m pdserve.launch_server --model-path M [--disaggregation-mode prefill|decode]`: runs one server.

    this process      HTTP (uvicorn), tokenizer, and the bootstrap server of a prefill server, in a thread
    child processes   the engine (`launch_engine`): model, KV memory, transfers

Prints one `PDSERVE_READY` line on stdout when it can serve. The death of any process ends all. Hosts with `--node-rank`
above 0 have no HTTP: their ranks follow rank 0 at node 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.base.env import CONTROL_TOKEN, control_token
from pdserve.base.hosts import url_host, warn_open, warn_unsealed, warn_weak
from pdserve.base.log import setup_logging
from pdserve.base.process import ServerReady, announce_ready, exit_on_signals
from pdserve.base.startup_progress import READY, announce_status, told
from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.access_group import ProofRule
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import for_mode, resolve
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch_checks import LocalModel, check_proof, check_start
from pdserve.launch_engine import REFUSED, ROLES, EngineProcesses
from pdserve.protocol.channel import ApiChannel, ZmqApiChannel
from pdserve.protocol.replicas import ReplicatedChannel

if TYPE_CHECKING:
    from pdserve.server.lifecycle.instance import EngineBackend
    from pdserve.transfer.bootstrap import BootstrapServer


log = logging.getLogger("pdserve.launch_server")  # __name__ is "__main__" when it is run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until a signal; return the exit status: 0, 1 when the engine died, 2 for a wrong configuration."""
    exit_on_signals()  # until the HTTP server installs its own handlers
    try:
        config = parse_server_args(sys.argv[1:] if argv is None else argv)
        setup_logging(config.observe.log_level, ROLES[config.disagg.disaggregation_mode], config.observe.log_format)
        check_start(config)
        check_proof(config)
        resolved = resolve(config)
        return launch(resolved, config) if config.parallel.node_rank == 0 else join(resolved)
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return REFUSED


def launch(config: ServerConfig, given: ServerConfig) -> int:
    """Start engine and HTTP server, serve, and end them in order. `given`: the configuration before `resolve`."""
    model = LocalModel.find(config)
    sides = Sides(given, model)
    served = False
    try:
        first = sides.add(config)
        first.start()
        with told(log.info, "importing the HTTP server's libraries"):  # the engine starts meanwhile
            from pdserve.server.lifecycle.run import run_api
        status = run_api(first, tokenizer_dir=model.tokenizer, other=sides.other)
        served = True
    finally:
        sides.end(told=served)
    return REFUSED if sides.refused else status


class Sides:
    """The engines of one server, one for each role that it has had.

    `given` is the configuration before `resolve`. `model`: None where the model path is one of this host. A `Side` is
    constructed in full before its predecessor ends, so a wrong configuration is refused while that serves.
    """

    def __init__(self, given: ServerConfig, model: LocalModel | None = None) -> None:
        self._given = given
        self._model = model
        self._sides: list[Side] = []
        self._bootstrap_port: int | None = None

    def add(self, config: ServerConfig) -> EngineBackend:
        """Construct one more side, not started. Raises ConfigError."""
        _warn(config)
        ports = [config.disagg.disaggregation_bootstrap_port]
        if self._sides and self._given.disagg.disaggregation_bootstrap_port in (None, 0):
            ports = [self._bootstrap_port or ports[0], 0]  # no port was given: the former or default one, else any
        side = Side(config, [port for port in ports if port is not None], self._model)
        self._bootstrap_port = self._bootstrap_port if side.bootstrap is None else side.bootstrap.port
        self._sides = [*self._sides[-1:], side]  # earlier sides have ended
        return side.backend()

    def other(self, role: DisaggMode) -> EngineBackend:
        """Construct the side of another role, not started.

        Raises:
            ConfigError: the server cannot have that role.
        """
        if self._given.parallel.nnodes > 1:
            text = "--nnodes is above 1: the ranks on other hosts were started for one role; restart the server"
            raise ConfigError(text, field="nnodes")
        return self.add(resolve(for_mode(self._given, role)))

    @property
    def refused(self) -> bool:
        """Whether the newest engine has refused its configuration."""
        return self._sides[-1].engine.refused

    def end(self, *, told: bool) -> None:
        """End all sides. `told`: see `EngineProcesses.end`."""
        for side in self._sides:
            side.end(told=told)


class Side:
    """The engine of one role, and the bootstrap server of a prefill server.

    The bootstrap server listens from construction on, at the first of `bootstrap_ports` that is free.
    """

    def __init__(self, config: ServerConfig, bootstrap_ports: Sequence[int], model: LocalModel | None = None) -> None:
        self._role = ROLES[config.disagg.disaggregation_mode]
        self.bootstrap: BootstrapServer | None = None
        if self._role == "prefill":
            self.bootstrap = _open_bootstrap(config.serving.host, bootstrap_ports)
            disagg = dataclasses.replace(config.disagg, disaggregation_bootstrap_port=self.bootstrap.port)
            config = dataclasses.replace(config, disagg=disagg)
        self._config = config
        try:
            in_engine = config if model is None else model.in_engine(config)
            self.engine = EngineProcesses(in_engine, self._bootstrap_port)
        except ConfigError:
            if self.bootstrap is not None:
                self.bootstrap.close()
            raise

    def backend(self) -> EngineBackend:
        """Return the interface that the API process uses."""
        from pdserve.server.lifecycle.instance import EngineBackend

        bootstrap = self.bootstrap
        return EngineBackend(
            config=self._config,
            open_channel=self._open_channel,
            engine_died=self.engine.died,
            bootstrap_port=self._bootstrap_port,
            on_ready=self._announce,
            own_counters=lambda: {} if bootstrap is None else {"bootstrap_routes_refused": float(bootstrap.rejected)},
            registered=lambda: bootstrap is None or bootstrap.complete,
            start=self._start,
            end=lambda: self.end(told=True),
            control_token=control_token(),
        )

    def end(self, *, told: bool) -> None:
        """End engine and bootstrap server; may be called again. `told`: see `EngineProcesses.end`."""
        self.engine.end(told=told)
        if self.bootstrap is not None:
            self.bootstrap.close()

    @property
    def _bootstrap_port(self) -> int | None:
        return None if self.bootstrap is None else self.bootstrap.port

    def _start(self) -> None:
        setup_logging(self._config.observe.log_level, self._role, self._config.observe.log_format)
        self.engine.start()

    def _open_channel(self) -> ApiChannel:
        channels = [ZmqApiChannel(address) for address in self.engine.addresses]
        return channels[0] if len(channels) == 1 else ReplicatedChannel(channels, named=self._role == "prefill")

    def _announce(self, port: int) -> None:
        url = f"{self._config.access.scheme}://{url_host(self._config.serving.host)}:{port}"
        announce_status(READY)
        announce_ready(ServerReady(role=self._role, url=url, bootstrap_port=self._bootstrap_port))


def _open_bootstrap(host: str, ports: Sequence[int]) -> BootstrapServer:
    from pdserve.transfer.bootstrap import BootstrapServer

    for port in ports[:-1]:
        with contextlib.suppress(ConfigError):
            return BootstrapServer(host, port, token=control_token())
    return BootstrapServer(host, ports[-1], token=control_token())


def join(config: ServerConfig) -> int:
    """Run the ranks of a host that is not node 0 until rank 0 stops them; return the exit status."""
    engine = EngineProcesses(LocalModel.find(config).in_engine(config), None)
    try:
        engine.start()
        status = engine.wait()
    finally:
        engine.end(told=False)
    return REFUSED if engine.refused else status


def _warn(config: ServerConfig) -> None:
    """Log warnings about ports that are open to other hosts, and about a missing or weak control token."""
    access, token = config.access, control_token()
    rule = access.proof_rule(has_token=bool(token))
    warn_open(config.serving.host, has_key=access.api_key is not None or rule is not ProofRule.OPTIONAL)
    if rule is ProofRule.UNLESS_KEY:
        log.info("%s is set and --api-key is not: requests need a proof of the token, as a router sends", CONTROL_TOKEN)
    warn_weak(token)
    if config.disagg.disaggregation_mode != "null" and not token:
        warn_unsealed(config.serving.host, config.disagg.disaggregation_host or config.serving.host)


if __name__ == "__main__":
    status = main()
    assert threading.current_thread() is threading.main_thread()
    sys.exit(status)
