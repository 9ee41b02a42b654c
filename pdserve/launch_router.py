"""`python -m pdserve.launch_router`: runs the router. Flag names follow SGLang's router.

    --pd-disaggregation --prefill URL [BOOTSTRAP_PORT|none] ... --decode URL ...     pairs
    --worker-urls URL ...                                                           monolith servers

It also starts without a server, for `POST /workers`. Prints one `PDSERVE_READY` line when it listens. SIGTERM or
Ctrl-C starts a drain: new requests are refused, running ones may continue for `--shutdown-grace-period-secs`, and then
end with an error. A second signal ends the drain at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from pdserve.base.hosts import url_host, warn_open
from pdserve.base.log import setup_logging
from pdserve.base.process import ServerReady, announce_ready, freeze_heap
from pdserve.errors import ConfigError
from pdserve.launch_checks import check_port
from pdserve.router.config.config import RouterConfig
from pdserve.router.config.flags import config_from, make_parser

__all__ = ["config_from", "main", "make_parser", "serve"]

log = logging.getLogger("pdserve.launch_router")  # __name__ is "__main__" when it is run

OTHERS_S = 0.5
"""Seconds that other calls may continue after all generating calls have ended."""


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for records of malformed HTTP: aiohttp answers 400, and would log a traceback for each."""
    from aiohttp.http_exceptions import HttpProcessingError

    kind = None if record.exc_info is None else record.exc_info[0]
    return kind is None or not issubclass(kind, HttpProcessingError)


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        ConfigError: wrong certificates.
        OSError: the port is taken.
    """
    from aiohttp import web

    from pdserve.router.app import ROUTER, make_app  # after the flags are checked, as the import takes half a second

    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told)
    tls = config.tls.port_context()
    warn_open(config.host, has_key=config.access.api_key is not None)
    if config.access.worker_proof_key is not None:
        log.info("requests to servers prove the control token; servers that do not prove it are not used")
    app = make_app(config)
    runner = web.AppRunner(
        app, handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=OTHERS_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
        port = runner.addresses[0][1]
        scheme = "http" if tls is None else "https"
        freeze_heap()
        announce_ready(ServerReady(role="router", url=f"{scheme}://{url_host(config.host)}:{port}"))
        await stop.wait()
        await app[ROUTER].drain(config.shutdown_timeout_s, hurry)
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a clean end, 2 for wrong flags or a port that is taken."""
    args = make_parser().parse_args(argv)
    import uvloop

    setup_logging("warning" if args.log_level == "warn" else args.log_level, "router", args.log_format)
    logging.getLogger("aiohttp.server").addFilter(is_worth_logging)
    try:
        config = config_from(args)
        check_port(config.host, config.port, "port")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
