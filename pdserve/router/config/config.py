"""What the router is started with. Made by `flags`, read by every file of the router."""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import Literal
from urllib.parse import urlsplit

from pdserve.errors import ConfigError
from pdserve.router.config.access_config import RouterAccessConfig, TlsConfig

PolicyName = Literal["cache_aware", "least_loaded", "power_of_two", "round_robin", "random", "consistent_hashing"]
PrefillPolicyName = Literal[PolicyName, "bucket"]

POLICY_HELP = (
    "which servers a request goes to: cache_aware (where most of its prompt was sent before, as long as nobody is far "
    "busier than the others), least_loaded, power_of_two (the less loaded of two), round_robin, random, or "
    "consistent_hashing (a conversation stays where its KV cache is: header X-SMG-Routing-Key or X-Session-ID, field "
    "session_params.id, conversation, prompt_cache_key or user, else how its prompt begins)"
)


class WorkerRole(enum.StrEnum):
    """What a worker does. `REGULAR` workers do both halves themselves and get no room."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"

    @property
    def mode(self) -> str:
        """What its servers call it: a `--disaggregation-mode`."""
        return "null" if self is WorkerRole.REGULAR else self.value

    @classmethod
    def of_mode(cls, mode: str) -> WorkerRole | None:
        """The role of servers with this `--disaggregation-mode`; None for what is none."""
        return next((role for role in cls if role.mode == mode), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker as it was named to the router.

    `bootstrap_port` None with `ask_bootstrap_port` means: ask the worker's `/get_server_info`; without it: the field
    is sent as null. `api_key` is sent to this worker instead of the router's `--worker-api-key`.
    """

    role: WorkerRole
    url: str
    bootstrap_port: int | None = None
    ask_bootstrap_port: bool = False
    api_key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def host(self) -> str:
        """The host part of the URL (IPv6 without brackets): what decode finds the bootstrap server at."""
        host = urlsplit(self.url).hostname
        assert host is not None, "parse_worker_url checked it"
        return host


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How workers are watched; times in seconds."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    failure_threshold: int = 3
    """Checks in a row that may time out before a worker counts as dead; one refused connection is enough."""
    success_threshold: int = 1
    """Good checks in a row before a worker that was dead counts as alive."""
    endpoint: str = "/health"
    enabled: bool = True
    """Without checks a worker counts as alive until a connection to it is refused, and again a second later."""
    load_interval_s: float = 1.0
    """How often workers are asked for their load, where a policy goes by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """How pairs are probed; see `watchdog`. Times in seconds."""

    interval_s: float = 3.0
    timeout_s: float = 4.0
    enabled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """When a request is tried again: before its first byte, and streams after it where `stream_retries` allows."""

    max_tries: int = 3
    first_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2
    """The share of the pause by which it is made longer or shorter at random, 0 to 1."""
    stream_retries: int = 0
    """How often a stream whose decode worker dies goes on from another pair."""

    def backoff_s(self, attempt: int, rng: random.Random) -> float:
        """The pause after try number `attempt` (from 1)."""
        steady = min(self.max_backoff_s, self.first_backoff_s * self.multiplier ** (attempt - 1))
        return float(steady * (1 + self.jitter * rng.uniform(-1, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """When a worker that fails gets no requests; see `breaker`."""

    failure_threshold: int = 10
    success_threshold: int = 3
    open_s: float = 60.0
    window_s: float = 120.0
    enabled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """How much is sent to workers at once, and what waits for them; see `admission`. None: no limit."""

    max_inflight: int | None = None
    """Requests at one worker."""
    max_concurrent_requests: int | None = None
    """Requests at all workers together."""
    queue_size: int = 100
    queue_timeout_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Which policy chooses for which role, and what they go by; names and defaults are sglang-router's."""

    policy: PolicyName = "cache_aware"
    prefill_policy: PrefillPolicyName | None = None
    decode_policy: PolicyName | None = None
    cache_threshold: float = 0.3
    balance_abs_threshold: float = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 60.0
    max_tree_size: int = 1 << 26
    bucket_adjust_interval_s: float = 5.0

    def of(self, role: WorkerRole) -> PrefillPolicyName:
        """The policy that chooses among the workers of a role."""
        own = {
            WorkerRole.PREFILL: self.prefill_policy,
            WorkerRole.DECODE: self.decode_policy,
            WorkerRole.REGULAR: None,
        }[role]
        return own or self.policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Everything the router is started with; times in seconds."""

    pd: bool
    """Pairs of prefill and decode workers; otherwise workers that do both halves."""
    workers: tuple[WorkerSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 30000
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 1800.0
    """From the request's arrival to its last byte, all tries and the queue together."""
    max_request_bytes: int = 32 << 20
    shutdown_timeout_s: float = 5.0
    policies: PolicyConfig = PolicyConfig()
    health: HealthConfig = HealthConfig()
    probes: ProbeConfig = ProbeConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    limits: LimitConfig = LimitConfig()
    access: RouterAccessConfig = RouterAccessConfig()
    tls: TlsConfig = TlsConfig()
    otlp_traces_endpoint: str | None = None
    """Where spans are posted; None: calls are not traced."""

    @property
    def roles(self) -> tuple[WorkerRole, ...]:
        """The roles that a request needs one worker of each."""
        return (WorkerRole.PREFILL, WorkerRole.DECODE) if self.pd else (WorkerRole.REGULAR,)

    def __post_init__(self) -> None:
        """Raises `ConfigError` where values contradict each other."""
        for spec in self.workers:
            if spec.role not in self.roles:
                raise ConfigError("--worker-urls cannot be combined with --prefill or --decode", field="worker_urls")
        missing = set(self.roles) - {spec.role for spec in self.workers}
        if self.workers and missing:
            raise ConfigError("at least one --prefill and one --decode worker are needed", field="workers")
        urls = [spec.url for spec in self.workers]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"a worker URL is given twice: {sorted(urls)}", field="workers")
        _check_numbers(self)
        if not self.health.endpoint.startswith("/"):
            raise ConfigError("--health-check-endpoint must begin with /", field="health_check_endpoint")


