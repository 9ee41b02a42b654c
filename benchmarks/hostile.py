"""What one hostile request costs everybody else: the worst `/health`, the longest pause of a stream, memory.

    python -m benchmarks.hostile --write
    python -m benchmarks.hostile --only 'look-ups|/detokenize'
    python -m benchmarks.hostile --only 'router'

Starts a server and sends each request of `ATTACKS`, several at once where it says so, while a prober asks `/health` and
a client reads a stream. Requests of `pair_attacks` go to the decode server of a pair, those of `ROUTER_ATTACKS` to the
pair's router, and the stream comes through the router. Exit status 1 when a request is answered otherwise than
documented (docs/limits.md), or leaves pages or rows behind.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.report import Run, add_model_flags, add_write_flags, footer, markdown_table
from benchmarks.servers import GRACE_S, Server, server_flags
from pdserve.base.process import Child, end_all

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
JSON = {"Content-Type": "application/json"}
POOL = ("--max-total-tokens", "8192")
PROBE_S = 0.02
TIMEOUT_S = 120.0
NOTES = (
    "Times are elapsed: what else the machine does is in them.",
    "RSS: of the API process, its peak beyond before; with look-ups of the decode server's engine, which does them; of "
    "the router where requests go to it.",
)


@dataclasses.dataclass(frozen=True)
class Attack:
    """`body` is sent to `path`, `times` at once; every answer has `status`."""

    name: str
    path: str
    body: Callable[[], bytes]
    status: int = 400
    times: int = 1
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    each: Callable[[int], bytes] | None = None
    """Instead of `body`: makes the body of the request of this number."""


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"max_tokens": 1, **fields}).encode()


def _messages(count: int, content: str = "x") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}] * count


def _schema(num: int) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num)}})


def _tools(count: int, size: int) -> list[dict[str, Any]]:
    """`count` tools, each with a description of `size` characters."""
    named = [{"name": f"f{i}", "description": "x" * size} for i in range(count)]
    return [{"type": "function", "function": function} for function in named]


def _nested(levels: int, count: int) -> bytes:
    """A JSON body with `levels` levels of nesting. Its prompt is a list of `count` nested lists."""
    one = b"[" * (levels - 2) + b"]" * (levels - 2)
    return b'{"prompt": [' + b",".join([one] * count) + b"]}"


def _deep_schema(levels: int) -> str:
    return '{"not": ' * levels + "{}" + "}" * levels


def _slow_pattern(number: int) -> bytes:
    """A pattern of its own for each request: one that was too slow once is refused at once for a while."""
    answer = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    letter = chr(0x3B1 + number)  # of another script than the answer
    return _json(prompt="Tell a long story.", stop_regex=f"(?:(?:[^{letter}#]+)+)+[{letter}#]", **answer)()


ATTACKS = (
    Attack("nothing", COMPLETIONS, _json(prompt="hi"), 200),
    Attack("text of 4 MB", COMPLETIONS, _json(prompt="a b " * 1_000_000), times=4),
    Attack("blanks, just below what may fit", COMPLETIONS, _json(prompt=" " * 600_000), times=4),
    Attack("4096 texts of 8 KB", COMPLETIONS, _json(prompt=["a b " * 2000] * 4096)),
    Attack("a million token ids", GENERATE, _json(input_ids=[5] * 1_000_000), times=4),
    Attack("chat of 4 MB", CHAT, _json(messages=_messages(1, "a b " * 1_000_000)), times=4),
    Attack("100,000 messages", CHAT, _json(messages=_messages(100_000)), times=4),
    Attack("4096 messages", CHAT, _json(messages=_messages(4096)), times=4),
    Attack("tools of 2 MB", CHAT, _json(messages=_messages(1), tools=_tools(200, 10_000)), times=4),
    Attack("256 tools, just below 1 MiB", CHAT, _json(messages=_messages(1), tools=_tools(256, 4000)), times=4),
    Attack("300 tools", CHAT, _json(messages=_messages(1), tools=_tools(300, 1)), times=4),
    Attack("documents of 2 MB", CHAT, _json(messages=_messages(1), documents=[{"text": "x" * 2_000_000}]), times=4),
    Attack(
        "chat_template_kwargs of 2 MB",
        CHAT,
        _json(messages=_messages(1), chat_template_kwargs={"a": "x" * 2_000_000}),
        times=4,
    ),
    Attack(
        "chat_template_kwargs, just below 1 MiB",
        CHAT,
        _json(messages=_messages(1), chat_template_kwargs={f"a{i}": "x" * 1000 for i in range(1024)}),
        200,
        times=4,
    ),
    Attack(
        "chat_template_kwargs of 70,000 names",
        CHAT,
        _json(messages=_messages(1), chat_template_kwargs={f"a{i}": "x" for i in range(70_000)}),
        times=4,
    ),
    Attack("/tokenize of 4 MB", TOKENIZE, _json(prompt="a b " * 1_000_000), times=4),
    Attack("/detokenize of 1.4 million ids", DETOKENIZE, _json(tokens=[[5] * 340] * 4096), 200, times=4),
    Attack("/detokenize of a text of 1.4 million ids", DETOKENIZE, _json(tokens=[5] * 1_400_000), 200, times=4),
    Attack("JSON of 254 levels, 130,000 lists", COMPLETIONS, lambda: _nested(254, 515), times=4),
    Attack("JSON of 300 levels", COMPLETIONS, lambda: _nested(300, 435), times=4),
    Attack("headers of 70 KB", COMPLETIONS, _json(prompt="hi"), times=16, headers={"X-Large": "a" * 70_000}),
    Attack("headers of 17 KB", COMPLETIONS, _json(prompt="hi"), times=16, headers={"X-Large": "a" * 17_000}),
    Attack("a path of 60 KB", COMPLETIONS + "/a" * 30_000, _json(prompt="hi"), 414, times=16),
    Attack("a path of 9 KB", COMPLETIONS + "/a" * 4_500, _json(prompt="hi"), 414, times=16),
    Attack("two million empty lists", COMPLETIONS, lambda: b'{"prompt": [[' + b"],[" * 2_000_000 + b"]}", times=4),
    Attack("a body of 33 MB", COMPLETIONS, _json(prompt="a" * (33 << 20)), 413, times=4),
    Attack("twelve bodies of 30 MB", COMPLETIONS, _json(prompt="a" * (30 << 20)), times=12),
    Attack("damaged JSON of 8 MB", COMPLETIONS, lambda: b'{"prompt": [' + b"1," * 4_000_000),
    Attack("logit_bias of all tokens", COMPLETIONS, _json(prompt="hi", logit_bias={str(i): 1 for i in range(49152)})),
    Attack("a million stop tokens", COMPLETIONS, _json(prompt="hi", stop_token_ids=list(range(1_000_000)))),
    Attack("100,000 stop strings", COMPLETIONS, _json(prompt="hi", stop=[f"x{i}" for i in range(100_000)])),
    Attack("4096 prompts, n of 3", COMPLETIONS, _json(prompt=["a"] * 4096, n=3)),
    Attack("stop_regex of 1.5 million repeats", COMPLETIONS, _json(prompt="x", stop_regex="(?:ab?c*){1500000}x")),
    Attack("regex of 1.5 million repeats", COMPLETIONS, _json(prompt="x", regex="(?:ab?c*){1500000}x")),
    Attack("a schema of 7,000 fields", COMPLETIONS, _json(prompt="x", json_schema=_schema(7000)), times=4),
    Attack("a schema of 250 levels", COMPLETIONS, _json(prompt="x", json_schema=_deep_schema(249)), times=4),
    Attack("a stop_regex that is slow on the answer", COMPLETIONS, bytes, times=8, each=_slow_pattern),
)


ROUTER_ATTACKS = (
    Attack("router: nothing", CHAT, _json(messages=_messages(1)), 200),
    Attack("router: chat of 20 MB", CHAT, _json(messages=_messages(1, "a b " * 5_000_000))),
    Attack("router: chat of 20 MB, several", CHAT, _json(messages=_messages(1, "a b " * 5_000_000)), times=4),
    Attack("router: JSON of 254 levels, 130,000 lists", COMPLETIONS, lambda: _nested(254, 515), times=4),
)
"""Requests to a router of two servers."""


def pair_attacks(silent_port: int) -> tuple[Attack, ...]:
    """Requests to a decode server. `silent_port`: connections to it are taken on all of 127/8, and nothing is said."""

    def looked_up(number: int) -> bytes:
        where = {"bootstrap_host": f"127.1.0.{number + 1}", "bootstrap_port": silent_port}
        return _json(input_ids=[5, 6, 7], bootstrap_room=(1 << 40) + number, **where)()

    return (Attack("look-ups that hang", GENERATE, bytes, 502, times=64, each=looked_up),)


class Client:
    """Sends to one server; a connection for each request."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = JSON
    ) -> tuple[int, bytes]:
        """Status and body; status 0 where the connection was broken."""
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def accounts(self) -> dict[str, int]:
        """What the server holds: pages and rows that are free, cached, or held for peers."""
        memory: dict[str, int] = json.loads(self.ask("GET", "/get_server_info")[1])["internal_states"][0]["memory"]
        free = memory["pages_free"] + memory["pages_evictable"]
        cached = ("pages_free", "pages_cached", "pages_evictable")
        return {"pages_free": free} | {name: count for name, count in memory.items() if name not in cached}


