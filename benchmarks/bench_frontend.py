"""What a token costs the API process on its way from the scheduler to a client's stream: CPU time, by endpoint.

    python -m benchmarks.bench_frontend [--streams 64] [--rate 5000] [--rounds 3] [--write]

The API process is the real one: decoding of the scheduler's messages, incremental detokenization, stop strings,
metrics, SSE, HTTP. The scheduler is a stand-in that gives each stream a random token a step (`frontend_child.py`),
which has more broken characters than text. Clients read whatever comes and look for the end of the stream.

- `paced`: at `--rate` tokens a second over all streams. `share` is how much of one core the API process used. The mark
  is that it keeps up: the stand-in's last token is sent and read within the time that it takes at that rate.
- `flat out`: the stand-in sends as fast as it can. `tokens/s of a core` is tokens by CPU seconds of the API process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from pdserve.base.process import Child, end_all
from pdserve.protocol.channel import create_channel_address, remove_channel_address

READY_S, PATIENCE_S, GRACE_S = 60.0, 300.0, 5.0
END = b"0\r\n\r\n"
"""The last chunk of an HTTP answer."""
PATHS = {"/generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


def body_of(name: str, num_tokens: int) -> dict[str, Any]:
    """A streamed request of `num_tokens` tokens."""
    if name == "/generate":
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
        return {"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
    more = {"model": "smollm2", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    if name == "completions":
        return {"prompt": [5, 6, 7], **more}
    return {"messages": [{"role": "user", "content": "hi"}], **more}


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: CPU seconds of the API process, the time the stand-in took, and the time until all was read."""

    cpu_s: float
    sent_s: float
    read_s: float
    num_tokens: int
    num_bytes: int


class FrontEnd:
    """The API process and the stand-in, as children."""

    def __init__(
        self, stack: contextlib.ExitStack, model: str, streams: int, tokens: int, rates: Sequence[float]
    ) -> None:
        address = create_channel_address()
        stack.callback(remove_channel_address, address)
        self._streams, self._tokens = streams, tokens
        self._done: list[float] = []
        base = [sys.executable, "-m", "benchmarks.frontend_child"]
        env = dict(os.environ, OMP_NUM_THREADS="1")
        channel = ["--channel", address.directory]
        numbers = ["--streams", str(streams), "--tokens", str(tokens), "--rates", *map(str, rates)]
        api = Child("api", [*base, "api", *channel, "--model-path", model], env=env, on_line=print)
        engine = Child("engine", [*base, "engine", *channel, *numbers], env=env, on_line=self._hear)
        stack.callback(end_all, [api, engine], GRACE_S)
        url = urlsplit(api.wait_ready(READY_S).url)
        self._place = (str(url.hostname), int(url.port or 0))
        self._api = api.pid

    def _hear(self, line: str) -> None:
        if line.startswith("DONE "):
            self._done.append(float(line.split()[1]))
        else:
            print(line)

    def run(self, name: str) -> Round:
        """All streams of one endpoint."""
        data = json.dumps(body_of(name, self._tokens)).encode()
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        head = f"POST {PATHS[name]} HTTP/1.1\r\n{fields}"
        self._done.clear()
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_connection(self._place)) for _ in range(self._streams)]
            before = self._cpu_s()
            for one in sockets:
                one.sendall(head.encode() + data)
            began, num_bytes = _read_all(sockets)
            read_s = time.monotonic() - began
        cpu_s = self._cpu_s() - before
        deadline = time.monotonic() + GRACE_S
        while not self._done and time.monotonic() < deadline:
            time.sleep(0.01)
        return Round(cpu_s, self._done[0], read_s, self._streams * self._tokens, num_bytes)

    def _cpu_s(self) -> float:
        tasks = Path(f"/proc/{self._api}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _read_all(sockets: Sequence[socket.socket]) -> tuple[float, int]:
    """Until every answer has ended; the time of the first byte, and how many there were.

    Raises:
        RuntimeError: an answer is none, or ends too early.
    """
    began, num_bytes = 0.0, 0
    tails = dict.fromkeys(sockets, b"")
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        deadline = time.monotonic() + PATIENCE_S
        while selector.get_map():
            if time.monotonic() > deadline:
                raise RuntimeError("the streams do not end")
            for key, _ in selector.select(1.0):
                one = next(it for it in (key.fileobj,) if isinstance(it, socket.socket))
                data = one.recv(1 << 18)
                began = began or time.monotonic()
                if not tails[one] and not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(f"no stream: {data[:300]!r}")
                num_bytes += len(data)
                tails[one] = (tails[one] + data)[-len(END) :]
                if tails[one] == END:
                    selector.unregister(one)
                elif not data:
                    raise RuntimeError("a stream was cut")
    return began, num_bytes


Rounds = dict[str, list[Round]]
"""By endpoint."""


def measure(args: argparse.Namespace) -> tuple[Rounds, Rounds]:
    """`--rounds` rounds of each endpoint, paced and flat out, in turn, after one that does not count."""
    paced: Rounds = {name: [] for name in args.endpoints}
    flat: Rounds = {name: [] for name in args.endpoints}
    with contextlib.ExitStack() as stack:
        front = FrontEnd(stack, args.model_path, args.streams, args.tokens, (args.rate, 0.0))
        for number in range(args.rounds + 1):
            for name in args.endpoints:
                for rounds in (paced, flat):
                    found = front.run(name)
                    if number:
                        rounds[name].append(found)
    return paced, flat


def table(args: argparse.Namespace, paced: Rounds, flat: Rounds) -> str:
    """A row an endpoint."""
    rows = []
    for name in paced:
        show = [
            report.spread_of([one.cpu_s / one.sent_s * 100 for one in paced[name]]).show(0, "%"),
            report.spread_of([one.num_tokens / one.read_s for one in paced[name]]).show(),
            report.spread_of([one.cpu_s / one.num_tokens * 1e6 for one in paced[name]]).show(),
            report.spread_of([one.cpu_s / one.num_tokens * 1e6 for one in flat[name]]).show(),
            report.spread_of([one.num_tokens / one.cpu_s for one in flat[name]]).show(),
            report.spread_of([one.num_bytes / one.num_tokens for one in paced[name]]).show(),
        ]
        rows.append([name, *show])
    header = [
        "endpoint",
        f"share of a core at {args.rate:,.0f} tokens/s",
        "read, tokens/s",
        "paced, us a token",
        "flat out, us a token",
        "tokens/s of a core",
        "paced, bytes a token",
    ]
    return report.markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="whose tokenizer")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each stream")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens a second over all streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoints", nargs="+", choices=tuple(PATHS), default=list(PATHS))
    report.add_write_flags(parser, "frontend")
    args = parser.parse_args(argv)
    run = report.Run("frontend", argv)
    paced, flat = measure(args)
    facts = run.facts(
        paced={name: [dataclasses.asdict(one) for one in found] for name, found in paced.items()},
        flat_out={name: [dataclasses.asdict(one) for one in found] for name, found in flat.items()},
    )
    text = f"""# What a token costs the API process, {facts["date"]}

{args.streams} streams of {args.tokens} tokens each; median of {args.rounds} rounds (least-most).

{table(args, paced, flat)}

{report.footer(facts, own_load=2)}
"""
    run.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
