"""The router's command line, under SGLang's names where its router has the same thing. Called by `launch_router`."""

from __future__ import annotations

import argparse
from typing import NoReturn, get_args

from pdserve.errors import ConfigError
from pdserve.router.config.access_flags import access_of, add_access, tls_of
from pdserve.router.config.config import (
    POLICY_HELP,
    BreakerConfig,
    HealthConfig,
    LimitConfig,
    PolicyConfig,
    PolicyName,
    ProbeConfig,
    RetryConfig,
    RouterConfig,
    WorkerRole,
    WorkerSpec,
    parse_worker_url,
    prefill_spec,
)
from pdserve.router.config.sglang_flags import UNSUPPORTED

DEFAULTS = RouterConfig(pd=True)
POLICIES = get_args(PolicyName)
POLICY_ALIASES = {"consistent_hash": "consistent_hashing", "manual": "consistent_hashing"}
"""SGLang's `manual` keeps a routing key on its worker as well, with a table where we hash."""


UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Says of sglang-router's flags that this router does not have what to do instead."""

    def error(self, message: str) -> NoReturn:
        """As argparse does, but for those."""
        given = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else []
        names = [one.removeprefix("--").partition("=")[0] for one in given if one.startswith("--")]
        for name in names:
            if name in UNSUPPORTED:
                super().error(f"--{name} of sglang-router is not supported: {UNSUPPORTED[name]}")
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    """All flags of the router; times in seconds unless the name says otherwise."""
    parser = Parser(
        prog="python -m pdserve.launch_router",
        allow_abbrev=False,
        description="A router before prefill and decode servers, or before servers that do both halves.",
    )
    _add_workers(parser.add_argument_group("workers"))
    _add_policies(parser.add_argument_group("policies"))
    _add_http(parser.add_argument_group("HTTP"))
    _add_limits(parser.add_argument_group("limits and the queue"))
    _add_health(parser.add_argument_group("health checks and circuit breakers"))
    add_access(parser.add_argument_group("access and TLS"))
    return parser


Group = argparse._ArgumentGroup


def _add_workers(group: Group) -> None:
    add = group.add_argument
    add("--pd-disaggregation", action="store_true", help="route each request to a prefill and a decode server")
    add("--prefill", action="append", nargs="+", default=[], metavar=("URL", "PORT"), help="prefill server; repeatable")
    add("--decode", action="append", default=[], metavar="URL", help="decode server; repeatable")
    add("--worker-urls", nargs="*", default=None, metavar="URL", help="servers that do both halves")


def _add_policies(group: Group) -> None:
    add, own = group.add_argument, DEFAULTS.policies
    given = (*POLICIES, *POLICY_ALIASES)
    shown = f"{{{','.join(POLICIES)}}}"
    add("--policy", choices=given, metavar=shown, default=own.policy, help=POLICY_HELP)
    text = "instead of --policy for prefill servers; bucket: prompts of like length go to one server"
    add("--prefill-policy", choices=(*given, "bucket"), metavar=f"{shown[:-1]},bucket}}", help=text)
    add("--decode-policy", choices=given, metavar=shown, help="instead of --policy for decode servers")
    text = "cache_aware: share of a prompt, 0 to 1, that a server must have been sent before to get it for that"
    add("--cache-threshold", type=float, default=own.cache_threshold, help=text)
    text = "cache_aware and bucket: go by load alone where loads differ by more than so many requests"
    add("--balance-abs-threshold", type=float, default=own.balance_abs_threshold, help=text)
    text = "and by more than this factor"
    add("--balance-rel-threshold", type=float, default=own.balance_rel_threshold, help=text)
    text = "cache_aware: how often texts sent long ago are forgotten"
    add("--eviction-interval-secs", "--eviction-interval", type=float, default=own.eviction_interval_s, help=text)
    text = "cache_aware: characters remembered for each server"
    add("--max-tree-size", type=int, default=own.max_tree_size, help=text)
    text = "bucket: how often the lengths are divided anew"
    add("--bucket-adjust-interval-secs", type=float, default=own.bucket_adjust_interval_s, help=text)


def _add_http(group: Group) -> None:
    add = group.add_argument
    add("--host", default=DEFAULTS.host, help="address to listen on")
    add("--port", type=int, default=DEFAULTS.port, help="HTTP port; 0 picks a free one")
    add("--connect-timeout", type=float, default=DEFAULTS.connect_timeout_s, help="to reach a server")
    text = "one deadline for a whole request: queue, tries and answer"
    add("--request-timeout-secs", "--request-timeout", type=float, default=DEFAULTS.request_timeout_s, help=text)
    text = "largest request body in bytes"
    add("--max-payload-size", "--max-request-bytes", type=int, default=DEFAULTS.max_request_bytes, help=text)
    text = "time for requests in flight when the router ends"
    names = ("--shutdown-grace-period-secs", "--shutdown-timeout")
    add(*names, type=float, default=DEFAULTS.shutdown_timeout_s, help=text)
    own = DEFAULTS.access
    text = "where clients' request ids are looked for; workers and answers get it as X-Request-Id"
    add("--request-id-headers", nargs="*", default=list(own.request_id_headers), metavar="HEADER", help=text)
    add("--enable-trace", action="store_true", help="traces through OpenTelemetry, which pdserve[otel] brings")
    text = "collector that spans are posted to over OTLP/HTTP: HOST:PORT, or a URL"
    add("--otlp-traces-endpoint", default="localhost:4318", metavar="WHERE", help=text)
    add("--log-level", choices=("debug", "info", "warn", "warning", "error"), default="info", help="what is logged")


