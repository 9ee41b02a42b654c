"""Requests for `bench_state_ratio`: multi-turn chats, prompts of a trace, and answers without a prefix cache.

A workload is a list of sessions, each a list of turns. A user plays one session at a time: it waits `think_s`, sends
all tokens so far with the new ones behind them, and waits for the answer. The same arguments give the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Tokens of the blocks that a trace's `hash_ids` name."""
FIRST_OWN_TOKEN = 1 << 28
"""Chats use token ids from here on, the sampled tokens are lower."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """`new_ids`: tokens behind those of the session so far. `think_s`: seconds from the last answer to this turn."""

    new_ids: list[int]
    max_new_tokens: int
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sessions, in the order in which they start; `num_users` are played at a time."""

    name: str
    sessions: Sequence[Sequence[Turn]]
    num_users: int
    has_prefix_cache: bool = True

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(map(len, self.sessions))

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest session at its end."""
        return max(sum(len(turn.new_ids) + turn.max_new_tokens for turn in session) for session in self.sessions)


def chats(
    num_sessions: int, num_users: int, *, name: str = "chats", seed: int = 0, think_s: float = 4.0, scale: int = 1
) -> Workload:
    """Chats of 2 to 8 turns, each behind one of six system prompts.

    In tokens: system prompts of 300 to 2,000, messages of 20 to 400 times `scale`, answers of 30 to 150. `think_s` is
    the mean of an exponential distribution.
    """
    rng = random.Random(seed)
    systems = [_own_tokens(rng, rng.randint(300, 2000)) for _ in range(6)]

    def turn(head: list[int]) -> Turn:
        message = _own_tokens(rng, rng.randint(20, 400) * scale)
        return Turn(head + message, rng.randint(30, 150), rng.expovariate(1.0 / think_s))

    sessions = [
        [turn(rng.choice(systems) if number == 0 else []) for number in range(rng.randint(2, 8))]
        for _ in range(num_sessions)
    ]
    return Workload(name, sessions, num_users)


def answers(num_sessions: int, num_users: int, *, name: str = "answers, no cache", seed: int = 0) -> Workload:
    """Single requests without a prefix cache, as a decode server has them: 500 to 1,500 tokens, answers of 100 to 400.

    Users do not wait between two requests.
    """
    rng = random.Random(seed)
    sessions = [[Turn(_own_tokens(rng, rng.randint(500, 1500)), rng.randint(100, 400))] for _ in range(num_sessions)]
    return Workload(name, sessions, num_users, has_prefix_cache=False)


def trace(path: Path, num_users: int, *, every: int, most_prompt_tokens: int, most_requests: int) -> Workload:
    """The requests of a trace in their order, without its times: each user sends the next one.

    One conversation of `every` is taken. Requests whose first two `hash_ids` are equal count as one conversation.
    Requests with longer prompts than `most_prompt_tokens` are left out, and all behind the first `most_requests`.
    """
    numbers: dict[tuple[int, ...], int] = {}
    sessions: list[list[Turn]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            number = numbers.setdefault(tuple(entry["hash_ids"][:2]), len(numbers))
            if number % every == 0 and 0 < entry["input_length"] <= most_prompt_tokens:
                sessions.append([Turn(_trace_tokens(entry), max(1, entry["output_length"]))])
                if len(sessions) == most_requests:
                    break
    if not sessions:
        raise ValueError(f"{path} has no request of at most {most_prompt_tokens} prompt tokens")
    return Workload(path.stem, sessions, num_users)


def _trace_tokens(entry: dict[str, Any]) -> list[int]:
    """Token ids of a trace's request: each `hash_ids` block has ids of its own."""
    tokens: list[int] = []
    for block in entry["hash_ids"]:
        first = FIRST_OWN_TOKEN + block * TRACE_BLOCK_TOKENS
        tokens += range(first, first + TRACE_BLOCK_TOKENS)
    return tokens[: entry["input_length"]]


def _own_tokens(rng: random.Random, count: int) -> list[int]:
    return [FIRST_OWN_TOKEN + rng.getrandbits(20) for _ in range(count)]
