"""How long a server's start takes, by part, and how much memory its processes have, beside the size of its weights.

    python -m benchmarks.bench_startup --write

Each line is a server of its own, started and asked (`/get_server_info`). The last two have a made-up model of `--gib`
GiB of weights, written to a temporary directory. "peak" is the most resident memory that the scheduler's process ever
had; "over its weights" is what of it exceeds the weights in the form that is computed with, and what an
engine with next to no weights has. It stays small where no weights are in memory twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import Run, add_write_flags, footer, markdown_table
from benchmarks.servers import monolith
from pdserve.base import startup_times
from pdserve.base.process_use import OWN
from pdserve.memory.prefault import MOST_BYTES_AHEAD, TOKENS_AHEAD

MIB = 1 << 20
PARTS = (startup_times.IMPORTS, startup_times.WEIGHTS, startup_times.PACK, startup_times.POOLS)
TOKENIZER = ("--tokenizer-path", "smollm2")
POOL_TOKENS = 2048
"""Of each server's KV pool, which is committed ahead of its use: small beside the weights, which are measured here."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One server: its model and flags."""

    name: str
    model: str
    dtype: str
    flags: tuple[str, ...] = ()


def made_up_model(directory: Path, num_bytes: int, *, num_heads: int = 24) -> Path:
    """A Llama checkpoint of about so many bytes of random bfloat16 weights, with SmolLM2's tokenizer's vocabulary."""
    kv, vocab = 64 * (num_heads // 3), int(str(CONFIG["vocab_size"]))
    hidden, inner = 3 * kv, 8 * kv
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    wide = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    each = 2 * sum(rows * columns for rows, columns in (*shapes.values(), *wide.values()))
    num_layers = max(1, round((num_bytes - 4 * vocab * hidden) / each))

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * 0.02

    tensors = {"model.embed_tokens.weight": some(vocab, hidden), "lm_head.weight": some(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{name}.weight": some(*shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.mlp.{name}.weight": some(*shape) for name, shape in wide.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 3}
    (directory / "config.json").write_text(json.dumps({**CONFIG, **sizes, **heads}))
    return directory


def measure(case: Case, threads: int) -> dict[str, Any]:
    """Start the server, ask it, and end it. Bytes and seconds."""
    began = time.perf_counter()
    flags = [*case.flags, "--max-total-tokens", str(POOL_TOKENS)]
    with monolith(case.model, case.dtype, threads=threads, flags=flags) as url:
        ready_s = time.perf_counter() - began
        with urllib.request.urlopen(f"{url}/get_server_info", timeout=30) as answer:
            info = json.load(answer)
    processes = info["processes"]
    (scheduler,) = (use for name, use in processes.items() if name != OWN)
    seconds = startup_times.read_facts(info["facts"])
    weights, pool = int(info["facts"]["weight_bytes"]), int(info["facts"]["kv_pool_bytes"])
    return {
        "name": case.name, "ready_s": ready_s, "seconds": seconds, "weight_bytes": weights, "kv_pool_bytes": pool,
        "scheduler": scheduler, "api": processes[OWN],
    }  # fmt: skip


def line(result: dict[str, Any], bare: int) -> list[str]:
    """One row of the table."""
    scheduler, weights, seconds = result["scheduler"], result["weight_bytes"], result["seconds"]
    over = scheduler["peak_bytes"] - bare - weights
    return [
        result["name"],
        f"{result['ready_s']:.1f}",
        *(f"{seconds.get(part, 0.0):.2f}" for part in PARTS),
        f"{weights / MIB:.0f}",
        *(f"{scheduler[kind] / MIB:.0f}" for kind in ("rss_bytes", "peak_bytes", "anonymous_bytes")),
        f"{over / weights:+.0%}",
        f"{result['api']['rss_bytes'] / MIB:.0f}",
    ]


def report(results: Sequence[dict[str, Any]], bare: int, facts: dict[str, Any]) -> str:
    """The results for people."""
    header = ["server", "ready s", *PARTS, "weights MiB", "RSS now", "peak", "anonymous", "over its weights", "API RSS"]
    rows = [line(result, bare) for result in results]
    notes = [
        f"An engine without weights (a model of 13 MB, less its weights) had {bare / MIB:.0f} MiB at its peak.",
        f"KV pools have {POOL_TOKENS:,} tokens here. Unless told otherwise they are address space of a fifth of the "
        f"available RAM, at most 4 GiB, and the pages of the next {TOKENS_AHEAD:,} tokens, at most "
        f"{MOST_BYTES_AHEAD >> 30} GiB, become memory in the background from the start on.",
        "A tied embedding is there twice in the bfloat16 and int8 servers: as rows to look up, and packed.",
    ]
    return f"# Start-up: time and memory\n\n{markdown_table(header, rows)}\n\n{footer(facts, notes)}\n"


def cases_of(big: str) -> list[Case]:
    """SmolLM2 in every number format, and the made-up model."""
    return [
        Case("SmolLM2 bfloat16", "smollm2", "bfloat16"),
        Case("SmolLM2 int8", "smollm2", "bfloat16", ("--quantization", "int8")),
        Case("SmolLM2 float32 (torch)", "smollm2", "float32"),
        Case("SmolLM2 bfloat16 (torch)", "smollm2", "bfloat16", ("--cpu-kernels", "torch")),
        Case("made-up bfloat16", big, "bfloat16", TOKENIZER),
        Case("made-up int8", big, "bfloat16", (*TOKENIZER, "--quantization", "int8")),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gib", type=float, default=1.0, help="weights of the made-up model")
    add_write_flags(parser, "startup")
    args = parser.parse_args(argv)
    run = Run("startup", argv)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made_up, tempfile.TemporaryDirectory() as tiny:
        big = made_up_model(Path(made_up), int(args.gib * (1 << 30)))
        small = Case("bare", str(made_up_model(Path(tiny), 0, num_heads=3)), "bfloat16", TOKENIZER)
        least = measure(small, args.threads)
        bare = least["scheduler"]["peak_bytes"] - least["weight_bytes"]
        results = []
        for case in cases_of(str(big)):
            results.append(measure(case, args.threads))
            print("  ".join(line(results[-1], bare)), flush=True)
    facts = run.facts(results=results, bare_bytes=bare)
    run.publish(args, report(results, bare, facts), facts)


if __name__ == "__main__":
    main()
