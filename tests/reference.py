"""What transformers generates: the reference that pdserve's tokens must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in transformers, on CPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits behind every token: float32 `[len(tokens), vocab]`."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


@torch.inference_mode()
def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens, past any end-of-sequence token."""
    past, feed, tokens = None, torch.tensor([list(prompt)]), []
    for _ in range(num_tokens):
        out = model(feed, past_key_values=past, use_cache=True)
        past = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        feed = torch.tensor([[tokens[-1]]])
    return tokens
