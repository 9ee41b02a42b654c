"""The memory that loading a checkpoint on a CPU adds to a process, beside the size of its file.

    python -m benchmarks.loading_memory [--formats bf16 q4_0 awq fp8] [--write]

Each format is loaded in a process of its own. "adds" is its resident memory behind the load, without the KV pool, less
that before, when all modules are imported; the pages of files that it still maps count. "peak" is the most during the
load, likewise. bf16 is SmolLM2 as safetensors; AWQ (groups of 64) and FP8 (a scale per output) are written from it with
the writers of `tests/quantized.py`, and Q4_0 with gguf's: its linear layers, the head in Q8_0, as llama.cpp has them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from pdserve.model.paths import resolve_model_path, smollm2_gguf
from tests.quantized import SCHEMES, Scheme, awq_scheme, write_quantized

MIB = 1 << 20
TOKENS = 1024
"""Of the KV pool, which is small beside the weights; its bytes are subtracted."""


@dataclasses.dataclass(frozen=True)
class Added:
    """Bytes that a load has added, at its end and at most."""

    held: int
    peak: int


def memory_bytes(field: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def load_child(path: str, threads: int, found: multiprocessing.SimpleQueue[Added]) -> None:
    """Load the checkpoint in this process, and report the memory that this adds."""
    import gguf  # imported here, so that their memory is in the first figure
    import torch

    from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
    from pdserve.executor.factory import build_executor

    assert gguf
    torch.set_num_threads(threads)
    config = ServerConfig(
        model=ModelConfig(model_path=path, dtype="bfloat16"),
        memory=MemoryConfig(max_total_tokens=TOKENS),
        kernels=KernelConfig(device="cpu", cpu_threads=threads),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    built = build_executor(config, max_rows=4)
    held, peak = memory_bytes("VmRSS") - before, memory_bytes("VmHWM") - before
    pool = built.layout.bytes_of(built.num_pages + 1)
    found.put(Added(held - pool, peak - pool))
    built.executor.close()


def in_child(path: Path, threads: int) -> Added:
    """Return what a new process adds."""
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.SimpleQueue[Added] = context.SimpleQueue()
    child = context.Process(target=load_child, args=(str(path), threads, found))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the process that loads {path} ended with {child.exitcode}")
    return found.get()


def write_scheme(scheme: Scheme) -> Callable[[Path], Path]:
    """Return a writer of SmolLM2 in a scheme of `tests/quantized.py`."""

    def write(directory: Path) -> Path:
        write_quantized(resolve_model_path("smollm2"), directory / "model", scheme)
        return directory / "model"

    return write


def write_q4_0(directory: Path) -> Path:
    """Write the file of the wheel with its matrices in Q4_0, and the embeddings, which are the head, in Q8_0."""
    import gguf
    from gguf import GGMLQuantizationType as Kind

    reader = gguf.GGUFReader(smollm2_gguf())
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values.astype("float32"))
            continue
        form = Kind.Q8_0 if tensor.name == "token_embd.weight" else Kind.Q4_0
        writer.add_tensor(tensor.name, gguf.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "bf16": lambda directory: resolve_model_path("smollm2"),
    "q4_0": write_q4_0,
    "awq": write_scheme(awq_scheme(64)),
    "fp8": write_scheme(SCHEMES["fp8, channel"]),
}


def file_bytes(path: Path) -> int:
    """Return the bytes of a checkpoint's weight files."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--cpu-threads", type=int, default=1)
    report.add_write_flags(parser, "loading-memory")
    args = parser.parse_args(argv)
    record = report.Run("loading-memory", argv, module="loading_memory")
    os.environ["OMP_NUM_THREADS"] = str(args.cpu_threads)
    rows, figures = [], {}
    for form in args.formats:
        with tempfile.TemporaryDirectory() as work:
            path = FORMATS[form](Path(work))
            size, added = file_bytes(path), in_child(path, args.cpu_threads)
        figures[form] = {"file": size, **dataclasses.asdict(added)}
        cells = [f"{size / MIB:.0f}", f"{added.held / MIB:.0f}", f"{added.held / size:.2f}", f"{added.peak / size:.2f}"]
        rows.append([form, *cells])
        print(json.dumps({form: figures[form]}), flush=True)
    table = report.markdown_table(["format", "file, MiB", "adds, MiB", "adds / file", "peak / file"], rows)
    facts = record.facts(formats=figures)
    record.publish(args, f"{table}\n\n{report.footer(facts)}\n", facts)


if __name__ == "__main__":
    main()