def _add_limits(group: Group) -> None:
    add, own, retry = group.add_argument, DEFAULTS.limits, DEFAULTS.retry
    text = "requests at one server at a time; more wait in the queue. No limit without it"
    add("--max-inflight", type=int, default=own.max_inflight, help=text)
    text = "requests at all servers together; -1: no limit"
    add("--max-concurrent-requests", type=int, default=-1, help=text)
    add("--queue-size", type=int, default=own.queue_size, help="requests that may wait; one more is a 503")
    add("--queue-timeout-secs", type=float, default=own.queue_timeout_s, help="longest wait; then a 503")
    text = "tries per request, the first one too; only before its first byte"
    add("--retry-max-retries", "--max-tries", type=int, default=retry.max_tries, help=text)
    add("--disable-retries", action="store_true", help="one try per request")
    add("--retry-initial-backoff-ms", type=float, default=retry.first_backoff_s * 1000, help="pause before the 2nd try")
    add("--retry-max-backoff-ms", type=float, default=retry.max_backoff_s * 1000, help="longest pause")
    text = "each further pause is longer by this factor"
    add("--retry-backoff-multiplier", type=float, default=retry.multiplier, help=text)
    text = "share of a pause, 0 to 1, by which it is longer or shorter at random"
    add("--retry-jitter-factor", type=float, default=retry.jitter, help=text)
    text = "how often a stream of one sequence goes on from another pair when its decode server dies; 0: never"
    add("--retry-streams", type=int, default=retry.stream_retries, metavar="N", help=text)


def _add_health(group: Group) -> None:
    add, own, breaker = group.add_argument, DEFAULTS.health, DEFAULTS.breaker
    text = "how often a server is asked; a dead one every half second"
    add("--health-check-interval-secs", "--health-check-interval", type=float, default=own.interval_s, help=text)
    text = "how long its answer may take"
    add("--health-check-timeout-secs", "--health-check-timeout", type=float, default=own.timeout_s, help=text)
    text = "checks in a row without an answer until a server counts as dead; a refused connection is enough"
    add("--health-failure-threshold", type=int, default=own.failure_threshold, help=text)
    text = "good checks in a row until it counts as alive again"
    add("--health-success-threshold", type=int, default=own.success_threshold, help=text)
    add("--health-check-endpoint", default=own.endpoint, metavar="PATH", help="what is asked")
    add("--disable-health-check", action="store_true", help="take servers to be alive until a connection breaks")
    text = "how often servers are asked for their load, where a policy goes by it"
    add("--load-check-interval-secs", type=float, default=own.load_interval_s, help=text)
    text = "how often one token is sent through pairs that serve nothing else, to see whether they would"
    add("--pair-probe-interval-secs", type=float, default=DEFAULTS.probes.interval_s, help=text)
    text = "how long it may take; a pair where two in a row do not come gets no requests until one does"
    add("--pair-probe-timeout-secs", type=float, default=DEFAULTS.probes.timeout_s, help=text)
    add(
        "--disable-pair-probes", action="store_true", help="take a pair to serve as long as its two servers are healthy"
    )
    text = "failures within the window, without a success between them, until a server gets no requests for a while"
    add("--cb-failure-threshold", type=int, default=breaker.failure_threshold, help=text)
    text = "probes that must succeed before it gets all again"
    add("--cb-success-threshold", type=int, default=breaker.success_threshold, help=text)
    add("--cb-timeout-duration-secs", type=float, default=breaker.open_s, help="how long it gets none")
    add("--cb-window-duration-secs", type=float, default=breaker.window_s, help="the window")
    add("--disable-circuit-breaker", action="store_true", help="send requests whatever came of earlier ones")


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Checked configuration; `ConfigError` names the flag at fault."""
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
        access=access_of(args),
        tls=tls_of(args),
    )


def _specs(args: argparse.Namespace) -> tuple[WorkerSpec, ...]:
    if (args.prefill or args.decode) and not args.pd_disaggregation:
        raise ConfigError("--prefill and --decode need --pd-disaggregation", field="pd_disaggregation")
    if not args.pd_disaggregation and args.worker_urls is None:
        message = "name servers with --worker-urls URL ..., or with --pd-disaggregation --prefill URL --decode URL"
        raise ConfigError(message, field="worker_urls")
    specs = [prefill_spec(values) for values in args.prefill]
    specs += [WorkerSpec(role=WorkerRole.DECODE, url=parse_worker_url(url, field="decode")) for url in args.decode]
    regular = [parse_worker_url(url, field="worker-urls") for url in args.worker_urls or []]
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