class Watch:
    """Asks `/health`, reads a stream, and looks at memory, for as long as the block lasts."""

    def __init__(self, client: Client, process: psutil.Process, streaming: Client) -> None:
        self._client = client
        self._streaming = streaming
        self._process = process
        self._rss = process.memory_info().rss
        self._end = threading.Event()
        self.health_s = self.pause_s = 0.0
        self.more_bytes = 0
        self.bad_probes = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch during the block."""
        threads = [threading.Thread(target=each) for each in (self._probe, self._stream, self._look)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        try:
            yield
        finally:
            time.sleep(0.1)
            self._end.set()
            for thread in threads:
                thread.join()

    def _probe(self) -> None:
        while not self._end.wait(PROBE_S):
            began = time.perf_counter()
            self.bad_probes += self._client.ask("GET", "/health")[0] != 200
            self.health_s = max(self.health_s, time.perf_counter() - began)

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.more_bytes = max(self.more_bytes, self._process.memory_info().rss - self._rss)

    def _stream(self) -> None:
        body = json.dumps({"prompt": "tell", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
        connection = http.client.HTTPConnection(self._streaming._address, timeout=TIMEOUT_S)
        connection.request("POST", COMPLETIONS, body, JSON)
        answer = connection.getresponse()
        last = time.perf_counter()
        while not self._end.is_set() and answer.readline():
            now = time.perf_counter()
            self.pause_s, last = max(self.pause_s, now - last), now
        answer.close()
        connection.close()


def run_attack(client: Client, process: psutil.Process, attack: Attack, streaming: Client) -> dict[str, Any]:
    """One attack beside a watch; what came of it. `streaming`: where the stream beside it comes from."""
    body = attack.body()
    bodies = [body if attack.each is None else attack.each(number) for number in range(attack.times)]
    watch = Watch(client, process, streaming)
    headers = JSON | attack.headers
    began = time.perf_counter()
    with watch.running(), ThreadPoolExecutor(attack.times) as pool:
        answers = list(pool.map(lambda body: client.ask("POST", attack.path, body, headers)[0], bodies))
        took = time.perf_counter() - began
    return {
        "name": attack.name,
        "times": attack.times,
        "bytes": len(bodies[0]),
        "statuses": sorted(set(answers)),
        "as_documented": set(answers) <= {attack.status, 413 if attack.status == 413 else 503} - {0}
        and attack.status in answers,
        "answered_s": took,
        "health_s": watch.health_s,
        "bad_probes": watch.bad_probes,
        "pause_s": watch.pause_s,
        "more_mb": watch.more_bytes / 1e6,
    }


def settled(client: Client, before: dict[str, int]) -> bool:
    """Whether the server holds what it held before, within ten seconds."""
    deadline = time.perf_counter() + 10.0
    while time.perf_counter() < deadline:
        if client.accounts() == before:
            return True
        time.sleep(0.1)
    return False


def row(found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [
        found["name"] + (f", {found['times']} at once" if found["times"] > 1 else ""),
        " ".join(map(str, found["statuses"])),
        f"{found['health_s'] * 1e3:.0f} ms",
        f"{found['pause_s'] * 1e3:.0f} ms",
        f"{found['more_mb']:.0f} MB",
        f"{found['answered_s']:.1f} s",
    ]


class Found:
    """What came of the attacks that were run so far."""

    def __init__(self, only: str) -> None:
        self._only = only
        self.all: list[dict[str, Any]] = []

    def chosen(self, attacks: Sequence[Attack]) -> list[Attack]:
        """Those whose name was asked for."""
        return [attack for attack in attacks if re.search(self._only, attack.name)]

    def run(
        self,
        attacks: Sequence[Attack],
        client: Client,
        process: psutil.Process,
        streaming: Client,
        server: Client | None = None,
    ) -> None:
        """Run the chosen ones of `attacks`. `server`, else `client`, is settled now, and has the accounts."""
        server = server or client
        before = server.accounts()
        for attack in self.chosen(attacks):
            found = run_attack(client, process, attack, streaming)
            found["settled"] = settled(server, before)
            self.all.append(found)
            print(row(found), "" if found["settled"] else "NOT SETTLED", flush=True)


def attack_monolith(args: argparse.Namespace, found: Found) -> None:
    """`ATTACKS`, against a server of its own."""
    flags = [*server_flags(args.model, args.dtype, "null", args.threads), *POOL]
    server = Server("server", "pdserve.launch_server", flags, args.threads)
    try:
        client = Client(server.wait().url)
        client.ask("POST", COMPLETIONS, _json(prompt="hi", regex="a+")())
        found.run(ATTACKS, client, psutil.Process(server.child.pid), client)
    finally:
        end_all([server.child], GRACE_S)


def attack_pair(args: argparse.Namespace, found: Found, attacks: Sequence[Attack]) -> None:
    """`attacks` against the decode server of a pair, `ROUTER_ATTACKS` against the pair's router."""
    children: list[Child] = []

    def start(name: str, module: str, flags: Sequence[str]) -> Server:
        server = Server(name, module, flags, args.threads)
        children.append(server.child)
        return server

    try:
        launch = "pdserve.launch_server"
        prefill, decode = (
            start(mode, launch, [*server_flags(args.model, args.dtype, mode, args.threads), *POOL])
            for mode in ("prefill", "decode")
        )
        sender, receiver = prefill.wait(), decode.wait()
        flags = ["--pd-disaggregation", "--port", "0", "--prefill", sender.url, str(sender.bootstrap_port)]
        router = start("router", "pdserve.launch_router", [*flags, "--decode", receiver.url, "--disable-pair-probes"])
        through = Client(router.wait().url)
        through.ask("POST", COMPLETIONS, _json(prompt="hi")())
        server = Client(receiver.url)
        found.run(attacks, server, engine_of(decode.child.pid), through)
        found.run(ROUTER_ATTACKS, through, psutil.Process(router.child.pid), through, server)
    finally:
        end_all(children, GRACE_S)


