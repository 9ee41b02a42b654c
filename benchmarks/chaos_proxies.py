"""Links that `benchmarks.chaos` can cut without network namespaces: a TCP proxy before every port of a server.

    router, client ──────────────> proxy ──> HTTP
    decode ──────────────────────> proxy ──> bootstrap server of prefill
    prefill, decode ─────────────> proxy ──> control port of the other
    Mooncake engine of prefill ──> proxy ──> Mooncake engine of decode: handshake, then data

The router's flags name the proxies of the first two. A server tells its peers the others (`benchmarks.chaos_server`).
The proxies run on an event loop in a thread of their own. Who connects to one is found out by its port, so a link can
be cut in one direction and between two servers only. What is held up is kept, and passed on when the link is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
HTTP, BOOTSTRAP, CONTROL, MOONCAKE, DATA = "http", "bootstrap", "control", "mooncake", "data"
HOST = "127.0.0.1"
CALL_S = 30.0
BACKLOG = 512
CHUNK = 1 << 16
_LENGTH = struct.Struct("<Q")
"""Before each message of Mooncake's handshake; it counts the byte of the message's kind, too."""
_DATA_PORT = re.compile(rb'"tcp_data_port":(\d+)')
_RESET = struct.pack("ii", 1, 0)
"""As SO_LINGER: closing sends a reset."""


class Proxies:
    """All proxies. `owner` says which server has a local port of this host, "" for none; it may take a while.

    Methods may be called by any thread but that of the proxies.
    """

    def __init__(self, owner: Callable[[int], str] = lambda port: "") -> None:
        self._owner = owner
        self._cut: set[str] = set()
        self._refusing: set[str] = set()
        self._held: set[tuple[str, str]] = set()
        self._delay_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._proxies: dict[tuple[str, str, int], _Proxy] = {}
        """By server, what it listens for, and its own port."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._registrar = self._call(asyncio.start_server(self._register, HOST, 0))
        self.port = int(self._registrar.sockets[0].getsockname()[1])
        """Where servers ask for proxies: see `ask_for_proxy`."""

    # ------------------------------------------------------------------ proxies

    def open(self, server: str, kind: str, port: int, at: int = 0) -> int:
        """The port of a proxy before `port` of `server`: `at`, where that is not 0. It may be there already."""
        return self._call(self._open(server, kind, port, at))

    def drop(self, server: str) -> None:
        """The processes of `server` have ended: reset its connections, and refuse new ones until the next `open`."""
        self._call(self._drop(server))

    def close(self) -> None:
        """End everything."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    # ------------------------------------------------------------------ faults

    def cut(self, server: str) -> None:
        """From now on nothing passes to `server` or from it. Connections stay open; to its ports none can be made."""
        self._call(self._apply(server, self._cut.add, _Proxy.fall_silent))

    def hold(self, sender: str, receiver: str) -> None:
        """From now on nothing passes from one server to the other; connections stay open."""
        self._call(self._change(lambda: self._held.add((sender, receiver))))

    def slow_down(self, server: str, delay_s: float) -> None:
        """What a read of a link of `server` brings, up to 64 KiB, passes so late from now on, one after the other."""
        self._call(self._change(lambda: self._delay_s.update({server: delay_s})))

    def refuse(self, server: str) -> None:
        """Reset all connections of `server`. New ones to it are refused, and what it begins itself is held up."""
        self._call(self._apply(server, self._refusing.add, _Proxy.stop))
        self._call(self._reset(server))

    def heal(self) -> None:
        """Undo all `cut`, `hold`, `slow_down` and `refuse`."""
        self._call(self._heal())

    # ------------------------------------------------------------------ on the loop

    async def may_pass(self, sender: str, receiver: str) -> None:
        """Return when something may pass from one server to another."""
        while self._is_held(sender, receiver):
            await self._changed.wait()
        if delay_s := max(self._delay_s.get(sender, 0.0), self._delay_s.get(receiver, 0.0)):
            await asyncio.sleep(delay_s)

    async def owner_of(self, port: int) -> str:
        """Which server has a local port."""
        return await asyncio.to_thread(self._owner, port)

    async def data_proxy(self, server: str, port: int) -> int:
        """The port of the proxy before a data port of a Mooncake engine."""
        return await self._open(server, DATA, port, 0)

    def _is_held(self, sender: str, receiver: str) -> bool:
        stopped = sender in self._refusing or not self._cut.isdisjoint((sender, receiver))
        return stopped or (sender, receiver) in self._held

    async def _change(self, change: Callable[[], object]) -> None:
        change()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _apply(
        self, server: str, change: Callable[[str], None], to_each: Callable[[_Proxy], Awaitable[None]]
    ) -> None:
        await self._change(lambda: change(server))
        for proxy in list(self._proxies.values()):
            if proxy.server == server:
                await to_each(proxy)

    async def _reset(self, server: str) -> None:
        for proxy in self._proxies.values():
            proxy.reset(server)

    async def _heal(self) -> None:
        deaf = [proxy for proxy in self._proxies.values() if proxy.server in self._cut | self._refusing]
        await self._change(lambda: [fault.clear() for fault in (self._cut, self._refusing, self._held, self._delay_s)])
        for proxy in deaf:
            proxy.listen(proxy.port)

    async def _open(self, server: str, kind: str, port: int, at: int) -> int:
        proxy = self._proxies.get((server, kind, port))
        if proxy is None:
            proxy = self._proxies[server, kind, port] = _Proxy(self, server, kind, port)
        proxy.listen(at or proxy.port)
        return proxy.port

    async def _drop(self, server: str) -> None:
        for key in [key for key in self._proxies if key[0] == server]:
            proxy = self._proxies.pop(key)
            await proxy.stop()
            proxy.reset(server)

    async def _close(self) -> None:
        self._registrar.close()
        for proxy in self._proxies.values():
            await proxy.stop()
            proxy.reset(proxy.server)
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _register(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            asked = json.loads(await reader.readline())
            port = await self._open(asked["server"], asked["kind"], asked["port"], 0)
            writer.write(f"{port}\n".encode())
            await writer.drain()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)


class _Proxy:
    """One listening port before a port of `server`. On the loop only."""

    def __init__(self, proxies: Proxies, server: str, kind: str, target: int) -> None:
        self._proxies, self.server, self._kind, self._target = proxies, server, kind, target
        self.port = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._filler: socket.socket | None = None
        self._ends: dict[asyncio.StreamWriter, str] = {}
        """Both ends of all connections, with who opened the connection."""
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, port: int) -> None:
        """Listen on `port`, 0 being a free one, unless it listens already; after `fall_silent`, accept again."""
        if self._listener is None:
            self._listener = socket.create_server((HOST, port), backlog=BACKLOG)
            self._listener.setblocking(False)
            self.port = int(self._listener.getsockname()[1])
        self._listener.listen(BACKLOG)
        if self._accepting is None:
            self._accepting = asyncio.create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """New connections are refused from now on."""
        await self._accept_no_more()
        for each in (self._listener, self._filler):
            if each is not None:
                each.close()
        self._listener = self._filler = None

    async def fall_silent(self) -> None:
        """New connections hang from now on: the accept queue is full, so the system drops their SYN packets."""
        await self._accept_no_more()
        if self._listener is not None and self._filler is None:
            self._listener.listen(0)
            self._filler = socket.socket()
            self._filler.setblocking(False)
            self._filler.connect_ex((HOST, self.port))

    async def _accept_no_more(self) -> None:
        accepting, self._accepting = self._accepting, None
        if accepting is not None:
            accepting.cancel()
            await asyncio.wait([accepting])  # until then the loop looks at the listener, which may be closed next

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, whose = await asyncio.get_running_loop().sock_accept(listener)
            if self._filler is not None and whose == self._filler.getsockname():
                connection.close()
                self._filler.close()
                self._filler = None
                continue
            task = asyncio.create_task(self._serve(connection, whose[1]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def reset(self, server: str) -> None:
        """Reset the connections that `server` opened or that lead to it."""
        for writer, source in list(self._ends.items()):
            if server in (source, self.server):
                _reset(writer)

    async def _serve(self, connection: socket.socket, port: int) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
        self._ends[writer] = source = ""
        there: asyncio.StreamWriter | None = None
        try:
            if self._kind != HTTP:  # the router's and clients', many of them
                self._ends[writer] = source = await self._proxies.owner_of(port)
            await self._proxies.may_pass(source, self.server)
            answers, there = await asyncio.open_connection(HOST, self._target, limit=CHUNK)
            self._ends[there] = source
            changed = _DataPorts(self._data_proxy).feed if self._kind == MOONCAKE else None
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, there, source, self.server))
                both.create_task(self._pump(answers, writer, self.server, source, changed))
            writer.close()
            there.close()
        except ConnectionRefusedError:
            await self.stop()  # who listened there has ended: the next one hears that from the system
        except (OSError, ExceptionGroup):
            pass  # one of the two has broken off: so does the other, below
        finally:
            for end in (writer, there):
                if end is not None:
                    _reset(end)
                    self._ends.pop(end, None)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sender: str,
        receiver: str,
        changed: Callable[[bytes], Awaitable[bytes]] | None = None,
    ) -> None:
        """Pass on what `sender` says until it has said everything.

        Raises:
            ConnectionError: it has broken off, and the receiver may hear so.
        """
        more = True
        while more:
            try:
                data = await reader.read(CHUNK)
            except ConnectionError:
                await self._proxies.may_pass(sender, receiver)
                raise
            await self._proxies.may_pass(sender, receiver)
            more = bool(data)
            with contextlib.suppress(ConnectionError):  # the receiver has broken off: the other direction finds out
                writer.write(data if changed is None else await changed(data))
                await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _data_proxy(self, port: int) -> int:
        return await self._proxies.data_proxy(self.server, port)


class _DataPorts:
    """What a Mooncake engine says in its handshake, with a proxy's port in the place of its data port."""

    def __init__(self, proxied: Callable[[int], Awaitable[int]]) -> None:
        self._proxied = proxied
        self._kept = b""

    async def feed(self, data: bytes) -> bytes:
        """The whole messages that have come by now, changed."""
        self._kept += data
        said = b""
        while len(self._kept) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._kept)[0]
            if len(self._kept) < end:
                break
            message, self._kept = self._kept[_LENGTH.size : end], self._kept[end:]
            if (found := _DATA_PORT.search(message)) is not None:
                port = await self._proxied(int(found[1]))
                message = message[: found.start(1)] + str(port).encode() + message[found.end(1) :]
            said += _LENGTH.pack(len(message)) + message
        return said


def _reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off, unless it has been closed."""
    if not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


def ask_for_proxy(registrar: int, server: str, kind: str, port: int) -> int:
    """Have the `Proxies` at `registrar` open a proxy before `port` of `server`; its port. Raises OSError."""
    with socket.create_connection((HOST, registrar), timeout=CALL_S) as asking:
        asking.sendall(json.dumps({"server": server, "kind": kind, "port": port}).encode() + b"\n")
        answer = asking.makefile("rb").readline()
    if not answer:
        raise OSError(f"there is no proxy for port {port} of {server}")
    return int(answer)
