"""The servers behind one `LLM`: their host processes, and this process's ends of their channels. Owned by `LLM`.

any thread:   start, close, and work that `LLM` submits to `loop`
loop thread:  spawns the hosts, owns and reads the channels; the caller may run another event loop, as notebooks do
host's watch: a thread per host notifies the loop of its death; then all present and later requests fail

open ── start ──> ready ── close ──> closed          the death of one server fails all, as with `launch_local`
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from pdserve.base.env import CONTROL_TOKEN
from pdserve.base.process import Child, end_all
from pdserve.errors import ConfigError, EngineDeadError
from pdserve.launch_engine import CUDA_DEVICES, REFUSED
from pdserve.launch_local import THREAD_VARIABLES
from pdserve.launch_offline import LOOPBACK, Announcement, ConfigRefusal, parse_line
from pdserve.llm.options import Deployment, ServerCommand
from pdserve.protocol.channel import ApiChannel, ChannelAddress, ZmqApiChannel, remove_channel_address
from pdserve.protocol.messages import MAX_ROOM, RoomAddress, Shutdown
from pdserve.protocol.replicas import ReplicatedChannel
from pdserve.server.app import make_metrics
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.request.constraints import GrammarCheck
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.tokenizer import Tokenizer

HOST_COMMAND = (sys.executable, "-m", "pdserve.launch_offline")
GRACE_S = 15.0
ABANDON_S = 2.0
"""Grace time in seconds of servers that never became ready, which need no orderly shutdown."""
TAIL_LINES = 5


class RunningServer:
    """One started server. Loop thread only, except that the host's reader thread sets `tail` and `refusal`.

    `num_live`: live sequences.
    """

    def __init__(self, server: ServerCommand, tokenizer: Tokenizer | None) -> None:
        self.server = server
        self.num_live = 0
        self._tokenizer = tokenizer
        self._announcement: Announcement | None = None
        self._channel: ApiChannel | None = None
        self._context: ServerContext | None = None
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.refusal: ConfigError | None = None

    @property
    def context(self) -> ServerContext:
        """The `ServerContext`, as HTTP endpoints have it. Only after `connect`."""
        assert self._context is not None, "connected"
        return self._context

    def room(self) -> RoomAddress:
        """Create a bootstrap room at this prefill server."""
        assert self._announcement is not None, "connected"
        room = secrets.randbelow(MAX_ROOM)
        return RoomAddress(host=LOOPBACK, port=self._announcement.bootstrap_port, room=room)

    def connect(self, announcement: Announcement) -> None:
        """Open the channels and start to read them."""
        config, mode = self.server.config, self.server.mode
        self._announcement = announcement
        channels = [ZmqApiChannel(ChannelAddress(directory)) for directory in announcement.directories]
        self._channel = channels[0] if len(channels) == 1 else ReplicatedChannel(channels, named=mode == "prefill")
        metrics = make_metrics(config)
        client = EngineClient(self._channel, self._tokenizer, metrics, match_stops=mode != "prefill")
        grammars = GrammarCheck(config.grammar, self._tokenizer)
        formats = ChatFormats.of(config.serving, self._tokenizer)
        self._context = ServerContext(
            config, client, self._tokenizer, metrics, int(time.time()), grammars, formats=formats,
            adapters=dict(config.lora.adapters),
        )  # fmt: skip
        client.start()

    def lost(self, error: EngineDeadError) -> None:
        """Fail all requests: this server, or another server of the deployment, has died."""
        if self._context is not None:
            self._context.client.fail(error)

    async def disconnect(self) -> None:
        """Send `Shutdown` to the engine and close the channel."""
        if self._context is not None and self._channel is not None:
            await self._context.client.stop()
            await self._context.grammars.close()
            await self._channel.send(Shutdown())
            self._channel.close()

    def clean(self) -> None:
        """Remove the channel directories that a killed host has left."""
        for directory in [] if self._announcement is None else self._announcement.directories:
            remove_channel_address(ChannelAddress(directory))


class Servers:
    """See the file's docstring."""

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer | None) -> None:
        self.loop = LoopThread("pdserve-llm")
        self.all = [RunningServer(server, tokenizer) for server in deployment.servers]
        self._env = _environment(deployment.threads)
        self._children: list[Child] = []
        self._died: str | None = None
        self._ready = False
        self._owner = os.getpid()
        self._closing = threading.Event()

    def of(self, *modes: str) -> list[RunningServer]:
        """Return the servers with one of these disaggregation modes."""
        return [running for running in self.all if running.server.mode in modes]

    def start(self) -> None:
        """Start all servers and wait until they can take requests, without a timeout.

        Raises:
            ConfigError: a server refused its configuration.
            EngineDeadError: a server died.
        """
        try:
            self.loop.call(self._start())
        except EngineDeadError as error:
            self.close()
            raise self._why(error) from None
        except BaseException:
            self.close()
            raise
        self._ready = True

    def close(self) -> None:
        """End all processes and fail running requests. Idempotent; any thread except the loop thread.

        Does nothing in a fork of the process that started them, because they are not the fork's children.
        """
        if self._closing.is_set() or os.getpid() != self._owner:
            return
        self._closing.set()
        self.loop.call(self._disconnect())
        end_all(self._children, GRACE_S if self._ready else ABANDON_S)
        self.loop.close()
        for running in self.all:
            running.clean()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def _why(self, error: EngineDeadError) -> ConfigError | EngineDeadError:
        """Build the error of a failed start from the servers' refusals and last log lines. All have ended by then.

        Ranks report a refused configuration in their logs only.
        """
        for running in self.all:
            if running.refusal is not None:
                return running.refusal
        tail = "\n".join(line for running in self.all for line in running.tail)
        text = f"{error}; its output says why:\n{tail}" if tail else str(error)
        refused = any(child.returncode == REFUSED for child in self._children)
        return ConfigError(text) if refused else EngineDeadError(text)

    async def _start(self) -> None:
        announced = [self._spawn(running) for running in self.all]
        for running, announcement in zip(self.all, announced, strict=True):
            running.connect(await announcement)
        for running in self.all:
            await running.context.client.wait_ready()
        if self._died is not None:
            raise EngineDeadError(self._died)

    def _spawn(self, running: RunningServer) -> asyncio.Future[Announcement]:
        """Start a host process; the future resolves to its `Announcement`."""
        announced: asyncio.Future[Announcement] = asyncio.get_running_loop().create_future()
        name = running.server.name

        def on_line(line: str) -> None:
            said = parse_line(line)
            if isinstance(said, Announcement):
                self.loop.post(lambda: announced.set_result(said) if not announced.done() else None)
            elif isinstance(said, ConfigRefusal):
                running.refusal = ConfigError(said.message, field=said.field)
            else:
                running.tail.append(line)
                print(line, file=sys.stderr, flush=True)

        def on_exit(child: Child) -> None:
            self.loop.post(lambda: self._on_death(f"the {name} server (pid {child.pid}) has ended", announced))

        argv = [*HOST_COMMAND, *running.server.argv]
        devices = running.server.devices
        env = self._env if devices is None else {**self._env, CUDA_DEVICES: ",".join(devices)}
        self._children.append(Child(name, argv, env=env, on_line=on_line, on_exit=on_exit))
        return announced

    def _on_death(self, sentence: str, announced: asyncio.Future[Announcement]) -> None:
        if self._closing.is_set() or self._died is not None:
            return
        self._died = sentence
        error = EngineDeadError(sentence)
        if not announced.done():
            announced.set_exception(error)
        for running in self.all:
            running.lost(error)

    async def _disconnect(self) -> None:
        await asyncio.gather(*(running.disconnect() for running in self.all))


def _environment(threads: int | None) -> dict[str, str]:
    """Environment of the hosts: a shared control token, and the number of threads.

    `threads` None: not set, as one server uses all cores.
    """
    variables = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {CONTROL_TOKEN: secrets.token_hex(32)} | dict(os.environ) | variables


T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads until `close`, in an event loop of its own.

    It also starts the child processes. The kernel ends them with the thread that started them, and this thread lives
    until `close`.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work`; any thread except the loop thread. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for its result; any thread except the loop thread.

        An interrupt of the wait requests cancellation of `work` and is raised again.
        """
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, call: Callable[[], None]) -> None:
        """Schedule `call` on the loop; any thread. Does nothing after `close`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the loop thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Stop the loop and cancel running work. Waits for the thread unless called in it."""
        self.post(self._loop.stop)
        if not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()
