"""The faults that `benchmarks.chaos` injects, one after the other, and how long the service takes to recover from each.

Recovered: every pair that the fault concerned has answered a request, sent to both of its servers directly, with the
right text, and the router counts its servers as healthy. Called by the main thread, which owns the processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import psutil
import requests
import zmq

from benchmarks.chaos_farm import Farm, Member
from benchmarks.chaos_load import GENERATE, Question
from pdserve.errors import PdserveError
from pdserve.transfer.bootstrap_client import fetch_replica
from pdserve.transfer.control import CurveKeys
from pdserve.transfer.wire import MAX_FRAME_BYTES, Hello, Packet, Wire
from tests.fuzz.structs import sample

ATTEMPT_S, EVERY_S, MAX_TRIES = 15.0, 1.0, 4
"""Of a request that looks whether a pair has recovered; another is sent beside it every so often, up to so many."""
LIMIT_S = 90.0
SLOW_S = (0.02, 0.3)
"""By how much what passes a slow link comes late."""
FOLLOW_S = 10.0
"""In which the other processes of a server must end when one was killed."""


@dataclasses.dataclass(frozen=True)
class Injected:
    """One fault that has happened. `recovery_s` None: it was not over within `LIMIT_S`."""

    kind: str
    member: str
    began: float
    lasted_s: float
    recovery_s: float | None
    detail: str = ""


class Faults:
    """Picks faults by a seed, injects them, waits for recovery. `probe` is a question with token ids."""

    def __init__(self, farm: Farm, probe: Question, seed: int, token: str) -> None:
        self._farm, self._probe, self._token = farm, probe, token
        self._rng = random.Random(seed)
        self._rooms = itertools.count(1 << 50)
        self.happened: list[Injected] = []
        self.problems: list[str] = []
        self.turns: Counter[str] = Counter()
        """Faults that have begun and that are over, by member: odd while the member is under a fault."""
        self._kinds: dict[str, Callable[[Member], None]] = {
            "kill server": self._kill_server,
            "kill engine": self._kill_engine,
            "stop server": lambda member: self._stop(member, member.processes()),
            "stop engine": lambda member: self._stop(member, [e] if (e := member.engine()) else []),
            "stop API": lambda member: self._stop(member, member.processes()[:1]),
            "stranger's frames": self._stranger,
            "forged Hello": self._forged,
            "half-open connections": self._half_open,
            "junk for bootstrap": self._bootstrap_junk,
        }
        if farm.network is not None:
            self._kinds |= {"cut link": self._cut, "device down": self._device_down, "one-way link": self._one_way}
        if (proxies := farm.proxies) is not None:
            faults: dict[str, Callable[[Member], None]] = {
                "cut link": lambda member: proxies.cut(member.name),
                "reset link": lambda member: proxies.refuse(member.name),
                "slow link": lambda member: proxies.slow_down(member.name, self._rng.uniform(*SLOW_S)),
                "one-way link": lambda member: proxies.hold(member.name, self._other(member).name),
            }
            self._kinds |= {kind: functools.partial(self._at_proxies, fault) for kind, fault in faults.items()}
        self._chosen = list(self._kinds)
        self._bag: list[str] = []

    @property
    def kinds(self) -> list[str]:
        """All kinds of faults that can be injected here."""
        return list(self._kinds)

    def only(self, kinds: Sequence[str]) -> None:
        """Inject no other kinds from now on."""
        self._chosen, self._bag = list(kinds), []

    def inject(self) -> Injected:
        """The next fault: kinds come in a shuffled order, each once before any comes again."""
        if not self._bag:
            self._bag = list(self._chosen)
            self._rng.shuffle(self._bag)
        kind = self._bag.pop()
        member = self._rng.choice(self._farm.workers)
        began = time.monotonic()
        self.turns[member.name] += 1
        detail = ""
        try:
            self._kinds[kind](member)
        except (OSError, psutil.Error, requests.RequestException, AssertionError, PdserveError) as error:
            detail = repr(error)[:300]
            self.problems.append(f"{kind} of {member.name}: {detail}")
        ended = time.monotonic()
        recovery = self._recovery(member)
        self.turns[member.name] += 1
        injected = Injected(kind, member.name, began, ended - began, recovery, detail)
        self.happened.append(injected)
        return injected

    def pairs_of(self, member: Member) -> list[tuple[Member, Member]]:
        """Every pair of a prefill and a decode server that `member` is in."""
        return [p for p in itertools.product(self._farm.prefill, self._farm.decode) if member in p]

    # ------------------------------------------------------------------ processes

    def _kill_server(self, member: Member) -> None:
        self._kill(member, member.processes()[:1])

    def _kill_engine(self, member: Member) -> None:
        engine = member.engine()
        self._kill(member, [engine] if engine else [])

    def _kill(self, member: Member, victims: list[psutil.Process]) -> None:
        before = member.processes()
        for process in victims:
            process.kill()
        deadline = time.monotonic() + FOLLOW_S
        while (alive := [process for process in before if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive:
            self.problems.append(f"{member.name}: {len(alive)} processes live {FOLLOW_S:g} s after a kill of another")
        time.sleep(self._rng.uniform(0.0, 3.0))
        self._farm.restart(member)

    def _stop(self, member: Member, processes: list[psutil.Process]) -> None:
        for process in processes:
            process.suspend()
        time.sleep(self._rng.choice((0.3, 2.0, 6.0, 15.0)) * self._rng.uniform(0.7, 1.3))
        for process in reversed(processes):
            process.resume()

    # ------------------------------------------------------------------ links

    def _cut(self, member: Member) -> None:
        assert self._farm.network is not None and member.host is not None
        self._farm.network.cut(member.host)
        self._outage()
        self._farm.network.cut()

    def _device_down(self, member: Member) -> None:
        assert self._farm.network is not None and member.host is not None
        self._farm.network.set_device(member.host, up=False)
        self._outage()
        self._farm.network.set_device(member.host, up=True)

    def _one_way(self, member: Member) -> None:
        """Packets from `member` to one server of the other role are lost; all others arrive."""
        other = self._other(member).host
        assert self._farm.network is not None and member.host is not None and other is not None
        self._farm.network.swallow(member.host, other)
        self._outage()
        self._farm.network.deliver(member.host, other)

    def _at_proxies(self, fault: Callable[[Member], None], member: Member) -> None:
        """The same and more without a network of our own."""
        assert self._farm.proxies is not None
        fault(member)
        try:
            self._outage()
        finally:
            self._farm.proxies.heal()

    def _other(self, member: Member) -> Member:
        """A server of the other role."""
        return self._rng.choice(self._farm.decode if member.mode == "prefill" else self._farm.prefill)

    def _outage(self) -> None:
        time.sleep(self._rng.choice((0.5, 3.0, 10.0)) * self._rng.uniform(0.7, 1.3))

    # ------------------------------------------------------------------ strangers

    def _stranger(self, member: Member) -> None:
        """Bytes that are no frame, and frames that are too large, at the control port."""
        frames = [b"", b"junk", bytes(200), os.urandom(300), b"x" * (MAX_FRAME_BYTES + 1)]
        self._push(member, [*frames, *(os.urandom(self._rng.randint(0, 300)) for _ in range(2000))])

    def _forged(self, member: Member) -> None:
        """Hellos to a prefill server by instances that nobody knows, who have the token and claim a peer's endpoint."""
        prefill = member if member.mode == "prefill" else self._rng.choice(self._farm.prefill)
        decode = member if member.mode == "decode" else self._rng.choice(self._farm.decode)
        claimed = str(decode.state()["facts"]["control_endpoint"])
        route = fetch_replica(*prefill.bootstrap, self._token)
        facts = {name: fact for name, fact in route.facts.items() if isinstance(fact, str | int)}
        hello = sample(Hello, self._rng, {"endpoint": claimed, "facts": facts, "answer": False})
        names = [f"forged-{self._rng.getrandbits(32):x}" for _ in range(2)]
        packets = [sample(Packet, self._rng, {"sender": n, "receiver": route.instance, "body": hello}) for n in names]
        wire = Wire(self._token)
        self._push(prefill, [wire.encode(packet) for packet in packets], encrypted=True)

    def _push(self, member: Member, frames: Sequence[bytes], *, encrypted: bool = False) -> None:
        endpoint = member.state()["facts"]["control_endpoint"]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pushing = context.socket(zmq.PUSH)
        pushing.setsockopt(zmq.SNDTIMEO, 2000)
        if encrypted:
            keys = CurveKeys.of(self._token)
            pushing.curve_publickey, pushing.curve_secretkey, pushing.curve_serverkey = (
                keys.public,
                keys.secret,
                keys.public,
            )
        pushing.connect(f"tcp://{endpoint}")
        try:
            for frame in frames:
                pushing.send(frame)
        except zmq.Again:
            pass  # it takes nothing from strangers
        finally:
            pushing.close(linger=1000)
            context.term()

    def _half_open(self, member: Member) -> None:
        """Connections to every port of `member` that say half a sentence and wait."""
        ports = [member.port, int(str(member.state()["facts"]["control_endpoint"]).rsplit(":", 1)[1])]
        if member.mode == "prefill":
            ports.append(member.bootstrap[1])
        opened: list[socket.socket] = []
        try:
            for each in ports * 60:
                connection = socket.create_connection((member.address, each), timeout=5)
                opened.append(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Le")
            time.sleep(self._rng.uniform(1.0, 5.0))
        finally:
            for connection in opened:
                connection.close()

    def _bootstrap_junk(self, member: Member) -> None:
        """Routes that a stranger registers, and other junk, at the bootstrap server."""
        host, port = (member if member.mode == "prefill" else self._rng.choice(self._farm.prefill)).bootstrap
        wrong = {"instance": "x", "host": "h", "port": "seven", "page_size": 1, "kv_cache_dtype": "a", "model": "m"}
        for body in (b"\x80junk", b"[" * 10_000, b"{}" * 500_000):
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.put(f"http://{host}:{port}/route", data=body, timeout=10)
                assert 400 <= answer.status_code < 500, answer.text[:100]
        answer = requests.put(f"http://{host}:{port}/route", json=wrong, timeout=10)
        assert 400 <= answer.status_code < 500, answer.text[:100]

    # ------------------------------------------------------------------ recovery

    def _recovery(self, member: Member) -> float | None:
        """Seconds from now until all pairs of `member` answer, and the router counts their servers as healthy."""
        began = time.monotonic()
        waits = [_Recovery(self, prefill, decode) for prefill, decode in self.pairs_of(member)]
        times = [wait.result(began + LIMIT_S) for wait in waits]
        while not self._healthy(member) and time.monotonic() < began + LIMIT_S:
            time.sleep(0.1)
        healthy = time.monotonic() if self._healthy(member) else None
        return None if healthy is None or None in times else max(healthy, *(t for t in times if t)) - began

    def _healthy(self, member: Member) -> bool:
        with contextlib.suppress(requests.RequestException, ValueError, KeyError):
            workers = requests.get(f"{self._farm.router.url}/workers", timeout=10).json()["workers"]
            return any(worker["url"] == member.url and worker["is_healthy"] for worker in workers)
        return False

    def answers(self, prefill: Member, decode: Member) -> bool:
        """Whether this pair answers the probe rightly within `ATTEMPT_S`. Any thread."""
        host, port = prefill.bootstrap
        room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(self._rooms)}
        body = {**self._probe.body, **room}
        texts: list[str] = []

        def half(member: Member) -> None:
            with contextlib.suppress(requests.RequestException, ValueError, KeyError):
                answer = requests.post(f"{member.url}{GENERATE}", json=body, timeout=ATTEMPT_S)
                if member is decode and answer.status_code == 200:
                    texts.append(answer.json()["text"])

        thread = threading.Thread(target=half, args=(prefill,), daemon=True)
        thread.start()
        half(decode)
        return texts == list(self._probe.expected)


def _lives(process: psutil.Process) -> bool:
    """Whether it has not ended. Its server's `Child` reaps it; so it is not waited for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class _Recovery:
    """Asks one pair every `EVERY_S`, without waiting for earlier tries, until one is answered."""

    def __init__(self, faults: Faults, prefill: Member, decode: Member) -> None:
        self._faults, self._prefill, self._decode = faults, prefill, decode
        self._done = threading.Event()
        self._at = 0.0
        self._free = threading.Semaphore(MAX_TRIES)
        threading.Thread(target=self._ask, daemon=True).start()

    def result(self, deadline: float) -> float | None:
        """When the pair answered; None when it has not by the deadline."""
        recovered = self._done.wait(max(0.0, deadline - time.monotonic()))
        self._done.set()
        return self._at if recovered else None

    def _ask(self) -> None:
        while not self._done.is_set():
            if self._free.acquire(timeout=EVERY_S):
                threading.Thread(target=self._try, daemon=True).start()
                self._done.wait(EVERY_S)

    def _try(self) -> None:
        right = self._faults.answers(self._prefill, self._decode)
        self._free.release()
        if right and not self._done.is_set():
            self._at = time.monotonic()
            self._done.set()