def _check_numbers(config: RouterConfig) -> None:
    health, retry, breaker, limits, policies = (
        config.health,
        config.retry,
        config.breaker,
        config.limits,
        config.policies,
    )
    positive = {
        "--health-check-interval-secs": health.interval_s,
        "--health-check-timeout-secs": health.timeout_s,
        "--load-check-interval-secs": health.load_interval_s,
        "--pair-probe-interval-secs": config.probes.interval_s,
        "--pair-probe-timeout-secs": config.probes.timeout_s,
        "--connect-timeout": config.connect_timeout_s,
        "--request-timeout-secs": config.request_timeout_s,
        "--cb-window-duration-secs": breaker.window_s,
        "--cb-timeout-duration-secs": breaker.open_s,
        "--queue-timeout-secs": limits.queue_timeout_s,
        "--eviction-interval-secs": policies.eviction_interval_s,
        "--bucket-adjust-interval-secs": policies.bucket_adjust_interval_s,
        "--balance-rel-threshold": policies.balance_rel_threshold,
    }
    at_least_one = {
        "--max-tries": retry.max_tries,
        "--health-failure-threshold": health.failure_threshold,
        "--health-success-threshold": health.success_threshold,
        "--cb-failure-threshold": breaker.failure_threshold,
        "--cb-success-threshold": breaker.success_threshold,
        "--max-payload-size": config.max_request_bytes,
        "--max-tree-size": policies.max_tree_size,
        "--max-inflight": 1 if limits.max_inflight is None else limits.max_inflight,
        "--max-concurrent-requests": 1 if limits.max_concurrent_requests is None else limits.max_concurrent_requests,
        "--retry-backoff-multiplier": retry.multiplier,
    }
    not_negative = {
        "--queue-size": limits.queue_size,
        "--retry-streams": retry.stream_retries,
        "--retry-initial-backoff-ms": retry.first_backoff_s,
        "--retry-max-backoff-ms": retry.max_backoff_s,
        "--balance-abs-threshold": policies.balance_abs_threshold,
        "--shutdown-timeout": config.shutdown_timeout_s,
    }
    shares = {"--retry-jitter-factor": retry.jitter, "--cache-threshold": policies.cache_threshold}
    for flag, value in positive.items():
        _require(value > 0, flag, "above 0", value)
    for flag, value in at_least_one.items():
        _require(value >= 1, flag, "at least 1", value)
    for flag, value in not_negative.items():
        _require(value >= 0, flag, "at least 0", value)
    for flag, value in shares.items():
        _require(0 <= value <= 1, flag, "between 0 and 1", value)


def _require(good: bool, flag: str, expected: str, value: float) -> None:
    if not good:
        raise ConfigError(f"{flag} must be {expected}, got {value}", field=flag.removeprefix("--").replace("-", "_"))


def parse_worker_url(text: str, *, field: str) -> str:
    """The base URL of a worker without a trailing slash; `ConfigError` unless it is http(s)://host[:port]."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--{field} {text!r} is not a URL: {error}", field=field) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"--{field} needs a URL such as http://127.0.0.1:30000, got {text!r}", field=field)
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"--{field} takes scheme, host and port only, got {text!r}", field=field)
    return f"{parts.scheme}://{parts.netloc}"


def prefill_spec(values: list[str]) -> WorkerSpec:
    """`--prefill URL [PORT|none]`: without a port the worker is asked for it, with `none` null is sent."""
    if len(values) not in (1, 2):
        raise ConfigError(f"--prefill takes a URL and at most one bootstrap port, got {values}", field="prefill")
    url = parse_worker_url(values[0], field="prefill")
    if len(values) == 1:
        return WorkerSpec(role=WorkerRole.PREFILL, url=url, ask_bootstrap_port=True)
    if values[1].lower() == "none":
        return WorkerSpec(role=WorkerRole.PREFILL, url=url)
    if not values[1].isdecimal() or not 1 <= int(values[1]) <= 65535:
        raise ConfigError(f"the bootstrap port is 1 to 65535 or none, got {values[1]!r}", field="prefill")
    return WorkerSpec(role=WorkerRole.PREFILL, url=url, bootstrap_port=int(values[1]))
