"""One request of the load: its body for each backend, and the times and tokens of its stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from pdserve.base.hosts import without_credentials
from pdserve.errors import ConfigError

Json = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""
Clock = Callable[[], float]

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "sglang": "/generate"}
"""The path of each backend, by the names of `vllm bench serve` and of SGLang's bench_serving."""
MAX_LINE_BYTES = 16 << 20
MODELS_TIMEOUT_S = 30.0
MAX_MODELS_BYTES = 4 << 20
MAX_ERROR_CHARS = 300
DRAIN_S = 1.0
"""Seconds to wait for the end of the connection's answer behind `[DONE]`, so that the next request can use it, too."""


def backend_of(endpoint: str) -> str:
    """Return the backend of an endpoint's path: `openai` unless the path says otherwise."""
    if endpoint.rstrip("/").endswith("/chat/completions"):
        return "openai-chat"
    return "sglang" if endpoint.rstrip("/").endswith("/generate") else "openai"


@dataclasses.dataclass(kw_only=True)
class BenchRecord:
    """What one request got.

    `start_s` is in seconds after the start of the run; all other times are in seconds after `start_s`. `arrivals_s` has
    the time of each event with text, or of each event with a choice in a whole answer without any text. `end_s` is the
    time of the last event with a choice, or of the failure. `counted_by` says what `output_tokens` counts: `usage`, or
    `events` at a server that sends no usage. `unfinished`: the run ended before the answer did; `end_s` is then the end
    of the run. `error_kind` None and not `unfinished`: a whole answer.
    """

    start_s: float = 0.0
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "usage"
    text: str = ""
    unfinished: bool = False
    error_kind: str | None = None
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return self.error_kind is None and not self.unfinished

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without one."""
        return self.arrivals_s[0] if self.arrivals_s else None

    @property
    def ttst_s(self) -> float | None:
        """Time to the second token, from the request's start; None without one."""
        return self.arrivals_s[1] if len(self.arrivals_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first one; None for an answer of one token."""
        if not self.arrivals_s or self.output_tokens < 2:
            return None
        return (self.end_s - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between events with text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]

    def fail(self, kind: str, message: str) -> None:
        """Record the first error."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, message[:MAX_ERROR_CHARS]


class EventReader:
    """Takes a stream's bytes with their times, and fills in a record. Has no clock and no socket of its own."""

    def __init__(self, record: BenchRecord) -> None:
        self.record = record
        self.done = False
        self._pending = b""
        self._choices_s: list[float] = []
        self._usage_seen = False
        self._generated = 0

    def feed(self, chunk: bytes, at_s: float) -> None:
        """Take bytes that came `at_s` seconds after the request's start. Raises ValueError for what is no event."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            raise ValueError(f"an event has more than {MAX_LINE_BYTES >> 20} MiB")
        for line in lines:
            if line.startswith(b"data:") and not self.done:
                self._take(line[5:].strip(), at_s)

    def finish(self) -> None:
        """Take the end of the answer: without `[DONE]`, or without an event that has a choice, it is an error."""
        record = self.record
        if not self.done and self._pending.strip() != b"data: [DONE]":
            record.fail("truncated", "the stream ended without [DONE]")
        if not self._choices_s:
            record.fail("invalid_answer", "the stream has no event with a choice")
        self._count_events()
        if not record.arrivals_s and record.error_kind is None:
            record.arrivals_s = self._choices_s  # its tokens have no text

    def cut(self, at_s: float) -> None:
        """Take the end of the run, `at_s` seconds after the request's start."""
        self.record.unfinished, self.record.end_s = True, at_s
        self._count_events()

    def _count_events(self) -> None:
        """Count the events with text as tokens where no usage came."""
        if not self._usage_seen:
            self.record.output_tokens, self.record.counted_by = len(self.record.arrivals_s), "events"

    def _take(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is a {type(event).__name__}, not an object")
        if event.get("error"):
            self.record.fail("error_event", _message_of(event))
            self.done = True
            return
        if "meta_info" in event:
            self._take_native(event, at_s)
        else:
            self._take_openai(event, at_s)

    def _take_openai(self, event: Json, at_s: float) -> None:
        record = self.record
        choices = event.get("choices") or []
        piece = "".join(text_of(choice) for choice in choices)
        if choices:
            record.end_s = at_s
            self._choices_s.append(at_s)
        if piece:
            record.arrivals_s.append(at_s)
            record.text += piece
        usage = event.get("usage")
        if usage:
            self._count(usage, (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))

    def _take_native(self, event: Json, at_s: float) -> None:
        """Take an event of `/generate`: its text is the whole text so far, or the new one of an incremental stream."""
        record, meta = self.record, event["meta_info"]
        record.end_s = at_s
        self._choices_s.append(at_s)
        text = str(event.get("text") or "")
        new = text[len(record.text) :] if text.startswith(record.text) else text
        generated = int(meta.get("completion_tokens", 0))
        if new or generated > self._generated:
            record.arrivals_s.append(at_s)
            record.text += new
        self._generated = max(self._generated, generated)
        self._count(meta, meta.get("cached_tokens"))
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            record.fail("error_event", str(reason.get("message") or "aborted"))

    def _count(self, usage: Json, cached: Any) -> None:
        record = self.record
        record.prompt_tokens = int(usage.get("prompt_tokens") or record.prompt_tokens)
        record.cached_tokens = int(cached or 0)
        if usage.get("completion_tokens") is not None:
            record.output_tokens = int(usage["completion_tokens"])
            self._usage_seen = True


def text_of(choice: Json) -> str:
    """Return the text that a streamed choice brings: content, reasoning, or the arguments of a tool call."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    calls = delta.get("tool_calls") or []
    texts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    texts += [(call.get("function") or {}).get(key) for call in calls for key in ("name", "arguments")]
    return "".join(text for text in texts if isinstance(text, str))


def refusal_of(body: bytes) -> str:
    """Return the message of a refused request: that of OpenAI's error object, else the whole body."""
    try:
        return _message_of(orjson.loads(body))
    except ValueError:
        return body.decode(errors="replace")


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchTarget:
    """An endpoint and how to ask it. `model` None: not sent. `timeout_s`: per request, from its start to its end."""

    base_url: str
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 600.0
    verify_tls: bool = True

    @property
    def root(self) -> str:
        """The address without `/v1` and a slash at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def url(self) -> str:
        """Where requests go to."""
        return self.root + (self.endpoint or ENDPOINTS[self.backend])

    def body(self, prompt: Prompt, output_len: int) -> Json:
        """Return the request's body. Raises ConfigError for a prompt that the backend cannot take."""
        messages = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        if self.backend == "openai-chat":
            if not messages and not isinstance(prompt, str):
                raise ConfigError("chat takes text, not token ids; give --prompt-type text", field="prompt")
            said = list(prompt) if messages else [{"role": "user", "content": prompt}]
            own: Json = {"messages": said, "max_completion_tokens": output_len}
            return self._openai(own)
        if messages:
            raise ConfigError(f"a prompt of messages needs --backend openai-chat, not {self.backend}", field="messages")
        sent = prompt if isinstance(prompt, str) else list(prompt)
        if self.backend == "openai":
            return self._openai({"prompt": sent, "max_tokens": output_len})
        sampling = dict(self.sampling) | {"max_new_tokens": output_len, "ignore_eos": self.ignore_eos}
        field = "text" if isinstance(prompt, str) else "input_ids"
        return {field: sent, "sampling_params": sampling, "stream": True} | dict(self.extra_body)

    def _openai(self, own: Json) -> Json:
        body: Json = {} if self.model is None else {"model": self.model}
        body |= own | dict(self.sampling) | {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra_body)


class BenchClient:
    """Sends requests to one target. Used as an async context manager, on one event loop."""

    def __init__(self, target: BenchTarget, clock: Clock = time.perf_counter) -> None:
        self.target = target
        self._clock = clock
        headers = {"Content-Type": "application/json", **target.headers}
        if target.api_key is not None:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> BenchClient:
        connector = aiohttp.TCPConnector(limit=0, ssl=self.target.verify_tls)
        timeout = aiohttp.ClientTimeout(total=self.target.timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def first_model(self) -> str:
        """Return the first model of `/v1/models`. Raises ConfigError when there is none, or nothing answers."""
        assert self._session is not None
        path = f"{self.target.root}/v1/models"
        url = without_credentials(path)
        try:
            timeout = aiohttp.ClientTimeout(total=min(self.target.timeout_s, MODELS_TIMEOUT_S))
            async with self._session.get(path, timeout=timeout) as response:
                if response.status != 200:
                    raise ConfigError(f"{url} answers {response.status}; give --model, or --api-key", field="model")
                body = b""
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > MAX_MODELS_BYTES:
                        raise ValueError("too long for a list of models")
                return str(orjson.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, OSError) as error:
            told = str(error) or type(error).__name__
            raise ConfigError(f"--base-url: nothing answers at {url}: {told}", field="base_url") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} lists no model; give --model", field="model") from error

    async def send(
        self, prompt: Prompt, output_len: int, run_start: float = 0.0, record: BenchRecord | None = None
    ) -> BenchRecord:
        """Send a request and read its answer to the end. Never raises for what the server does.

        Args:
            run_start: the clock at the start of the run.
            record: filled in and returned. When this task is cancelled it has what came until then, as `unfinished`.

        Raises:
            ConfigError: as `BenchTarget.body`, and for a body that JSON cannot have.
        """
        assert self._session is not None
        try:
            data = orjson.dumps(self.target.body(prompt, output_len))
        except TypeError as error:  # half of a surrogate pair, an integer of more than 64 bits
            raise ConfigError(f"a request cannot be sent as JSON: {error}", field="prompt") from error
        record = BenchRecord() if record is None else record
        reader = EventReader(record)
        began = self._clock()
        record.start_s = began - run_start
        try:
            async with self._session.post(self.target.url, data=data) as response:
                if response.status != 200:
                    record.fail(f"http_{response.status}", refusal_of(await response.content.read(1 << 16)))
                else:
                    await self._read(response, reader, began)
        except asyncio.CancelledError:
            if not reader.done:
                reader.cut(self._clock() - began)
            raise
        except TimeoutError:
            record.fail("timeout", f"no end within {self.target.timeout_s:g} s")
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            record.fail("disconnected", f"{type(error).__name__}: {error}")
        except (aiohttp.ClientError, OSError) as error:
            record.fail("connection", f"{type(error).__name__}: {error}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            record.fail("invalid_answer", f"{type(error).__name__}: {error}")
        if record.error_kind is not None:
            record.end_s = self._clock() - began
        return record

    async def _read(self, response: aiohttp.ClientResponse, reader: EventReader, began: float) -> None:
        chunks = response.content.iter_any()
        async for chunk in chunks:
            reader.feed(chunk, self._clock() - began)
            if reader.done:
                break
        reader.finish()
        if reader.done and reader.record.error_kind is None:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(DRAIN_S):
                    async for _ in chunks:
                        pass
