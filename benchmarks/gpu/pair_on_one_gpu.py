"""A prefill and a decode server on one GPU behind the router, beside a monolith: tokens, TTFT, KV transfer.

    python -m benchmarks.gpu.pair_on_one_gpu [--models tiny-fp32 Qwen3-0.6B] [--engines mooncake nixl] [--out DIR]
    python -m benchmarks.gpu.pair_on_one_gpu --device cpu --models tiny-fp32     on a CPU: does the program work?

Every prompt is sent alone, greedily, to the monolith and then to the pair, so that both compute steps with the same
rows: their tokens must be equal, in bfloat16 too. All servers share the device, but one computes at a time. `tiny-fp32`
is a checkpoint in float32; other models are random weights in published shapes, in bfloat16, the same in all servers.

Then the pair gets all prompts `--copies` times at once: prefill, copies and decode run beside each other, and more
requests wait than run. In float32 the tokens must be the same again; in bfloat16 a batch of another size may round
another way, so the equal ones are only counted.

Of pdserve's transfer engines mooncake and nixl are made for memory of a CUDA device: without a NIC mooncake sends it by
TCP, through host memory; nixl goes by UCX, which knows copies from GPU to GPU within a host. `shm` maps host memory,
and is refused on CUDA. Where neither engine loads, the pair is run with `fake`, which moves nothing: that shows that
the servers start and talk, but there are no tokens to compare, so it counts as failed.

Report and figures are written anew after each pair, as `<date>-gpu-pair.md` and `.json`, servers' logs beside them.
Exit status: 0 all tokens equal, 1 some differ or a pair failed or moved nothing, 3 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks import first_token, report
from benchmarks.answers import INCREMENTAL, Answer, equal_tokens, read_answer
from benchmarks.gpu.shapes import HYBRID_MODELS, MODELS, TINY_HYBRID_MODELS, TINY_MODELS
from pdserve.base.host_facts import cpu_model
from pdserve.base.process import Child
from pdserve.errors import PdserveError
from pdserve.launch_local import SERVER_COMMAND, LocalConfig, LocalService
from tests.driver import random_prompt
from tests.model_families import FAMILIES
from tests.tiny import VOCAB_SIZE, make_tiny, tiny_tokenizer

EXIT_FAILED, EXIT_NO_DEVICE = 1, 3
TINY = "tiny-fp32"
TINY_HYBRID = "tiny-hybrid-fp32"
IN_FP32 = (TINY, TINY_HYBRID)
SHAPES = MODELS | HYBRID_MODELS | TINY_MODELS | TINY_HYBRID_MODELS
MONOLITH = "monolith"
LOADERS = {
    "mooncake": "import torch, mooncake.engine",
    "nixl": "import torch; from pdserve.transfer.transports.nixl_engine import load_native; load_native()",
}
"""What must run for an engine to be there; in a process of its own, which a broken library may take along."""
FAKE = "fake"
MORE = ("--disaggregation-layerwise-transfer", "--disaggregation-enable-kv-checksum")
"""Flags of the last pair of a model in float32: decode refuses KV that does not have prefill's checksum."""
LOAD_S, REQUEST_S, GRACE_S = 60.0, 60.0, 10.0
NUM_LOG_LINES = 25
ROWS = 8


@dataclasses.dataclass(frozen=True)
class Pair:
    """One pair to start: the engine between its servers, and flags beyond the common ones."""

    engine: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In tables."""
        return " ".join(["1P1D", self.engine, *(flag.removeprefix("--disaggregation-") for flag in self.flags)])


@dataclasses.dataclass
class Outcome:
    """What came of a pair. `equal` is None where no bytes were moved; `error` is None where all answers came."""

    model: str
    pair: Pair
    error: str | None = None
    lengths: Sequence[int] = ()
    start_s: float = 0.0
    alone: list[Answer] = dataclasses.field(default_factory=list)
    answers: list[Answer] = dataclasses.field(default_factory=list)
    equal: list[bool] | None = None
    at_once: list[bool] | None = None
    """Whether the answers to prompts sent together are the monolith's to each alone."""

    @property
    def passed(self) -> bool:
        """Every answer came, and its tokens are the monolith's."""
        same_at_once = self.model not in IN_FP32 or all(self.at_once or ())
        return self.error is None and bool(self.equal) and all(self.equal or ()) and same_at_once

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.error is not None:
            return self.error
        if self.equal is None:
            return "answers came, but no KV was moved: tokens are not compared"
        differ = [index for index, same in enumerate(self.equal) if not same]
        if not differ:
            found = f"{len(self.equal)} of {len(self.equal)} answers equal"
            return f"{found}, {sum(self.at_once)} of {len(self.at_once)} sent at once" if self.at_once else found
        where = ", ".join(f"{i} at token {first_difference(self.alone[i], self.answers[i])}" for i in differ[:5])
        return f"{len(self.equal) - len(differ)} of {len(self.equal)} answers equal; differing: {where}"


