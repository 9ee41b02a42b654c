"""The CPU kernels as torch operations, `torch.ops.pdserve.*`, one call each, for models and tests in Python.

Each call is a program (`program.py`) of its own. Inputs are converted to float32, and results to the dtype of the
inputs; `NativeDecoder` avoids this conversion. All operations check their arguments and raise ValueError. For meta
tensors, and so under torch.compile, they return empty tensors of the right shape. They have no gradients. Weights are
the tensors of `Packed`. Operations run on the threads passed to `use` while another owner keeps these alive. Otherwise
they run on as many threads as torch had at the first call.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.base.native import best_level
from pdserve.memory.layout import page_and_slot, pages_for
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.layer_spec import ExpertActivation, MoeSpec
from pdserve.model.native.program import Program
from pdserve.model.native.resources import MAX_GROUP, MAX_HEAD_DIM, Buffer, HeadShape, Threads
from pdserve.model.native.sampling import NativeChooser
from pdserve.model.native.weights import BLOCK, Packed

_DRAWN = [("greedy", "?"), ("temperature", "f4"), ("top_k", "i8"), ("top_p", "f4"), ("min_p", "f4")]


class _Machine:
    """The threads and instruction-set level that operations run on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: Threads | None = None
        self._used: tuple[weakref.ref[Threads], str] | None = None

    def use(self, threads: Threads, level: str) -> None:
        """See the module's `use`."""
        self._used = weakref.ref(threads), level

    def parts(self) -> tuple[Threads, str]:
        """Return threads and level."""
        used = self._used
        threads = None if used is None else used[0]()
        if used is not None and threads is not None:
            return threads, used[1]
        with self._lock:
            if self._own is None:
                self._own = Threads(torch.get_num_threads())
            return self._own, best_level()

    def forget(self) -> None:
        """Forget all threads in a forked process, which has none of them."""
        self._lock, self._used = threading.Lock(), None
        if self._own is not None:
            self._own.handle = None
        self._own = None


_machine = _Machine()
os.register_at_fork(after_in_child=_machine.forget)


def use(threads: Threads, level: str) -> None:
    """Run all later operations on these threads, at this instruction-set level. Keeps only a weak reference."""
    _machine.use(threads, level)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, real: bool) -> Tensor:
    """Divide `x` `[N, width]` by its root mean square and multiply by `weight` `[width]`; rounds to bfloat16."""
    _check_rows(x, "x")
    _require(weight.shape == (x.shape[1],), f"weight is {list(weight.shape)}, not [{x.shape[1]}]")
    if not real:
        return x.new_empty(x.shape)
    program = _program()
    source, out = _samples(program, x.shape[1]), _samples(program, x.shape[1], torch.bfloat16)
    program.norm(source, weight, eps, out)
    return _run(program, out, (source, x))


def linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, num_out: int, *, real: bool) -> Tensor:
    """Map `[N, in]` to `[N, num_out]`."""
    _check_rows(x, "x")
    _check_packed("weight", weight, scale, bias, x.shape[1])
    fits = weight.shape[0] == 1 and 0 < num_out <= weight.shape[1] * BLOCK
    _require(fits, f"weight is not a layer of {num_out} outputs")
    if not real:
        return x.new_empty(x.shape[0], num_out)
    program = _program()
    source, out = _samples(program, x.shape[1]), _samples(program, num_out)
    program.linear(source, Packed(weight, scale, bias, num_out, x.shape[1]), out)
    return _run(program, out, (source, x))


