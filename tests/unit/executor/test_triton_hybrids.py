"""Models with states, windows or latents by Triton's kernels: the tokens of torch, in mixed batches and by replays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.executor.factory import LoadedEngine
from pdserve.executor.graphs import EagerCapture, GraphCapture
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES, KIMI
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, WINDOW_FAMILIES, make_tiny
from tests.unit.model.triton_kit import DEVICE

SHORT = [random_prompt(length, VOCAB_SIZE) for length in (3, 2)]
MODELS = [("qwen3_next", 20, 12), ("qwen3_next", 66, 40), ("qwen3_5_text", 66, 40), ("window", 66, 40)]
LATENTS = [(name, 36, 20) for name in ("deepseek_v32", "deepseek_v3", "deepseek_v2", "glm_moe_dsa", "glm4_moe_lite")]
"""Families, the longer prompt, and its chunks."""
SELECTING = ("deepseek_v32", "glm_moe_dsa")
"""Families with sparse attention, whose decode steps are not captured."""
NUM_TOKENS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny checkpoint, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "window":
                make_tiny("qwen3", made[name], eos_token_id=None, **WINDOW_FAMILIES["qwen3"])
            else:
                FAMILIES[name].write(made[name])
        return made[name]

    return make


def built(path: Path, attention_backend: Any) -> LoadedEngine:
    return build(
        path, page_size=8, max_total_tokens=512, max_rows=4, dtype="float32", context_length=128, model_impl="native",
        device="cuda" if DEVICE == "cuda" else "cpu", attention_backend=attention_backend, disable_cuda_graph=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "chunk"),
    [*rest_slow(MODELS), *rest_slow(LATENTS), pytest.param(KIMI, 70, 40, marks=pytest.mark.slow)],
)
def test_tokens_are_torch_s(name: str, length: int, chunk: int, checkpoint: Callable[[str], Path]) -> None:
    """Chunks that end inside blocks of 64 tokens, beside a row that decodes; and captured decode steps."""
    path, prompts = checkpoint(name), [random_prompt(1, VOCAB_SIZE), random_prompt(length, VOCAB_SIZE)]
    mine, theirs = Driver(built(path, "triton")), Driver(built(path, "torch"))
    assert mine.generate(prompts, NUM_TOKENS, chunk=chunk) == theirs.generate(prompts, NUM_TOKENS)
    assert mine.built.executor.can_capture == (name not in SELECTING)
    if name in SELECTING:
        return
    mine.built.executor.capture_decode((4,), EagerCapture() if DEVICE == "cpu" else GraphCapture())
    assert mine.generate(SHORT, NUM_TOKENS) == theirs.generate(SHORT, NUM_TOKENS)
