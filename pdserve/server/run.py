"""Runs the API process: uvicorn around the application, a watch on the engine, an orderly end.

Called by `launch_server` in the main process, with the API end of the channel to a scheduler process it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError, EngineDeadError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import Shutdown
from pdserve.server.app import create_app, make_metrics
from pdserve.server.engine_client import EngineClient
from pdserve.server.tls import server_tls
from pdserve.server.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.2
GRACE_S = 5
"""How long running requests may go on after the first signal; the second ends at once."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; `run` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Overrides uvicorn's."""
        yield


def _listen(config: ServerConfig) -> socket.socket:
    host, port = config.serving.host, config.serving.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", field="port") from error


def _settings(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's; it is not to believe `X-Forwarded-For`, which it does of loopback unless told otherwise."""
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )
    settings.load()
    settings.ssl = server_tls(config.access)
    return settings


def _on_signals(server: uvicorn.Server) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


async def _watch(server: uvicorn.Server, client: EngineClient, died: Callable[[], str | None]) -> None:
    """End the server when the engine is gone; its streams have been told by then."""
    while client.alive:
        sentence = died()
        if sentence is not None:
            log.error("%s", sentence)
            client.fail(EngineDeadError(sentence))
            break
        await asyncio.sleep(ENGINE_WATCH_S)
    if client.engine_lost:
        log.error("the engine is gone; the server ends")
        server.should_exit = True


async def _announce(
    server: uvicorn.Server,
    client: EngineClient,
    port: int,
    on_listening: Callable[[int], None],
    on_ready: Callable[[int], None],
) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    on_listening(port)
    with contextlib.suppress(EngineDeadError):
        await client.wait_ready()
        on_ready(port)


def _nothing(port: int) -> None:
    """Nobody wants to know."""


async def serve(
    config: ServerConfig,
    channel: ApiChannel,
    tokenizer: Tokenizer | None,
    *,
    engine_died: Callable[[], str | None],
    on_listening: Callable[[int], None] = _nothing,
    on_ready: Callable[[int], None] = _nothing,
    own_counters: Callable[[], Mapping[str, float]] = dict,
    registered: Callable[[], bool] = lambda: True,
) -> int:
    """Serve until a signal, or until the engine dies; returns the exit status: 0, or 1 without an engine.

    It listens at once; `/health` turns 200 when the scheduler has announced itself. `engine_died` says in a sentence
    which process has ended. `on_listening` gets the bound port, and `on_ready` gets it once requests are taken.
    `own_counters` are shown in `/metrics`, `registered` in `/ready`.

    Raises:
        ConfigError: the port cannot be bound.
    """
    metrics = make_metrics(config, own_counters)
    mode = config.disagg.disaggregation_mode
    client = EngineClient(channel, tokenizer, metrics, match_stops=mode != "prefill")
    app = create_app(config, client, tokenizer, metrics, registered=registered)
    server = _Server(_settings(app, config))
    listener = _listen(config)
    _on_signals(server)
    side_tasks = [
        asyncio.create_task(_announce(server, client, listener.getsockname()[1], on_listening, on_ready)),
        asyncio.create_task(_watch(server, client, engine_died)),
    ]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in side_tasks:
            task.cancel()
        await asyncio.gather(*side_tasks, return_exceptions=True)
        listener.close()
    if client.engine_lost:
        return 1
    await channel.send(Shutdown())
    return 0


def run_api(
    config: ServerConfig,
    open_channel: Callable[[], ApiChannel],
    *,
    tokenizer_dir: str | Path | None,
    engine_died: Callable[[], str | None],
    on_listening: Callable[[int], None] = _nothing,
    on_ready: Callable[[int], None] = _nothing,
    own_counters: Callable[[], Mapping[str, float]] = dict,
    registered: Callable[[], bool] = lambda: True,
) -> int:
    """Load the tokenizer of `tokenizer_dir` and serve; returns the exit status. Blocks the calling thread.

    `open_channel` is called inside the event loop, where the sockets must be made. `on_listening` gets the bound port
    when it listens, `on_ready` when the engine can take requests. `own_counters` are shown in `/metrics`, `registered`
    in `/ready`.

    Raises:
        ConfigError: the tokenizer cannot be read, or the port cannot be bound.
    """
    tokenizer = None
    if tokenizer_dir is not None:
        tokenizer = load_tokenizer(tokenizer_dir, config.serving.chat_template)

    async def main() -> int:
        channel = open_channel()
        try:
            return await serve(
                config,
                channel,
                tokenizer,
                engine_died=engine_died,
                on_listening=on_listening,
                on_ready=on_ready,
                own_counters=own_counters,
                registered=registered,
            )
        finally:
            channel.close()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
