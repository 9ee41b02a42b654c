"""Where and how a server publishes KV events and its load: `--kv-events-config` and `--load-publish-endpoint`.

Names are those of vLLM and SGLang.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pdserve.base.hosts import parse_address, reachable
from pdserve.errors import ConfigError

WireForm = Literal["map", "array"]
FIELD = "kv_events_config"
FLAG = "--kv-events-config"
LOAD_FIELD = "load_publish_endpoint"
LOAD_FLAG = "--load-publish-endpoint"
_MAX_JSON = 1 << 16
_MAX_COUNT = 1 << 24
_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.%\w]+\]|[^:/\s*\[\]]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://[^\s\0]+")
_WILDCARDS = ("*", "0.0.0.0", "[::]")


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A zmq endpoint of replica 0.

    Replica n has the TCP port + n, or the path with `_dp<n>`. Port 0 is any free one.
    """

    address: str
    host: str | None
    """None: ipc."""
    port: int | None

    def of_replica(self, dp_rank: int) -> str:
        """Return the endpoint of a replica."""
        if self.port is None:
            return f"{self.address}_dp{dp_rank}" if dp_rank else self.address
        return f"tcp://{self.host}:{self.port + dp_rank if self.port else 0}"

    def ports_of(self, dp_ranks: Iterable[int]) -> list[tuple[str, int]]:
        """Return address (empty: all) and port of these replicas; nothing for ipc, port 0, and names of interfaces."""
        host = "" if self.host == "*" else (self.host or "").strip("[]")
        if not self.port or (host and parse_address(host) is None):
            return []
        return [(host, self.port + rank) for rank in dp_ranks]

    @property
    def is_bound(self) -> bool:
        """Whether a publisher binds this endpoint by default: wildcards and ipc, as vLLM's does."""
        return self.host is None or self.host in _WILDCARDS

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can reach a socket bound there."""
        return self.host is not None and (self.host in _WILDCARDS or reachable(self.host.strip("[]")))


LOOPBACK_ENDPOINT = Endpoint("tcp://127.0.0.1:5557", "127.0.0.1", 5557)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """A valid configuration of a publisher.

    `binds`: the publisher binds `endpoint`, else it connects to it. `replay_endpoint`: always bound; None: no replay.
    `buffer_steps`: batches kept for replay. `hwm`: batches queued for a slow subscriber before it loses further ones.
    `max_queue_size`: turns of the scheduler that wait for the publisher. `wire_form`: events as msgpack maps, or as the
    arrays of older readers.
    """

    endpoint: Endpoint = LOOPBACK_ENDPOINT
    binds: bool = True
    replay_endpoint: Endpoint | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    wire_form: WireForm = "map"

    @property
    def bound(self) -> tuple[Endpoint, ...]:
        """The endpoints at which strangers could connect."""
        own = (self.endpoint,) if self.binds else ()
        return own if self.replay_endpoint is None else (*own, self.replay_endpoint)


def parse_kv_events(text: str | None, num_replicas: int = 1) -> KVEventsConfig | None:
    """Read the JSON of `--kv-events-config`; None when it is absent or names no publisher.

    Raises:
        ConfigError: the value is not valid; the message names its field.
    """
    if text is None:
        return None
    values = _read(text)
    known = {"publisher", "enable_kv_cache_events", "endpoint", "bind", "replay_endpoint", "buffer_steps", "hwm",
             "max_queue_size", "topic", "format"}  # fmt: skip
    unknown = sorted(values.keys() - known)
    if unknown:
        raise _wrong(unknown[0], f"is not known; the fields are {', '.join(sorted(known))}")
    found: dict[str, Any] = {}
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if name in values:
            found[name] = _count(name, values[name])
    topic = values.get("topic", "")
    if not isinstance(topic, str) or "\0" in topic or len(topic) > 1024:
        raise _wrong("topic", "must be a text of at most 1,024 characters")
    found["topic"] = topic
    if "endpoint" in values:
        found["endpoint"] = _endpoint("endpoint", values["endpoint"], num_replicas)
        found["binds"] = found["endpoint"].is_bound
    if values.get("bind") is not None:
        if not isinstance(values["bind"], bool):
            raise _wrong("bind", "must be true or false")
        found["binds"] = values["bind"]
    if values.get("replay_endpoint") is not None:
        found["replay_endpoint"] = _endpoint("replay_endpoint", values["replay_endpoint"], num_replicas)
    found["wire_form"] = _wire_form(values.get("format", "map"))
    config = KVEventsConfig(**found)
    _check_endpoints(config, num_replicas)
    return config if _is_on(values) else None


def parse_load_endpoint(text: str | None, events: KVEventsConfig | None, num_replicas: int = 1) -> Endpoint | None:
    """Read `--load-publish-endpoint`: off, auto, or where replica 0 publishes its load; None: load is not published.

    `auto` are the ports behind those of the KV `events`, and behind those of replays that would overlap.

    Raises:
        ConfigError: the value is not valid, overlaps the ports of `events`, or `auto` has no ports to follow.
    """
    if text is None or text == "off":
        return None
    taken = () if events is None else events.bound
    if text == "auto":
        if events is None or not events.binds or events.endpoint.port is None:
            raise ConfigError(f"{LOAD_FLAG} auto needs {FLAG} with a bound tcp:// endpoint", field=LOAD_FIELD)
        port = events.endpoint.port and events.endpoint.port + num_replicas
        replay = None if events.replay_endpoint is None else events.replay_endpoint.port
        if port and replay and abs(replay - port) < num_replicas:
            port = replay + num_replicas
        text = f"tcp://{events.endpoint.host}:{port}"
    found = _TCP.fullmatch(text)
    endpoint = Endpoint(text, None, None) if found is None else Endpoint(text, found["host"], int(found["port"]))
    if found is None and not _IPC.fullmatch(text):
        raise ConfigError(
            f"{LOAD_FLAG} is {text!r}, but must be off, auto, tcp://HOST:PORT or ipc://PATH", field=LOAD_FIELD
        )
    if endpoint.port is not None and endpoint.port + num_replicas - 1 > 65535:
        raise ConfigError(
            f"{LOAD_FLAG}: the ports of {num_replicas} replicas from {text} on must be at most 65535", field=LOAD_FIELD
        )
    for other in taken:
        both = (endpoint.port, other.port)
        overlap = abs(both[0] - both[1]) < num_replicas if both[0] and both[1] else endpoint.address == other.address
        if overlap and endpoint.port != 0:
            raise ConfigError(
                f"{LOAD_FLAG} {text} overlaps {other.address} of {FLAG}; give other ports", field=LOAD_FIELD
            )
    return endpoint


def _read(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text) if len(text) <= _MAX_JSON else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} is no JSON: {error}", field=FIELD) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} must be a JSON object of at most {_MAX_JSON} characters", field=FIELD)
    return values


def _is_on(values: dict[str, Any]) -> bool:
    enabled, publisher = values.get("enable_kv_cache_events"), values.get("publisher")
    if enabled is not None and not isinstance(enabled, bool):
        raise _wrong("enable_kv_cache_events", "must be true or false")
    if publisher not in (None, "null", "zmq"):
        raise _wrong("publisher", f"is {publisher!r}, but must be 'zmq' or 'null'")
    if publisher is None:
        return enabled is True
    return publisher == "zmq" and enabled is not False


def _wire_form(value: object) -> WireForm:
    if value in ("default", "dynamo"):  # SGLang's names: maps, with hashes that depend on adapter and salt (dynamo)
        return "map"
    for form in get_args(WireForm):
        if value == form:
            return form  # type: ignore[no-any-return]
    raise _wrong("format", f"is {value!r}, but must be 'map' ('default', 'dynamo') or 'array'")


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
        raise _wrong(name, f"is {value!r}, but must be a whole number, 1 to {_MAX_COUNT}")
    return value


def _endpoint(name: str, value: object, num_replicas: int) -> Endpoint:
    text = value if isinstance(value, str) else ""
    if _IPC.fullmatch(text):
        return Endpoint(text, None, None)
    found = _TCP.fullmatch(text)
    if found is None:
        raise _wrong(name, f"is {value!r}, but must be tcp://HOST:PORT or ipc://PATH")
    port = int(found["port"])
    if port + num_replicas - 1 > 65535:
        raise _wrong(name, f"is {value!r}, but the port of each of {num_replicas} replicas must be at most 65535")
    return Endpoint(text, found["host"], port)


def _check_endpoints(config: KVEventsConfig, num_replicas: int) -> None:
    ours, replay = config.endpoint, config.replay_endpoint
    if ours.port == 0 and not config.binds:
        raise _wrong("endpoint", f"is {ours.address!r}, but port 0 is only for an endpoint that is bound")
    if replay is None:
        return
    if ours.port is None or replay.port is None:
        overlap = ours.address == replay.address
    else:
        overlap = config.binds and ours.port > 0 and replay.port > 0 and abs(ours.port - replay.port) < num_replicas
    if overlap:
        raise _wrong(
            "replay_endpoint",
            f"is {replay.address!r}, but the ports of {num_replicas} replicas from there on and those from "
            f"{ours.address!r} on must differ",
        )


def _wrong(name: str, rule: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {name} {rule}", field=FIELD)
