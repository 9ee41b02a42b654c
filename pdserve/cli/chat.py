"""`pdserve chat`: a terminal client for any OpenAI chat endpoint. Streams the answers and keeps the conversation.

Interactive in a terminal: Ctrl-C ends an answer, Ctrl-D the chat, `/help` lists the commands. With a message as
argument or a pipe on stdin there is one answer, and only its text goes to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests

from pdserve.base.hosts import without_credentials
from pdserve.cli.fleet import credentials_of, open_session, printable, tls_error
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError, RequestError
from pdserve.http.credentials import API_KEY

DEFAULT_URLS = ("http://127.0.0.1:8000", "http://127.0.0.1:30000")
"""Default addresses of `pdserve pair` and the router, and of `pdserve serve`."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0
BUSY_TIMEOUT_S = 60.0
"""How long requests are sent again that a service refuses with 503 and Retry-After: it starts, or is busy."""
LONGEST_PAUSE_S = 2.0
WRONG_USAGE, FAILED, INTERRUPTED = 2, 1, 130
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
COMMANDS = {
    "/reset": "forget the conversation",
    "/retry": "answer the last message once more",
    "/system TEXT": "set the system prompt; without TEXT remove it",
    "/help": "list these commands",
    "/exit": "end, as Ctrl-D does",
}


