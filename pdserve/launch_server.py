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
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdserve.base.env import CONTROL_TOKEN, control_token
from pdserve.base.hosts import url_host, warn_open, warn_unsealed, warn_weak
from pdserve.base.log import setup_logging
from pdserve.base.process import ServerReady, announce_ready, exit_on_signals
from pdserve.base.startup_progress import READY, announce_status, told
from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.access_group import ProofRule
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import disagg_fields, for_mode, resolve
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch_checks import LocalModel, check_proof, check_start
from pdserve.launch_engine import REFUSED, ROLES, EngineProcesses
from pdserve.protocol.channel import ApiChannel, ZmqApiChannel
from pdserve.protocol.messages import SwitchRole
from pdserve.protocol.replicas import ReplicatedChannel

if TYPE_CHECKING:
    from pdserve.server.lifecycle.instance import EngineBackend
    from pdserve.transfer.bootstrap import BootstrapServer


log = logging.getLogger("pdserve.launch_server")  # __name__ is "__main__" when it is run
ENGINE_QUIET_S = 5.0
"""Seconds within which a drained engine must have ended its last transfers before it changes its role."""


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
    """The roles of one server: the present one, and the next one during a role change.

    `given` is the configuration before `resolve`. `model`: None where the model path is one of this host. A `Side` is
    constructed in full before its predecessor ends, so a wrong configuration is refused while that serves. It takes
    over the engine of its predecessor where that is possible (`reload_reason`).
    """

    def __init__(self, given: ServerConfig, model: LocalModel | None = None) -> None:
        self._given = given
        self._model = model
        self._present: Side | None = None
        self._next: Side | None = None
        self._bootstrap_port: int | None = None

    def add(self, config: ServerConfig) -> EngineBackend:
        """Construct a side with an engine of its own, not started. Raises ConfigError."""
        return self._add(config, None).backend(self._begun)

    def _add(self, config: ServerConfig, former: Side | None) -> Side:
        _warn(config)
        ports = [config.disagg.disaggregation_bootstrap_port]
        if (self._present or self._next) is not None and self._given.disagg.disaggregation_bootstrap_port in (None, 0):
            ports = [self._bootstrap_port or ports[0], 0]  # no port was given: the former or default one, else any
        side = Side(config, [port for port in ports if port is not None], self._model, former)
        self._bootstrap_port = self._bootstrap_port if side.bootstrap is None else side.bootstrap.port
        self._next = side
        return side

    def other(self, role: DisaggMode) -> EngineBackend:
        """Construct the side of another role, which takes over the running engine where that is possible.

        Raises:
            ConfigError: the server cannot have that role.
        """
        config, present = resolve(for_mode(self._given, role)), self._present
        if present is None or not present.engine.runs:
            return self._reloaded(config)
        reason = reload_reason(present.config, present.engine.starts[0].config, config)
        if reason is not None:
            log.info("the role change reloads the engine: %s", reason)
            return self._reloaded(config)
        side = self._add(config, present)
        return side.backend(self._begun, lambda: self._reloaded(config))

    def _reloaded(self, config: ServerConfig) -> EngineBackend:
        """Construct a side of another role with an engine of its own. Raises ConfigError where that is impossible."""
        if self._given.parallel.nnodes > 1:
            text = "--nnodes is above 1: the ranks on other hosts cannot be started again from here; restart the server"
            raise ConfigError(text, field="nnodes")
        return self.add(config)

    def _begun(self, side: Side) -> None:
        """Note that `side` is the present one: its engine was started, or has taken its role."""
        self._present, self._next = side, None

    @property
    def refused(self) -> bool:
        """Whether the newest engine has refused its configuration."""
        newest = self._next or self._present
        return newest is not None and newest.engine.refused

    def end(self, *, told: bool) -> None:
        """End all sides. `told`: see `EngineProcesses.end`."""
        for side in (self._present, self._next):
            if side is not None:
                side.end(told=told)


def reload_reason(present: ServerConfig, started: ServerConfig, wanted: ServerConfig) -> str | None:
    """Return why the engine of the role `present` cannot take the role `wanted` in place; None: it can.

    `started`: the configuration that the engine was started with.
    """
    if dataclasses.replace(present, disagg=wanted.disagg) != wanted:
        return "flags outside disaggregation differ between the roles"
    if wanted.wants_host_tier and not started.wants_host_tier:
        return "the host tier is made at the start, and the engine was started in a role without a prefix cache"
    if wanted.disagg.may_share_memory and not started.disagg.may_share_memory:
        backend = wanted.disagg.disaggregation_transfer_backend
        return f"{backend} needs a KV pool in shared memory, but no --disaggregation-transfer-backend was given"
    return None


