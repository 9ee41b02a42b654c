"""Top-p by searching the bits of a probability, beside sorting the vocabulary."""

from __future__ import annotations

import pytest
import torch

from pdserve.model.gpu.sampling import top_p_threshold
from tests.unit.model.triton_kit import DEVICE


def by_sorting(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens are kept, in float64."""
    ranked, order = probs.double().sort(-1, descending=True)
    kept = ranked.cumsum(-1) - ranked < top_p[:, None].double()
    return torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, kept)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_the_same_tokens_are_kept_as_by_sorting(spread: float) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(int(spread))) * spread
    top_p = torch.tensor([0.01, 0.3, 0.5, 0.9, 0.95, 0.999])
    probs = logits.softmax(-1).to(DEVICE)
    least = top_p_threshold(probs, top_p.to(DEVICE))
    assert torch.equal(probs >= least[:, None], by_sorting(probs, top_p.to(DEVICE)))


def test_equal_probabilities_are_kept_together_and_a_row_that_is_too_light_is_kept_whole() -> None:
    probs = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [0.1, 0.1, 0.0, 0.0]], device=DEVICE)
    least = top_p_threshold(probs, torch.tensor([0.3, 0.9, 0.9], device=DEVICE))
    assert least.tolist() == [0.25, 0.5, 0.0]