@dataclasses.dataclass(kw_only=True)
class ChatReply:
    """One answer. `ttft_s`: seconds to its first text, None without one; `seconds`: to its end.

    `num_tokens` is the server's count, None where it sent none. `interrupted`: Ctrl-C ended it.
    """

    text: str = ""
    ttft_s: float | None = None
    seconds: float = 0.0
    num_tokens: int | None = None
    interrupted: bool = False

    def summary(self) -> str:
        """Return tokens, time to the first token, and speed, as far as they are known."""
        parts = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s * 1e3:.0f} ms")
            decoding_s = self.seconds - self.ttft_s
            if self.num_tokens is not None and self.num_tokens > 1 and decoding_s > 0:
                parts.append(f"{(self.num_tokens - 1) / decoding_s:.1f} tokens/s")
        return ", ".join([*parts, *(["interrupted"] if self.interrupted else [])])


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve chat`."""
    parser = CommandParser(
        prog="pdserve chat",
        allow_abbrev=False,
        description="Talks to a service through its OpenAI endpoint. With MESSAGE, or text on stdin, there is one "
        "answer.",
    )
    add = parser.add_argument
    add("message", nargs="*", metavar="MESSAGE", help="one message to answer, instead of a conversation")
    text = f"address of the service, with or without /v1 (default: {' or '.join(DEFAULT_URLS)}, the first that listens)"
    add("--url", help=text)
    add("--api-key", metavar="KEY", help=f"key of the service (or in {API_KEY}, OPENAI_API_KEY)")
    add("--model", help="model name; the service's first model when absent")
    add("--system", metavar="TEXT", help="system prompt")
    add("--max-tokens", type=int, metavar="N", help="longest answer in tokens; the model's limit when absent")
    add("--temperature", type=float, help="sampling temperature; the model's default when absent")
    add("--top-p", type=float, help="nucleus sampling; the model's default when absent")
    add("--seed", type=int, help="seed of the sampling")
    add("--ca-cert", metavar="PEM", help="CA certificates of an https service; the system's when absent")
    return parser


def main(argv: Sequence[str]) -> int:
    """Chat; return the exit status: 0, 1 when the service does not answer, 2 for wrong flags, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    piped = not sys.stdin.isatty()
    try:
        message = " ".join(args.message) or (sys.stdin.read().strip() if piped else "")
        if piped and not message:
            raise ConfigError("there is no message: give one as argument or on stdin")
        with ChatClient(args.url or find_service(), api_key=_key(args.api_key), ca_cert=args.ca_cert) as client:
            sampling = {
                "max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed,
            }  # fmt: skip
            session = ChatSession(client, args.model or client.first_model(), args.system, sampling)
            return answer_once(session, message) if message else converse(session)
    except RequestError as error:
        print(f"pdserve chat: {error.message}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def find_service() -> str:
    """Return the first of `DEFAULT_URLS` that listens, else the first one."""
    for url in DEFAULT_URLS:
        address = urlsplit(url)
        with contextlib.suppress(OSError):
            socket.create_connection((address.hostname or "", address.port or 0), CONNECT_TIMEOUT_S).close()
            return url
    return DEFAULT_URLS[0]


def _key(given: str | None) -> str | None:
    keys = (given, os.environ.get(API_KEY), os.environ.get("OPENAI_API_KEY"))
    # A server's variable may list several keys.
    return next((key.partition(",")[0].strip() for key in keys if key is not None and key.strip()), None)


class ChatClient:
    """HTTP side of the chat: one session with an OpenAI endpoint. Used as a context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, ca_cert: str | None = None) -> None:
        """Raises ConfigError for an address that is no HTTP URL, and for CA certificates that cannot be read."""
        self.url = without_credentials(url.rstrip("/").removesuffix("/v1"))
        _, self._http = open_session(self.url, ca_cert)
        self._http.auth = credentials_of(url)
        if api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the first model that the service lists. Raises RequestError."""
        with self._send("GET", "/v1/models", None) as response:
            try:
                return str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise RequestError(f"{self.url}/v1/models lists no model; give --model") from None

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Send a chat request and yield the chunks of its answer. Closing the generator aborts the request.

        Raises:
            RequestError: the service cannot be reached, refuses the request, or ends it with an error.
        """
        with self._send("POST", "/v1/chat/completions", body) as response:
            try:
                for line in response.iter_lines(chunk_size=None):
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise RequestError(f"the answer ended with an error: {_message_of(chunk, 'unknown')}")
                    yield chunk
            except (requests.RequestException, ValueError) as error:
                raise RequestError(f"the answer broke off: {error}") from error
        raise RequestError("the answer broke off: the connection ended before it")

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> requests.Response:
        """Send a request, and again while the service is busy. Raises RequestError."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while (response := self._send_once(method, path, body)).status_code == requests.codes.unavailable:
            pause = response.headers.get("Retry-After", "")
            if not pause.isdigit() or time.monotonic() >= deadline:
                break
            response.close()
            time.sleep(min(float(pause), LONGEST_PAUSE_S))
        return self._checked(response, path)

    def _send_once(self, method: str, path: str, body: dict[str, Any] | None) -> requests.Response:
        try:
            return self._http.request(
                method, f"{self.url}{path}", json=body, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
            )
        except requests.exceptions.SSLError as error:
            raise tls_error(self.url, error) from error
        except (requests.RequestException, OSError) as error:
            hint = "start a service with `pdserve pair MODEL`, or give --url"
            raise RequestError(f"nothing answers at {self.url} ({_cause(error)}); {hint}") from error

    def _checked(self, response: requests.Response, path: str) -> requests.Response:
        """Return a response with a good status; raise RequestError for any other."""
        if response.ok:
            return response
        with response:
            try:
                text = _message_of(response.json(), response.reason)
            except ValueError:
                text = response.reason
            hint = f"; give --api-key, or set {API_KEY}" if response.status_code == requests.codes.unauthorized else ""
            raise RequestError(f"{self.url}{path} answers {response.status_code}: {text}{hint}")


def _message_of(body: Any, otherwise: str) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return printable(str(error.get("message", otherwise)) if isinstance(error, dict) else str(error or otherwise))


def _cause(error: BaseException) -> str:
    """Return the innermost cause: requests wraps it several times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class ChatSession:
    """The conversation: messages so far, system prompt and sampling. `sampling`: request fields; None: not sent."""

    def __init__(self, client: ChatClient, model: str, system: str | None, sampling: dict[str, Any]) -> None:
        self.client, self.model, self.system = client, model, system
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[dict[str, str]] = []

    def ask(self, message: str, *, show_reasoning: bool) -> ChatReply:
        """Stream the answer to `message` to stdout. Ctrl-C ends it; what has come stays part of the conversation.

        Raises:
            RequestError: as `ChatClient.stream`; the message is then not part of the conversation.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = self._sampling | {
            "model": self.model,
            "messages": [*system, *asked],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = ChatReply()
        started = time.perf_counter()
        with contextlib.closing(self.client.stream(body)) as chunks:
            try:
                self._follow(chunks, reply, started, show_reasoning)
            except KeyboardInterrupt:
                reply.interrupted = True
        reply.seconds = time.perf_counter() - started
        self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        return reply

    def _follow(self, chunks: Iterator[dict[str, Any]], reply: ChatReply, started: float, show_reasoning: bool) -> None:
        thinking, shown = False, printable if sys.stdout.isatty() else str
        for chunk in chunks:
            usage = chunk.get("usage")
            if usage is not None:
                reply.num_tokens = usage.get("completion_tokens")
            for choice in chunk.get("choices", []):
                delta = choice.get("delta", {})
                thought, text = delta.get("reasoning_content"), delta.get("content")
                if (thought or text) and reply.ttft_s is None:
                    reply.ttft_s = time.perf_counter() - started
                if thought and show_reasoning:
                    print(_dim(shown(thought)), end="", flush=True)
                    thinking = True
                if text:
                    print(("\n" if thinking else "") + shown(text), end="", flush=True)
                    thinking = False
                    reply.text += text


def answer_once(session: ChatSession, message: str) -> int:
    """Print the answer to one message; return the exit status."""
    reply = session.ask(message, show_reasoning=False)
    print(flush=True)
    return INTERRUPTED if reply.interrupted else 0


def converse(session: ChatSession) -> int:
    """Chat until the end of stdin or `/exit`; return 0."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history of `input`
    print(f"{session.model} at {session.client.url}. /help lists the commands, Ctrl-D ends.")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends)")
            continue
        if line == "/exit":
            return 0
        message = _obey(session, line) if line.startswith("/") else line
        if message:
            _talk(session, message)


def _talk(session: ChatSession, message: str) -> None:
    try:
        reply = session.ask(message, show_reasoning=True)
    except RequestError as error:
        print(f"\npdserve chat: {error.message}", file=sys.stderr)
        return
    print("\n" + _dim(reply.summary()))


def _dim(text: str) -> str:
    return f"{DIM}{text}{PLAIN}" if sys.stdout.isatty() else text


def _obey(session: ChatSession, line: str) -> str | None:
    """Carry out a command; return the message that it asks for, None for no message."""
    name, _, text = line.partition(" ")
    if name == "/reset":
        session.messages = []
        print("(new conversation)")
    elif name == "/system":
        session.system = text.strip() or None
        print(f"(system prompt: {session.system or 'none'})")
    elif name == "/retry" and session.messages:
        message = session.messages[-2]["content"]
        session.messages = session.messages[:-2]
        return message
    else:
        if name not in ("/help", "/retry"):
            print(f"there is no command {name}")
        print("\n".join(f"  {command:<14}{about}" for command, about in COMMANDS.items()))
    return None
