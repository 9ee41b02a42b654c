"""What a grammar costs a token: decode steps with and without one, and its parts alone, in one run on this machine.

    python -m benchmarks.bench_grammar --model-path smollm2 --rows 1 8

Peer: the same steps of the same executor with free text; steps of both kinds take turns. Parts are times of the thread
that works, so that other load of the machine does not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import numpy as np

from pdserve.base.hf_tokenizer import read_tokenizer_json
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.memory.layout import pages_for
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path
from pdserve.protocol.sampling import CoreSamplingParams, Grammar

STEPS = 60
PROMPT = [10 + i for i in range(32)]
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 200}, "minItems": 50},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["names", "kind"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(kind="json_schema", text=json.dumps(SCHEMA))


def steps_ms(built: LoadedEngine, num_rows: int) -> tuple[float, float]:
    """Median milliseconds of a decode step of `num_rows` rows: free text, and with the grammar."""
    executor, steps = built.executor, itertools.count()
    pages = iter(range(built.num_pages))
    needed = pages_for(len(PROMPT) + STEPS + 1, executor.layout.page_tokens)
    groups: list[list[int]] = []
    for grammar in (None, GRAMMAR):
        sampling = CoreSamplingParams(temperature=0.0, ignore_eos=True, grammar=grammar)
        taken_rows = [built.table.open(list(itertools.islice(pages, needed))) for _ in range(num_rows)]
        opened = [row for row in taken_rows if row is not None]
        for row in opened:
            executor.open_row(row, PROMPT, len(PROMPT), sampling, None)
        groups.append(opened)
    taken: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS):
        start = 0 if step == 0 else len(PROMPT) + step - 1
        for rows, times in zip(groups, taken, strict=True):
            plan = BatchPlan(
                next(steps), tuple(BatchRow(str(row), row, start, len(PROMPT) + step, True) for row in rows)
            )
            began = time.perf_counter()
            assert not run(executor, plan).failed
            times.append(time.perf_counter() - began)
    for row in itertools.chain(*groups):
        executor.close_row(row)
        built.table.close(row)
    free, constrained = (1e3 * statistics.median(times[2:]) for times in taken)
    return free, constrained


def parts_ms(vocabulary: Vocabulary) -> dict[str, float]:
    """Milliseconds of a thread: opening the grammar, a mask, one token accepted."""

    def spent(times: list[float]) -> float:
        return 1e3 * statistics.median(times)

    opening, masks, accepts = [], [], []
    text = '{"names": ["' + "The quick brown fox jumps over the lazy dog. " * 3 + '", "'
    ids = vocabulary.tokens.tokenize_str(text)
    for _ in range(5):
        began = time.thread_time()
        matcher = Matcher(vocabulary, compile_grammar(GRAMMAR, JsonRules(), vocabulary))
        opening.append(time.thread_time() - began)
        for token in ids:
            began = time.thread_time()
            matcher.mask()
            between = time.thread_time()
            matcher.accept([token])
            masks.append(between - began)
            accepts.append(time.thread_time() - between)
    return {
        "opening": spent(opening),
        "mask": spent(masks),
        "longest mask": 1e3 * float(np.max(masks)),
        "accept": spent(accepts),
    }


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cpu-threads", type=int, default=1)
    args = parser.parse_args()
    built = build_executor(
        ServerConfig(
            model=ModelConfig(model_path=args.model_path),
            memory=MemoryConfig(max_total_tokens=8192),
            kernels=KernelConfig(cpu_threads=args.cpu_threads),
        ),
        max_rows=2 * max(args.rows),
    )
    path = resolve_model_path(args.model_path)
    began = time.thread_time()
    text = read_tokenizer_json(resolve_tokenizer_path(path))
    assert text is not None, "the model has a tokenizer"
    vocabulary = Vocabulary(text, built.spec.vocab_size, built.spec.eos_token_ids)
    print(f"{built.device}, {built.spec.vocab_size} tokens; vocabulary made in {time.thread_time() - began:.2f} s")
    print("; ".join(f"{name} {value:.3f} ms" for name, value in parts_ms(vocabulary).items()))
    for num_rows in args.rows:
        free, constrained = steps_ms(built, num_rows)
        print(
            f"{num_rows} rows: step {free:.2f} ms free, {constrained:.2f} ms with a grammar: {constrained / free:.3f}x"
        )
    built.executor.close()


if __name__ == "__main__":
    main()
