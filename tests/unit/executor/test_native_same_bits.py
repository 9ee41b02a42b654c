"""The CPU kernels give a request the same bits in any company, chunk, page size, thread and order of work.

As `test_deterministic.py`: KV bytes of every layer, and log-probabilities. Only the deterministic mode, which the
kernels have as well, computes the tokens of prompts as decoded ones: else the bits differ, which shows that the
comparison can fail.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from pdserve.base import native
from tests.driver import Driver, build, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.same_bits import LENGTH, NUM_NEW, PROMPT, SEEDED, Answer, answer, kv_of
from tests.unit.model.native_kit import LEVELS_HERE, needs_kernels

pytestmark = needs_kernels
SMOL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
Quantization = Literal["int8"] | None
KINDS: list[tuple[str, Quantization]] = [("smol", None), ("smol", "int8"), ("qwen3", None), ("qwen3_moe", "int8")]


def make(
    path: Path,
    quantization: Quantization = None,
    *,
    page_size: int = 16,
    threads: int = 1,
    deterministic: bool = False,
) -> Driver:
    """A driver of the kernels with a fresh pool full of NaN."""
    load_format: Literal["auto", "dummy"] = "auto" if list(path.glob("*.safetensors")) else "dummy"
    return Driver(
        build(
            path, dtype="bfloat16", load_format=load_format, quantization=quantization, page_size=page_size,
            cpu_threads=threads, max_rows=40, cpu_kernels="native", max_total_tokens=1 << 16,
            deterministic=deterministic,
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Quantization]:
    name, quantization = request.param
    directory = tmp_path_factory.mktemp(name)
    if name == "smol":
        (directory / "config.json").write_text(json.dumps(SMOL))
        return directory, quantization
    return make_tiny(name, directory), quantization


@pytest.fixture(scope="module")
def expected(kind: tuple[Path, Quantization]) -> Answer:
    """Alone, whole, pages of 16, one thread."""
    return answer(make(*kind))


@pytest.fixture(scope="module")
def driver(kind: tuple[Path, Quantization]) -> Driver:
    return make(*kind)


@pytest.mark.parametrize("others", [1, 2, 3, 8, 30])
def test_alone_or_among_others(driver: Driver, expected: Answer, others: int) -> None:
    assert answer(driver, others=others).same_bits(expected)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64, 149])
def test_whole_or_in_chunks(driver: Driver, expected: Answer, chunk: int) -> None:
    assert answer(driver, chunk=chunk).same_bits(expected)


@pytest.mark.parametrize("threads", rest_slow([3, 1, 2, 5]))
@pytest.mark.parametrize("page_size", [1, 48, 64])
def test_any_page_size_and_number_of_threads(
    kind: tuple[Path, Quantization], expected: Answer, page_size: int, threads: int
) -> None:
    driver = make(*kind, page_size=page_size, threads=threads)
    assert answer(driver).same_bits(expected)
    assert answer(driver, others=5, chunk=40).same_bits(expected)


@pytest.mark.parametrize("computed", [1, 3, NUM_NEW - 1])
def test_decoded_tokens_computed_again_behind_their_prompt(driver: Driver, expected: Answer, computed: int) -> None:
    """As after a retraction."""
    known = tuple(token.token_id for token in expected.tokens[:computed])
    again = answer(driver, known=known, chunk=64, others=2)
    assert again.same_bits(dataclasses.replace(expected, tokens=expected.tokens[computed:]))


def as_a_prompt(driver: Driver, expected: Answer) -> torch.Tensor:
    """The KV of the prompt and all decoded tokens but the last, as one prompt."""
    known = [token.token_id for token in expected.tokens[:-1]]
    row = driver.open([*PROMPT, *known], LENGTH + NUM_NEW)
    driver.step((row, 0, LENGTH + len(known), True))
    kv = kv_of(driver.built, row, LENGTH + len(known))
    driver.close(row)
    return kv


def test_decoded_tokens_as_a_prompt_have_other_bits(driver: Driver, expected: Answer) -> None:
    kv, prompt = as_a_prompt(driver, expected), slice(0, LENGTH)
    assert torch.equal(kv[..., prompt, :], expected.kv[..., prompt, :])
    assert not torch.equal(kv, expected.kv)


def test_but_not_in_the_deterministic_mode(kind: tuple[Path, Quantization]) -> None:
    driver = make(*kind, deterministic=True)
    plain = answer(driver)
    assert torch.equal(as_a_prompt(driver, plain), plain.kv)
    other = make(*kind, deterministic=True, threads=2, page_size=64)
    for chunk, others in ((LENGTH, 3), (1, 0), (64, 8)):
        assert answer(other, chunk=chunk, others=others).same_bits(plain)
    known = tuple(token.token_id for token in plain.tokens[:3])
    assert answer(other, known=known).same_bits(dataclasses.replace(plain, tokens=plain.tokens[3:]))


def test_seeded_sampling_with_filters(driver: Driver) -> None:
    alone = answer(driver, sampling=SEEDED)
    assert answer(driver, sampling=SEEDED, others=8, chunk=16).same_bits(alone)


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_on_every_level(level: str, kind: tuple[Path, Quantization], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.LEVEL_VARIABLE, level)
    plain = answer(make(*kind))
    driver = make(*kind, threads=2, page_size=5)
    assert answer(driver, others=4, chunk=30).same_bits(plain)
    assert answer(driver, chunk=149).same_bits(plain)


LONG = 1_300


def beside(prompts: list[list[int]], driver: Driver, num_steps: int) -> torch.Tensor:
    """The KV of the first prompt and what it decodes in `num_steps`, beside the others."""
    rows = [driver.open(prompt, LONG + 16) for prompt in prompts]
    driver.step(*((row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)))
    for i in range(num_steps):
        ends = [len(prompt) + i for prompt in prompts]
        driver.step(*((row, end, end + 1, True) for row, end in zip(rows, ends, strict=True)))
    return kv_of(driver.built, rows[0], len(prompts[0]) + num_steps)


@pytest.mark.parametrize(
    "threads", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)]
)
def test_long_contexts_however_their_keys_are_shared(threads: int, tmp_path: Path) -> None:
    """A long row alone, whose keys are cut for the threads, and among others, where fewer or none are; on one thread
    nothing is cut. KV of as many steps as there are tokens, and tokens, some steps of which are one call."""
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (LONG, 1, 128, 129, 400, 256, 900, 2, 640, 5)]
    one, several = (make(tmp_path, threads=count, page_size=64) for count in (1, threads))
    plain = beside(prompts[:1], one, 8)
    for count in (1, 2, 3, 6, len(prompts)):
        assert torch.equal(beside(prompts[:count], several, 8), plain)
    alone = [one.generate([prompt], 20)[0] for prompt in prompts]
    assert several.generate(prompts, 20) == alone
    assert [several.generate([prompt], 20)[0] for prompt in prompts[::4]] == alone[::4]
