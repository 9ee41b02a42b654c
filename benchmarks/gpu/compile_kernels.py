"""Compiles the Triton kernels as steps launch them, for a kind of GPU, on a machine that has none.

    python -m benchmarks.gpu.compile_kernels [--capability 90]

The interpreter of the tests runs kernels that no compiler would take. Here every kernel of a decode step, a prefill
step and a mixture of experts goes through Triton's compiler and ptxas; what it takes of registers and shared memory,
and the stack, where registers are spilled, is printed. Exit status 1 where one does not compile or does not fit.
TRITON_INTERPRET must not be set: there would be nothing to compile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks import report
from benchmarks.gpu import delta_checks
from benchmarks.gpu.delta_checks import DeltaShape
from benchmarks.gpu.kernel_checks import GEMMA2, GPT_OSS, NOPE, QWEN3_NEXT, WINDOW, AttentionShape, attention_of
from pdserve.executor.backend_choice import make_kernels
from pdserve.memory.layout import GroupKind, attention_group
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.latent_index import IndexInputs
from pdserve.model.attention.latents import LatentProjection
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.attention.triton_latents import TritonLatents
from pdserve.model.config import index_plane, layout_of_layers
from pdserve.model.expert_math import ExpertWeights
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.gpu import (
    causal_conv,
    channel_delta_prefill,
    decode_attention,
    elementwise,
    experts,
    extend_attention,
    gated_delta,
    gated_delta_prefill,
    latent_attention,
    packed_gemm,
    routes,
    sampling,
    small_batch_gemm,
)
from pdserve.model.gpu import fused_qk_norm_rope_cache as heads
from pdserve.model.gpu.packed_gemm import PackedWeight
from pdserve.model.grouped_weights import GroupFormat
from pdserve.model.layer_spec import IndexSpec, MoeSpec
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.kernels import FastKernels
from pdserve.model.triton_delta import TritonDelta

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that a program may have, by compute capability."""
_CORES = 132
"""Multiprocessors, of the largest."""
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel in one form. `stack_bytes` a thread are there where registers went to memory."""

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int


class Compiler:
    """Takes the place of the launch: `compiled` grows by each form of a kernel that is launched for the first time."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self._seen: set[str] = set()
        self.compiled: list[Compiled] = []
        self.case = ""

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """What `JITFunction.run` is called with."""
        values = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: value for name, value in options.items() if name in kernel.arg_names
        }
        signature, constants, attributes = _specialised(kernel, values)
        launch = {name: options[name] for name in ("num_warps", "num_stages", "launch_pdl") if name in options}
        key = f"{kernel.__name__} {signature} {constants} {attributes} {launch}"
        if key in self._seen:
            return
        self._seen.add(key)
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=self._target, options=launch)
        registers, stack = _resources(binary.asm["cubin"])
        self.compiled.append(
            Compiled(kernel.__name__, self.case, registers, stack, binary.metadata.shared, binary.metadata.num_warps)
        )


