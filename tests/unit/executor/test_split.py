"""A model that is split over real gloo ranks computes what the whole one does: tokens, logits, and KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.parallel import ParallelShape
from pdserve.errors import ConfigError, ModelError
from pdserve.executor.input_batch import cut_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.model.config import kv_layout
from pdserve.model.loader import read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.executor.split_ranks import LoadFormat, fixed_logprobs, in_bfloat16, in_turns, leave, marked, outcome

TP2, TP4, PP2, PP3 = (ParallelShape(tp_size=tp, pp_size=pp) for tp, pp in ((2, 1), (4, 1), (1, 2), (1, 3)))
BOTH = ParallelShape(tp_size=2, pp_size=2)
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[ParallelShape, Family, dict[str, Any]]] = {
    "tp2": (TP2, "llama", {}),
    "tp2, qkv bias, tied, vocabulary that does not divide": (
        TP2, "qwen2", {"tie_word_embeddings": True, "vocab_size": 321},
    ),
    "pp3, stages without a layer of a group": (PP3, "qwen3", WINDOW_FAMILIES["qwen3"]),
    "tp4, fewer kv heads, qk norm": (TP4, "qwen3", {}),
    "tp4, one kv head, all biases": (TP4, "llama", {"num_key_value_heads": 1, **BIASES}),
    "tp4, a rank without vocabulary": (TP4, "llama", {"vocab_size": 9}),
    "tp2, experts": (TP2, "qwen3_moe", {"decoder_sparse_step": 2}),
    "tp2 x pp2, experts": (BOTH, "qwen3_moe", {}),
    "pp2": (PP2, "qwen2", {}),
    "pp3, tied": (PP3, "llama", {"tie_word_embeddings": True}),
    "tp2 x pp2, tied, qk norm": (BOTH, "qwen3", {"tie_word_embeddings": True}),
    "tp2 x pp2, biases": (BOTH, "llama", {**BIASES, "vocab_size": 323}),
    "tp2 x pp2, windows": (BOTH, "qwen3", WINDOW_FAMILIES["qwen3"]),
    "tp2, windows in all layers": (TP2, "mistral", WINDOW_FAMILIES["mistral"]),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(CASES, keep=4))
def test_a_split_model_computes_what_the_whole_one_does(name: str, gang: Gang, tmp_path: Path) -> None:
    shape, family, overrides = CASES[name]
    path = make_tiny(family, tmp_path, seed=5, **overrides)
    _check(gang, shape, path, int(overrides.get("vocab_size", VOCAB_SIZE)))


@pytest.mark.parametrize("shape", [TP2, PP2], ids=["tp2", "pp2"])
def test_steps_that_overlap_come_to_the_same(shape: ParallelShape, gang: Gang, tmp_path: Path) -> None:
    _check(gang, shape, make_tiny("llama", tmp_path), VOCAB_SIZE, overlap=True)


@pytest.mark.parametrize("shape", [PP2, BOTH], ids=["pp2", "tp2 x pp2"])
def test_stages_compute_steps_of_other_requests_at_the_same_time(
    shape: ParallelShape, gang: Gang, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path)
    whole = in_turns(SingleRank(), path, VOCAB_SIZE, tmp_path / "unused")
    assert all(len(tokens) == 5 for tokens in whole)
    assert gang.run(shape, in_turns, path, VOCAB_SIZE, tmp_path / "launched") == [whole] * shape.num_ranks


def test_dummy_weights_are_parts_of_the_whole_ones(gang: Gang, tmp_path: Path) -> None:
    path = make_tiny("qwen2", tmp_path)
    (path / "model.safetensors").unlink()
    _check(gang, BOTH, path, VOCAB_SIZE, load_format="dummy")


def _check(
    gang: Gang,
    shape: ParallelShape,
    path: Path,
    vocab_size: int,
    *,
    overlap: bool = False,
    load_format: LoadFormat = "auto",
) -> None:
    """All ranks agree with each other and with one that has everything."""
    whole = outcome(SingleRank(), path, vocab_size, False, load_format)
    ranks = gang.run(shape, outcome, path, vocab_size, overlap, load_format)
    layout = kv_layout(read_spec(path), 16, "float32").groups[0]
    for index, rank in enumerate(ranks):
        assert rank.greedy == whole.greedy and rank.chunked == whole.greedy
        assert rank.chance == whole.chance
        assert rank.following == whole.following
        assert torch.equal(rank.logprobs, ranks[0].logprobs)
        torch.testing.assert_close(rank.logprobs, whole.logprobs, atol=2e-4, rtol=0.0)
        for mine, others in zip(rank.prompt, whole.prompt, strict=True):
            torch.testing.assert_close(mine, others, atol=2e-4, rtol=0.0)
        (heads, _), held_layers = layout.heads_of(shape.coord(index)), layout.layers_of(shape.coord(index))
        layers = [layout.layers.index(layer) for layer in held_layers]
        held = whole.pages[:, layers][:, :, :, heads]
        torch.testing.assert_close(rank.pages, held, atol=2e-4, rtol=0.0, equal_nan=True)
        assert rank.num_bytes < whole.num_bytes
    assert not whole.logprobs.isnan().any()
    assert fingerprint_of([rank.samples for rank in ranks]) == fingerprint_of([whole.samples])


def test_other_weights_have_another_fingerprint_and_ranks_must_agree(tmp_path: Path) -> None:
    ours, theirs = ({"w": {0: 1.0, 9: value}} for value in (2.0, 3.0))
    assert fingerprint_of([ours]) != fingerprint_of([theirs])
    assert fingerprint_of([{"w": {0: 1.0}}, {"w": {9: 2.0}}]) == fingerprint_of([ours])
    with pytest.raises(ModelError, match="different values of w"):
        fingerprint_of([ours, theirs])


def test_ranks_agree_in_bfloat16(gang: Gang, tmp_path: Path) -> None:
    """Sums over ranks round otherwise than in one piece; all ranks still hold the same tokens."""
    ranks = gang.run(BOTH, in_bfloat16, make_tiny("llama", tmp_path), VOCAB_SIZE)
    assert all(rank == ranks[0] for rank in ranks) and len(ranks[0][0]) == 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["torch", "kernels"])
@pytest.mark.parametrize("shape", [TP2, TP4, PP2], ids=["tp2", "tp4", "pp2"])
def test_deterministic_mode_holds_for_each_split(
    shape: ParallelShape, dtype: Literal["float32", "bfloat16"], gang: Gang, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path, num_key_value_heads=4)
    ranks = gang.run(shape, fixed_logprobs, path, VOCAB_SIZE, dtype, fixed_order=True)
    for together, alone in ranks:
        assert len(together) == 3 and together == alone
    if shape == PP2:  # stages round nothing
        assert ranks[0] == fixed_logprobs(SingleRank(), path, VOCAB_SIZE, dtype)


def test_a_layer_is_marked_when_every_micro_batch_has_written_it(gang: Gang, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, num_hidden_layers=4)
    for num_batches, num_layers, marks in gang.run(PP2, marked, path):
        assert (num_batches, num_layers) == (2, 2)
        assert marks == [(0, 2), (1, 2)]


def test_a_rank_that_is_gone_is_an_error_and_no_hang(gang: Gang) -> None:
    assert gang.run(TP2, leave, timeout_s=5.0) == [True, True]


@pytest.mark.parametrize(
    ("shape", "field", "message"),
    [
        (ParallelShape(tp_size=3), "tp_size", "attention heads"),
        (ParallelShape(tp_size=8), "tp_size", "attention heads"),
        (ParallelShape(pp_size=4), "pp_size", "3 layers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused_by_name(
    shape: ParallelShape, field: str, message: str, tmp_path: Path
) -> None:
    class Elsewhere(SingleRank):
        coord = shape.coord(0)

    with pytest.raises(ConfigError, match=message) as error:
        in_bfloat16(Elsewhere(), make_tiny("llama", tmp_path), VOCAB_SIZE)
    assert error.value.field == field


ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200), st.booleans()), min_size=1, max_size=12)


@given(facts=ROWS, num_stages=st.integers(1, 6), min_tokens=st.integers(1, 64))
def test_micro_batches_are_the_step_cut_into_even_pieces(
    facts: list[tuple[int, int, bool]], num_stages: int, min_tokens: int
) -> None:
    rows = tuple(BatchRow(str(i), i, start, start + count, sample) for i, (start, count, sample) in enumerate(facts))
    parts = cut_plan(BatchPlan(3, rows), num_stages, min_tokens)
    sizes = [sum(row.num_tokens for row in part.rows) for part in parts]
    assert 1 <= len(parts) <= num_stages and max(sizes) - min(sizes) <= 1
    assert len(parts) == 1 or min(sizes) >= min_tokens
    pieces = [row for part in parts for row in part.rows]
    for row in rows:
        mine = [piece for piece in pieces if piece.row == row.row]
        assert [piece.start for piece in mine] == [row.start, *[piece.end for piece in mine[:-1]]]
        assert mine[-1].end == row.end and [piece.sample for piece in mine[:-1]] == [False] * (len(mine) - 1)
        assert mine[-1].sample == row.sample
    assert [piece.row for piece in pieces] == sorted(piece.row for piece in pieces)
