"""What an 8-bit KV cache costs and saves: perplexity, greedy tokens, bytes moved and transfer time, by format.

    python -m benchmarks.bench_kv_cache_dtype [--requests 12] [--write]
    python -m benchmarks.bench_kv_cache_dtype --attention

A service of 1P1D for each `--kv-cache-dtype` answers the same prompts one after the other: pieces of this repository's
documents, `--input-len` tokens each. Perplexity is that of the pieces' second halves, from the log probabilities of the
prompt. A token agrees where it is the one of the model's own format; behind the first that differs a text goes its own
way. `transfer` is `transfer_s` of the request: the part of the time to its first token that is neither queue nor
prefill. With `--attention` only decode attention of the CPU kernels is measured: rows of 4,096 keys, one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.servers import local_pair
from pdserve.base.hf_tokenizer import read_tokenizer_json
from pdserve.base.native import best_level
from pdserve.model.attention.kv_rows import encode_rows
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.native.program import Program
from pdserve.model.native.resources import HeadShape, Threads
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

FORMATS = ("auto", "int8", "fp8_e4m3")
TIMEOUT_S = 300.0


@dataclasses.dataclass
class Answers:
    """What one format's service answered. `logprobs`: of the second halves' tokens. Times in milliseconds."""

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    kv_bytes: list[int] = dataclasses.field(default_factory=list)
    transfer_ms: list[float] = dataclasses.field(default_factory=list)
    write_ms: list[float] = dataclasses.field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Perplexity of the second halves."""
        return math.exp(-statistics.fmean(self.logprobs))


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """Send a JSON body, and return the answer's."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def pieces(model: str, count: int, length: int) -> list[list[int]]:
    """Cut the repository's documents into `count` prompts of `length` token ids."""
    text = read_tokenizer_json(resolve_tokenizer_path(resolve_model_path(model)))
    assert text is not None, f"{model} has a tokenizer"
    tokenizer = Tokenizer.from_str(text)
    documents = "\n".join(path.read_text(encoding="utf-8") for path in sorted((report.ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(documents[: 8 * count * length]).ids
    if len(ids) < count * length:
        raise RuntimeError(f"the documents have {len(ids)} tokens, fewer than {count} pieces of {length}")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def measure(args: argparse.Namespace, kv_format: str) -> Answers:
    """Ask one format's service, each prompt twice: the first time scores it, the second time is measured."""
    answers = Answers()
    flags = ["--kv-cache-dtype", kv_format, "--disable-radix-cache"]
    with local_pair(args.model, args.dtype, threads=1, flags=flags) as url:
        for prompt in pieces(args.model, args.requests, args.input_len):
            sampling = {"temperature": 0, "max_new_tokens": args.output_len, "ignore_eos": True}
            body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
            half = len(prompt) // 2
            scored = ask(url, "/generate", body | {"return_logprob": True, "logprob_start_len": half})
            entries = scored["meta_info"]["input_token_logprobs"]
            answers.logprobs += [entry[0] for entry in entries if entry[0] is not None]
            answer = ask(url, "/generate", body)
            timing = answer["meta_info"]["timing"]
            answers.tokens.append(answer["output_ids"])
            answers.kv_bytes.append(timing["kv_bytes"])
            answers.transfer_ms.append(1e3 * timing["transfer_s"])
            answers.write_ms.append(1e3 * timing["kv_transfer_s"])
    return answers


def agreement(found: Answers, wanted: Answers) -> tuple[float, float]:
    """Return the share of equal tokens up to the first that differs, and the share of equal first tokens."""
    equal = total = first = 0
    for mine, theirs in zip(found.tokens, wanted.tokens, strict=True):
        same = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))
        equal, total, first = equal + same, total + len(mine), first + (same > 0)
    return equal / total, first / len(found.tokens)


def table(all_answers: dict[str, Answers]) -> str:
    """One line for each format."""
    own = all_answers["auto"]
    rows = []
    for name, found in all_answers.items():
        prefix, first = agreement(found, own)
        kv_bytes = statistics.fmean(found.kv_bytes)
        rows.append(
            [
                name, f"{found.perplexity:.3f}", f"{found.perplexity / own.perplexity:.4f}", f"{first:.0%}",
                f"{prefix:.0%}", f"{kv_bytes / 1e6:.2f}", f"{kv_bytes / statistics.fmean(own.kv_bytes):.3f}",
                report.spread_of(found.transfer_ms).show(2), report.spread_of(found.write_ms).show(2),
            ]
        )  # fmt: skip
    header = [
        "KV format", "perplexity", "ratio", "first tokens equal", "tokens equal before the first other", "MB moved",
        "ratio", "transfer, ms", "of it writing, ms",
    ]  # fmt: skip
    return report.markdown_table(header, rows)


SHAPES = ((9, 3, 64, 8), (32, 8, 128, 4))
"""Query heads, KV heads, their size, and rows: SmolLM2-135M and an 8B model."""
NUM_KEYS, PAGE, ROUNDS = 4096, 64, 15


def attention_ms(shape: tuple[int, int, int, int], kv_dtype: str, level: str) -> float:
    """Return the least milliseconds of decode attention over `NUM_KEYS` keys for each row."""
    num_heads, kv_heads, dim, num_rows = shape
    each = NUM_KEYS // PAGE
    table = np.arange(num_rows * each, dtype=np.int32).reshape(num_rows, each)
    positions = np.full(num_rows, NUM_KEYS - 1, dtype=np.int64)
    columns = np.stack((np.zeros_like(positions), positions, table[:, -1].astype(np.int64), positions % PAGE))
    rows = HostRows(positions, positions + 1, np.arange(num_rows), np.zeros_like(positions), table)
    batch = ForwardBatch(torch.from_numpy(columns), torch.arange(num_rows), rows)
    values = torch.randn(num_rows * each, 1, 2, kv_heads, PAGE, dim)
    kv = values.bfloat16() if kv_dtype == "bfloat16" else encode_rows(values, kv_dtype)
    program = Program(Threads(1), level, HeadShape(1, num_heads, kv_heads, PAGE, dim, kv_dtype=kv_dtype), kv)
    qkv, out = program.buffer((num_heads + 2 * kv_heads) * dim), program.buffer(num_heads * dim)
    program.angles(torch.zeros(dim // 2), 1.0)
    program.place(qkv, 0, None, None, 0.0)
    program.attend(0, out)
    program.reserve(num_rows, 0)
    program.begin(batch)
    program.view(qkv, num_rows).normal_()
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        program.begin(batch)
        program.run(0, program.num_ops)
        seconds.append(time.perf_counter() - began)
    return 1e3 * min(seconds)


def attention_table() -> str:
    """Decode attention of each shape and format, and its ratio to bfloat16."""
    level, lines = best_level(), []
    for shape in SHAPES:
        found = {name: attention_ms(shape, name, level) for name in ("bfloat16", *FORMATS[1:])}
        text = "{} heads, {} KV heads of {}, {} rows".format(*shape)
        lines += [[text, name, f"{ms:.2f}", f"{ms / found['bfloat16']:.2f}"] for name, ms in found.items()]
    return report.markdown_table([f"{level}, one thread", "KV format", "ms", "ratio"], lines, num_text=2)


def document(args: argparse.Namespace, facts: dict[str, Any], found: dict[str, Answers]) -> str:
    """The whole report in Markdown."""
    return f"""# KV cache in 8 bits, {facts["date"]}

{args.model}, {args.dtype}, 1P1D over shared memory: {args.requests} prompts of {args.input_len} tokens, answers of \
{args.output_len}, one after the other. Median of the requests (least-most).

{table(found)}

{report.footer(facts, own_load=1)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_model_flags(parser)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=32)
    report.add_write_flags(parser, "kv-cache-dtype")
    parser.add_argument("--attention", action="store_true", help="only decode attention of the CPU kernels")
    args = parser.parse_args(argv)
    if args.attention:
        print(attention_table())
        return 0
    run = report.Run("kv-cache-dtype", argv, module="bench_kv_cache_dtype")
    found = {kv_format: measure(args, kv_format) for kv_format in FORMATS}
    facts = run.facts(answers={name: dataclasses.asdict(answers) for name, answers in found.items()})
    run.publish(args, document(args, facts, found), facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