class Side:
    """The engine of one role, and the bootstrap server of a prefill server.

    The bootstrap server listens from construction on, at the first of `bootstrap_ports` that is free. `former`: the
    side whose running engine this one takes over, with `adopt`; None: this side starts an engine.
    """

    def __init__(
        self,
        config: ServerConfig,
        bootstrap_ports: Sequence[int],
        model: LocalModel | None = None,
        former: Side | None = None,
    ) -> None:
        self._role = ROLES[config.disagg.disaggregation_mode]
        self.bootstrap: BootstrapServer | None = None
        if self._role == "prefill":
            self.bootstrap = _open_bootstrap(config.serving.host, bootstrap_ports)
            disagg = dataclasses.replace(config.disagg, disaggregation_bootstrap_port=self.bootstrap.port)
            config = dataclasses.replace(config, disagg=disagg)
        self.config = config
        self._former, self._owns_engine = former, former is None
        self._channel: ApiChannel | None = None
        try:
            if former is None:
                in_engine = config if model is None else model.in_engine(config)
                self.engine = EngineProcesses(in_engine, self._bootstrap_port)
            else:
                self.engine = former.engine
        except ConfigError:
            if self.bootstrap is not None:
                self.bootstrap.close()
            raise

    def backend(
        self, begun: Callable[[Side], None], reload: Callable[[], EngineBackend] | None = None
    ) -> EngineBackend:
        """Return the interface that the API process uses.

        `begun` is called when this side has its engine. `reload`: see `EngineBackend`.
        """
        from pdserve.server.lifecycle.instance import EngineBackend

        bootstrap = self.bootstrap
        return EngineBackend(
            config=self.config,
            open_channel=self._open_channel,
            engine_died=self.engine.died,
            bootstrap_port=self._bootstrap_port,
            on_ready=self._announce,
            own_counters=lambda: {} if bootstrap is None else {"bootstrap_routes_refused": float(bootstrap.rejected)},
            registered=lambda: bootstrap is None or bootstrap.complete,
            start=lambda: self._start(begun),
            end=lambda: self.end(told=True),
            control_token=control_token(),
            switch=self._switch,
            reload=reload,
            adopt=lambda: self._adopt(begun),
        )

    def end(self, *, told: bool) -> None:
        """End the engine, unless it is another side's, and the bootstrap server; may be called again.

        `told`: see `EngineProcesses.end`.
        """
        if self._owns_engine:
            self.engine.end(told=told)
        if self.bootstrap is not None:
            self.bootstrap.close()

    @property
    def _bootstrap_port(self) -> int | None:
        return None if self.bootstrap is None else self.bootstrap.port

    def _start(self, begun: Callable[[Side], None]) -> None:
        self._log_as_this_role()
        self.engine.start()
        begun(self)

    def _switch(self, query_id: str) -> SwitchRole:
        """Return the command by which a running engine takes this role. A new server id: all replicas register anew."""
        return SwitchRole(
            query_id=query_id,
            disagg=disagg_fields(self.config),
            server=uuid.uuid4().hex,
            bootstrap_port=self._bootstrap_port,
            timeout_s=ENGINE_QUIET_S,
        )

    def _adopt(self, begun: Callable[[Side], None]) -> None:
        """Take over the engine of `former`, and close what the former side owns in this process."""
        former, self._former = self._former, None
        assert former is not None
        self._owns_engine, former._owns_engine = True, False
        former.end(told=True)
        self.engine.rename(self._role)
        self._log_as_this_role()
        begun(self)

    def _log_as_this_role(self) -> None:
        setup_logging(self.config.observe.log_level, self._role, self.config.observe.log_format)

    def _open_channel(self) -> ApiChannel:
        named = self._role == "prefill"
        if self._former is not None:
            channel = self._former._channel
            assert channel is not None, "the former side serves"
            if isinstance(channel, ReplicatedChannel):
                channel.begin_role(named=named)
        else:
            channels = [ZmqApiChannel(address) for address in self.engine.addresses]
            channel = channels[0] if len(channels) == 1 else ReplicatedChannel(channels, named=named)
        self._channel = channel
        return channel

    def _announce(self, port: int) -> None:
        url = f"{self.config.access.scheme}://{url_host(self.config.serving.host)}:{port}"
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
