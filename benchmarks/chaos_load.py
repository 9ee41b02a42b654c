"""The clients of `benchmarks.chaos`: what they ask, in which manner, and the verdict on each answer.

Every question is greedy, and its answer is known beforehand from a monolith. Whatever happens to the servers, an
answer is that text whole, or an error that says so: each other outcome is a verdict of `BAD`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

GOOD, ERROR, ABORTED, LEFT = "good", "error", "aborted", "left"
WRONG, LOST, HUNG = "wrong", "lost", "hung"
BAD = (WRONG, LOST, HUNG)
"""Wrong: another text, or a refusal of a sound request. Lost: the connection or the stream broke off without a word.
Hung: no end within the deadline."""
RETRYABLE = frozenset({408, 409, 425, 429, 499, 500, 502, 503, 504})
MANNERS = ("plain", "stream", "slow reader", "hang-up", "abort")
WEIGHTS = (5, 6, 1, 1, 1)
PROBE = "probe"
"""The kind of the shortest question; it also tells whether a pair has recovered."""
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
_WORDS = ("red", "green", "blue", "seven", "eleven", "river", "stone", "cloud", "engine", "window", "garden", "copper")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Question:
    """A request without the fields that its manner adds, and its answer: the text of each choice."""

    kind: str
    path: str
    body: dict[str, Any]
    expected: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one request ended. Times are of `time.monotonic`."""

    kind: str
    manner: str
    verdict: str
    began: float
    ended: float
    detail: str = ""


def make_questions(seed: int, model: str, count: int, long_words: int) -> list[Question]:
    """`count` questions of all kinds, in turn; long ones have `long_words` words."""
    rng = random.Random(seed)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(low, high)))

    def chat(text: str, **more: Any) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}

    def completion(text: str, **more: Any) -> dict[str, Any]:
        return {"model": model, "prompt": text, "temperature": 0, "ignore_eos": True, **more}

    def ids(**more: Any) -> dict[str, Any]:
        prompt = [rng.randint(100, 5000) for _ in range(rng.randint(4, 200))]
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": rng.randint(4, 40), **more}
        return {"input_ids": prompt, "sampling_params": sampling}

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    makers: list[Callable[[], Question]] = [
        lambda: Question("completion", COMPLETIONS, completion(words(3, 60), max_tokens=rng.randint(2, 48))),
        lambda: Question("chat", CHAT, chat(words(3, 60), max_tokens=rng.randint(2, 48))),
        lambda: Question("ids", GENERATE, ids()),
        lambda: Question(
            "n", COMPLETIONS, completion(words(3, 30), max_tokens=rng.randint(2, 16), n=rng.randint(2, 3))
        ),
        lambda: Question("schema", CHAT, chat(f"Who is {words(1, 3)}?", max_tokens=64, response_format=form)),
        lambda: Question("long", COMPLETIONS, completion(words(long_words, long_words), max_tokens=rng.randint(2, 16))),
        lambda: Question("long stream", CHAT, chat(words(3, 30), max_tokens=200, ignore_eos=True)),
    ]
    probe = {
        "input_ids": [100, 200, 300],
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3},
    }
    return [Question(PROBE, GENERATE, probe), *(makers[i % len(makers)]() for i in range(count))]


