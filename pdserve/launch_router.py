"""`python -m pdserve.launch_router`: the embedded router as a process. Flag names follow SGLang's router.

    --pd-disaggregation --prefill URL [BOOTSTRAP_PORT|none] ... --decode URL ...     pairs
    --worker-urls URL ...                                                           servers that do both halves

Prints one `PDSERVE_READY` line when it listens; SIGTERM or Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from typing import get_args

from aiohttp import web

from pdserve.base.process import Ready, announce_ready
from pdserve.errors import ConfigError
from pdserve.router.app import make_app
from pdserve.router.config import (
    POLICY_HELP,
    PolicyName,
    Role,
    RouterConfig,
    WorkerSpec,
    parse_worker_url,
    prefill_spec,
)

DEFAULTS = RouterConfig(workers=(WorkerSpec(role=Role.REGULAR, url="http://127.0.0.1"),))


def make_parser() -> argparse.ArgumentParser:
    """All flags of the router; times in seconds."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.launch_router", allow_abbrev=False, description=__doc__)
    add = parser.add_argument
    add("--pd-disaggregation", action="store_true", help="route each request to a prefill and a decode server")
    add("--prefill", action="append", nargs="+", default=[], metavar=("URL", "PORT"), help="prefill server; repeatable")
    add("--decode", action="append", default=[], metavar="URL", help="decode server; repeatable")
    add("--worker-urls", nargs="+", default=[], metavar="URL", help="servers that do both halves")
    add("--policy", choices=get_args(PolicyName), default=DEFAULTS.policy, help=POLICY_HELP)
    add("--host", default=DEFAULTS.host, help="address to listen on")
    add("--port", type=int, default=DEFAULTS.port, help="HTTP port; 0 picks a free one")
    add("--health-check-interval", type=float, default=DEFAULTS.health_check_interval_s)
    add("--health-check-timeout", type=float, default=DEFAULTS.health_check_timeout_s)
    add("--health-failure-threshold", type=int, default=DEFAULTS.health_failure_threshold)
    add("--connect-timeout", type=float, default=DEFAULTS.connect_timeout_s)
    add("--request-timeout", type=float, default=DEFAULTS.request_timeout_s, help="one deadline for a whole request")
    add("--max-tries", type=int, default=DEFAULTS.max_tries, help="tries per request, before its first byte")
    add("--max-request-bytes", type=int, default=DEFAULTS.max_request_bytes, help="largest request body")
    add(
        "--shutdown-timeout",
        type=float,
        default=DEFAULTS.shutdown_timeout_s,
        help="time for requests in flight at the end",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def config_from(args: argparse.Namespace) -> RouterConfig:
    """Checked configuration; `ConfigError` names the flag at fault."""
    if (args.prefill or args.decode) and not args.pd_disaggregation:
        raise ConfigError("--prefill and --decode need --pd-disaggregation", field="pd_disaggregation")
    specs = [prefill_spec(values) for values in args.prefill]
    specs += [WorkerSpec(role=Role.DECODE, url=parse_worker_url(url, field="decode")) for url in args.decode]
    specs += [WorkerSpec(role=Role.REGULAR, url=parse_worker_url(url, field="worker-urls")) for url in args.worker_urls]
    return RouterConfig(
        workers=tuple(specs),
        policy=args.policy,
        host=args.host,
        port=args.port,
        health_check_interval_s=args.health_check_interval,
        health_check_timeout_s=args.health_check_timeout,
        health_failure_threshold=args.health_failure_threshold,
        connect_timeout_s=args.connect_timeout,
        request_timeout_s=args.request_timeout,
        max_tries=args.max_tries,
        max_request_bytes=args.max_request_bytes,
        shutdown_timeout_s=args.shutdown_timeout,
    )


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    runner = web.AppRunner(
        make_app(config), handler_cancellation=True, access_log=None, shutdown_timeout=config.shutdown_timeout_s
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        port = runner.addresses[0][1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        announce_ready(Ready(role="router", url=f"http://{host}:{port}"))
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean end, 2 for wrong flags or a port that is taken."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(config_from(args)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
