"""The outputs of layers that `LayerTaps` keep are those of transformers, in chunks and beside other rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.model.interface import LayerTaps
from tests.driver import random_prompt
from tests.reference import load_reference
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.model.eagle_kit import Bench, Way, assert_near, ways

LAYERS = (0, 2, 4)
LENGTHS = (40, 3, 17)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ways())
def test_taps_are_the_outputs_of_the_layers(family: Family, way: Way, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, num_hidden_layers=6)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    bench = Bench(path, way, prompts)
    taps = LayerTaps(LAYERS)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for at in range(0, max(LENGTHS), 16):
        rows = [(row, at, min(at + 16, length)) for row, length in enumerate(LENGTHS) if at < length]
        plain = bench.forward(bench.batch(rows)).clone()
        tapped = bench.forward(bench.batch(rows), taps=taps)
        assert torch.equal(plain, tapped)
        sizes = [end - start for _, start, end in rows]
        assert taps.hidden.shape == (sum(sizes), len(LAYERS) * bench.model.spec.hidden_size)
        for (row, _, _), part in zip(rows, taps.hidden.float().split(sizes), strict=True):
            parts[row].append(part.clone())
    reference = load_reference(path)
    for prompt, found in zip(prompts, parts, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer + 1][0] for layer in LAYERS], -1)
        assert_near(torch.cat(found), wanted, way.tolerance)


def test_a_layer_that_is_not_tapped_is_not_kept() -> None:
    taps = LayerTaps((1,))
    taps.put(1, torch.ones(2, 4))
    taps.put(0, torch.zeros(2, 4))
    assert torch.equal(taps.hidden, torch.ones(2, 4))
