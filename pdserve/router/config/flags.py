"""The router's command line; flags that sglang-router also has keep their names. Called by `launch_router`.

Keys and passwords can also be environment variables: every user of the machine can read a command line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn, get_args

from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY, control_token, worker_proof_secret
from pdserve.base.hosts import server_url
from pdserve.base.plugins import POLICY_PLUGINS, plugin_names
from pdserve.base.proof import MacKey
from pdserve.config.cli import no_such_flag
from pdserve.config.responses_group import BACKGROUND_HELP, MB_HELP, SIZE_HELP, TTL_HELP, ResponseStoreConfig
from pdserve.errors import ConfigError
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY, WORKER_ADMIN_API_KEY, WORKER_API_KEY
from pdserve.http.session_proof import worker_key
from pdserve.router.config.config import (
    POLICY_HELP,
    BreakerConfig,
    HealthConfig,
    LimitConfig,
    PolicyConfig,
    PolicyName,
    ProbeConfig,
    RetryConfig,
    RouterAccessConfig,
    RouterConfig,
    TlsConfig,
    WorkerRole,
    WorkerSpec,
    prefill_spec,
)
from pdserve.router.config.discovery import add_discovery_flags, discovery_from

KEYFILE_PASSWORD = "PDSERVE_SSL_KEYFILE_PASSWORD"
DEFAULTS = RouterConfig(pd=True)
POLICIES = get_args(PolicyName)
POLICY_ALIASES = {"consistent_hash": "consistent_hashing", "manual": "consistent_hashing"}
"""SGLang's `manual` also keeps a routing key on its worker, with a table instead of a hash."""
UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Reports an alternative for each flag of sglang-router that this router does not support."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line: for an unknown flag an alternative, or the nearest name."""
        given = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else []
        names = [one.partition("=")[0] for one in given if one.startswith("--")]
        for name in names:
            if name.removeprefix("--") in UNSUPPORTED:
                message = f"{name} of sglang-router is not supported: {UNSUPPORTED[name.removeprefix('--')]}"
                break
        else:
            if names:
                message = no_such_flag(names[0], self._option_string_actions)
        self.exit(2, f"error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the router's flags; times are in seconds unless the flag's name has another unit."""
    parser = Parser(
        prog="python -m pdserve.launch_router",
        allow_abbrev=False,
        description="A router in front of prefill and decode servers, or in front of regular servers.",
    )
    _add_workers(parser.add_argument_group("workers"))
    add_discovery_flags(parser.add_argument_group("Kubernetes service discovery"))
    _add_policies(parser.add_argument_group("policies"))
    _add_http(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits and the queue"))
    _add_health(parser.add_argument_group("health checks and circuit breakers"))
    _add_access(parser.add_argument_group("access and TLS"))
    return parser


Group = argparse._ArgumentGroup


def _add_workers(group: Group) -> None:
    add = group.add_argument
    add("--pd-disaggregation", action="store_true", help="route each request to a prefill and a decode server")
    add("--prefill", action="append", nargs="+", default=[], metavar=("URL", "PORT"), help="prefill server; repeatable")
    add("--decode", action="append", default=[], metavar="URL", help="decode server; repeatable")
    add("--worker-urls", nargs="*", default=None, metavar="URL", help="regular servers, which run prefill and decode")


def _add_policies(group: Group) -> None:
    add, own = group.add_argument, DEFAULTS.policies
    given = (*POLICIES, *POLICY_ALIASES, *plugin_names(POLICY_PLUGINS))
    shown = f"{{{','.join(POLICIES)}}}"
    add("--policy", choices=given, metavar=shown, default=own.policy, help=POLICY_HELP)
    text = "replaces --policy for prefill servers; bucket: prompts of similar length go to one server"
    add("--prefill-policy", choices=(*given, "bucket"), metavar=f"{shown[:-1]},bucket}}", help=text)
    add("--decode-policy", choices=given, metavar=shown, help="replaces --policy for decode servers")
    text = (
        "cache_aware and kv_aware: minimum share of a prompt, 0 to 1, that a server must have cached to be chosen for "
        "its cache"
    )
    add("--cache-threshold", type=float, default=own.cache_threshold, help=text)
    text = (
        "cache_aware and bucket: choose by load alone if loads differ by more than this number of requests; kv_aware: "
        "choose no server whose load is more than this above the smallest"
    )
    add("--balance-abs-threshold", type=float, default=own.balance_abs_threshold, help=text)
    text = "and by more than this factor"
    add("--balance-rel-threshold", type=float, default=own.balance_rel_threshold, help=text)
    text = "cache_aware: interval of evictions from the prefix tree"
    add("--eviction-interval-secs", "--eviction-interval", type=float, default=own.eviction_interval_s, help=text)
    text = "cache_aware: characters kept in the prefix tree per server"
    add("--max-tree-size", type=int, default=own.max_tree_size, help=text)
    text = "bucket: interval in which the length ranges are recomputed"
    add("--bucket-adjust-interval-secs", type=float, default=own.bucket_adjust_interval_s, help=text)


def _add_http(group: Group) -> None:
    add = group.add_argument
    add("--host", default=DEFAULTS.host, help="address to listen on")
    add("--port", type=int, default=DEFAULTS.port, help="HTTP port; 0 picks a free one")
    add("--connect-timeout", type=float, default=DEFAULTS.connect_timeout_s, help="timeout to connect to a server")
    text = "deadline of a request, including the queue and all attempts"
    add("--request-timeout-secs", "--request-timeout", type=float, default=DEFAULTS.request_timeout_s, help=text)
    text = "maximum size of a request body in bytes"
    add("--max-payload-size", "--max-request-bytes", type=int, default=DEFAULTS.max_request_bytes, help=text)
    text = "time to drain running requests at shutdown"
    names = ("--shutdown-grace-period-secs", "--shutdown-timeout")
    add(*names, type=float, default=DEFAULTS.shutdown_timeout_s, help=text)
    own = DEFAULTS.access
    text = "headers with a client's request id, the first match counts; sent to workers and clients as X-Request-Id"
    add("--request-id-headers", nargs="*", default=list(own.request_id_headers), metavar="HEADER", help=text)
    add("--enable-trace", action="store_true", help="OpenTelemetry traces; needs pdserve[otel]")
    text = "OTLP/HTTP collector that spans are sent to: HOST:PORT, or a URL"
    add("--otlp-traces-endpoint", default="localhost:4318", metavar="WHERE", help=text)
    add("--log-level", choices=("debug", "info", "warn", "warning", "error"), default="info", help="minimum log level")
    add("--log-format", choices=("text", "json"), default="text", help="format of log lines; json: one object a line")
    text = "seconds between log lines with load, throughput and latencies while requests run; 0: none"
    add("--log-stats-interval", type=float, default=DEFAULTS.log_stats_interval_s, help=text)
    text = "log a line for each HTTP request; probes and /metrics only at --log-level debug"
    add("--access-log", action=argparse.BooleanOptionalAction, default=False, help=text)


def _add_limits(group: Group) -> None:
    add, own, retry = group.add_argument, DEFAULTS.limits, DEFAULTS.retry
    text = "maximum requests at one server; more wait in the queue. No limit when absent"
    add("--max-inflight", type=int, default=own.max_inflight, help=text)
    text = "maximum requests at all servers together; -1: no limit"
    add("--max-concurrent-requests", type=int, default=-1, help=text)
    add("--queue-size", type=int, default=own.queue_size, help="maximum waiting requests; more are refused with 503")
    add("--queue-timeout-secs", type=float, default=own.queue_timeout_s, help="maximum wait in the queue, then 503")
    text = "attempts per request, including the first; retries happen only before the first byte"
    add("--retry-max-retries", "--max-tries", type=int, default=retry.max_tries, help=text)
    add("--disable-retries", action="store_true", help="one attempt per request")
    add("--retry-initial-backoff-ms", type=float, default=retry.first_backoff_s * 1000, help="first backoff")
    add("--retry-max-backoff-ms", type=float, default=retry.max_backoff_s * 1000, help="maximum backoff")
    text = "factor by which each further backoff is longer"
    add("--retry-backoff-multiplier", type=float, default=retry.multiplier, help=text)
    text = "maximum random change of a backoff, as a share of it, 0 to 1"
    add("--retry-jitter-factor", type=float, default=retry.jitter, help=text)
    text = "how often a stream of one sequence continues at another pair when its decode server dies; 0: never"
    add("--retry-streams", type=int, default=retry.stream_retries, metavar="N", help=text)
    text = "move the running requests of a decode server that is drained to other decode servers"
    add("--drain-migrate", action="store_true", help=text)
    stored = DEFAULTS.responses
    add("--response-store-size", type=int, default=stored.response_store_size, metavar="N", help=SIZE_HELP)
    add("--response-store-mb", type=int, default=stored.response_store_mb, metavar="MB", help=MB_HELP)
    add("--response-store-ttl", type=float, default=stored.response_store_ttl, metavar="SECONDS", help=TTL_HELP)
    most = stored.max_background_responses
    add("--max-background-responses", type=int, default=most, metavar="N", help=BACKGROUND_HELP)


def _add_health(group: Group) -> None:
    add, own, breaker = group.add_argument, DEFAULTS.health, DEFAULTS.breaker
    text = "interval of health checks; of a dead server at most half a second"
    add("--health-check-interval-secs", "--health-check-interval", type=float, default=own.interval_s, help=text)
    text = "timeout of a health check"
    add("--health-check-timeout-secs", "--health-check-timeout", type=float, default=own.timeout_s, help=text)
    text = "timed-out checks in a row after which a server counts as dead; one refused connection suffices"
    add("--health-failure-threshold", type=int, default=own.failure_threshold, help=text)
    text = "successful checks in a row after which a server counts as alive again"
    add("--health-success-threshold", type=int, default=own.success_threshold, help=text)
    add("--health-check-endpoint", default=own.endpoint, metavar="PATH", help="path of health checks")
    add("--disable-health-check", action="store_true", help="servers count as alive until a connection fails")
    text = "interval of load queries to servers, if a policy uses loads"
    add("--load-check-interval-secs", type=float, default=own.load_interval_s, help=text)
    text = "interval of probes, which generate one token through idle pairs"
    add("--pair-probe-interval-secs", type=float, default=DEFAULTS.probes.interval_s, help=text)
    text = "timeout of a probe; after two failed probes in a row a pair gets no requests until a probe succeeds"
    add("--pair-probe-timeout-secs", type=float, default=DEFAULTS.probes.timeout_s, help=text)
    add("--disable-pair-probes", action="store_true", help="a pair counts as serving if its two servers are healthy")
    text = "failures within the window, without a success between them, that open a server's circuit breaker"
    add("--cb-failure-threshold", type=int, default=breaker.failure_threshold, help=text)
    text = "successful requests that close a half-open circuit breaker"
    add("--cb-success-threshold", type=int, default=breaker.success_threshold, help=text)
    add("--cb-timeout-duration-secs", type=float, default=breaker.open_s, help="time a circuit breaker stays open")
    add("--cb-window-duration-secs", type=float, default=breaker.window_s, help="window of --cb-failure-threshold")
    add("--disable-circuit-breaker", action="store_true", help="send requests to servers regardless of failures")


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Return the checked configuration; `ConfigError` names the invalid flag."""
    return RouterConfig(
        otlp_traces_endpoint=args.otlp_traces_endpoint if args.enable_trace else None,
        pd=args.pd_disaggregation,
        workers=_specs(args),
        host=args.host,
        port=args.port,
        connect_timeout_s=args.connect_timeout,
        request_timeout_s=args.request_timeout_secs,
        max_request_bytes=args.max_payload_size,
        shutdown_timeout_s=args.shutdown_grace_period_secs,
        drain_migrate=args.drain_migrate,
        policies=_policies(args),
        health=_health(args),
        retry=RetryConfig(
            max_tries=1 if args.disable_retries else args.retry_max_retries,
            first_backoff_s=args.retry_initial_backoff_ms / 1000,
            max_backoff_s=args.retry_max_backoff_ms / 1000,
            multiplier=args.retry_backoff_multiplier,
            jitter=args.retry_jitter_factor,
            stream_retries=args.retry_streams,
        ),
        probes=ProbeConfig(
            interval_s=args.pair_probe_interval_secs,
            timeout_s=args.pair_probe_timeout_secs,
            enabled=not args.disable_pair_probes,
        ),
        breaker=_breaker(args),
        limits=LimitConfig(
            max_inflight=args.max_inflight,
            max_concurrent_requests=None if args.max_concurrent_requests == -1 else args.max_concurrent_requests,
            queue_size=args.queue_size,
            queue_timeout_s=args.queue_timeout_secs,
        ),
        responses=ResponseStoreConfig(
            response_store_size=args.response_store_size,
            response_store_mb=args.response_store_mb,
            response_store_ttl=args.response_store_ttl,
            max_background_responses=args.max_background_responses,
        ),
        access=_access_of(args),
        access_log=args.access_log,
        log_stats_interval_s=args.log_stats_interval,
        tls=_tls_of(args),
        discovery=discovery_from(args),
    )


def _specs(args: argparse.Namespace) -> tuple[WorkerSpec, ...]:
    if (args.prefill or args.decode) and not args.pd_disaggregation:
        raise ConfigError("--prefill and --decode need --pd-disaggregation", field="pd_disaggregation")
    if not args.pd_disaggregation and args.worker_urls is None and not args.service_discovery:
        message = "name servers with --worker-urls URL ..., or with --pd-disaggregation --prefill URL --decode URL"
        raise ConfigError(message, field="worker_urls")
    specs = [prefill_spec(values) for values in args.prefill]
    specs += [WorkerSpec(role=WorkerRole.DECODE, url=server_url(url, field="decode")) for url in args.decode]
    regular = [server_url(url, field="worker_urls") for url in args.worker_urls or []]
    return (*specs, *(WorkerSpec(role=WorkerRole.REGULAR, url=url) for url in regular))


def _policies(args: argparse.Namespace) -> PolicyConfig:
    return PolicyConfig(
        policy=POLICY_ALIASES.get(args.policy, args.policy),
        prefill_policy=POLICY_ALIASES.get(args.prefill_policy, args.prefill_policy),
        decode_policy=POLICY_ALIASES.get(args.decode_policy, args.decode_policy),
        cache_threshold=args.cache_threshold,
        balance_abs_threshold=args.balance_abs_threshold,
        balance_rel_threshold=args.balance_rel_threshold,
        eviction_interval_s=args.eviction_interval_secs,
        max_tree_size=args.max_tree_size,
        bucket_adjust_interval_s=args.bucket_adjust_interval_secs,
    )


def _health(args: argparse.Namespace) -> HealthConfig:
    return HealthConfig(
        interval_s=args.health_check_interval_secs,
        timeout_s=args.health_check_timeout_secs,
        failure_threshold=args.health_failure_threshold,
        success_threshold=args.health_success_threshold,
        endpoint=args.health_check_endpoint,
        enabled=not args.disable_health_check,
        load_interval_s=args.load_check_interval_secs,
    )


def _breaker(args: argparse.Namespace) -> BreakerConfig:
    return BreakerConfig(
        failure_threshold=args.cb_failure_threshold,
        success_threshold=args.cb_success_threshold,
        open_s=args.cb_timeout_duration_secs,
        window_s=args.cb_window_duration_secs,
        enabled=not args.disable_circuit_breaker,
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    """Add the access and TLS flags to an argument group."""
    add = group.add_argument
    text = "comma-separated keys; clients must send one as Authorization: Bearer KEY. When absent, no key is needed"
    add("--api-key", metavar="KEY", help=f"{text} (or in {API_KEY})")
    text = "keys that replace --api-key for admin paths: add and remove servers, flush caches, abort requests"
    add("--admin-api-key", metavar="KEY", help=f"{text} (or in {ADMIN_API_KEY})")
    text = "key sent to servers; when absent --api-key, and without that the client's Authorization header"
    add("--worker-api-key", metavar="KEY", help=f"{text} (or in {WORKER_API_KEY})")
    text = "key sent to servers with admin requests; when absent --admin-api-key, and without that --worker-api-key"
    add("--worker-admin-api-key", metavar="KEY", help=f"{text} (or in {WORKER_ADMIN_API_KEY})")
    text = (
        f"prove {CONTROL_TOKEN} to servers with every request instead of sending keys, and use only servers that prove "
        f"it first; the default where the variable is set, or {WORKER_PROOF_KEY}, which is derived from it"
    )
    add("--worker-control-proof", action=argparse.BooleanOptionalAction, help=text)
    text = "concurrent generating requests per client; more are refused with 429. No limit when absent"
    add("--max-concurrent-requests-per-client", type=int, metavar="N", help=text)
    text = "trusted proxies, as comma-separated addresses and networks; their X-Forwarded-For names the client"
    add("--forwarded-allow-ips", metavar="ADDRESSES", help=text)
    text = "origins of web pages that may send requests, * for all; none when absent"
    add("--cors-allowed-origins", nargs="*", default=[], metavar="ORIGIN", help=text)
    add("--tls-cert-path", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    text = f"private key of --tls-cert-path; the password of an encrypted key is read from {KEYFILE_PASSWORD}"
    add("--tls-key-path", type=Path, metavar="PEM", help=text)
    add("--ca-cert-paths", type=Path, nargs="*", default=[], metavar="PEM", help="CA certificates of https servers")
    add("--client-cert-path", type=Path, metavar="PEM", help="client certificate for https servers")
    add("--client-key-path", type=Path, metavar="PEM", help="private key of --client-cert-path")


def _access_of(args: argparse.Namespace) -> RouterAccessConfig:
    """Read the access flags; `ConfigError` names the invalid flag."""
    return RouterAccessConfig(
        api_key=_secret(args.api_key, API_KEY),
        admin_api_key=_secret(args.admin_api_key, ADMIN_API_KEY),
        worker_api_key=_secret(args.worker_api_key, WORKER_API_KEY),
        worker_admin_api_key=_secret(args.worker_admin_api_key, WORKER_ADMIN_API_KEY),
        worker_proof_key=_proof_key(args.worker_control_proof),
        max_concurrent_requests_per_client=args.max_concurrent_requests_per_client,
        forwarded_allow_ips=args.forwarded_allow_ips,
        cors_allowed_origins=tuple(args.cors_allowed_origins),
        request_id_headers=tuple(args.request_id_headers),
    )


def _tls_of(args: argparse.Namespace) -> TlsConfig:
    """Read the TLS flags; `ConfigError` if a certificate has no key, or a key no certificate."""
    return TlsConfig(
        cert=args.tls_cert_path,
        key=args.tls_key_path,
        key_password=_secret(None, KEYFILE_PASSWORD),
        worker_ca=tuple(args.ca_cert_paths),
        client_cert=args.client_cert_path,
        client_key=args.client_key_path,
    )


def _proof_key(wanted: bool | None) -> MacKey | None:
    """Read the key from the environment; None: requests carry no proofs. `wanted` None: where the key is set.

    `ConfigError` if the key is wanted and not set.
    """
    if wanted is False:
        return None
    secret, token = worker_proof_secret(), control_token()
    if secret is not None:
        return MacKey(secret)
    if token:
        return worker_key(token)
    if wanted:
        text = f"--worker-control-proof needs {CONTROL_TOKEN} or {WORKER_PROOF_KEY} in the environment"
        raise ConfigError(text, field="worker_control_proof")
    return None


def _secret(given: str | None, variable: str) -> str | None:
    """Return the flag's value, else the environment variable; an empty variable is ignored."""
    return given if given is not None else os.environ.get(variable, "").strip() or None


_ABSENT = "this router does not have this feature"
_TOKENIZER = "the workers tokenize text"
_STORE = "responses are stored in memory: --response-store-size, --response-store-mb, --response-store-ttl"
_AUTH = "use --api-key and --admin-api-key"

UNSUPPORTED: dict[str, str] = {
    "assignment-mode": "--policy consistent_hashing keeps a conversation on its worker",
    "backend": "workers speak SGLang's protocol",
    "chat-template": _TOKENIZER,
    "control-plane-api-keys": _AUTH,
    "control-plane-audit-enabled": _AUTH,
    "dp-aware": "a worker spreads requests over its own replicas",
    "enable-igw": _ABSENT,
    "history-backend": _STORE,
    "jwt-audience": _AUTH,
    "jwt-issuer": _AUTH,
    "jwt-jwks-uri": _AUTH,
    "jwt-role-mapping": _AUTH,
    "log-dir": "logs go to stderr",
    "max-idle-secs": "--policy consistent_hashing keeps no table of conversations",
    "mcp-config-path": _ABSENT,
    "mini-lb": "this router has one implementation only",
    "model-path": _TOKENIZER,
    "oracle-connect-descriptor": _STORE,
    "oracle-password": _STORE,
    "oracle-pool-max": _STORE,
    "oracle-pool-min": _STORE,
    "oracle-pool-timeout-secs": _STORE,
    "oracle-tns-alias": _STORE,
    "oracle-username": _STORE,
    "oracle-wallet-path": _STORE,
    "postgres-db-url": _STORE,
    "postgres-pool-max": _STORE,
    "prometheus-duration-buckets": "the buckets are fixed",
    "prometheus-host": "metrics are at /metrics of the router's own port",
    "prometheus-port": "metrics are at /metrics of the router's own port",
    "rate-limit-tokens-per-second": "use --max-concurrent-requests and --max-inflight",
    "reasoning-parser": "it is a flag of the workers",
    "redis-pool-max": _STORE,
    "redis-retention-days": _STORE,
    "redis-url": _STORE,
    "tokenizer-cache-enable-l0": _TOKENIZER,
    "tokenizer-cache-enable-l1": _TOKENIZER,
    "tokenizer-cache-l0-max-entries": _TOKENIZER,
    "tokenizer-cache-l1-max-memory": _TOKENIZER,
    "tokenizer-path": _TOKENIZER,
    "tool-call-parser": "it is a flag of the workers",
    "worker-startup-check-interval": "workers are checked every half second until they are healthy",
    "worker-startup-timeout-secs": "the router starts without its workers, and uses each as soon as it is healthy",
}
"""Flags of sglang-router 0.3 that this router does not support: the alternative by name, without leading dashes.

A test checks that supported flags are not in this table.
"""
