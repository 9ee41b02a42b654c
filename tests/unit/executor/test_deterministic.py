"""Deterministic mode: a request's logits and KV have the same bits in any batch, chunk, page size and order of work.

The checks compare KV bytes of every layer and the log-probabilities of the best tokens. That they can fail shows
without the mode: torch's operations differ on the same work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.model.attention import batch_invariant as fixed_blocks
from tests.driver import Driver
from tests.share import rest_slow
from tests.tiny import FAMILIES, VOCAB_SIZE, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.executor.same_bits import LENGTH, NUM_NEW, PROMPT, SEEDED, TOP, Answer, answer, kv_of


def make(
    path: Path, *, page_size: int = 16, deterministic: bool = True, threads: int = 1, dtype: str = "auto"
) -> Driver:
    """A driver of an executor with a fresh pool full of NaN. `threads` are torch's, which computes in either mode."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype, load_format="auto"),  # type: ignore[arg-type]
        memory=MemoryConfig(page_size=page_size, max_total_tokens=8192),
        kernels=KernelConfig(
            device="cpu", cpu_kernels="torch", cpu_threads=threads, enable_deterministic_inference=deterministic
        ),
    )
    return Driver(build_executor(config, max_rows=16))


QUICK = {("llama", "bfloat16"), ("qwen2", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32")}
"""What is tried each time: every family, and both formats."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (family, dtype), id=f"{family}-{dtype}", marks=[] if (family, dtype) in QUICK else pytest.mark.slow
        )
        for family in FAMILIES
        for dtype in ("float32", "bfloat16")
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype = request.param
    return make_tiny(family, tmp_path_factory.mktemp(f"{family}_{dtype}"), dtype=dtype)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answer:
    """Alone, whole, pages of 16."""
    return answer(make(checkpoint))


@pytest.fixture(scope="module")
def driver(checkpoint: Path) -> Driver:
    return make(checkpoint)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads are global in torch."""
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("others", [1, 8])
def test_alone_or_among_others(driver: Driver, expected: Answer, others: int) -> None:
    assert answer(driver, others=others).same_bits(expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_whole_or_in_chunks(driver: Driver, expected: Answer, chunk: int) -> None:
    assert answer(driver, chunk=chunk).same_bits(expected)


@pytest.mark.parametrize("page_size", [1, 48, 64, 128])
def test_any_page_size(checkpoint: Path, expected: Answer, page_size: int) -> None:
    assert answer(make(checkpoint, page_size=page_size), others=3, chunk=40).same_bits(expected)


@pytest.mark.parametrize("computed", [1, NUM_NEW - 1])
def test_decoded_tokens_recomputed_as_a_prompt(driver: Driver, expected: Answer, computed: int) -> None:
    known = tuple(token.token_id for token in expected.tokens[:computed])
    again = answer(driver, known=known, chunk=64, others=2)
    assert again.same_bits(dataclasses.replace(expected, tokens=expected.tokens[computed:]))


def test_seeded_sampling_with_filters(driver: Driver) -> None:
    alone = answer(driver, sampling=SEEDED)
    assert answer(driver, sampling=SEEDED, others=8, chunk=16).same_bits(alone)
    assert len({token.token_id for token in alone.tokens}) > 1


def test_pages_computed_elsewhere_and_a_cached_prefix(checkpoint: Path, expected: Answer) -> None:
    """Decode on a second executor, and the rest of a prompt behind pages that another request has computed."""
    prefill, decode = make(checkpoint), make(checkpoint, page_size=16)
    source = prefill.open(PROMPT, LENGTH, num_prompt=LENGTH, top_logprobs=TOP)
    first = prefill.step((source, 0, LENGTH, True))[0]
    assert first == expected.tokens[0]
    for shared in (LENGTH, 96):
        row = decode.open([*PROMPT, first.token_id], LENGTH + NUM_NEW, num_prompt=LENGTH, top_logprobs=TOP)
        count = -(-shared // 16)
        pages = prefill.built.executor.pools[0].pages[prefill.built.table.pages[source, :count].tolist()]
        decode.built.executor.pools[0].pages[decode.built.table.pages[row, :count].tolist()] = pages
        sampled, start = [first], shared
        while len(sampled) < NUM_NEW:
            end = LENGTH + len(sampled)
            token = decode.step((row, start, end, True))[0]
            assert token is not None
            sampled.append(token)
            start = end
        assert Answer(tuple(sampled), kv_of(decode.built, row, start)).same_bits(expected)


@pytest.mark.parametrize("threads", rest_slow([2, 3]))
def test_any_number_of_threads(checkpoint: Path, expected: Answer, threads: int) -> None:
    assert answer(make(checkpoint, threads=threads), others=8, chunk=40).same_bits(expected)


def test_narrow_pieces_for_long_contexts_change_nothing(
    driver: Driver, expected: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_blocks, "SCORE_BYTES", 1 << 15)
    assert answer(driver, others=3, chunk=64).same_bits(expected)
    monkeypatch.setattr(fixed_blocks, "SCORE_BYTES", 1)
    assert answer(driver).same_bits(expected)


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 40},
        {"intermediate_size": 100, "mlp_bias": True, "attention_bias": True},
    ],
)
def test_any_shape_of_heads_and_layers(tmp_path: Path, shape: dict[str, Any]) -> None:
    driver = make(make_tiny("llama", tmp_path, **shape))
    plain = answer(driver)
    assert answer(driver, others=8, chunk=40).same_bits(plain)
    known = tuple(token.token_id for token in plain.tokens[:3])
    assert answer(driver, known=known).same_bits(dataclasses.replace(plain, tokens=plain.tokens[3:]))


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_layers_with_a_window(tmp_path: Path, family: Family) -> None:
    """In one group of all tokens, and in a group of their own."""
    path = make_tiny(family, tmp_path, **WINDOW_FAMILIES[family])
    driver = make(path)
    plain = answer(driver)
    assert answer(driver, others=7, chunk=40).same_bits(plain)
    assert answer(make(path, page_size=48), others=3, chunk=7).same_bits(plain)
    known = tuple(token.token_id for token in plain.tokens[:3])
    assert answer(driver, known=known).same_bits(dataclasses.replace(plain, tokens=plain.tokens[3:]))


def test_other_kernels_but_the_same_model(checkpoint: Path, expected: Answer) -> None:
    """Against the default mode: the same tokens in float32, and the prompt's KV close in any format."""
    usual = answer(make(checkpoint, deterministic=False))
    wide = expected.kv.dtype == torch.float32
    prompts = (usual.kv[..., :LENGTH, :].float(), expected.kv[..., :LENGTH, :].float())
    torch.testing.assert_close(*prompts, rtol=1e-3 if wide else 0.1, atol=1e-3 if wide else 0.5)
    if wide:
        assert [token.token_id for token in usual.tokens] == [token.token_id for token in expected.tokens]


SMOL_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def _differences(path: Path, deterministic: bool, dtype: str) -> tuple[bool, ...]:
    """Whether each of a few ways of doing the same work gives other bits than the plain way."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=dtype, load_format="dummy"),  # type: ignore[arg-type]
        memory=MemoryConfig(page_size=16, max_total_tokens=8192),
        kernels=KernelConfig(
            device="cpu", cpu_kernels="torch", cpu_threads=1, enable_deterministic_inference=deterministic
        ),
    )
    driver = Driver(build_executor(config, max_rows=16))
    plain = answer(driver)
    known = tuple(token.token_id for token in plain.tokens[: NUM_NEW - 1])
    variants = (answer(driver, others=8), answer(driver, chunk=1), answer(driver, chunk=64))
    again = answer(driver, known=known)
    recomputed = dataclasses.replace(plain, tokens=plain.tokens[NUM_NEW - 1 :])
    return (*(not variant.same_bits(plain) for variant in variants), not again.same_bits(recomputed))


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16"]))
def test_without_the_mode_the_same_work_gives_other_bits(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOL_SHAPE))
    assert not any(_differences(tmp_path, True, dtype))
    assert any(_differences(tmp_path, False, dtype))
