"""Servers die in the middle of a migration: the request goes on where it was, or its copy ends and leaves nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server
from tests.e2e.moves import AT, RIDS, Servers, assert_equal, greedy, migrate, refusal, seeded, servers
from tests.e2e.test_retry_streams import gist
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384")
CACHED = "--disaggregation-decode-enable-radix-cache"
Post = Callable[[], tuple[int, bytes]]


@contextmanager
def gateway(target: Server, at_last: Callable[[Post], tuple[int, bytes] | None]) -> Iterator[str]:
    """The URL of a proxy before `target`. `at_last` has the call of `/migrate_in` that follows the stages: it may call
    `target` by its argument; None breaks the connection.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))

            def post() -> tuple[int, bytes]:
                headers = {"Content-Type": "application/json"}
                answer = requests.post(target.url + self.path, data=body, headers=headers, timeout=60)
                return answer.status_code, answer.content

            is_last = self.path == "/migrate_in" and json.loads(body)["request"]["sampling"]["max_new_tokens"] > 0
            answer = at_last(post) if is_last else post()
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_the_target_is_killed_in_the_middle(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Before it has the request, while it takes it, and when it computes it: the request goes on where it was."""
    model = str(tiny_checkpoint("llama"))
    targets = [start_server(model, "decode", *FLAGS, CACHED, name=f"target-{n}") for n in range(3)]
    with servers(model, [(CACHED,)], *FLAGS) as made, running(*targets):
        (source,) = made.decodes
        expected = made.run(source, seeded())
        for number, target in enumerate(targets):

            def at_last(post: Post, number: int = number, target: Server = target) -> None:
                if number == 0:
                    target.kill()
                    return
                with ThreadPoolExecutor(1) as pool:
                    answer = pool.submit(post)
                    if number == 2:
                        assert answer.result()[0] == 200
                    target.kill()
                    answer.exception()

            def act(rid: str, target: Server = target, at_last: Any = at_last) -> None:
                with gateway(target, at_last) as url:
                    assert refusal(migrate(source, rid, url)) == (502, "migration_failed", "to")

            sent = source.counter("prefixes_sent")
            assert_equal(made.run(source, seeded(), act), expected, number)
            assert source.counter("prefixes_sent") > sent, "a stage has arrived before"
        assert source.counter("migrations_failed") == len(targets)
        assert source.counter("migrations_out") == 0


@pytest.mark.parametrize("late", [False, True])
def test_the_source_is_killed_in_the_middle(late: bool, tiny_checkpoint: Callable[[Family], Path]) -> None:
    """The client's connection breaks. The target is free again, whether it computes the request or has not got it."""
    model = str(tiny_checkpoint("llama"))
    source = start_server(model, "decode", *FLAGS, CACHED, name="source")
    with servers(model, [(CACHED,)], *FLAGS) as made, running(source):
        (target,) = made.decodes
        expected = made.run(target, greedy())

        def at_last(post: Post) -> tuple[int, bytes] | None:
            answer = post() if late else None
            assert answer is None or answer[0] == 200, answer
            source.kill()
            if answer is None:
                assert post()[0] != 200, "its sender is dead"
            return None

        def act(rid: str) -> None:
            with gateway(target, at_last) as url, pytest.raises(requests.ConnectionError):
                migrate(source, rid, url)

        with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            made.run(source, greedy(), act)
        assert_idle(target, made.prefill, deadline_s=60)
        assert target.counter("migrations_in") == late
        assert_equal(made.run(target, greedy()), expected)


def test_a_router_goes_on_when_the_source_dies(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """The request is computed on another pair, and the stream has the same tokens."""
    model = str(tiny_checkpoint("llama"))
    source = start_server(model, "decode", *FLAGS, CACHED, name="source")
    with servers(model, [(CACHED,)], *FLAGS) as made, running(source):
        (target,) = made.decodes
        expected = made.run(target, seeded())
        router = start_router(
            [made.prefill], [source, target], "--retry-streams", "2", "--decode-policy", "round_robin"
        )
        with running(router):
            for _ in range(4):
                if run_through(router, made, source, target, expected):
                    break
            else:
                pytest.fail("no request has come to the source")
            assert_idle(made.prefill, target, deadline_s=60)


def run_through(router: Server, made: Servers, source: Server, target: Server, expected: dict[str, Any]) -> bool:
    """Run a request through a router, and return whether it came to `source`.

    In that case `source` is killed while the request moves.
    """
    body = seeded() | {"rid": f"routed-{next(RIDS)}", "stream": True}
    killed = False

    def at_last(post: Post) -> None:
        nonlocal killed
        assert post()[0] == 200
        killed = True
        source.kill()

    events = []
    with requests.post(f"{router.url}/generate", json=body, stream=True, timeout=120) as answer:
        assert answer.status_code == 200, answer.text
        for line in answer.iter_lines():
            if not line or line == b"data: [DONE]":
                continue
            events.append(json.loads(line.removeprefix(b"data: ")))
            if len(events) == AT:
                with gateway(target, at_last) as url:
                    try:
                        assert migrate(source, body["rid"], url, attach=True).status_code == 404
                    except requests.ConnectionError:
                        assert killed
    assert_equal(gist("/generate", events), expected)
    return killed
