"""Cache salts in the simulated world: a request finds in a prefix cache only what requests of its salt have left there.

The KV of a prompt is the same with any salt, so tokens cannot show that salts are ignored. The oracle is the number of
cached tokens that each request reports: some other request of its salt must have begun with these tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from pdserve.memory.prefix_cache import SaltedTokens, salt_of
from pdserve.scheduler.draft_length import RequestSpeculation
from pdserve.scheduler.request import Req, Times
from pdserve.scheduler.speculation import NgramDrafter
from pdserve.sim.shape import Prompt, RequestHalf, Shape, request
from tests.world.pressure import FAULTS, assert_caught, pressured, run_alone, run_pair
from tests.world.workload import with_salts, with_states

Patch = pytest.MonkeyPatch


def salted(seed: int) -> tuple[Shape, Sequence[Prompt]]:
    """The pressed world of a seed, whose prompts begin alike and have salts; every third model has states."""
    shape, prompts = pressured(seed)
    rng = random.Random(f"salted {seed}")
    if seed % 3 == 2:
        shape = with_states(shape, rng)
    shape = dataclasses.replace(shape, decode_prefix_cache=seed % 4 < 2, num_pages=shape.num_pages + 30)
    return shape, with_salts(rng, prompts, share=1.0)


def play(seed: int) -> Counter[str]:
    """Run a pair, or with an odd seed a monolith. Raises AssertionError for cached tokens of another salt."""
    shape, prompts = salted(seed)
    if seed % 2:
        node = run_alone(seed, shape, prompts, random.Random(seed), arrivals=0.2)
        return check(prompts, [node.halves[f"r{index}"] for index in range(len(prompts))])
    world, halves = run_pair(seed, shape, prompts, FAULTS)
    cached = check(prompts, halves)
    for node in (world.prefill, world.decode):
        if node.memory.pages.tree is not None:
            cached["salts in a tree"] += len({found.salt for found in node.memory.pages.tree.nodes()}) > 2
    return cached


def check(prompts: Sequence[Prompt], halves: Sequence[RequestHalf | None]) -> Counter[str]:
    """Compare the cached tokens of each request with the beginnings of all others of its salt; counts by salt."""
    known = [
        (prompt.salt, (*prompt.tokens, *([] if half is None else half.tokens)))
        for prompt, half in zip(prompts, halves, strict=True)
    ]
    counts = Counter[str]()
    for index, half in enumerate(halves):
        if half is None or not half.cached_tokens:
            continue
        salt, tokens = known[index]
        others = [other for at, (its, other) in enumerate(known) if its == salt and at != index]
        longest = max((common(tokens, other) for other in others), default=0)
        assert half.cached_tokens <= longest, f"request {index} of salt {salt!r}: {half.cached_tokens} cached tokens"
        counts[salt] += 1
    return counts


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


SLOW = [pytest.param(range(first, first + 300), marks=pytest.mark.slow) for first in range(12, 1212, 300)]


@pytest.mark.parametrize("seeds", [range(12), *SLOW], ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_cached_tokens_are_those_of_the_salt(seeds: range) -> None:
    counts = sum((play(seed) for seed in seeds), Counter[str]())
    assert min(counts[salt] for salt in ("", "a", "b", "salts in a tree")) > len(seeds) // 8, counts


def the_key_has_no_salt(patch: Patch) -> None:
    token_bytes = Req.token_bytes
    patch.setattr(Req, "token_bytes", lambda self, num_tokens: bytes(token_bytes(self, num_tokens)))


def a_slice_loses_the_salt(patch: Patch) -> None:
    patch.setattr(SaltedTokens, "__getitem__", bytes.__getitem__)


def salts_of_one_length_are_one(patch: Patch) -> None:
    patch.setattr("pdserve.memory.prefix_cache.salt_of", lambda tokens: "x" * len(salt_of(tokens)))


@pytest.mark.parametrize("bug", [the_key_has_no_salt, a_slice_loses_the_salt, salts_of_one_length_are_one])
def test_a_planted_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    assert_caught(play, 40)


def test_past_outputs_are_no_drafts_for_another_salt() -> None:
    def req(salt: str, tokens: tuple[int, ...], output: list[int]) -> Req:
        return Req(request("r", Prompt(tokens, 9, salt=salt), None), Times(0.0), output)

    found = {}
    for salts in (("", ""), ("", "a"), ("a", ""), ("a", "b"), ("a", "a")):
        drafter = NgramDrafter(2, 8, 4096)
        drafter.ended(req(salts[0], (1, 2), [10, 11, 12, 13, 14]))
        found[salts] = drafter.find(req(salts[1], (5, 6), [10, 11]), RequestSpeculation(), 2)[0]
    assert {salts: bool(drafts) for salts, drafts in found.items()} == {salts: salts == ("", "") for salts in found}