def engine_of(pid: int) -> psutil.Process:
    """The scheduler's process of the server `pid`: of its children the one with most memory."""
    return max(psutil.Process(pid).children(recursive=True), key=lambda process: process.memory_info().rss)


@contextmanager
def silent_listener() -> Iterator[int]:
    """A port on all addresses of this host whose connections are taken by the kernel and never answered."""
    with contextlib.closing(socket.create_server(("0.0.0.0", 0), backlog=1024)) as listener:
        yield listener.getsockname()[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="attacks whose name matches this regular expression")
    add_model_flags(parser)
    add_write_flags(parser, "hostile")
    args = parser.parse_args(argv)
    run = Run("hostile", argv, module="hostile")
    found = Found(args.only)
    if found.chosen(ATTACKS):
        attack_monolith(args, found)
    with silent_listener() as port:
        if found.chosen([*(attacks := pair_attacks(port)), *ROUTER_ATTACKS]):
            attack_pair(args, found, attacks)
    header = ["request", "status", "worst `/health`", "longest pause of a stream", "RSS beyond before", "answered in"]
    facts = run.facts(attacks=found.all)
    text = (
        f"# Hostile requests\n\n{markdown_table(header, [row(each) for each in found.all])}\n\n{footer(facts, NOTES)}\n"
    )
    run.publish(args, text, facts)
    return int(not all(each["as_documented"] and each["settled"] and not each["bad_probes"] for each in found.all))


if __name__ == "__main__":
    sys.exit(main())
