"""Checks of a tiny family's greedy tokens against transformers' own: alone, in chunks, and by a pair without memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.driver import Driver, build
from tests.model_families import LENGTHS, TinyFamily, prompts_of
from tests.model_pair import running_models

NEW_TOKENS = 8
FEW_TOKENS = 384
"""Tokens of a pool that is too small for the load of `check_pair`."""
NATIVE: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native"}
"""Both servers of a pair run native code."""


def check_chunks(
    family: TinyFamily,
    path: Path,
    *,
    lengths: Sequence[int] = LENGTHS,
    chunk: int = 40,
    alone: bool = False,
    **flags: Any,
) -> None:
    """Assert that native code has transformers' tokens of prompts in chunks, and with `alone` of each by itself.

    `flags`: see `build`.
    """
    prompts = prompts_of(lengths)
    expected = family.reference_tokens(path, prompts, NEW_TOKENS)
    driver = Driver(build(path, dtype="float32", model_impl="native", **flags))
    assert driver.generate(prompts, NEW_TOKENS, chunk=chunk) == expected
    if alone:
        assert [driver.generate([prompt], NEW_TOKENS)[0] for prompt in prompts] == expected, "alone"


def check_pair(
    family: TinyFamily,
    path: Path,
    *,
    num_new: int = NEW_TOKENS,
    num_long: int = 60,
    at_once: slice = slice(None),
    num_hits: int = 0,
    **flags: Any,
) -> None:
    """Assert that a pair has transformers' tokens: for prompts alone, for those of `at_once` together, and for a load
    with retractions and one abort.

    `num_hits`: tokens of cached prefixes that prefill must have used by then. `num_long`: new tokens of each request of
    the load. `flags`: see `running_models`.
    """
    prompts, load = prompts_of(LENGTHS), prompts_of((63, 64, 65, 40), seed=1)
    expected = family.reference_tokens(path, prompts, num_new)
    long = family.reference_tokens(path, load, num_long)
    with running_models(path, pair=True, max_total_tokens=FEW_TOKENS, **flags) as pair:
        assert [pair.generate([prompt], num_new)[0] for prompt in prompts] == expected
        assert pair.generate(prompts[at_once], num_new) == expected[at_once], "at once"
        assert pair.prefill is not None and pair.prefill.state().counters.get("cached_tokens", 0) >= num_hits
        answers = pair.generate([*load, load[0]], num_long, aborted={4: 5})
        assert answers[:4] == long, "with too little memory"
        assert answers[4] == long[0][: len(answers[4])], "what came before the abort"
        assert pair.answering.state().counters["requests_retracted"] > 0
        pair.assert_idle()
