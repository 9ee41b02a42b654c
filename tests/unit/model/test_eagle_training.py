"""`scripts/train_eagle.py` trains what runs: its logits are those of the saved head, for drafts behind drafts too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from pdserve.model.config import read_model_spec
from pdserve.model.drafting.spec import read_eagle3
from tests.driver import random_prompt
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.eagle_kit import TAPS, ReferenceHead

SCRIPT = Path(__file__).parents[3] / "scripts" / "train_eagle.py"
NUM_STEPS = 3
DRAFT_TOKENS = torch.arange(3, VOCAB_SIZE, 4)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("train_eagle", SCRIPT)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["train_eagle"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


@torch.no_grad()
def test_the_logits_in_training_are_those_of_the_saved_head(script: ModuleType, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    spec, weights = read_model_spec(path), load_file(path / "model.safetensors")
    head = script.Head(spec, weights, DRAFT_TOKENS)
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16())  # as they are saved
    directory = tmp_path / "head"
    directory.mkdir()
    script.save(directory, spec, head, DRAFT_TOKENS, TAPS)
    assert read_eagle3(directory, spec).taps == TAPS

    embedding = weights["model.embed_tokens.weight"]
    reference = ReferenceHead(directory, embedding)
    tokens, hidden = random_prompt(12, VOCAB_SIZE), torch.randn(12, 3 * spec.hidden_size)
    trained = head(embedding[tokens][None], hidden[None], NUM_STEPS)
    taken = reference.take(hidden)
    inputs = torch.cat((torch.zeros_like(taken[:1]), taken[:-1]))
    for first in range(len(tokens)):
        known = inputs[: first + 1]
        for step in range(min(NUM_STEPS, len(tokens) - first)):
            slot = first + step  # the drafts behind `first` have been right so far
            state = reference.hidden(tokens[: slot + 1], known)[-1:]
            wanted = reference.logits(state)[:, DRAFT_TOKENS]
            torch.testing.assert_close(trained[step][:, slot], wanted, rtol=1e-4, atol=1e-4)
            known = torch.cat((known, state))
