"""`python -m pdserve.launch_offline FLAGS`: the engine of one server, without HTTP. Started by `llm/servers.py`.

    this process      owns the engine's processes, and the bootstrap server of a prefill server, in a thread
    child processes   the engine (`launch_engine`); the process of the `LLM` has the API end of its channels

This is a separate program because processes that multiprocessing spawns run the main module of their parent again: that
is this file, not the user's script or notebook. It prints the directories of the channels. It ends with the engine, at
SIGTERM, or with its parent.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import msgspec

from pdserve.base.env import control_token
from pdserve.base.log import setup_logging
from pdserve.base.process import exit_on_signals
from pdserve.config import ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch_checks import LocalModel, check_storage
from pdserve.launch_engine import REFUSED, ROLES, EngineProcesses

PREFIX = "PDSERVE_ENGINE "
LOOPBACK = "127.0.0.1"


class Announcement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The channel directory of each replica, and the bootstrap port (None unless prefill)."""

    directories: list[str]
    bootstrap_port: int | None


class ConfigRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="Refusal"):
    """The configuration is wrong; `field` names the flag at fault, None if there is not one."""

    message: str
    field: str | None


def parse_line(line: str) -> Announcement | ConfigRefusal | None:
    """Parse a line of this program's output; None for a line without an announcement."""
    if not line.startswith(PREFIX):
        return None
    return msgspec.json.decode(line.removeprefix(PREFIX), type=Announcement | ConfigRefusal)


def _say(what: Announcement | ConfigRefusal) -> None:
    print(PREFIX + msgspec.json.encode(what).decode(), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an engine until SIGTERM; return the exit status: 0, 1 when it died, 2 for a wrong configuration."""
    exit_on_signals()
    try:
        config = parse_server_args(sys.argv[1:] if argv is None else argv)
        setup_logging(config.observe.log_level, ROLES[config.disagg.disaggregation_mode], config.observe.log_format)
        check_storage(config)
        resolved = without_streams(config, resolve(config))
        return host(LocalModel.find(resolved).in_engine(resolved))
    except PdserveError as error:
        _say(ConfigRefusal(message=str(error), field=error.field if isinstance(error, ConfigError) else None))
        return REFUSED


def without_streams(given: ServerConfig, resolved: ServerConfig) -> ServerConfig:
    """Return `resolved` without the defaults that favor streams, since an `LLM` returns whole answers.

    `given` is the configuration before `resolve`: flags that it sets are kept.
    """
    saturation = given.schedule.prefill_saturation_tokens
    schedule = dataclasses.replace(
        resolved.schedule,
        mixed_chunk_size=given.schedule.mixed_chunk_size,
        prefill_saturation_tokens=-1 if saturation is None else saturation,
    )
    return dataclasses.replace(resolved, schedule=schedule)


def host(config: ServerConfig) -> int:
    """Start the engine, announce its channels, and end it in order.

    The `LLM` sends `Shutdown` through the channels before it ends this process.
    """
    from pdserve.transfer.bootstrap import BootstrapServer

    bootstrap: BootstrapServer | None = None
    engine: EngineProcesses | None = None
    try:
        if config.disagg.disaggregation_mode == "prefill":
            port = config.disagg.disaggregation_bootstrap_port
            assert port is not None, "resolve has filled it in"
            bootstrap = BootstrapServer(LOOPBACK, port, token=control_token())
        bootstrap_port = None if bootstrap is None else bootstrap.port
        engine = EngineProcesses(config, bootstrap_port)
        directories = [address.directory for address in engine.addresses]
        _say(Announcement(directories=directories, bootstrap_port=bootstrap_port))
        engine.start()
        status = engine.wait()
    finally:
        if engine is not None:
            engine.end(told=True)
        if bootstrap is not None:
            bootstrap.close()
    return REFUSED if engine.refused else status


if __name__ == "__main__":
    sys.exit(main())