def _specialised(kernel: JITFunction, values: dict[str, Any]) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and attributes as Triton's launcher finds them: ones are constants, 16s are known.

    Tensors are taken to begin at 16 bytes.
    """
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        aligned = False
        is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or is_one:
            signature[param.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            aligned = not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not param.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread, by cuobjdump; 0 and 0 where it is not there."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", text.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def launches(compiler: Compiler) -> Iterator[str]:
    """Go through all launches; yields what is being launched."""
    shapes = [
        AttentionShape("Qwen3-0.6B", 16, 8, 128, 16),
        AttentionShape("Qwen3-8B", 32, 8, 128, 16),
        AttentionShape("Qwen3-8B, page 1", 32, 8, 128, 1),
        AttentionShape("SmolLM2-135M", 9, 3, 64, 16),
        AttentionShape("Qwen3-8B, fp32", 32, 8, 128, 16, "float32"),
        QWEN3_NEXT,
        WINDOW,
        GEMMA2,
        GPT_OSS,
        NOPE,
    ]
    for shape in shapes:
        for step, spans in {"decode": [(4095, 4096)], "decode 256": [(99, 100)] * 256, "prefill": [(0, 300)]}.items():
            compiler.case = f"{shape.name}, {step}"
            yield compiler.case
            _attend(shape, spans)
    for heads_here, dtype in ((128, torch.bfloat16), (16, torch.bfloat16), (20, torch.float32)):
        for step, spans in {"decode": [(4095, 4096)], "decode 64": [(99, 100)] * 64, "prefill": [(900, 940)]}.items():
            for top_k in (None, 64):
                compiler.case = f"latents, {heads_here} heads, {dtype}, {step}, {'sparse' if top_k else 'dense'}"
                yield compiler.case
                _latents(heads_here, dtype, spans, top_k)
    deltas = [*delta_checks.SHAPES, dataclasses.replace(delta_checks.QWEN3_NEXT, name="fp32", dtype="float32")]
    for delta in deltas:
        for step, spans in {"decode": [(9, 10)], "decode 8": [(9, 10)] * 8, "prefill": [(0, 300)]}.items():
            compiler.case = f"delta rule, {delta.name}, {step}"
            yield compiler.case
            _delta(delta, spans)
        compiler.case = f"delta rule, {delta.name}, verify"
        yield compiler.case
        _delta(delta, list(delta_checks.VERIFY), drafts=True)
    kernels = make_kernels("triton")
    for rows, hidden, inner in ((1, 1024, 3072), (64, 4096, 12288), (64, 2048, 6144)):
        compiler.case = f"{rows} rows of {hidden}"
        yield compiler.case
        x = torch.empty(rows, hidden, dtype=torch.bfloat16)
        kernels.add_norm(x, x, x[0], 1e-6)
        kernels.norm(x, x[0], 1e-6)
        kernels.add_norm(x, x, x[0], 1e-6, 1.0)
        for gate in (elementwise.swiglu, elementwise.geglu):
            gate(*torch.empty(rows, 2 * inner, dtype=torch.bfloat16).chunk(2, -1))
        queries = torch.empty(rows, hidden // 256, 2, 256, dtype=torch.bfloat16)
        kernels.gate(queries[:, :, 0].contiguous(), queries[:, :, 1])
        kernels.gate(x, x[:, :1])
    for rows, num_out, num_in in (
        (1, 6144, 4096), (16, 4096, 12288), (2, 960, 576), (1, 151936, 4096),
        (64, 6144, 4096), (32, 4096, 12288), (17, 960, 576), (64, 151936, 4096),
    ):  # fmt: skip
        compiler.case = f"{rows} rows from {num_in} to {num_out}"
        yield compiler.case
        x, weight = (torch.empty(n, num_in, dtype=torch.bfloat16) for n in (rows, num_out))
        kernels.linear(x, weight, None)
        kernels.linear(x, weight, weight[:, 0].contiguous())
        kernels.gated(x, weight, None)
        kernels.gated(x, weight, None, "gelu_tanh")
    compiler.case = "angles, 64 tokens"
    yield compiler.case
    kernels.angles(torch.zeros(64, dtype=torch.int64), torch.empty(64), 1.0, torch.bfloat16)
    compiler.case = "likeliest, 64 rows"
    yield compiler.case
    logits, best = torch.empty(64, 151936, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int64)
    sampling.keep_argmax(logits, logits, best, torch.empty(65, 1024, dtype=torch.int32), best, best)
    compiler.case = "top-p, 64 rows"
    yield compiler.case
    sampling.top_p_threshold(torch.empty(64, 151936), torch.empty(64))
    for tokens in (1, 64, 2048):
        compiler.case = f"experts, {tokens} tokens"
        yield compiler.case
        x = torch.empty(tokens, 2048, dtype=torch.bfloat16)
        gate_up, down = (torch.empty(128, *s, dtype=torch.bfloat16) for s in ((1536, 2048), (2048, 768)))
        slots = torch.zeros(tokens * 8, dtype=torch.int64)
        out = kernels.experts(x, slots, ExpertWeights(gate_up, down))
        wide, deep = (torch.empty(128, width, dtype=torch.bfloat16) for width in (1536, 2048))
        kernels.experts(x, slots, ExpertWeights(gate_up, down, wide, deep, act="gpt_oss", act_limit=7.0))
        moe = MoeSpec(num_experts=128, top_k=8, intermediate_size=768, norm_top_k=True)
        kernels.route(torch.empty(tokens, 128, dtype=torch.bfloat16), moe)
        moe = dataclasses.replace(moe, scoring="sigmoid", num_groups=8, top_groups=4, routed_scale=2.5)
        kernels.route(torch.empty(tokens, 128), moe, torch.empty(128))
        kernels.weighted_sum(out.view(tokens, 8, 2048), torch.empty(tokens, 8))
    yield from _packed(compiler)


def _packed(compiler: Compiler) -> Iterator[str]:
    """Products with quantized weights, which stay packed."""
    formats = [GroupFormat(4, 32), GroupFormat(4, 128, has_mins=True), GroupFormat(8, 4096)]
    formats += [GroupFormat(*size, is_float=True) for size in ((8, 128), (8, 4096), (4, 32))]
    cpu, bias = torch.device("cpu"), torch.empty(4096, dtype=torch.bfloat16)
    for form in formats:
        for rows in (1, 64):
            compiler.case = f"{form}, {rows} rows"
            yield compiler.case
            x = torch.empty(rows, 4096, dtype=torch.bfloat16)
            weight = PackedWeight.empty(form, 1, 4096, 4096, cpu)
            packed_gemm.linear(x, weight, bias)
            packed_gemm.linear(x, weight, None)
            gate_up = PackedWeight.empty(form, 8, 1536, 4096, cpu)
            down = PackedWeight.empty(form, 8, 4096, 768, cpu)
            slots = torch.zeros(rows * 4, dtype=torch.int64)
            packed_gemm.expert_rows(x, slots, gate_up, down, None, None, "gpt_oss", 7.0)


def _latents(num_heads: int, dtype: torch.dtype, spans: list[tuple[int, int]], top_k: int | None) -> None:
    """One layer's attention over latents of DeepSeek-V3's shape; with `top_k` over selected ones (DSA)."""
    name, cpu = str(dtype).removeprefix("torch."), torch.device("cpu")
    planes = attention_group(
        kind=GroupKind.MLA, page_tokens=64, num_kv_heads=1, head_dim=576, dtype=name, num_layers=1
    ).planes
    index = index_plane(IndexSpec(num_heads=64, head_dim=128, top_k=2048), 64, name)
    layout = layout_of_layers({(GroupKind.MLA, None, planes): [0], (GroupKind.INDEX, None, (index,)): [0]}, 1, 64)
    batch = _batch(spans, 64)
    backend = TritonLatents(*(GroupPool(group, 4, cpu) for group in layout.groups))
    tokens = batch.num_tokens
    projection = LatentProjection(torch.empty(num_heads * 256, 512, dtype=dtype), num_heads, 128, 128, 64)
    query, latents = torch.zeros(tokens, num_heads, 192, dtype=dtype), torch.zeros(tokens, 576, dtype=dtype)
    keys = torch.zeros(tokens, 64, 128, dtype=dtype), torch.zeros(tokens, 128, dtype=dtype)
    inputs = None if top_k is None else IndexInputs(*keys, torch.zeros(tokens, 64), top_k)
    backend.begin(batch).attend_latents(0, query, latents, projection, 0.1, inputs)


def _batch(spans: list[tuple[int, int]], page_tokens: int) -> ForwardBatch:
    """Rows whose pages are all the first one."""
    starts, ends = (np.array(x, dtype=np.int64) for x in zip(*spans, strict=True))
    counts = ends - starts
    pages = np.zeros((len(spans), -(-int(ends.max()) // page_tokens)), dtype=np.int32)
    host = HostRows(
        starts=starts, ends=ends, offsets=np.cumsum(counts) - counts, prompts=np.zeros_like(starts), pages=pages
    )
    zeros = torch.zeros(int(counts.sum()), dtype=torch.int64)
    return ForwardBatch(zeros.expand(4, -1).contiguous(), zeros, host)


def _attend(shape: AttentionShape, spans: list[tuple[int, int]]) -> None:
    """One layer's attention, on memory that nobody reads."""
    cpu = torch.device("cpu")
    group = attention_group(
        num_layers=2, page_tokens=shape.page_tokens,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        dtype=shape.dtype,
    )  # fmt: skip
    dtype = torch.bfloat16 if shape.dtype == "bfloat16" else torch.float32
    batch = _batch(spans, shape.page_tokens)
    norm = RMSNorm(torch.empty(shape.head_dim, dtype=dtype), 1e-6, FastKernels(), shape.norm_offset)
    num_heads = shape.num_heads * (1 + shape.has_gates) + 2 * shape.num_kv_heads
    qkv = torch.empty(batch.num_tokens, num_heads, shape.head_dim, dtype=dtype)
    rotary = int(shape.head_dim * shape.rotary)
    angles = torch.empty(batch.num_tokens, 1, rotary, dtype=dtype) if rotary else None
    sinks = torch.empty(shape.num_heads) if shape.has_sinks else None
    heads = Heads(qkv, shape.num_heads, shape.num_kv_heads, norm, norm, angles, angles, shape.has_gates, sinks)
    attention_of("triton", KVPool(group, 4, cpu), shape, cpu).begin(batch).attend(1, heads)


