"""Mutated checkpoints: `config.json`, safetensors headers, GGUF headers, read as a server that starts reads them.

Called by `tests.fuzz.__main__` with many files, by `test_fuzz` with few. Files are read in child processes whose
address space is bounded: whatever a file says, the child answers `ok`, or an error that pdserve raises on purpose, in
time. Run as a program this file is such a child: it takes the folder and the numbers of cases, and prints one line for
each.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tests.fuzz.structs import change_bytes, change_tree

Kind = Literal["config", "safetensors", "gguf"]
KINDS: tuple[Kind, ...] = ("config", "safetensors", "gguf")
MEMORY_BYTES = 3 << 30
"""Address space that a child may have beyond what it has when it begins."""
MAX_CASE_S = 30.0
MAX_GROWTH_MB = 256.0
START_S = 120.0
BATCH = 500
NUMBERS = (0, -1, 1, 3, 0.5, -0.5, 1 << 31, 10**12, 1 << 63, 10**30, float("nan"), float("inf"), 1e-300, 1e300)
WORDS = ("x", "linear", "yarn", "llama3", "dynamic", "float8", "bfloat16", "Qwen2ForCausalLM", "gelu", "\0")


@dataclasses.dataclass
class FileReport:
    """What a run has come to."""

    num_files: int = 0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    slowest_s: float = 0.0
    growth_mb: float = 0.0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_files} files in {self.seconds:.0f} s: {dict(sorted(self.outcomes.items()))}; "
            f"slowest {self.slowest_s:.2f} s, memory {self.growth_mb:+.0f} MB, {len(self.failures)} failures"
        )


def run(folder: Path, num_files: int, seed: int) -> FileReport:
    """Read so many files of each kind in turn. `report.failures` names each case that failed."""
    report, began = FileReport(), time.monotonic()
    make_sound(folder / "sound")
    for first in range(0, num_files, BATCH):
        cases = list(range(first, min(first + BATCH, num_files)))
        while cases:
            done = _run_child(folder, seed, cases, report)
            cases = cases[done:]
    report.seconds = time.monotonic() - began
    return report


def _run_child(folder: Path, seed: int, cases: list[int], report: FileReport) -> int:
    """A child for `cases`: how many it got through, counting the one that it died of."""
    argv = [sys.executable, "-m", "tests.fuzz.files", str(folder), str(seed), str(cases[0]), str(cases[-1] + 1)]
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    limit_s = START_S + MAX_CASE_S
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    done = 0
    try:
        for line in child.stdout:
            said = json.loads(line)
            done += 1
            report.num_files += 1
            report.outcomes[f"{said['kind']} {said['outcome']}"] += 1
            report.slowest_s = max(report.slowest_s, said["took_s"])
            report.growth_mb = max(report.growth_mb, said["growth_mb"])
            if said["failure"]:
                report.failures.append(f"case {said['case']} of seed {seed} ({said['kind']}): {said['failure']}")
        child.wait(limit_s)
    finally:
        child.kill()
        _, errors = child.communicate()
    if done < len(cases):
        report.num_files += 1
        report.outcomes["died"] += 1
        case = cases[done]
        report.failures.append(f"case {case} of seed {seed} ended the process ({child.returncode}): {errors[-600:]}")
        return done + 1
    return done


# ---------------------------------------------------------------------- the child


def main(folder: Path, seed: int, start: int, end: int) -> None:
    """Read cases `start` to `end`."""
    import faulthandler

    from pdserve.errors import ConfigError, ModelError
    from tests.fuzz.watch import rss_mb

    read_case(folder / "sound", "config")  # imports, before memory is bounded
    read_case(folder / "sound" / "model.gguf", "gguf")
    limit_memory()
    base = rss_mb()
    for case in range(start, end):
        kind = KINDS[case % len(KINDS)]
        path = make_case(folder, random.Random(f"{seed}-{case}"), kind, case)
        faulthandler.dump_traceback_later(MAX_CASE_S, exit=True)
        began, failure = time.monotonic(), ""
        try:
            read_case(path, kind)
            outcome = "ok"
        except (ConfigError, ModelError) as error:
            outcome = type(error).__name__
        except BaseException as error:
            outcome, failure = "failed", f"{type(error).__name__}: {error}"[:500] + _where(error)
        took = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        grown = rss_mb() - base
        if grown > MAX_GROWTH_MB:
            failure = failure or f"memory grew by {grown:.0f} MB"
            base = rss_mb()
        said = {"case": case, "kind": kind, "outcome": outcome, "took_s": took, "growth_mb": grown, "failure": failure}
        print(json.dumps(said), flush=True)
        shutil.rmtree(path if path.is_dir() else path.parent, ignore_errors=True)


def _where(error: BaseException) -> str:
    """The innermost place in pdserve that an error went through."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "pdserve" in code.co_filename:
            place = f" (at {Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name})"
        trace = trace.tb_next
    return place


def read_case(path: Path, kind: Kind) -> None:
    """What a server does with a checkpoint when it starts. Raises ConfigError or ModelError."""
    import torch

    from pdserve.base.parallel import SINGLE
    from pdserve.model.config import check_spec, kv_layout
    from pdserve.model.loader import load_model, read_spec, resolve_dtype

    spec = read_spec(path)
    check_spec(spec, SINGLE.shape, 1, 1)
    dtype = resolve_dtype(path, spec, "auto", load_format="auto")
    load_model(path, spec, dtype, torch.device("cpu"), load_format="auto", seed=0)
    kv_layout(spec, 16, dtype)


