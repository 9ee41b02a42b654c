"""Requests that decode by single steps and by rows with drafts, which must give the same tokens and the same KV."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from pdserve.executor.interface import BatchRow, SampledToken, StepResult
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, random_prompt
from tests.tiny import EOS_ID, VOCAB_SIZE

MOST_DRAFTS = 5


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how its `num_new` tokens are sampled."""

    prompt: tuple[int, ...]
    sampling: CoreSamplingParams = GREEDY
    logprobs: Logprobs | None = None
    num_new: int = 12

    @property
    def max_len(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt) + self.num_new


@dataclasses.dataclass
class Outcome:
    """Sampled tokens of each request, and its open row."""

    tokens: list[list[SampledToken]]
    rows: list[int]
    num_steps: int = 0
    num_accepted: int = 0
    num_rejected: int = 0

    @property
    def ids(self) -> list[list[int]]:
        """Token ids of each request."""
        return [[token.token_id for token in tokens] for tokens in self.tokens]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt."""
    return tuple(random_prompt(length, VOCAB_SIZE, seed))


def sixteen() -> list[Request]:
    """Requests of every kind of sampling, with prompts of many lengths."""
    chance = {"temperature": 1.0}
    samplings: list[tuple[dict[str, object], Logprobs | None]] = [
        ({}, None),
        (chance, None),
        (chance, Logprobs()),
        ({}, Logprobs(top=5)),
        (chance | {"top_k": 20, "top_p": 0.9}, Logprobs(top=20, token_ids=(3, 300))),
        ({"repetition_penalty": 1.4}, None),
        ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, Logprobs(top=2)),
        (chance | {"repetition_penalty": 1.2, "frequency_penalty": 0.7}, Logprobs()),
        ({"logit_bias": {9: 6.0, 11: 6.0}}, None),
        (chance | {"logit_bias": {9: 8.0, 11: 8.0}, "presence_penalty": 2.0}, Logprobs(top=1)),
        ({"min_new_tokens": 7, "logit_bias": {EOS_ID: 40.0}}, Logprobs(top=3)),
        (chance | {"min_new_tokens": 4, "stop_token_ids": (9,), "logit_bias": {9: 30.0}}, None),
        (chance | {"min_p": 0.05, "temperature": 1.7}, Logprobs(token_ids=(5,))),
        (chance | {"temperature": 0.3}, None),
        ({"frequency_penalty": -1.0}, None),
        (chance, Logprobs(top=20)),
    ]
    return [
        Request(
            prompt_of(1 + 13 * index % 90, index),
            CoreSamplingParams(**({"temperature": 0.0, "seed": index} | settings)),  # type: ignore[arg-type]
            logprobs,
            num_new=9 + index % 5,
        )
        for index, (settings, logprobs) in enumerate(samplings)
    ]


def open_rows(driver: Driver, requests: Sequence[Request]) -> list[int]:
    """Open a row for each request."""
    return [driver.open(one.prompt, one.max_len + 1, one.sampling, logprobs=one.logprobs) for one in requests]


def by_single_steps(driver: Driver, requests: Sequence[Request]) -> Outcome:
    """Whole prompts in one step, then one token of each request in a step."""
    found = Outcome([[] for _ in requests], open_rows(driver, requests))
    while True:
        plan, members = [], []
        for index, (one, row, tokens) in enumerate(zip(requests, found.rows, found.tokens, strict=True)):
            if len(tokens) < one.num_new:
                end = len(one.prompt) + len(tokens)
                plan.append((row, end - 1 if tokens else 0, end, True))
                members.append(index)
        if not plan:
            return found
        found.num_steps += 1
        for index, token in zip(members, driver.step(*plan), strict=True):
            assert token is not None
            found.tokens[index].append(token)


def guess(truth: Sequence[int], choice: random.Random) -> tuple[int, ...]:
    """Drafts of what follows: none, all right, all wrong, or right up to some place."""
    drafts = list(truth[: choice.randrange(MOST_DRAFTS + 1)])
    if drafts and choice.random() < 0.6:
        at = choice.randrange(len(drafts))
        drafts[at] = (drafts[at] + 1 + choice.randrange(VOCAB_SIZE - 1)) % VOCAB_SIZE
    return tuple(drafts)


def by_drafts(
    driver: Driver, requests: Sequence[Request], truth: Sequence[Sequence[int]], choice: random.Random, chunk: int = 40
) -> Outcome:
    """Steps with chunks of prompts, rows without drafts, and rows with drafts that `guess` makes from `truth`."""
    found = Outcome([[] for _ in requests], open_rows(driver, requests))
    computed = [0] * len(requests)
    while True:
        plan: list[BatchRow] = []
        members = []
        for index, (one, row, tokens) in enumerate(zip(requests, found.rows, found.tokens, strict=True)):
            known = len(one.prompt) + len(tokens)
            if len(tokens) == one.num_new or choice.random() < 0.2:
                continue
            start, members = computed[index], [*members, index]
            if not tokens:
                end = min(known, start + choice.randrange(1, chunk))
                plan.append(BatchRow(str(row), row, start, end, end == known))
            else:
                drafts = guess(truth[index][len(tokens) : one.num_new - 1], choice)
                plan.append(BatchRow(str(row), row, start, start + 1 + len(drafts), True, drafts=drafts))
        if not plan:
            if all(len(tokens) == one.num_new for one, tokens in zip(requests, found.tokens, strict=True)):
                return found
            continue
        found.num_steps += 1
        result = driver.run(plan)
        for place, (index, row) in enumerate(zip(members, plan, strict=True)):
            take(found, result, place, index, row)
            computed[index] = row.end - len(row.drafts) + len(result.more.get(place, ()))


def take(found: Outcome, result: StepResult, place: int, index: int, row: BatchRow) -> None:
    """Add the tokens of row `place` of a step to request `index`."""
    sampled = result.sampled(place)
    assert len(sampled) <= 1 + len(row.drafts) and bool(sampled) == row.sample
    accepted = len(result.more.get(place, ()))
    assert [token.token_id for token in sampled[:accepted]] == list(row.drafts[:accepted])
    found.tokens[index] += sampled
    found.num_accepted += accepted
    found.num_rejected += len(row.drafts) - accepted
