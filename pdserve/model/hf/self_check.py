"""Compares a bound model with transformers' own forward pass, before it serves.

Two short prompts run in one pass over pages, then one token of each; the hidden states must be about those of each
prompt alone with transformers' own cache and attention. So a model whose code uses the cache in an unknown way is
refused, and gives no wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.memory.layout import PageSpace, pages_for
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray

_LENGTHS = (5, 7)
_TOLERANCE = 0.5
"""Largest relative difference of hidden states. Rounding in bfloat16 gives a few percent; wrong states give more than
all of it.
"""
Forward = Callable[[ForwardBatch], Tensor]
"""Returns the hidden states of a batch, `[tokens, hidden_size]`."""


def own_hidden(model: Any, device: torch.device) -> list[Tensor]:
    """Return the hidden states of each prompt, by transformers' own cache and the attention that `model` has now."""
    text = model.config.get_text_config(decoder=True)
    found = []
    for ids in _prompts(text.vocab_size):
        tokens = torch.from_numpy(ids)[None].to(device)
        positions = torch.arange(len(ids), device=device)[None]
        cache = transformers.DynamicCache(config=text)
        output = model.get_decoder()(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
        found.append(output.last_hidden_state[0])
    return found


def check_against(
    own: Sequence[Tensor], forward: Forward, pools: Sequence[GroupPool], vocab_size: int, where: str
) -> None:
    """Run the prompts over the first pages and slots of `pools`, which no request has yet, and compare.

    Raises:
        ModelError: the hidden states differ. The message begins with `where`.
    """
    page_tokens = pools[0].group.page_tokens
    num_pages = pages_for(max(_LENGTHS), page_tokens)
    needed = {PageSpace.SLOTS: len(_LENGTHS)}
    if any(pool.num_pages < needed.get(pool.group.space, len(_LENGTHS) * num_pages) for pool in pools):
        return  # a pool of a page or two: tests alone
    device, ends = own[0].device, np.array(_LENGTHS)
    pages = np.arange(len(_LENGTHS) * num_pages, dtype=np.int32).reshape(len(_LENGTHS), -1)
    prompts = _prompts(vocab_size)

    def run(starts: IntArray, stops: IntArray) -> Tensor:
        lengths = stops - starts
        spans = list(zip(prompts, starts, stops, strict=True))
        ids = np.concatenate([prompt[start:stop] for prompt, start, stop in spans])
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        columns = np.zeros((4, len(ids)), dtype=np.int64)
        columns[0], columns[1] = ids, positions
        slots = np.arange(len(_LENGTHS), dtype=np.int32)
        rows = HostRows(starts, stops, lengths.cumsum() - lengths, stops, pages, pages, slots)
        sampled = torch.zeros(1, dtype=torch.int64, device=device)
        return forward(ForwardBatch(torch.from_numpy(columns).to(device), sampled, rows))

    first, last = run(np.zeros_like(ends), ends - 1), run(ends - 1, ends)
    for pool in pools:
        pool.pages_as_bytes[: pages.size].zero_()
    begins = (ends - 1).cumsum() - (ends - 1)
    for row, expected in enumerate(own):
        found = torch.cat([first[begins[row] : begins[row] + ends[row] - 1], last[row : row + 1]])
        expected = expected.float()
        difference = float((found.float() - expected).norm() / expected.norm().clamp_min(1e-12))
        if not difference <= _TOLERANCE:
            raise ModelError(
                f"{where}: over pages the model's hidden states differ from transformers' own by {difference:.0%}"
            )


def _prompts(vocab_size: int) -> list[IntArray]:
    return [(np.arange(length, dtype=np.int64) * (13 + length) + 1) % vocab_size for length in _LENGTHS]