def feed_forward(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_bias: Tensor | None, down: Tensor,
    down_scale: Tensor | None, down_bias: Tensor | None, act: str = "silu", *, real: bool,
) -> Tensor:  # fmt: skip
    """Compute `down(act(gate) * up)` of `[N, width]`; each block of `gate_up` has 16 outputs of gate and 16 of up.

    `act`: "silu" or "gelu_tanh".
    """
    width, inner = _check_gated(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    _require(act in ("silu", "gelu_tanh"), f"act is {act!r}, not silu or gelu_tanh")
    _require(gate_up.shape[0] == 1, f"gate_up is {gate_up.shape[0]} layers")
    if not real:
        return x.new_empty(x.shape)
    program = _program()
    source, out = _samples(program, width), _samples(program, width)
    wide = Packed(gate_up, gate_up_scale, gate_up_bias, 2 * inner, width, 2)
    program.gated(source, wide, norm=None, eps=0.0, act="gelu_tanh" if act == "gelu_tanh" else "silu")
    program.linear(None, Packed(down, down_scale, down_bias, width, inner), out)
    return _run(program, out, (source, x))


def route(
    logits: Tensor, top_k: int, normalise: bool, sigmoid: bool = False, correction: Tensor | None = None,
    num_groups: int = 1, top_groups: int = 1, scale: float = 1.0, *, real: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `Kernels.route`; the arguments are the fields of `MoeSpec`. Ties go to the lower expert index."""
    _check_rows(logits, "logits")
    num_experts = logits.shape[1]
    _require(1 <= top_k <= num_experts, f"top_k is {top_k}, of {num_experts} experts")
    fits = num_groups >= 1 and num_experts % num_groups == 0 and 1 <= top_groups <= num_groups
    _require(fits, f"the {top_groups} best of {num_groups} groups of {num_experts} experts cannot be chosen")
    fits = correction is None or correction.shape == (num_experts,)
    _require(fits, f"correction is not [{num_experts}]")
    if not real:
        shape = (logits.shape[0], top_k)
        return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)
    program = _program()
    source, weights = _samples(program, num_experts), _samples(program, top_k)
    experts = _samples(program, top_k, torch.int64)
    moe = MoeSpec(
        num_experts=num_experts, top_k=top_k, intermediate_size=1, norm_top_k=normalise,
        scoring="sigmoid" if sigmoid else "softmax", num_groups=num_groups, top_groups=top_groups, routed_scale=scale,
    )  # fmt: skip
    program.route(source, experts, weights, moe, correction)
    return _run(program, experts, (source, logits), dtype=torch.int64), program.view(weights, len(logits)).clone()


def experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, down: Tensor,
    down_scale: Tensor | None, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, act: str = "silu",
    limit: float | None = None, *, real: bool,
) -> Tensor:  # fmt: skip
    """Compute `feed_forward` of each row's layers `experts` int64 `[N, top_k]`, weighted by `weights` `[N, top_k]`.

    `act` and `limit`: `act` and `act_limit` of `MoeSpec`.
    """
    width, inner = _check_gated(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias)
    fits = experts.ndim == 2 and experts.shape[0] == x.shape[0] and experts.dtype == torch.int64
    fits = fits and experts.shape[1] > 0
    _require(fits, f"experts is {experts.dtype} {list(experts.shape)}, not int64 [{x.shape[0]}, top_k]")
    _require(weights.shape == experts.shape, f"weights is {list(weights.shape)}, not {list(experts.shape)}")
    known: dict[str, ExpertActivation] = {"silu": "silu", "gpt_oss": "gpt_oss"}
    _require(act in known, f"act is {act}, which is none of {', '.join(known)}")
    if not real or not x.shape[0]:
        return x.new_empty(x.shape)
    low, high = (int(bound) for bound in experts.aminmax())
    _require(low >= 0 and high < gate_up.shape[0], f"experts are {low} to {high}, and there are {gate_up.shape[0]}")
    program, top_k = _program(), experts.shape[1]
    source, out = _samples(program, width), _samples(program, width)
    chosen, shares = _samples(program, top_k, torch.int64), _samples(program, top_k)
    wide = Packed(gate_up, gate_up_scale, gate_up_bias, 2 * inner, width, 2)
    deep = Packed(down, down_scale, down_bias, width, inner)
    program.experts(source, wide, deep, chosen, shares, out, act=known[act], limit=limit)
    return _run(program, out, (source, x), (chosen, experts), (shares, weights))


def argmax(logits: Tensor, *, real: bool) -> Tensor:
    """Return the index of each row's maximum, int64 `[N]`; ties go to the lower index."""
    _check_rows(logits, "logits")
    if not real:
        return logits.new_empty(logits.shape[0], dtype=torch.int64)
    program = _program()
    source, out = _samples(program, logits.shape[1]), _samples(program, 1, torch.int64)
    program.argmax(source, out)
    return _run(program, out, (source, logits), dtype=torch.int64)[:, 0]


def choose(
    logits: Tensor, points: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0,
    min_p: float = 0.0, *, real: bool,
) -> Tensor:  # fmt: skip
    """Sample a token for each row, int64 `[N]`, by inverting its distribution at `points` `[N]` in [0, 1).

    Candidates are the `top_k` likeliest tokens (None: all), limited to the fewest that sum to probability `top_p`.
    Tokens less than `min_p` times as likely as the likeliest are dropped.
    """
    _check_rows(logits, "logits")
    fits = points.shape == logits.shape[:1] and points.is_floating_point()
    _require(fits, f"points is {points.dtype} {list(points.shape)}, not numbers [{logits.shape[0]}]")
    _require(0 < temperature < math.inf, f"temperature is {temperature}, not above 0 and finite")
    _require(top_k is None or top_k >= 1, f"top_k is {top_k}, not at least 1")
    _require(0 < top_p <= 1 and 0 <= min_p <= 1, f"top_p is {top_p} and min_p {min_p}, not shares")
    if not real:
        return logits.new_empty(logits.shape[0], dtype=torch.int64)
    _require(bool(((points >= 0) & (points < 1)).all()), "points are not in [0, 1)")
    columns = np.zeros(len(logits), dtype=_DRAWN)
    filters = {"temperature": temperature, "top_k": top_k or logits.shape[1], "top_p": top_p, "min_p": min_p}
    for name, value in filters.items():
        columns[name] = value
    return NativeChooser(*_machine.parts())(logits.float(), columns, points.double().numpy())


def attend(
    qkv: Tensor, pages: Tensor, layer: int, starts: Tensor, ends: Tensor, table: Tensor, inverse: Tensor,
    factor: float = 1.0, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, *, real: bool,
) -> Tensor:  # fmt: skip
    """Normalise and rotate heads, write K and V to their pages, and attend: `[N, heads * dim]`.

    `qkv` `[N, (heads + 2 * kv_heads) * dim]` holds the tokens of rows that compute positions `[starts[r], ends[r])`,
    row after row. `table[r]` are a row's pages in `pages` bf16 `[pages, layers, 2, kv_heads, tokens, dim]`. A row of
    one token is a decode row, and a longer row is a chunk of a prompt: their bits differ.
    """
    shape = _check_heads(qkv, pages, layer)
    fits = starts.ndim == ends.ndim == 1 and table.ndim == 2 and starts.shape[0] == ends.shape[0] == table.shape[0]
    fits = fits and all(rows.dtype in (torch.int32, torch.int64) for rows in (starts, ends, table))
    _require(fits, "starts and ends [rows] and table [rows, pages] are not integers for the same rows")
    _require(window >= 0 and softcap >= 0, f"window is {window} and softcap {softcap}: neither may be negative")
    sizes = {"inverse": (inverse, shape.dim // 2), "sinks": (sinks, shape.num_heads)}
    for name, (vector, size) in (sizes | {"q_norm": (q_norm, shape.dim), "k_norm": (k_norm, shape.dim)}).items():
        _require(vector is None or vector.shape == (size,), f"{name} is not [{size}]")
    if not real:
        return qkv.new_empty(qkv.shape[0], shape.num_heads * shape.dim)
    batch = _batch_of(len(qkv), pages, starts, ends, table)
    program = _program(shape, pages)
    source, out = program.buffer(qkv.shape[1]), program.buffer(shape.num_heads * shape.dim)
    program.angles(inverse, factor)
    program.place(source, layer, q_norm, k_norm, eps)
    program.attend(layer, out, window=window, softcap=softcap, sinks=sinks)
    program.begin(batch)
    program.view(source, len(qkv)).copy_(qkv)
    program.run(0, program.num_ops)
    return program.view(out, len(qkv)).to(qkv.dtype, copy=True)


def _require(condition: bool, what: str) -> None:
    """Raise ValueError with `what` unless `condition` holds."""
    if not condition:
        raise ValueError(what)


def _check_rows(x: Tensor, name: str) -> None:
    """Raise ValueError unless `x` is a non-empty-width float matrix."""
    fits = x.ndim == 2 and x.is_floating_point() and x.shape[1] > 0
    _require(fits, f"{name} is {x.dtype} {list(x.shape)}, not rows of numbers")


def _check_packed(name: str, data: Tensor, scale: Tensor | None, bias: Tensor | None, num_in: int) -> None:
    """Raise ValueError unless the tensors are packed weights of `num_in` inputs."""
    deep = {torch.bfloat16: 2, torch.uint8: 4}.get(data.dtype)
    _require(deep is not None, f"{name} is {data.dtype}; packed weights are bfloat16 or uint8")
    is_grouped, width = scale is not None and scale.ndim == 5, -(-num_in // BLOCK) * BLOCK
    is_mxfp4 = data.dtype == torch.uint8 and data.ndim == 5 and data.shape[4] == BLOCK
    lanes = BLOCK // 2 if is_grouped and data.ndim == 5 and data.shape[3] == BLOCK // 2 else BLOCK
    layout: tuple[int, ...] = (width // (deep or 1), lanes, deep or 1)
    if is_mxfp4:
        layout = (width // BLOCK, 1 + BLOCK // 2, BLOCK)
    elif is_grouped and data.ndim == 5 and data.shape[4] == 2:
        layout = (width // 4, 2 * BLOCK, 2)
    fits = data.ndim == 5 and data.shape[1] > 0 and data.shape[2:] == layout and data.is_contiguous()
    _require(fits, f"{name} is {list(data.shape)}, not [layers, blocks, {', '.join(map(str, layout))}]")
    has_none = data.dtype == torch.bfloat16 or is_mxfp4
    _require((scale is None) == has_none, f"{name} needs a scale unless it is bfloat16 or MXFP4, which have none")
    of_outputs: tuple[int, ...] = (data.shape[0], data.shape[1] * BLOCK)
    of_groups = of_outputs
    if scale is not None and is_grouped:
        groups = min(max(scale.shape[2], 1), width // BLOCK)
        of_groups = (*data.shape[:2], groups, 2 if scale.shape[3] == 2 else 1, BLOCK)
    for what, vector, shape in (("scale", scale, of_groups), ("bias", bias, of_outputs)):
        fits = vector is None or (vector.shape == shape and vector.dtype == torch.float32)
        fits = fits and (vector is None or vector.is_contiguous())
        _require(fits, f"the {what} of {name} is not float32 {list(shape)}, contiguous")


def _check_gated(
    x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_bias: Tensor | None, down: Tensor,
    down_scale: Tensor | None, down_bias: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Check a gated feed-forward's tensors. Returns the width of `x` and the inner width, padded to whole blocks."""
    _check_rows(x, "x")
    width = x.shape[1]
    _check_packed("gate_up", gate_up, gate_up_scale, gate_up_bias, width)
    blocks = gate_up.shape[1]
    _require(blocks % 2 == 0, f"gate_up has {blocks} blocks, which is not a whole number of gate and up pairs")
    inner = blocks // 2 * BLOCK
    _check_packed("down", down, down_scale, down_bias, inner)
    fits = down.shape[:2] == (gate_up.shape[0], -(-width // BLOCK))
    _require(fits, f"down is not {gate_up.shape[0]} layers of {width} outputs")
    wide = Packed(gate_up, gate_up_scale, gate_up_bias, 2 * inner, width, 2)
    deep = Packed(down, down_scale, down_bias, width, inner)
    _require(wide.inputs == deep.inputs, f"gate_up has inputs in {wide.inputs}, and down in {deep.inputs}")
    return width, inner


def _check_heads(qkv: Tensor, pages: Tensor, layer: int) -> HeadShape:
    """Derive the head shape from `qkv` and `pages`. Raises ValueError."""
    _check_rows(qkv, "qkv")
    fits = pages.ndim == 6 and pages.shape[2] == 2 and min(pages.shape) > 0
    fits = fits and pages.dtype == torch.bfloat16 and pages.is_contiguous()
    _require(fits, f"pages is {pages.dtype} {list(pages.shape)}, not bfloat16 [pages, layers, 2, heads, tokens, dim]")
    _, layers, _, kv_heads, page_tokens, dim = pages.shape
    _require(dim % 2 == 0 and dim <= MAX_HEAD_DIM, f"pages has heads of {dim}: odd, or larger than {MAX_HEAD_DIM}")
    heads = qkv.shape[1] // dim - 2 * kv_heads
    fits = qkv.shape[1] % dim == 0 and 0 < heads <= MAX_GROUP * kv_heads and heads % kv_heads == 0
    _require(fits, f"qkv is {qkv.shape[1]} wide: no query heads of {dim} beside those of K and V for {kv_heads}")
    _require(0 <= layer < layers, f"layer is {layer}, of {layers}")
    return HeadShape(layers, heads, kv_heads, page_tokens, dim)


def _batch_of(num_tokens: int, pages: Tensor, starts: Tensor, ends: Tensor, table: Tensor) -> ForwardBatch:
    """Build a batch from rows. Raises ValueError when the rows do not cover `num_tokens` tokens or leave `pages`."""
    page_tokens = pages.shape[4]
    first, last, lines = (tensor.numpy().astype(np.int64) for tensor in (starts, ends, table))
    lengths, used = last - first, pages_for(last, page_tokens)
    _require(bool((first >= 0).all() and (lengths > 0).all()), "a row begins below 0, or ends where it begins")
    _require(int(lengths.sum()) == num_tokens, f"the rows are {int(lengths.sum())} tokens, and qkv has {num_tokens}")
    _require(bool((used <= lines.shape[1]).all()), f"table has {lines.shape[1]} pages a row, too few for an end")
    known = np.where(np.arange(lines.shape[1]) < used[:, None], lines, 0)
    _require(bool(((known >= 0) & (known < len(pages))).all()), f"table names pages that are not among {len(pages)}")
    offsets = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(first)), lengths)
    positions = np.arange(num_tokens) - offsets[row] + first[row]
    index, slots = page_and_slot(positions, page_tokens)
    columns = (np.zeros_like(positions), positions, known[row, index], slots)
    host = HostRows(first, last, offsets, np.where(lengths > 1, last, 0), known.astype(np.int32))
    return ForwardBatch(torch.from_numpy(np.stack(columns)), torch.from_numpy(offsets + lengths - 1), host)


def _program(heads: HeadShape | None = None, pages: Tensor | None = None) -> Program:
    """Make a new program."""
    return Program(*_machine.parts(), heads, pages)


def _samples(program: Program, width: int, dtype: torch.dtype = torch.float32) -> Buffer:
    """Allocate a buffer with one row per sample, for a program without tokens."""
    return program.buffer(width, dtype, of_samples=True)


def _run(program: Program, out: Buffer, *inputs: tuple[Buffer, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Run the whole program on the rows of `inputs`. Returns a copy of `out`, by default in the first input's dtype."""
    num_rows = len(inputs[0][1])
    program.begin_samples(num_rows)
    for buffer, rows in inputs:
        program.view(buffer, num_rows).copy_(rows)
    program.run(0, program.num_ops)
    return program.view(out, num_rows).to(dtype or inputs[0][1].dtype, copy=True)


_GATED = "Tensor gate_up, Tensor? gate_up_scale, {}Tensor down, Tensor? down_scale{}"
SCHEMAS: dict[Callable[..., Any], str] = {
    rms_norm: "(Tensor x, Tensor weight, float eps) -> Tensor",
    linear: "(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int num_out) -> Tensor",
    feed_forward: f"(Tensor x, {_GATED.format('Tensor? gate_up_bias, ', ', Tensor? down_bias')}, "
    "str act='silu') -> Tensor",
    route: "(Tensor logits, int top_k, bool normalise, bool sigmoid=False, Tensor? correction=None, int num_groups=1, "
    "int top_groups=1, float scale=1.0) -> (Tensor, Tensor)",
    experts: f"(Tensor x, Tensor experts, Tensor weights, {_GATED.format('', '')}, Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, str act='silu', float? limit=None) -> Tensor",
    argmax: "(Tensor logits) -> Tensor",
    choose: "(Tensor logits, Tensor points, float temperature=1.0, int? top_k=None, float top_p=1.0, "
    "float min_p=0.0) -> Tensor",
    attend: "(Tensor qkv, Tensor(a!) pages, int layer, Tensor starts, Tensor ends, Tensor table, Tensor inverse, "
    "float factor=1.0, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, int window=0, float softcap=0.0, "
    "Tensor? sinks=None) -> Tensor",
}


def _call(function: Callable[..., Any], real: bool, *args: Any, **kwargs: Any) -> Any:
    """Run one operation. Its tensors must be on one device, and none may require a gradient."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    _require(len({tensor.device for tensor in tensors}) == 1, "the tensors are not on one device")
    _require(not any(tensor.requires_grad for tensor in tensors), "these operations have no gradients")
    return function(*args, **kwargs, real=real)


for _function, _schema in SCHEMAS.items():
    torch.library.define(f"pdserve::{_function.__name__}", _schema)
    torch.library.impl(f"pdserve::{_function.__name__}", "cpu", functools.partial(_call, _function, True))
    torch.library.register_fake(f"pdserve::{_function.__name__}", functools.partial(_call, _function, False))
