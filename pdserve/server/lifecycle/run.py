"""Runs the API process: uvicorn around `RoleSwitchApp`, signals, graceful shutdown.

    first signal ──> not ready, new requests are refused ── all ended, or the grace time is over ──> port closes ──> end
    second signal ── running requests are aborted with an error ───────────────────────────────────────────────────> end

Called by `launch_server` in the main process, with an engine that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from pdserve.base.process import ENDING, raise_if_signalled
from pdserve.base.startup_progress import told
from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError
from pdserve.http.access import MAX_HEADER_BYTES, MAX_TARGET_BYTES
from pdserve.server.lifecycle.instance import EngineBackend, OtherRole, RoleSwitchApp, ignore_readiness
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

OTHERS_S = 2
"""Seconds that calls other than generation may continue after all generation calls have ended."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; `_on_signals` installs others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers; overrides uvicorn's method."""
        yield


def _listen(config: ServerConfig) -> socket.socket:
    host, port = config.serving.host, config.serving.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", field="port") from error


def _settings(app: RoleSwitchApp, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's settings. `proxy_headers` is off, because uvicorn trusts `X-Forwarded-For` from loopback by default."""
    settings = uvicorn.Config(
        app,
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,  # its loggers use the handler of `setup_logging`
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES + MAX_TARGET_BYTES,
        timeout_graceful_shutdown=OTHERS_S,
        timeout_keep_alive=75,
    )
    settings.load()
    settings.ssl = config.access.tls_context()
    return settings


def _on_signals(server: uvicorn.Server, app: RoleSwitchApp, grace_s: float) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    draining: list[asyncio.Task[None]] = []

    def stop() -> None:
        if draining:
            draining[0].cancel()
            app.abort_all()
            server.force_exit = server.should_exit
            server.should_exit = True
        else:
            draining.append(asyncio.create_task(_drain(server, app, grace_s)))

    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, stop)
    raise_if_signalled()  # a signal that arrived before the handlers were installed


async def _drain(server: uvicorn.Server, app: RoleSwitchApp, grace_s: float) -> None:
    try:
        await app.drain(grace_s)
    finally:
        server.should_exit = True


async def serve(
    first: EngineBackend,
    tokenizer: Tokenizer | None,
    *,
    other: OtherRole | None = None,
    on_listening: Callable[[int], None] = ignore_readiness,
) -> int:
    """Serve until a signal, or until the engine dies; returns the exit status: 0, or 1 if the engine has died.

    The port listens at once; `/health` returns 200 when the scheduler has sent `EngineReady`. `on_listening` gets the
    bound port. `tokenizer` None: the server takes token ids only. `other` creates the backend of another role; None:
    the role is fixed.

    Raises:
        ConfigError: the port cannot be bound, or a request log or tracing cannot be opened.
    """
    listener = _listen(first.config)
    try:
        port = listener.getsockname()[1]
        log.info("HTTP port %d is open; requests get 503 until the engine is ready", port)
        app = RoleSwitchApp(first, tokenizer, other, port=port, leave=lambda: _leave(server))
        server = _Server(_settings(app, first.config))
        _on_signals(server, app, first.config.serving.timeout_graceful_shutdown)
        listening = asyncio.create_task(_report_listening(server, port, on_listening))
        try:
            await app.open()
            await server.serve(sockets=[listener])
        finally:
            listening.cancel()
            status = await app.close()
    finally:
        listener.close()
    return status


def _leave(server: uvicorn.Server) -> None:
    server.should_exit = True


async def _report_listening(server: uvicorn.Server, port: int, on_listening: Callable[[int], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    on_listening(port)


def run_api(
    first: EngineBackend,
    *,
    tokenizer_dir: str | Path | None,
    other: OtherRole | None = None,
    on_listening: Callable[[int], None] = ignore_readiness,
) -> int:
    """Load the tokenizer of `tokenizer_dir` and serve; returns the exit status. Blocks the calling thread.

    `tokenizer_dir` None: no tokenizer. `first` is the backend of the first role, its engine already started. `other`
    creates the backend of another role; None: the role is fixed. `on_listening` gets the bound port.

    Raises:
        ConfigError: the tokenizer cannot be read, the port cannot be bound, or a request log or tracing cannot be
            opened.
    """
    tokenizer = None
    if tokenizer_dir is not None:
        with told(log.info, "loading the tokenizer"):
            tokenizer = load_tokenizer(tokenizer_dir, first.config.serving.chat_template)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(first, tokenizer, other=other, on_listening=on_listening))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
