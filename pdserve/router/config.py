"""What the router is started with. Owned by `launch_router`, read by every file of the router."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal
from urllib.parse import urlsplit

from pdserve.errors import ConfigError

PolicyName = Literal["random", "least_loaded", "consistent_hashing"]
"""`consistent_hashing` keeps a conversation on its servers, as SGLang's gateway does; see `conversation`."""

POLICY_HELP = (
    "which servers a request goes to: any, the least loaded, or by its conversation, which stays where its KV cache is "
    "(header X-SMG-Routing-Key or X-Session-ID, field prompt_cache_key or user, else how its prompt begins)"
)


class Role(enum.StrEnum):
    """What a worker does. `REGULAR` workers do both halves themselves and get no room."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker as named on the command line.

    `bootstrap_port` None with `ask_bootstrap_port` means: ask the worker's `/get_server_info`;
    without it: the field is sent as null.
    """

    role: Role
    url: str
    bootstrap_port: int | None = None
    ask_bootstrap_port: bool = False

    @property
    def host(self) -> str:
        """The host part of the URL (IPv6 without brackets): what decode finds the bootstrap server at."""
        host = urlsplit(self.url).hostname
        assert host is not None, "parse_worker_url checked it"
        return host


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Everything the router is started with; times in seconds."""

    workers: tuple[WorkerSpec, ...]
    policy: PolicyName = "random"
    host: str = "127.0.0.1"
    port: int = 30000
    health_check_interval_s: float = 2.0
    health_check_timeout_s: float = 5.0
    health_failure_threshold: int = 3
    """Health checks in a row that may time out before a worker counts as dead; one refused connection is enough."""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 1800.0
    """From the request's arrival to its last byte, all tries together."""
    max_tries: int = 3
    retry_backoff_s: float = 0.05
    """Wait before the second try; doubled for each further one."""
    max_request_bytes: int = 32 << 20
    shutdown_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Raises `ConfigError` where values contradict each other."""
        roles = {spec.role for spec in self.workers}
        if Role.REGULAR in roles and len(roles) > 1:
            raise ConfigError("--worker-urls cannot be combined with --prefill or --decode", field="worker_urls")
        if Role.REGULAR not in roles and roles != {Role.PREFILL, Role.DECODE}:
            raise ConfigError("at least one --prefill and one --decode worker are needed", field="workers")
        urls = [spec.url for spec in self.workers]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"a worker URL is given twice: {sorted(urls)}", field="workers")
        for name in ("health_check_interval_s", "health_check_timeout_s", "connect_timeout_s", "request_timeout_s"):
            if not dataclasses.asdict(self)[name] > 0:
                raise ConfigError(f"{name} must be above 0, got {dataclasses.asdict(self)[name]}", field=name)
        if self.max_tries < 1 or self.health_failure_threshold < 1 or self.max_request_bytes < 1:
            raise ConfigError("tries, health-failure-threshold and max-request-bytes must be at least 1")


def parse_worker_url(text: str, *, field: str) -> str:
    """The base URL of a worker without a trailing slash; `ConfigError` unless it is http(s)://host[:port]."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--{field} {text!r} is not a URL: {error}", field=field) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--{field} needs a URL such as http://127.0.0.1:30000, got {text!r}", field=field)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"--{field} takes scheme, host and port only, got {text!r}", field=field)
    return f"{parts.scheme}://{parts.netloc}"


def prefill_spec(values: list[str]) -> WorkerSpec:
    """`--prefill URL [PORT|none]`: without a port the worker is asked for it, with `none` null is sent."""
    if len(values) not in (1, 2):
        raise ConfigError(f"--prefill takes a URL and at most one bootstrap port, got {values}", field="prefill")
    url = parse_worker_url(values[0], field="prefill")
    if len(values) == 1:
        return WorkerSpec(role=Role.PREFILL, url=url, ask_bootstrap_port=True)
    if values[1].lower() == "none":
        return WorkerSpec(role=Role.PREFILL, url=url)
    if not values[1].isdecimal() or not 1 <= int(values[1]) <= 65535:
        raise ConfigError(f"the bootstrap port is 1 to 65535 or none, got {values[1]!r}", field="prefill")
    return WorkerSpec(role=Role.PREFILL, url=url, bootstrap_port=int(values[1]))
