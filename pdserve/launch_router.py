"""`python -m pdserve.launch_router`: the embedded router as a process. Flag names follow SGLang's router.

    --pd-disaggregation --prefill URL [BOOTSTRAP_PORT|none] ... --decode URL ...     pairs
    --worker-urls URL ...                                                           servers that do both halves

Without any server it starts too, and waits for `POST /workers`. Prints one `PDSERVE_READY` line when it listens;
SIGTERM or Ctrl-C ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from pdserve.base.exposure import url_host, warn_open
from pdserve.base.process import Ready, announce_ready
from pdserve.errors import ConfigError
from pdserve.router.app import make_app
from pdserve.router.config import RouterConfig
from pdserve.router.flags import config_from, make_parser
from pdserve.router.tls import server_tls

__all__ = ["config_from", "main", "make_parser", "serve"]


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    tls = server_tls(config.tls)
    warn_open(config.host, has_key=config.access.api_key is not None)
    runner = web.AppRunner(
        make_app(config),
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=config.shutdown_timeout_s,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=tls).start()
        port = runner.addresses[0][1]
        scheme = "http" if tls is None else "https"
        announce_ready(Ready(role="router", url=f"{scheme}://{url_host(config.host)}:{port}"))
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean end, 2 for wrong flags or a port that is taken."""
    args = make_parser().parse_args(argv)
    level = {"warn": "warning"}.get(args.log_level, args.log_level)
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config_from(args)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