def first_difference(ours: Answer, theirs: Answer) -> int:
    """The place of the first token that differs, from 0."""
    pairs = zip(ours.output_ids, theirs.output_ids, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), -1)


def engines_there(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of `wanted` that load here, and why the others do not."""
    found, notes = [], []
    for name in wanted:
        argv = [sys.executable, "-c", LOADERS[name]]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LOAD_S, check=False)
        except subprocess.TimeoutExpired:
            notes.append(f"{name} is not tried: it does not load within {LOAD_S:g} s")
            continue
        if done.returncode == 0:
            found.append(name)
        else:
            why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            notes.append(f"{name} is not tried, for it does not load: {why}")
    return found, notes


def prepare(name: str, directory: Path) -> int:
    """Write what servers of the model need; returns how many tokens prompts may be drawn from."""
    if name == TINY:
        make_tiny("qwen3", directory, max_position_embeddings=40960)
        return VOCAB_SIZE
    if name == TINY_HYBRID:
        family = FAMILIES["qwen3_next"]
        dataclasses.replace(family, changes=family.changes | {"max_position_embeddings": 40960}).write(directory)
        return VOCAB_SIZE
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    tiny_tokenizer().save_pretrained(directory)  # texts are of no interest here: prompts are token ids
    return int(SHAPES[name]["vocab_size"])


def server_flags(model: str, args: argparse.Namespace) -> list[str]:
    """Common to all servers: equal steps need equal chunks, graphs and pools, and prompts that are not cached."""
    longest = max(args.prompt_lens) + args.output_len
    pool = args.max_total_tokens or max(4 * longest, 1024 * ROWS)
    flags = ["--device", args.device, "--dtype", "float32" if model in IN_FP32 else "bfloat16", INCREMENTAL]
    flags += ["--disable-radix-cache", "--chunked-prefill-size", "2048", "--max-running-requests", str(ROWS)]
    flags += ["--max-total-tokens", str(pool), "--context-length", str(longest + 64)]
    if args.device == "cpu":
        flags += ["--cpu-threads", "1"]
    return flags if model in IN_FP32 else [*flags, "--load-format", "dummy"]


@contextlib.contextmanager
def monolith(directory: Path, flags: Sequence[str], ready_s: float, log: Path) -> Iterator[str]:
    """URL of a server that does both halves, with its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", buffering=1) as file:
        argv = [*SERVER_COMMAND, "--model-path", str(directory), "--port", "0", *flags]
        child = Child(MONOLITH, argv, on_line=lambda line: print(line, file=file))
        try:
            yield child.wait_ready(ready_s).url
        finally:
            child.end(GRACE_S)


@contextlib.contextmanager
def running_pair(
    pair: Pair, directory: Path, flags: Sequence[str], ready_s: float, logs: Path, threads: int | None
) -> Iterator[str]:  # fmt: skip
    """URL of the router of a prefill and a decode server, with their output in `logs`."""
    config = LocalConfig(
        model_path=str(directory),
        router_port=0,
        cpu_threads=threads,
        log_dir=logs,
        ready_timeout_s=ready_s,
        grace_s=GRACE_S,
        server_flags=(*flags, "--disaggregation-transfer-backend", pair.engine, *pair.flags),
    )
    service = LocalService(config, say=lambda line: None)
    try:
        yield service.start()
    finally:
        service.close()


async def ask_in_turn(
    urls: Sequence[str], prompts: Sequence[Sequence[int]], output_len: int, num_warm: int
) -> list[list[Answer]]:
    """The answers of each URL: prompt by prompt, one request at a time; the first `num_warm` prompts go before, too."""
    answers: list[list[Answer]] = [[] for _ in urls]
    async with aiohttp.ClientSession() as session:
        for index, prompt in enumerate([*prompts[:num_warm], *prompts]):
            for url, found in zip(urls, answers, strict=True):
                answer = Answer()
                async with asyncio.timeout(REQUEST_S):
                    await read_answer(session, url, prompt, output_len, answer)
                if index >= num_warm:
                    found.append(answer)
    return answers


async def ask_at_once(url: str, prompts: Sequence[Sequence[int]], output_len: int) -> list[Answer]:
    """The answers to all prompts, sent together."""
    answers = [Answer() for _ in prompts]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with asyncio.timeout(REQUEST_S):
            reads = [
                read_answer(session, url, prompt, output_len, answer)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            await asyncio.gather(*reads)
    return answers


def run_pair(
    outcome: Outcome, alone: str, directory: Path, flags: Sequence[str], prompts: Sequence[Sequence[int]],
    args: argparse.Namespace, logs: Path,
) -> None:  # fmt: skip
    """Start the pair of `outcome`, ask it and the monolith at `alone`, and note what came."""
    began = time.perf_counter()
    threads = 1 if args.device == "cpu" else None
    try:
        with running_pair(outcome.pair, directory, flags, args.ready_timeout, logs, threads) as url:
            outcome.start_s = time.perf_counter() - began
            found = asyncio.run(ask_in_turn([alone, url], prompts, args.output_len, len(args.prompt_lens)))
            together = asyncio.run(ask_at_once(url, [*prompts] * args.copies, args.output_len))
        outcome.alone, outcome.answers = found
        if outcome.pair.engine != FAKE:
            outcome.equal = equal_tokens(*found)
            alone_again = found[0] * args.copies
            outcome.at_once = [a.output_ids == b.output_ids for a, b in zip(alone_again, together, strict=True)]
    except (PdserveError, RuntimeError, ValueError, aiohttp.ClientError, TimeoutError) as error:
        outcome.error = f"{type(error).__name__}: {str(error)[:300]}"
        show_logs(logs)


def show_logs(logs: Path) -> None:
    """The last lines of every part's log."""
    for path in sorted(logs.glob("*.log")):
        print(f"--- {path.name}", *path.read_text().splitlines()[-NUM_LOG_LINES:], sep="\n", flush=True)


def run_model(
    model: str, pairs: Sequence[Pair], args: argparse.Namespace, has_time: Callable[[], bool],
    done: Callable[[Outcome], None],
) -> None:  # fmt: skip
    """All pairs of one model beside one monolith; `done` is called after each."""
    logs = args.out / "logs" / model
    with tempfile.TemporaryDirectory(prefix="pdserve-pair-") as temporary:
        directory = Path(temporary)
        vocab_size = prepare(model, directory)
        lengths = [args.prompt_lens[index % len(args.prompt_lens)] for index in range(args.prompts)]
        prompts = [random_prompt(length, vocab_size, seed=index) for index, length in enumerate(lengths)]
        flags = server_flags(model, args)
        try:
            with monolith(directory, flags, args.ready_timeout, logs / "monolith.log") as alone:
                for pair in pairs:
                    if not has_time():
                        done(Outcome(model, pair, "not run, the time was over"))
                        continue
                    outcome = Outcome(model, pair, lengths=lengths)
                    print(f"{model}: {pair.name}", flush=True)
                    run_pair(outcome, alone, directory, flags, prompts, args, logs / "-".join(pair.name.split()))
                    print(f"{model}: {pair.name}: {outcome.verdict}", flush=True)
                    done(outcome)
        except PdserveError as error:
            show_logs(logs)
            done(Outcome(model, pairs[0], f"the monolith does not start: {error}"))


def pairs_of(model: str, engines: Sequence[str]) -> list[Pair]:
    """Each engine; of the tiny model the first one again, with `MORE`."""
    found = [Pair(engine) for engine in engines]
    return [*found, Pair(engines[0], MORE)] if model in IN_FP32 and engines[0] != FAKE else found


def document(facts: dict[str, Any], outcomes: Sequence[Outcome], notes: Sequence[str]) -> str:
    """The whole report in Markdown."""
    verdicts = [
        f"- {one.model}, {one.pair.name}: {'passed' if one.passed else 'FAILED'}: {one.verdict}" for one in outcomes
    ]
    parts = [
        f"# A prefill and a decode server on one device: {facts['device']}, {facts['date']}",
        f"torch {facts['torch']}, revision {facts['revision']}; command: `{facts['command']}`",
        "\n".join([*verdicts, *(f"- {note}" for note in notes)]),
    ]
    parts += [section(one) for one in outcomes if one.answers]
    return "\n\n".join(parts) + "\n"


def section(one: Outcome) -> str:
    """One pair beside its monolith: TTFT in parts, then by length of the prompt with the rate of the KV."""
    names = {MONOLITH: one.alone, one.pair.name: one.answers}
    found = {name: [first_token.first_token_of(answer) for answer in answers] for name, answers in names.items()}
    different = len({tuple(answer.output_ids) for answer in one.alone})
    return "\n\n".join(
        [
            f"## {one.model}, {one.pair.name}: ready in {one.start_s:.0f} s",
            f"Of the monolith's {len(one.alone)} answers {different} are different.",
            first_token.table(found, [(one.pair.name, MONOLITH)]),
            report.markdown_table(
                ["prompt tokens", "TTFT alone, ms", "TTFT 1P1D, ms", "KV, MB", "GB/s"], by_length(one)
            ),
        ]
    )


def by_length(one: Outcome) -> list[list[str]]:
    """A row for each length of prompts: medians."""
    rows = []
    for length in sorted(set(one.lengths)):
        chosen = [index for index, each in enumerate(one.lengths) if each == length]
        alone, pair = (statistics.median(answers[i].ttft_s for i in chosen) for answers in (one.alone, one.answers))
        moved = [one.answers[i].timing.get("kv_bytes") or 0 for i in chosen]
        seconds = [one.answers[i].timing.get("kv_transfer_s") or 0.0 for i in chosen]
        rate = f"{sum(moved) / sum(seconds) / 1e9:.2f}" if sum(seconds) else "-"
        megabytes = statistics.median(moved) / 1e6
        rows.append([str(length), f"{alone * 1e3:.1f}", f"{pair * 1e3:.1f}", f"{megabytes:.1f}", rate])
    return rows


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--models", nargs="+", choices=(*IN_FP32, *SHAPES), default=[TINY, "Qwen3-0.6B"])
    add("--engines", nargs="+", choices=tuple(LOADERS), default=list(LOADERS), help="those that load are used")
    add("--prompts", type=int, default=20, help="how many, of --prompt-lens in turn")
    add("--prompt-lens", nargs="+", type=int, default=[17, 128, 512, 2048, 6000], help="in tokens")
    add("--copies", type=int, default=3, help="of all prompts, sent at once behind them; 0: none")
    add("--output-len", type=int, default=32, help="tokens of each answer")
    add("--max-total-tokens", type=int, help="KV pool of each server; four of the longest requests when absent")
    add("--max-minutes", type=float, default=5.0, help="no pair is started after so long")
    add("--ready-timeout", type=float, default=120.0, help="seconds until a server must be ready")
    add("--out", type=Path, default=Path(os.environ.get("OUT") or report.ROOT / "build" / "gpu"), help="a folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all pairs; print and write what came of them."""
    args = parse_flags(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was run")
        return EXIT_NO_DEVICE
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    facts = {
        "date": report.today(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_model(),
        "torch": torch.__version__,
        "revision": report.git_revision(),
        "command": report.command_line("benchmarks.gpu.pair_on_one_gpu", argv),
        "machine": report.machine(),
    }
    shutil.rmtree(args.out / "logs", ignore_errors=True)
    engines, notes = engines_there(args.engines)
    print("\n".join(notes), flush=True)
    if not engines:
        engines = [FAKE]
        notes.append(
            "no engine that moves memory of a CUDA device loads: the pair runs with `fake`, which moves nothing"
        )
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        figures = [dataclasses.asdict(one) | {"passed": one.passed} for one in outcomes]
        text = document(facts, outcomes, notes)
        report.write_results(args.out, "gpu-pair", text, {**facts, "notes": notes, "pairs": figures})

    for model in args.models:
        run_model(model, pairs_of(model, engines), args, lambda: time.monotonic() - began < 60 * args.max_minutes, done)
    print("\n" + document(facts, outcomes, notes))
    return 0 if outcomes and all(one.passed for one in outcomes) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
