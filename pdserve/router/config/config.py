"""The configuration of the router. Made by `flags`, read by all files of the router."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import ssl
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pdserve.base.hosts import server_url
from pdserve.base.proof import MacKey
from pdserve.config.responses_group import ResponseStoreConfig
from pdserve.errors import ConfigError
from pdserve.http.access import Network, parse_networks
from pdserve.http.credentials import Keys, check_keys, client_context, port_context, split_keys
from pdserve.router.config.discovery import DiscoveryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterAccessConfig:
    """Keys of clients and of workers, client limits, and CORS. Keys never appear in a repr."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    """Comma-separated Bearer keys of clients; None: requests need no key."""
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Comma-separated Bearer keys for admin paths (add and remove workers, flush, abort); None: `api_key`."""
    worker_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Key sent to workers; None: `api_key`, and without that the client's `Authorization` header."""
    worker_admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Key sent to workers with admin requests; None: `admin_api_key`, and without that the key for workers."""
    worker_proof_key: MacKey | None = dataclasses.field(default=None, repr=False)
    """If set, workers get proofs instead of keys, and must prove the control token themselves; see `worker_proof`."""
    max_concurrent_requests_per_client: int | None = None
    """Limit of concurrent generating requests per client; None: no limit."""
    forwarded_allow_ips: str | None = None
    """Trusted proxies, whose `X-Forwarded-For` names the client; see `pdserve.http.access`."""
    cors_allowed_origins: tuple[str, ...] = ()
    request_id_headers: tuple[str, ...] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")

    @property
    def keys(self) -> Keys:
        """The valid keys."""
        return Keys.of(self.api_key, self.admin_api_key)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """Networks of trusted proxies."""
        return parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)

    @property
    def key_for_workers(self) -> str | None:
        """The key sent to workers without a key of their own; None: none is set."""
        return self.worker_api_key or next(iter(split_keys(self.api_key)), None)

    @property
    def admin_key_for_workers(self) -> str | None:
        """The key sent with admin requests to workers without a key of their own; None: none is set."""
        own = self.worker_admin_api_key or next(iter(split_keys(self.admin_api_key)), None)
        return own or self.key_for_workers

    def __post_init__(self) -> None:
        """Check all values; `ConfigError` names the flag and contains no key."""
        check_keys("--api-key", self.api_key)
        check_keys("--admin-api-key", self.admin_api_key)
        for name, key in (
            ("--worker-api-key", self.worker_api_key),
            ("--worker-admin-api-key", self.worker_admin_api_key),
        ):
            check_keys(name, key)
        most = self.max_concurrent_requests_per_client
        if most is not None and most < 1:
            raise ConfigError(
                f"--max-concurrent-requests-per-client must be at least 1, got {most}",
                field="max_concurrent_requests_per_client",
            )
        parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """PEM files: the router's certificate for clients, and CA and client certificates for connections to workers."""

    cert: Path | None = None
    key: Path | None = None
    key_password: str | None = dataclasses.field(default=None, repr=False)
    worker_ca: tuple[Path, ...] = ()
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a certificate has no key, or a key no certificate."""
        for first, second in ((self.cert, self.key), (self.client_cert, self.client_key)):
            if (first is None) != (second is None):
                raise ConfigError("a TLS certificate needs its key, and the key its certificate", field="tls")

    def port_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the router's port; None: plain HTTP. ConfigError if a file is unusable."""
        if self.cert is None:
            return None
        return port_context(self.cert, self.key, self.key_password, "--tls-cert-path, --tls-key-path")

    def worker_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for https workers; None: the system's CA certificates and no client certificate.

        Raises:
            ConfigError: a file is unusable.
        """
        flags = "--ca-cert-paths, --client-cert-path"
        return client_context(self.worker_ca, self.client_cert, self.client_key, flags)


PolicyName = Literal[
    "cache_aware", "kv_aware", "least_loaded", "power_of_two", "round_robin", "random", "consistent_hashing"
]
PrefillPolicyName = Literal[PolicyName, "bucket"]

POLICY_HELP = (
    "how servers are chosen for a request: cache_aware (the server that was sent the longest prefix, unless loads are "
    "imbalanced), kv_aware (the server whose KV events say that it has cached most of the prompt), least_loaded, "
    "power_of_two (the less loaded of two random servers), round_robin, random, or consistent_hashing (a conversation "
    "stays on one server; its key is header X-SMG-Routing-Key or X-Session-ID, field session_params.id, conversation, "
    "prompt_cache_key or user, else the start of its prompt); or the name of an entry point of the group "
    "pdserve.router_policies"
)


class WorkerRole(enum.StrEnum):
    """Role of a worker. `REGULAR` workers run prefill and decode, and get no bootstrap room."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"

    @property
    def mode(self) -> str:
        """The role as a `--disaggregation-mode` of servers."""
        return "null" if self is WorkerRole.REGULAR else str(self)

    @classmethod
    def of_mode(cls, mode: str) -> WorkerRole | None:
        """Return the role of servers with this `--disaggregation-mode`; None if the mode is unknown."""
        return next((role for role in cls if role.mode == mode), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker as given to the router.

    `bootstrap_port` None: read from the worker's `/get_server_info` if `ask_bootstrap_port`, else sent as null.
    `api_key` is sent to this worker instead of `--worker-api-key`.
    """

    role: WorkerRole
    url: str
    bootstrap_port: int | None = None
    ask_bootstrap_port: bool = False
    api_key: str | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def host(self) -> str:
        """The host of the URL (IPv6 without brackets), at which decode connects to the bootstrap server."""
        host = urlsplit(self.url).hostname
        assert host is not None, "server_url checked it"
        return host


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Health checks of workers; times in seconds."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    failure_threshold: int = 3
    """Timed-out checks in a row after which a worker counts as dead; one refused connection suffices."""
    success_threshold: int = 1
    """Successful checks in a row after which a dead worker counts as alive."""
    endpoint: str = "/health"
    enabled: bool = True
    """False: a worker counts as alive until a connection fails; it is tried again after a second."""
    load_interval_s: float = 1.0
    """Interval of load queries to workers, if a policy uses loads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Probes of pairs; see `watchdog`. Times in seconds."""

    interval_s: float = 3.0
    timeout_s: float = 4.0
    enabled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Retries of requests before the first byte, and of streams after it if `stream_retries` > 0. Times in seconds."""

    max_tries: int = 3
    first_backoff_s: float = 0.05
    max_backoff_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2
    """Maximum random change of a backoff, as a share of it, 0 to 1."""
    stream_retries: int = 0
    """How often a stream whose decode worker dies continues at another pair."""

    def backoff_s(self, attempt: int, rng: random.Random) -> float:
        """Return the backoff after attempt number `attempt` (from 1)."""
        steady = min(self.max_backoff_s, self.first_backoff_s * self.multiplier ** (attempt - 1))
        return float(steady * (1 + self.jitter * rng.uniform(-1, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """Circuit breakers of workers; see `workers.Breaker`. Times in seconds."""

    failure_threshold: int = 10
    success_threshold: int = 3
    open_s: float = 60.0
    window_s: float = 120.0
    enabled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """Limits of requests at workers, and of the queue; see `admission`. None: no limit."""

    max_inflight: int | None = None
    """Limit of requests at one worker."""
    max_concurrent_requests: int | None = None
    """Limit of requests at all workers together."""
    queue_size: int = 100
    queue_timeout_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Policies by role and their parameters; names and defaults are those of sglang-router."""

    policy: str = "cache_aware"
    """A `PolicyName`, or the name of an entry point of the group `pdserve.router_policies`."""
    prefill_policy: str | None = None
    """As `policy`, or `bucket`; None: that of `policy`. So is `decode_policy`."""
    decode_policy: str | None = None
    cache_threshold: float = 0.3
    balance_abs_threshold: float = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 60.0
    max_tree_size: int = 1 << 26
    bucket_adjust_interval_s: float = 5.0

    def of(self, role: WorkerRole) -> str:
        """Return the policy that chooses among the workers of a role."""
        own = {
            WorkerRole.PREFILL: self.prefill_policy,
            WorkerRole.DECODE: self.decode_policy,
            WorkerRole.REGULAR: None,
        }[role]
        return own or self.policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The complete configuration of the router; times in seconds."""

    pd: bool
    """True: pairs of prefill and decode workers; False: regular workers."""
    workers: tuple[WorkerSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 30000
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 1800.0
    """Deadline from a request's arrival to its last byte, including the queue and all attempts."""
    max_request_bytes: int = 32 << 20
    shutdown_timeout_s: float = 5.0
    drain_migrate: bool = False
    """Whether running requests of a draining decode worker move to other decode workers."""
    policies: PolicyConfig = PolicyConfig()
    health: HealthConfig = HealthConfig()
    probes: ProbeConfig = ProbeConfig()
    retry: RetryConfig = RetryConfig()
    breaker: BreakerConfig = BreakerConfig()
    limits: LimitConfig = LimitConfig()
    responses: ResponseStoreConfig = ResponseStoreConfig()
    access: RouterAccessConfig = RouterAccessConfig()
    access_log: bool = False
    log_stats_interval_s: float = 10.0
    """0: no statistics lines."""
    tls: TlsConfig = TlsConfig()
    otlp_traces_endpoint: str | None = None
    """OTLP/HTTP collector of spans; None: requests are not traced."""
    discovery: DiscoveryConfig | None = None
    """Workers are also found through the Kubernetes API; None: they are not."""

    @property
    def roles(self) -> tuple[WorkerRole, ...]:
        """Roles: a request needs one worker of each."""
        return (WorkerRole.PREFILL, WorkerRole.DECODE) if self.pd else (WorkerRole.REGULAR,)

    def __post_init__(self) -> None:
        """Check all values; raises `ConfigError`."""
        for spec in self.workers:
            if spec.role not in self.roles:
                raise ConfigError("--worker-urls cannot be combined with --prefill or --decode", field="worker_urls")
        missing = set(self.roles) - {spec.role for spec in self.workers}
        if self.workers and missing and self.discovery is None:
            raise ConfigError("at least one --prefill and one --decode worker are needed", field="workers")
        urls = [spec.url for spec in self.workers]
        if len(set(urls)) != len(urls):
            raise ConfigError(f"a worker URL is given twice: {sorted(urls)}", field="workers")
        _check_numbers(self)
        self.responses.check()
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
        "--log-stats-interval": config.log_stats_interval_s,
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


def prefill_spec(values: list[str]) -> WorkerSpec:
    """Parse `--prefill URL [PORT|none]`: without a port the worker reports its port; with `none` null is sent."""
    if len(values) not in (1, 2):
        raise ConfigError(f"--prefill takes a URL and at most one bootstrap port, got {values}", field="prefill")
    url = server_url(values[0], field="prefill")
    if len(values) == 1:
        return WorkerSpec(role=WorkerRole.PREFILL, url=url, ask_bootstrap_port=True)
    if values[1].lower() == "none":
        return WorkerSpec(role=WorkerRole.PREFILL, url=url)
    if not values[1].isdecimal() or not 1 <= int(values[1]) <= 65535:
        raise ConfigError(f"the bootstrap port must be 1 to 65535 or none, got {values[1]!r}", field="prefill")
    return WorkerSpec(role=WorkerRole.PREFILL, url=url, bootstrap_port=int(values[1]))