@dataclasses.dataclass
class Seen:
    """What a client has seen of an answer so far."""

    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    error: str | None = None
    done: bool = False
    aborted: bool = False

    def take(self, event: dict[str, Any], *, delta: bool) -> None:
        """A whole answer, or with `delta` an event of a stream."""
        if "error" in event:
            error = event["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
        elif "choices" in event:
            for choice in event["choices"]:
                message = choice.get("delta" if delta else "message")
                piece = choice.get("text") if message is None else message.get("content")
                self.texts[choice["index"]] = self.texts.get(choice["index"], "") + (piece or "")
                self.aborted |= choice.get("finish_reason") == "abort"
        else:
            self.texts[0] = event["text"]
            finish = event["meta_info"].get("finish_reason") or {}
            if finish.get("type") == "abort":
                self.aborted, self.error = True, str(finish.get("message", "abort"))

    def answer(self) -> tuple[str, ...]:
        """The text of each choice."""
        return tuple(self.texts[index] for index in sorted(self.texts))

    def begins(self, expected: Sequence[str]) -> bool:
        """Whether what has come so far is how `expected` begins."""
        return all(index < len(expected) and expected[index].startswith(t) for index, t in self.texts.items())


class Client:
    """Asks one server; all its requests share a connection pool."""

    def __init__(self, session: aiohttp.ClientSession, url: str, deadline_s: float) -> None:
        self._session, self._url, self._deadline_s = session, url, deadline_s

    async def expect(self, question: Question) -> Question:
        """The question with its answer, from a server that nothing happens to."""
        async with self._session.post(self._url + question.path, json=question.body) as response:
            assert response.status == 200, (question, await response.text())
            seen = Seen()
            seen.take(await response.json(), delta=False)
        return dataclasses.replace(question, expected=seen.answer())

    async def ask(self, question: Question, manner: str, rng: random.Random) -> Ending:
        """One request and the verdict on its answer."""
        began, seen = time.monotonic(), Seen()
        try:
            async with asyncio.timeout(self._deadline_s):
                verdict, detail = await self._talk(question, manner, rng, seen)
        except TimeoutError:
            verdict, detail = HUNG, f"no end within {self._deadline_s:g} s; so far {seen}"[:300]
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            verdict, detail = LOST, repr(error)
        except (ValueError, KeyError, TypeError) as error:
            verdict, detail = WRONG, f"an answer that cannot be read: {error!r}"
        if verdict == WRONG:
            detail += f"; asked {json.dumps(question.body)[:200]}, expected {question.expected}"
        return Ending(question.kind, manner, verdict, began, time.monotonic(), detail)

    async def _talk(self, question: Question, manner: str, rng: random.Random, seen: Seen) -> tuple[str, str]:
        body = dict(question.body)
        rid = f"chaos-{rng.getrandbits(48):x}"
        if manner == "abort":
            body["rid"] = rid
        if manner != "plain":
            body["stream"] = True
        async with self._session.post(self._url + question.path, json=body) as response:
            if response.status != 200:
                return _refusal(response.status, await response.text())
            if manner == "plain":
                seen.take(json.loads(await response.read()), delta=False)
                seen.done = True
                return _verdict(seen, question)
            patience = rng.randint(1, 12) if manner in ("hang-up", "abort") else None
            num_events = 0
            async for raw in response.content:
                line = raw.decode().strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    seen.done = True
                    continue
                seen.take(json.loads(data), delta=True)
                num_events += 1
                if manner == "slow reader" and rng.random() < 0.2:
                    await asyncio.sleep(rng.uniform(0.1, 1.0))
                if patience is not None and num_events == patience:
                    if manner == "hang-up":
                        response.close()
                        return (LEFT, "") if seen.begins(question.expected) else (WRONG, f"so far {seen}")
                    async with self._session.post(f"{self._url}/abort_request", json={"rid": rid}) as answer:
                        await answer.read()
        if manner == "abort" and seen.aborted and seen.begins(question.expected):
            return ABORTED, ""
        return _verdict(seen, question)


def _refusal(status: int, text: str) -> tuple[str, str]:
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return WRONG, f"status {status} without an error object: {text[:200]!r}"
    return (ERROR if status in RETRYABLE else WRONG), f"{status}: {message}"


def _verdict(seen: Seen, question: Question) -> tuple[str, str]:
    if not seen.begins(question.expected):
        return WRONG, f"got {seen.answer()}"
    if seen.error is not None or seen.aborted:
        return ERROR, f"in the stream: {seen.error}"
    if not seen.done:
        return (
            LOST,
            f"the stream ended without [DONE] or an error event, after {sum(map(len, seen.texts.values()))} characters",
        )
    return (GOOD, "") if seen.answer() == question.expected else (WRONG, f"ended early: {seen.answer()}")


class Load:
    """Closed-loop clients that go on until they are told to stop. `endings` grows meanwhile."""

    def __init__(self, url: str, questions: Sequence[Question], seed: int, num_clients: int, deadline_s: float) -> None:
        self._url, self._questions, self._seed = url, questions, seed
        self._num_clients, self._deadline_s = num_clients, deadline_s
        self.endings: list[Ending] = []
        self.stopping = False

    async def run(self) -> None:
        """Ask until `stopping`, then wait for the answers that are still to come."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            client = Client(session, self._url, self._deadline_s)
            await asyncio.gather(*(self._client(client, index) for index in range(self._num_clients)))

    async def _client(self, client: Client, index: int) -> None:
        rng = random.Random(self._seed * 1000 + index)
        while not self.stopping:
            question = rng.choice(self._questions)
            manner = rng.choices(MANNERS, WEIGHTS)[0]
            if manner == "abort" and question.path != GENERATE:
                manner = "stream"
            ending = await client.ask(question, manner, rng)
            self.endings.append(ending)
            if ending.verdict == ERROR:
                await asyncio.sleep(rng.uniform(0.1, 0.5))


async def with_answers(url: str, questions: Sequence[Question]) -> list[Question]:
    """Every question with its answer from the server at `url`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        client = Client(session, url, 300.0)
        return [await client.expect(question) for question in questions]