def limit_memory() -> tuple[int, int]:
    """Bound the address space of this process; returns the limits before, for `resource.setrlimit`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    return before


# ---------------------------------------------------------------------- the files


def make_sound(folder: Path) -> None:
    """A tiny checkpoint, as a directory and as a gguf file."""
    from tests.gguf_files import write_gguf
    from tests.tiny import make_tiny

    if not (folder / "model.gguf").is_file():
        make_tiny("llama", folder, num_hidden_layers=1)
        write_gguf(folder, folder / "model.gguf", "llama")


def make_case(folder: Path, rng: random.Random, kind: Kind, case: int) -> Path:
    """Write the file of one case; returns what a server would be given."""
    sound, made = folder / "sound", folder / f"case-{case}"
    made.mkdir()
    if kind == "gguf":
        data = (sound / "model.gguf").read_bytes()
        (made / "model.gguf").write_bytes(change_gguf(data, rng))
        return made / "model.gguf"
    config = json.loads((sound / "config.json").read_text())
    weights = (sound / "model.safetensors").read_bytes()
    if kind == "config":
        changed = change_config(config, rng)
        text = json.dumps(changed).encode()
        (made / "config.json").write_bytes(change_bytes(text, rng) if rng.random() < 0.2 else text)
        (made / "model.safetensors").write_bytes(weights)
    else:
        (made / "config.json").write_text(json.dumps(config))
        (made / "model.safetensors").write_bytes(change_safetensors(weights, rng))
    return made


def sound_header(folder: Path, kind: Kind) -> bytes:
    """What a sound checkpoint has before its weights; all of a `config.json`."""
    if kind == "config":
        return (folder / "sound" / "config.json").read_bytes()
    if kind == "gguf":
        data = (folder / "sound" / "model.gguf").read_bytes()
        return data[: _end_of_gguf_header(data)]
    data = (folder / "sound" / "model.safetensors").read_bytes()
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def with_header(folder: Path, kind: Kind, header: bytes) -> Path:
    """Write the sound checkpoint with another header of that kind; returns what a server would be given.

    The length before a safetensors header is its own. Files are replaced, since those before may still be mapped.
    """
    sound, made = folder / "sound", folder / "with-header"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    weights = (sound / "model.safetensors").read_bytes()
    if kind == "gguf":
        data = (sound / "model.gguf").read_bytes()
        (made / "model.gguf").write_bytes(header + data[_end_of_gguf_header(data) :])
        return made / "model.gguf"
    if kind == "safetensors":
        rest = weights[8 + len(sound_header(folder, kind)) :]
        weights = struct.pack("<Q", len(header)) + header + rest
    (made / "config.json").write_bytes(header if kind == "config" else sound_header(folder, "config"))
    (made / "model.safetensors").write_bytes(weights)
    return made


def change_config(config: dict[str, Any], rng: random.Random) -> Any:
    """One to three fields with other values."""
    changed: Any = dict(config)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(sorted(changed))
        match rng.randrange(5):
            case 0 | 1:
                changed[name] = rng.choice(NUMBERS)
            case 2:
                changed[name] = rng.choice(WORDS)
            case 3:
                scaling = {"rope_type": rng.choice(WORDS), "factor": rng.choice(NUMBERS), "rope_theta": 1e4}
                more = {"low_freq_factor": rng.choice(NUMBERS), "high_freq_factor": rng.choice(NUMBERS)}
                changed["rope_scaling"] = scaling | more | {"original_max_position_embeddings": rng.choice(NUMBERS)}
            case _:
                changed[name] = change_tree(changed[name], rng, 1)
    return json.loads(json.dumps(changed, default=repr))


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Another header, another length of it, or a file that ends early."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(4):
        case 0:
            return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 8, 1 << 40, (1 << 64) - 1))) + data[8:]
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            header = change_bytes(header, rng)
        case _:
            tree = json.loads(header)
            entry = tree[rng.choice(sorted(name for name in tree if name != "__metadata__"))]
            field = rng.choice(sorted(entry))
            entry[field] = rng.choice(("F16", "F64", "I8", "Q")) if field == "dtype" else _bounds(entry[field], rng)
            header = json.dumps(tree).encode()
    return struct.pack("<Q", len(header)) + header + rest


def _bounds(values: list[int], rng: random.Random) -> list[Any]:
    """Shapes and offsets of another size."""
    whole = [n for n in NUMBERS if isinstance(n, int)]
    return [rng.choice((value, value + 1, value * 2, rng.choice(whole))) for value in values] + [1] * rng.randrange(2)


def change_gguf(data: bytes, rng: random.Random) -> bytes:
    """Counts, lengths and types in the header replaced, bytes changed, or a file that ends early."""
    end = _end_of_gguf_header(data)
    header, rest = data[:end], data[end:]
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            return change_bytes(header, rng) + rest
        case 2:
            at, width = rng.choice(tuple(_numbers(header)))
            value = rng.choice((0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
            packed = struct.pack("<Q", value)[:width]
            return header[:at] + packed + header[at + width :] + rest
        case _:
            at = rng.randrange(0, len(header) - 4)
            value = struct.pack("<f", rng.choice((0.0, -1.0, math.nan, math.inf, 1e30)))
            return header[:at] + value + header[at + 4 :] + rest


def _end_of_gguf_header(data: bytes) -> int:
    """Where the entry of the last tensor ends; padding and weights follow."""
    return data.index(b"output_norm.weight") + 64


def _numbers(header: bytes) -> Iterator[tuple[int, int]]:
    """Where small numbers of 8 and 4 bytes are: counts of tensors and keys, lengths of texts, types, sizes."""
    yield from ((8, 8), (16, 8))
    for at in range(24, len(header) - 8):
        if header[at] and not any(header[at + 2 : at + 8]):
            yield at, 8
        if header[at] and not any(header[at + 1 : at + 4]):
            yield at, 4


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(arg) for arg in sys.argv[2:]))
