"""A request and many ways to compute it, which are to give the same bits: alone, among others, in chunks."""

from __future__ import annotations

import dataclasses

import torch

from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import SampledToken
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, random_prompt
from tests.tiny import VOCAB_SIZE

NUM_NEW = 6
LENGTH = 150
TOP = 20
PROMPT = random_prompt(LENGTH, VOCAB_SIZE)
SEEDED = CoreSamplingParams(temperature=1.3, seed=5, top_p=0.9, top_k=50, frequency_penalty=0.3)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What must not depend on the rest: tokens with log-probabilities, and the KV `[layer, k/v, head, token, dim]`."""

    tokens: tuple[SampledToken, ...]
    kv: torch.Tensor

    def same_bits(self, other: Answer) -> bool:
        """Every bit equal."""
        return self.tokens == other.tokens and torch.equal(_bits(self.kv), _bits(other.kv))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes of `values`."""
    return values.contiguous().view(torch.uint8)


def kv_of(built: LoadedEngine, row: int, num_tokens: int) -> torch.Tensor:
    """The row's KV in order of tokens, `[layer, k/v, head, token, dim]`, a copy."""
    page = built.executor.layout.page_tokens
    pages = built.table.pages[row, : -(-num_tokens // page)].tolist()
    kv = built.executor.pools[0].pages[pages].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    return kv[:, :, :, :num_tokens].clone()


def answer(
    driver: Driver,
    *,
    chunk: int = LENGTH,
    others: int = 0,
    known: tuple[int, ...] = (),
    sampling: CoreSamplingParams = GREEDY,
) -> Answer:
    """PROMPT and NUM_NEW tokens. `known` were computed before and are a part of the prompt now, as after a retraction.

    `others` requests of many lengths prefill and decode in the same steps, before and behind it.
    """
    tokens = [*PROMPT, *known]
    total = LENGTH + NUM_NEW
    row = driver.open(tokens, total, sampling, num_prompt=LENGTH, top_logprobs=TOP)
    noise = [_Noise(driver, index) for index in range(others)]
    sampled: list[SampledToken] = []
    start = 0
    while len(known) + len(sampled) < NUM_NEW:
        have = len(tokens) + len(sampled)
        end = min(start + chunk, have)
        before, behind = noise[: others // 2], noise[others // 2 :]
        plan = [*(one.next() for one in before), (row, start, end, end == have), *(one.next() for one in behind)]
        result = driver.step(*plan)[len(before)]
        if result is not None:
            sampled.append(result)
        start = end
    kv = kv_of(driver.built, row, start)
    for opened in (row, *(one.row for one in noise)):
        driver.close(opened)
    return Answer(tuple(sampled), kv)


class _Noise:
    """A request that prefills in chunks of its own and then decodes."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._length = 3 + 29 * index
        self._chunk = 1 + 13 * (index % 5)
        self._at = 0
        sampling = CoreSamplingParams(temperature=0.7, seed=index, top_k=3 + index)
        prompt = random_prompt(self._length, VOCAB_SIZE, seed=index + 1)
        self.row = driver.open(prompt, self._length + LENGTH + NUM_NEW, sampling)

    def next(self) -> tuple[int, int, int, bool]:
        """Its part of the next plan."""
        end = min(self._at + self._chunk, self._length) if self._at < self._length else self._at + 1
        part = (self.row, self._at, end, end >= self._length)
        self._at = end
        return part
