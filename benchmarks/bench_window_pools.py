"""Tokens per GB of KV memory: window pages beside one pool in which all layers keep all tokens.

    python -m benchmarks.bench_window_pools [--lengths 8192,32768,131072] [--chunk 2048]

One request goes through the real memory of a server (`KVMemory`), chunk by chunk, and then generates tokens. The pages
that it holds are counted after each step. The layouts are those of Gemma-3, with five layers with a window to one
without, in bfloat16. The prefix cache is off, so that no page stays behind the window.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdserve.executor.memory_sizing import sizes_of_one
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.model.config import kv_layout, spec_from_config

MODELS: dict[str, dict[str, Any]] = {
    "Gemma-3 270M": {
        "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "intermediate_size": 2048, "sliding_window": 512,
    },
    "Gemma-3 27B": {
        "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
    },
}  # fmt: skip
PAGE_TOKENS = 64
NUM_GENERATED = 256
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of the pages that a request holds: the most at a time, and while it generates tokens."""

    most: int
    decoding: int


def layouts(fields: dict[str, Any]) -> tuple[KVLayout, KVLayout]:
    """Return the layout with window pages, and that of the same model with all tokens in all layers."""
    found = []
    for window in (fields["sliding_window"], None):
        config = {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, **fields, "sliding_window": window}
        found.append(kv_layout(spec_from_config(config, {}, where="shape"), PAGE_TOKENS, "bfloat16"))
    return found[0], found[1]


def held_by(layout: KVLayout, num_prompt: int, chunk: int) -> Held:
    """Run a request of `num_prompt` tokens through the memory of a server."""
    length = num_prompt + NUM_GENERATED
    sizes = sizes_of_one(layout, context_length=length, step_tokens=chunk, num_steps_ahead=1, decode_step_tokens=1)
    num_pages = layout.pages_for(length)
    table = PageTable(1, num_pages, has_window=layout.window > 0)
    memory = KVMemory(layout, num_pages, table, 1, group_sizes=sizes)
    lease = memory.reserve_tokens(num_prompt, "request", max_len=length)
    assert lease is not None
    sizes_of_page = {space: layout.space_bytes(space) for space in (PageSpace.TOKENS, PageSpace.WINDOW)}
    starts = [*range(0, num_prompt, chunk), *range(num_prompt, length)]
    counts = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        memory.grow(lease, end)
        released = [] if lease.groups is None else memory.cover_window(lease, None, start, end)
        used = {space: _used(memory, space) for space in sizes_of_page if space is PageSpace.TOKENS or layout.window}
        counts.append(sum(count * sizes_of_page[space] for space, count in used.items()))
        if lease.groups is not None:
            memory.groups.give_back(lease.groups, released)
    return Held(max(counts), counts[-1])


def _used(memory: KVMemory, space: PageSpace) -> int:
    allocator = memory.allocator_of(space)
    return allocator.num_pages - allocator.num_free


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default="8192,32768,131072", help="tokens of the prompts")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    options = parser.parse_args()
    print("| model | prompt | one pool: tokens per GB | with window pages, at most | while generating | times |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, fields in MODELS.items():
        windowed, whole = layouts(fields)
        for length in map(int, options.lengths.split(",")):
            own, all_tokens = held_by(windowed, length, options.chunk), held_by(whole, length, options.chunk)
            total = length + NUM_GENERATED
            rates = [total * GB / count for count in (all_tokens.most, own.most, own.decoding)]
            shown = " | ".join(f"{rate:,.0f}" for rate in rates)
            print(f"| {name} | {length:,} | {shown} | {rates[1] / rates[0]:.2f} to {rates[2] / rates[0]:.2f} |")


if __name__ == "__main__":
    main()
