"""What the control token costs: control frames, the look-up of a prefill server, and proofs of worker requests.

    python -m benchmarks.bench_control --write

Frames go through `ZmqControlSocket` and the mailbox on both sides, as a scheduler's do: in the clear, and encrypted
(CURVE) with a token. A look-up is one `PrefillFound` of the directory: with a token it is an exchange of proofs instead
of one question. Both ways in the same round, one after the other. A proof is what a router with the token adds to
a request: made by the router, checked by the server, with the digest of the body on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from benchmarks.report import Run, add_write_flags, footer, markdown_table, ratios, spread_of
from pdserve.base.mailbox import Mailbox
from pdserve.http.session_proof import Session, SessionVerifier, worker_key
from pdserve.transfer.bootstrap import BootstrapServer
from pdserve.transfer.bootstrap_client import register_route
from pdserve.transfer.bootstrap_routes import ReplicaRoute
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.events import FrameArrived, PrefillFound, TransferEvent

HOST, TOKEN = "127.0.0.1", "x" * 64
SIZES = (200, 4096, 65536)
"""A `TransferDone`, the `TransferInfo` of a long prompt, log probabilities of a prompt. Bytes."""
TIMEOUT_S = 60.0
WINDOW = 256
"""Frames under way at a time where the rate is measured: no frame may be dropped."""
ROUTE = ReplicaRoute(
    server="s", instance="i", host=HOST, port=1, page_size=16, kv_cache_dtype="bfloat16", model="m", facts={"a": 1}
)
NOTES = (
    "A request needs four to six control frames, most of them a few hundred bytes.",
    "CPU time says more than elapsed time where others use the cores.",
)


class End:
    """One process' control socket with its mailbox."""

    def __init__(self, token: str) -> None:
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        self.socket = ZmqControlSocket(HOST, token)
        self.mailbox.attach(self.socket)

    def frames(self) -> Iterator[bytes]:
        """What arrives; ends with an error after a while without."""
        while self.mailbox.wait(TIMEOUT_S):
            for event in self.mailbox.drain():
                if isinstance(event, FrameArrived):
                    yield event.frame
        raise TimeoutError("no frame")


def echo(token: str, link: Connection) -> None:
    """The other process: sends every frame back, until an empty one."""
    end = End(token)
    link.send(end.socket.endpoint)
    endpoint: str = link.recv()
    for frame in end.frames():
        if not frame:
            break
        end.socket.send(endpoint, frame)
    end.socket.close()


@contextlib.contextmanager
def pair(token: str) -> Iterator[tuple[End, str]]:
    """Our end, and the endpoint of another process that echoes."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo, args=(token, theirs))
    process.start()
    end, endpoint = End(token), str(ours.recv())
    ours.send(end.socket.endpoint)
    try:
        yield end, endpoint
    finally:
        end.socket.send(endpoint, b"")
        process.join(10)
        end.socket.close()
        if process.is_alive():
            process.kill()


def round_trip_us(end: End, endpoint: str, size: int, count: int) -> tuple[float, float]:
    """Microseconds there and back, one frame at a time: elapsed, and CPU time of all threads of our end."""
    frame, frames = bytes(size), end.frames()
    began, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        end.socket.send(endpoint, frame)
        next(frames)
    return (time.perf_counter() - began) / count * 1e6, (time.process_time() - cpu_s) / count * 1e6


def frames_per_s(end: End, endpoint: str, size: int, count: int) -> float:
    """Frames there and back a second, `WINDOW` of them under way."""
    frame, frames = bytes(size), end.frames()
    began = time.perf_counter()
    for number in range(count + WINDOW):
        if number < count:
            end.socket.send(endpoint, frame)
        if number >= WINDOW:
            next(frames)
    return count / (time.perf_counter() - began)


def look_up_ms(token: str, count: int) -> float:
    """Milliseconds from `find` to `PrefillFound`."""
    server = BootstrapServer(HOST, 0, token=token)
    mailbox: Mailbox[TransferEvent] = Mailbox()
    directory = HttpDirectory(mailbox.post, token)
    register_route(HOST, server.port, ROUTE, token)
    began = time.perf_counter()
    for _ in range(count):
        directory.find((HOST, server.port))
        assert mailbox.wait(TIMEOUT_S)
        (event,) = mailbox.drain()
        assert isinstance(event, PrefillFound), event
    took_ms = (time.perf_counter() - began) / count * 1e3
    directory.close()
    server.close()
    return took_ms


def proof_us(size: int, count: int) -> float:
    """Microseconds of CPU for the proofs of requests with bodies of `size` bytes, both ends together."""
    key, body = worker_key(TOKEN), bytes(size)
    session, verifier = Session(key), SessionVerifier(key)
    session.accept(*verifier.challenge(session.nonce, 0.0))
    began_s = time.process_time()
    for _ in range(count):
        digest = verifier.check(session.header("POST", "/generate", body), "POST", "/generate", 0.0)
        assert digest == hashlib.sha256(body).digest()
    return (time.process_time() - began_s) / count * 1e6


def measure(rounds: int, count: int) -> dict[str, dict[str, list[float]]]:
    """For each figure the value of each round, without ("") and with a token."""
    found: dict[str, dict[str, list[float]]] = {}

    def add(name: str, token: str, value: float) -> None:
        found.setdefault(name, {}).setdefault(token, []).append(value)

    for number in range(rounds):
        for token in ("", TOKEN) if number % 2 == 0 else (TOKEN, ""):
            with pair(token) as (end, endpoint):
                add("connecting and the first frame, ms", token, round_trip_us(end, endpoint, 1, 1)[0] / 1e3)
                for size in SIZES:
                    trips = max(count // (1 + size // 4096), 50)
                    elapsed_us, cpu_us = round_trip_us(end, endpoint, size, trips)
                    add(f"{size} B there and back, us", token, elapsed_us)
                    add(f"{size} B there and back, us of CPU at one end", token, cpu_us)
                    add(f"{size} B, frames/s", token, frames_per_s(end, endpoint, size, trips * 4))
            add("look-up of one replica, ms", token, look_up_ms(token, 50))
        for size in SIZES:
            add(f"proof of a request with a body of {size} B, us of CPU at both ends", TOKEN, proof_us(size, count))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=2000, help="small frames of a round")
    add_write_flags(parser, "control")
    args = parser.parse_args(argv)
    run = Run("control", argv)
    found = measure(args.rounds, args.count)
    rows = []
    for name, values in found.items():
        digits = 0 if "frames/s" in name else 1
        cells = [spread_of(values[token]).show(digits) if token in values else "-" for token in ("", TOKEN)]
        rows.append([name, *cells, ratios(values[TOKEN], values[""]).show(2) if "" in values else "-"])
    table = markdown_table(["", "without a token", "with", "ratio"], rows)
    facts = run.facts(found={name: [values.get("", []), values[TOKEN]] for name, values in found.items()})
    run.publish(args, f"# What the control token costs\n\n{table}\n\n{footer(facts, NOTES)}\n", facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
