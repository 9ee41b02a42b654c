"""Recurrent layers in torch under speculation, and the memory of pending tokens; see `draft_kit`."""

from __future__ import annotations

import itertools

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.model.attention.state_slots import StateSlots, pending_bytes, pending_tokens
from pdserve.model.gated_delta_net import TorchDelta
from pdserve.model.layers.gated_delta import MAX_PENDING
from tests.unit.model.delta_kit import delta_spec, state_pool
from tests.unit.model.draft_kit import MAX_DRAFTS, DeltaEngine, Row, check_drafts

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_torch_gives_the_bits_of_single_steps(dtype: torch.dtype, seed: int) -> None:
    spec = [
        delta_spec((2, 4), 16, 16), delta_spec((1, 2), 24, 40), delta_spec((2, 2), 32, 32, taps=2),
        delta_spec((2, 2), 16, 16, channel_decay=True), delta_spec((1, 2), 24, 40, channel_decay=True),
    ][seed % 5]  # fmt: skip
    single, drafted = (DeltaEngine(spec, dtype, TorchDelta()) for _ in range(2))
    check_drafts(single, drafted, seed, folds=seed % 2 == 0)


def test_a_row_with_more_drafts_than_the_layers_keep_is_refused() -> None:
    spec = delta_spec((1, 1), 16, 16)
    with pytest.raises(
        ConfigError, match="32 drafts of a row are more than the 31 that recurrent layers keep"
    ) as refused:
        StateSlots(state_pool(spec, 1, torch.float32), CPU, MAX_PENDING)
    assert refused.value.field == "speculative_num_draft_tokens"
    engine = DeltaEngine(spec, torch.float32, TorchDelta())
    with pytest.raises(AssertionError, match="more drafts than the layer keeps"):
        engine.step([Row(0, 70, MAX_DRAFTS + 1)], engine.inputs(MAX_DRAFTS + 2))


def test_the_bytes_of_pending_tokens_are_those_allocated() -> None:
    pool = state_pool(delta_spec((2, 4), 16, 32), 5, torch.bfloat16)
    for drafts, by_channel in itertools.product((0, 1, 7), (False, True)):
        layers = pending_tokens(pool, drafts, channel_decay=by_channel)
        tensors = [x for layer in layers if layer for x in vars(layer).values()]
        expected = pending_bytes(pool.group, drafts, channel_decay=by_channel)
        assert sum(x.nbytes for x in tensors) == expected * (pool.num_pages + 1)