def _delta(shape: DeltaShape, spans: list[tuple[int, int]], *, drafts: bool = False) -> None:
    """One layer of GatedDeltaNet or Kimi Delta Attention."""
    inputs, states = delta_checks.delta_step(shape, tuple(spans), torch.device("cpu"), drafts=drafts)
    found = TritonDelta().mix(inputs, states())
    TritonDelta().norm(found, found, found[0, 0], 1e-6, "sigmoid" if shape.channel_decay else "silu")


def compile_all(capability: int) -> tuple[list[Compiled], list[str]]:
    """Everything that compiled, and what went wrong."""
    compiler, failed = Compiler(capability), []

    def launched(kernel: JITFunction, *args: Any, **options: Any) -> None:
        try:
            compiler.run(kernel, *args, **options)
        except Exception as error:
            failed.append(f"{compiler.case}: {kernel.__name__}: {type(error).__name__}: {str(error)[:500]}")

    chained = {"CHAINED": True, "launch_pdl": True} if capability >= 90 else {"CHAINED": False}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", launched))
        chained_modules = (
            causal_conv, channel_delta_prefill, decode_attention, elementwise, experts, extend_attention, gated_delta,
            gated_delta_prefill, heads, latent_attention, packed_gemm, routes, sampling, small_batch_gemm,
        )  # fmt: skip
        for module in chained_modules:
            patches.enter_context(mock.patch.object(module, "chaining", return_value=chained))
        for module in (decode_attention, gated_delta, small_batch_gemm):
            patches.enter_context(mock.patch.object(module, "num_cores", return_value=_CORES))
        patches.enter_context(
            mock.patch.object(small_batch_gemm, "shared_bytes", return_value=SHARED_BYTES[capability])
        )
        for _ in launches(compiler):
            pass
    limit = SHARED_BYTES[capability]
    failed += [
        f"{one.case}: {one.kernel}: {one.shared_bytes} bytes of shared memory, a program may have {limit}"
        for one in compiler.compiled
        if one.shared_bytes > limit
    ]
    return compiler.compiled, failed


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=SHARED_BYTES, default=90, help="of the GPU: 90 is Hopper")
    args = parser.parse_args(argv)
    compiled, failed = compile_all(args.capability)
    header = ["kernel", "case", "warps", "registers", "stack, bytes", "shared, KiB"]
    rows = [
        [
            one.kernel,
            one.case,
            str(one.warps),
            str(one.registers),
            str(one.stack_bytes),
            f"{one.shared_bytes / 1024:.1f}",
        ]
        for one in compiled
    ]
    print(report.markdown_table(header, rows, num_text=2))
    for line in failed:
        print(f"FAIL {line}")
    return 1 if failed or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
