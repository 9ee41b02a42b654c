"""`pdserve chat` against a small HTTP server: what it sends, what it shows, and which errors it tells."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pdserve.cli.chat import ChatClient, ChatReply, ChatSession, converse, main
from pdserve.errors import RequestError


class Endpoint:
    """An OpenAI endpoint that streams `pieces`, and keeps the requests' bodies and keys."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Any]] = [{"content": "Hello"}, {"content": " there"}]
        self.error: dict[str, Any] | None = None
        self.status, self.finished = 200, True
        self.busy = 0
        """Refusals with 503 and Retry-After before the first answer."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                """Write nothing."""

            def do_GET(self) -> None:
                endpoint.keys.append(self.headers["Authorization"])
                self.answer(endpoint.status, {"data": [{"id": "first"}, {"id": "second"}]})

            def do_POST(self) -> None:
                endpoint.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if endpoint.status != 200 or endpoint.busy > 0:
                    self.answer(503 if endpoint.busy else endpoint.status, {"error": {"message": "no"}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for piece in endpoint.pieces:
                    self.event({"choices": [{"delta": piece}]})
                if endpoint.error is not None:
                    self.event({"error": endpoint.error})
                elif endpoint.finished:
                    self.event({"choices": [], "usage": {"completion_tokens": 2}})
                    self.wfile.write(b"data: [DONE]\n\n")

            def event(self, chunk: dict[str, Any]) -> None:
                self.wfile.write(f": a comment\n\ndata: {json.dumps(chunk)}\n\n".encode())

            def answer(self, status: int, body: dict[str, Any]) -> None:
                self.send_response(status)
                if endpoint.busy > 0:
                    endpoint.busy -= 1
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    for name in ("PDSERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = Endpoint()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_pipe_gets_the_text_of_one_answer_only(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.pieces.insert(0, {"reasoning_content": "hm"})
    pipe(monkeypatch, "line one\nline two\n")
    assert main(["--url", f"{endpoint.url}/v1/", "--max-tokens", "9", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    body = endpoint.bodies[0]
    assert body["model"] == "first"
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "line one\nline two"},
    ]
    assert body["max_tokens"] == 9
    assert "temperature" not in body, "what is not given is the model's own"


def test_a_terminal_obeys_no_control_characters_of_a_model(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.pieces = [{"content": "a\x1b]0;x\x07b\tc\nd"}]
    for is_terminal, shown in ((True, "a\\x1b]0;x\\x07b\tc\nd\n"), (False, "a\x1b]0;x\x07b\tc\nd\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
        monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)  # noqa: B023
        assert main(["--url", endpoint.url]) == 0
        assert capsys.readouterr().out == shown


def test_a_message_may_be_an_argument(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "")
    assert main(["--url", endpoint.url, "--model", "second", "Why", "so?"]) == 0
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": "Why so?"}]
    assert endpoint.bodies[0]["model"] == "second"
    assert endpoint.keys == [], "with a model name nothing is asked before"


@pytest.mark.parametrize(
    ("argv", "environment", "sent"),
    [
        ([], {}, None),
        ([], {"PDSERVE_API_KEY": "one,two"}, "Bearer one"),
        ([], {"OPENAI_API_KEY": "three"}, "Bearer three"),
        (["--api-key", "four"], {"PDSERVE_API_KEY": "one"}, "Bearer four"),
    ],
)
def test_the_key_is_the_flag_s_or_the_environment_s(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, argv: list[str], environment: dict[str, str], sent: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pipe(monkeypatch, "hi")
    assert main(["--url", endpoint.url, *argv]) == 0
    assert endpoint.keys == [sent]


def test_a_conversation_is_kept_and_reset(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "", "/retry", "two", "/reset", "/system terse", "three", "/nonsense", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with ChatClient(endpoint.url) as client:
        assert converse(ChatSession(client, "m", None, {"seed": 3})) == 0
    answer = {"role": "assistant", "content": "Hello there"}
    asked = [body["messages"] for body in endpoint.bodies]
    assert asked[0] == asked[1] == [{"role": "user", "content": "one"}]
    assert asked[2] == [*asked[0], answer, {"role": "user", "content": "two"}]
    assert asked[3] == [{"role": "system", "content": "terse"}, {"role": "user", "content": "three"}]
    assert all(body["seed"] == 3 for body in endpoint.bodies)
    shown = capsys.readouterr().out
    assert "Hello there" in shown
    assert "2 tokens, first after" in shown
    assert "there is no command /nonsense" in shown


def test_ctrl_c_ends_an_answer_and_keeps_what_came(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatClient(endpoint.url) as client:
        session = ChatSession(client, "m", None, {})
        stream = client.stream

        def interrupted(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield next(stream(body))
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "stream", interrupted)
        reply = session.ask("hi", show_reasoning=True)
    assert reply.interrupted
    assert session.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]


def test_ctrl_c_and_ctrl_d_at_the_prompt(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = iter([KeyboardInterrupt, EOFError])

    def typed(prompt: str) -> str:
        raise next(raised)

    monkeypatch.setattr("builtins.input", typed)
    with ChatClient(endpoint.url) as client:
        assert converse(ChatSession(client, "m", None, {})) == 0
    assert "(Ctrl-D or /exit ends)" in capsys.readouterr().out
    assert endpoint.bodies == []


def test_a_failed_message_is_not_part_of_the_conversation(endpoint: Endpoint) -> None:
    endpoint.error = {"message": "the worker died"}
    with ChatClient(endpoint.url) as client:
        session = ChatSession(client, "m", None, {})
        with pytest.raises(RequestError, match="ended with an error: the worker died"):
            session.ask("hi", show_reasoning=True)
        endpoint.error, endpoint.finished = None, False
        with pytest.raises(RequestError, match="broke off"):
            session.ask("hi", show_reasoning=True)
    assert session.messages == []


@pytest.mark.parametrize(
    ("status", "told"), [(401, "answers 401: no; give --api-key, or set PDSERVE_API_KEY"), (503, "answers 503: no")]
)
def test_a_refusal_says_what_to_do(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, told: str
) -> None:
    endpoint.status = status
    pipe(monkeypatch, "hi")
    assert main(["--url", endpoint.url, "--model", "m"]) == 1
    assert capsys.readouterr().err == f"pdserve chat: {endpoint.url}/v1/chat/completions {told}\n"


def test_a_service_that_is_busy_is_asked_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.busy = 2
    pipe(monkeypatch, "hi")
    assert main(["--url", endpoint.url, "--model", "m"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    assert len(endpoint.bodies) == 3
    endpoint.busy = 2
    monkeypatch.setattr("pdserve.cli.chat.BUSY_TIMEOUT_S", 0.0)
    pipe(monkeypatch, "hi")
    assert main(["--url", endpoint.url, "--model", "m"]) == 1
    assert "answers 503: no" in capsys.readouterr().err


def test_without_an_address_the_first_default_one_that_listens_is_used(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdserve.cli.chat.DEFAULT_URLS", ("http://127.0.0.1:1", endpoint.url))
    pipe(monkeypatch, "hi")
    assert main([]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    monkeypatch.setattr("pdserve.cli.chat.DEFAULT_URLS", ("http://127.0.0.1:1", "http://127.0.0.1:2"))
    pipe(monkeypatch, "hi")
    assert main([]) == 1
    assert "nothing answers at http://127.0.0.1:1 " in capsys.readouterr().err


def test_without_a_service_the_answer_says_how_to_start_one(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "hi")
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "nothing answers at http://127.0.0.1:1 (Connection refused); start a service with `pdserve pair" in err
    assert err.count("\n") == 1


def test_the_summary_has_what_is_known() -> None:
    assert ChatReply(num_tokens=11, ttft_s=0.5, seconds=1.5).summary() == "11 tokens, first after 500 ms, 10.0 tokens/s"
    assert ChatReply(ttft_s=0.25, seconds=1.0, interrupted=True).summary() == "first after 250 ms, interrupted"
