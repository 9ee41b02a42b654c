"""Log probabilities of prompt tokens: transformers', whatever the chunks, and never all logits at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.executor import prompt_logprobs
from pdserve.executor.prompt_logprobs import logsumexp_of_rows
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs, join
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference, reference_logits
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny

WISH = Logprobs(top=4, token_ids=(5, 300, 7), prompt_from=0)


def _told(driver: Driver, prompt: list[int], logprob_params: Logprobs, *, chunk: int) -> list[PromptLogprobs]:
    row = driver.open(prompt, len(prompt) + 1, logprobs=logprob_params)
    parts = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        parts += driver.result((row, start, end, end == len(prompt))).prompts.values()
    driver.close(row)
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    prompt = random_prompt(60, VOCAB_SIZE)
    expected = reference_logits(load_reference(path), prompt).log_softmax(-1)[:-1]
    told = join(_told(Driver(build(path)), prompt, WISH, chunk=60), 1, 60)
    assert told is not None
    own, ranks, top_ids, top, picked = (torch.from_numpy(np.array(array)) for array in told.arrays())
    targets = torch.tensor(prompt[1:])
    torch.testing.assert_close(own, expected.gather(1, targets[:, None])[:, 0], atol=1e-3, rtol=0)
    best = expected.topk(4)
    torch.testing.assert_close(top, best.values, atol=1e-3, rtol=0)
    assert top_ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(picked, expected[:, list(WISH.token_ids)], atol=1e-3, rtol=0)
    assert ranks.tolist() == ((expected > expected.gather(1, targets[:, None])).sum(-1) + 1).tolist()


def test_chunks_and_pieces_of_the_logits_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path)
    prompt = random_prompt(100, VOCAB_SIZE)
    whole = join(_told(Driver(build(path)), prompt, WISH, chunk=100), 1, 100)
    monkeypatch.setattr(prompt_logprobs, "LOGIT_BYTES", 4 * VOCAB_SIZE * 7)  # seven positions at a time
    chunked = _told(Driver(build(path)), prompt, WISH, chunk=16)
    assert [part.start for part in chunked] == [1, 17, 33, 49, 65, 81, 97]
    again = join(chunked, 1, 100)
    assert whole is not None and again is not None
    for one, other in zip(whole.arrays(), again.arrays(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_only_what_is_asked_for_of_each_request(tmp_path: Path) -> None:
    """Requests with other wishes, or none, stand in the same step; decode rows among them."""
    driver = Driver(build(make_tiny("llama", tmp_path)))
    prompts = [random_prompt(length, VOCAB_SIZE, seed=length) for length in (20, 31, 12, 9)]
    prompt_logprob_params = [
        Logprobs(top=1, prompt_from=5),
        None,
        Logprobs(top=3, token_ids=(9,), prompt_from=0),
        Logprobs(top=2),
    ]
    rows = [
        driver.open(prompt, 40, logprobs=logprob_params)
        for prompt, logprob_params in zip(prompts, prompt_logprob_params, strict=True)
    ]
    result = driver.result(*((row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)))
    assert sorted(result.prompts) == [0, 2]
    first, third = result.prompts[0], result.prompts[2]
    assert (first.start, first.num_tokens) == (6, 14)
    assert [array.shape[1:] for array in first.arrays()] == [(), (), (1,), (1,), (0,)]
    assert (third.start, third.num_tokens) == (1, 11)
    assert [array.shape[1:] for array in third.arrays()] == [(), (), (3,), (3,), (1,)]
    alone = _told(driver, prompts[2], prompt_logprob_params[2] or Logprobs(), chunk=12)[0]
    np.testing.assert_allclose(alone.arrays()[0], third.arrays()[0], atol=1e-4)
    tokens = result.tokens
    assert tokens[2] is not None and len(tokens[2].picked) == 1 and len(tokens[2].top) == 3
    assert tokens[3] is not None and tokens[3].picked == () and len(tokens[3].top) == 2
    again = driver.result(
        *((row, len(prompt), len(prompt) + 1, True) for row, prompt in zip(rows, prompts, strict=True))
    )
    assert not again.prompts, "the prompt is over"


def test_a_prompt_of_one_token_has_none(tmp_path: Path) -> None:
    driver = Driver(build(make_tiny("llama", tmp_path)))
    assert _told(driver, [5], WISH, chunk=1) == []
    assert _told(driver, [5, 6, 7], Logprobs(prompt_from=3), chunk=3) == []


def test_parts_stay_below_their_bound_and_join_in_any_order() -> None:
    rng = np.random.default_rng(0)
    own, top, picked = rng.random(1000), rng.random((1000, 20)), rng.random((1000, 3))
    whole = PromptLogprobs.pack(1, own, np.arange(1000), rng.integers(0, 99, (1000, 20)), top, picked)
    parts = list(whole.parts(5000))
    assert all(sum(map(len, (p.own, p.ranks, p.top_ids, p.top, p.picked))) <= 5000 for p in parts)
    for part in parts:
        part.check()
    assert join([*reversed(parts), parts[3]], 1, 1001) == whole
    assert join(parts[:-1], 1, 1001) is None


def test_a_position_alone_has_the_bits_that_it_has_among_others() -> None:
    """Also where the vocabulary is so large that torch shares a row among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(40):
            logits = 5 * torch.randn(3, 49152, generator=torch.Generator().manual_seed(seed))
            together = logsumexp_of_rows(logits)
            torch.testing.assert_close(together, logits.logsumexp(-1))
            assert torch.equal(together, torch.cat([logsumexp_of_rows(row[None]) for row in logits]))
    finally:
        torch.set_num_threads(threads)
