"""`Program`: operations of the CPU kernels, recorded once and run once per step.

Owned by `NativeDecoder`, or by one call in `ops`. `csrc/pdk.h` describes the operations. Operations hold addresses, so
the program keeps references to all tensors that they read.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.base.native import Decoding, PdkHeads, PdkRouting, Step, library
from pdserve.memory.dtypes import row_items
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.lora import Adapters, adapter_pointers
from pdserve.model.native.delta import DeltaShape, DeltaStates
from pdserve.model.native.resources import ACTIVATIONS, MAX_GROUP, MAX_HEAD_DIM, Activation, Buffer, HeadShape, Threads
from pdserve.model.native.weights import Packed
from pdserve.model.params import torch_dtype

KV_FORMATS = {"bfloat16": 0, "int8": 1, "fp8_e4m3": 2}
"""`kv_format` of `pdk_heads`, by the name in `memory/dtypes.py`."""
_ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int64: 8}
_NO_VIEW = (0, 0), torch.empty(0)


def _address(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> int:
    """Return an array's address; `array.ctypes` takes several times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


class Program:
    """Operations over buffers. `heads` and `kv`, if given, are the first of `add_heads`."""

    def __init__(self, threads: Threads, level: str, heads: HeadShape | None = None, kv: Tensor | None = None) -> None:
        self._handle: int | None = None
        self._library = library()
        self._kept: list[object] = [threads]
        self._handle = self._library.pdk_program_open(threads.handle, level.encode())
        if self._handle is None:
            raise RuntimeError(f"cannot open a program of level {level}")
        self._heads: list[HeadShape] = []
        self._max_pending: int | None = None
        """Most pending tokens of a slot; None: the program has no states."""
        if heads is not None and kv is not None:
            self.add_heads(heads, kv)
        self.num_ops = 0
        self._step_kept: list[object] = []
        self._decoded: IntArray = np.empty(0, dtype=np.int64)
        self._arrays: dict[int, tuple[int, npt.NDArray[Any] | None]] = {}
        self._views: dict[int, tuple[tuple[int, int], Tensor]] = {}
        """The last view of each buffer, with its address and number of rows."""
        self.adapted: Mapping[int, int] = {}
        """By `id` of each packed layer that has LoRA adapters, its number. Set before layers are recorded."""

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.pdk_program_close(self._handle)
            self._handle = None

    def add_heads(self, heads: HeadShape, kv: Tensor) -> int:
        """Add heads over a KV pool, and return their number.

        `kv` is `[num_pages, layers, 2, kv_heads, page_tokens, row_items(dim, heads.kv_dtype)]`: bf16, or codes of an
        8-bit format of `memory/dtypes.py`. Of latents it is bf16 `[num_pages, layers, 1, 1, page_tokens, dim]`.
        """
        row, kv_format, planes = row_items(heads.dim, heads.kv_dtype), KV_FORMATS[heads.kv_dtype], 2 - heads.of_latents
        assert kv.dtype == torch_dtype(heads.kv_dtype) and kv.is_contiguous(), "pages are contiguous"
        assert kv.shape[1:] == (heads.layers, planes, heads.num_kv_heads, heads.page_tokens, row), kv.shape
        assert heads.dim % 2 == 0 and heads.dim <= MAX_HEAD_DIM, f"heads of {heads.dim}"
        assert heads.num_heads % heads.num_kv_heads == 0 and heads.num_heads <= MAX_GROUP * heads.num_kv_heads
        assert all(heads.page_tokens == other.page_tokens for other in self._heads), "pages have the same tokens"
        strides = [stride * kv.itemsize // 2 for stride in kv.stride()]
        shape = PdkHeads(
            self._keep(kv), *strides[:2], 0 if heads.of_latents else strides[2], heads.num_kv_heads,
            heads.page_tokens, heads.dim, heads.num_heads, heads.of_window, kv_format,
            heads.dim**-0.5 if heads.scale is None else heads.scale,
        )  # fmt: skip
        number = self._number(self._library.pdk_add_heads(self._handle, ctypes.byref(shape)))
        self._heads.append(heads)
        assert number == len(self._heads) - 1, "heads are numbered in order"
        return number

    def buffer(self, width: int, dtype: torch.dtype = torch.float32, *, of_samples: bool = False) -> Buffer:
        """Allocate a buffer."""
        number = self._number(self._library.pdk_buffer(self._handle, width, _ITEM_BYTES[dtype], of_samples))
        return Buffer(number, width, dtype, of_samples)

    def view(self, buffer: Buffer, num_rows: int) -> Tensor:
        """View the first rows of a buffer, `[num_rows, width]`; valid until the next `begin` or `reserve`."""
        if num_rows == 0:
            return torch.empty(0, buffer.width, dtype=buffer.dtype)
        address = self._library.pdk_buffer_data(self._handle, buffer.number)
        where, view = self._views.get(buffer.number, _NO_VIEW)
        if where != (address, num_rows):
            raw = (ctypes.c_char * (num_rows * buffer.width * _ITEM_BYTES[buffer.dtype])).from_address(address)
            view = torch.frombuffer(raw, dtype=buffer.dtype).view(num_rows, buffer.width)
            self._views[buffer.number] = (address, num_rows), view
        return view

    def copied(self, buffer: Buffer, num_rows: int) -> Tensor:
        """Copy the items of the first rows of a buffer, flat: `[num_rows * width]`."""
        view = self.view(buffer, num_rows)
        where, array = self._arrays.get(buffer.number, (0, None))
        if array is None or where != view.data_ptr() or len(array) != view.numel():
            array = view.numpy().reshape(-1)
            self._arrays[buffer.number] = view.data_ptr(), array
        return torch.from_numpy(array.copy())

    def reserve(self, num_tokens: int, num_samples: int) -> None:
        """Size the buffers for steps of that many tokens and samples. Buffers that grow lose their contents."""
        self._number(self._library.pdk_reserve(self._handle, num_tokens, num_samples))

    def embed(self, out: Buffer, rows: Tensor, *, scale: float = 1.0) -> None:
        """Record: `out` = `scale` times the rows of `rows` bf16 `[vocab, width]` for the step's tokens."""
        assert rows.dtype == torch.bfloat16 and rows.is_contiguous() and rows.shape[1] == out.width
        self._op(self._library.pdk_op_embed(self._handle, out.number, self._keep(rows), out.width, scale))

    def embed_packed(self, out: Buffer, rows: Packed, *, scale: float = 1.0) -> None:
        """Record: `out` = the weights of the outputs of `rows` that are the step's tokens; in bf16 or integers."""
        assert rows.num_in == out.width and rows.num_parts == 1
        assert rows.data.dtype == torch.bfloat16 or rows.inputs == "int8", "floats of 4 or 8 bits are not looked up"
        self._op(self._library.pdk_op_embed_packed(self._handle, out.number, self._weights(rows), out.width, scale))

    def angles(self, inverse: Tensor, factor: float, *, heads: int = 0) -> None:
        """Record: the angles of `place` = positions times `inverse` `[half]`; `factor` multiplies cos and sin.

        The first `2 * half` items of a head are rotated. Heads without angles are not rotated.
        """
        assert inverse.ndim == 1 and 2 * len(inverse) <= self._heads[heads].dim, inverse.shape
        where = self._keep(inverse.float().contiguous())
        self._op(self._library.pdk_op_angles(self._handle, heads, where, len(inverse), factor))

    def linear(
        self,
        source: Buffer | None,
        weights: Packed,
        out: Buffer,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        add: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Record: `out` = (with `add` += `scale` times) the product, after `norm` if given.

        `source` None: the output of `gated`.
        """
        assert add or scale == 1.0, "only what is added is scaled"
        assert source is None or (source.width == weights.num_in and source.of_samples == out.of_samples)
        assert out.width == weights.num_out and out.dtype == torch.float32
        self._op(
            self._library.pdk_op_linear(
                self._handle, -1 if source is None else source.number, self._norm(norm, weights.num_in), eps,
                self._weights(weights), out.width, out.number, add, scale, out.of_samples,
            )
        )  # fmt: skip
        self._adapt(weights)

    def gated(
        self,
        source: Buffer,
        weights: Packed,
        *,
        norm: Tensor | None,
        eps: float,
        act: Activation = "silu",
        limit: float = math.inf,
    ) -> None:
        """Record: `act` of gate and up of `pack_gated` weights, as input of the `linear` that follows.

        `limit`: see `pdk_op_gated`.
        """
        assert source.width == weights.num_in
        self._op(
            self._library.pdk_op_gated(
                self._handle, source.number, self._norm(norm, weights.num_in), eps, self._weights(weights),
                ACTIVATIONS.index(act), limit,
            )
        )  # fmt: skip
        self._adapt(weights)

    def norm(self, source: Buffer, norm: Tensor, eps: float, out: Buffer) -> None:
        """Record: `out`, bf16, = `source` normalised."""
        assert out.dtype == torch.bfloat16 and out.width == source.width and out.of_samples == source.of_samples
        weight = self._norm(norm, source.width)
        self._op(self._library.pdk_op_norm(self._handle, source.number, weight, eps, out.number))

    def place(
        self,
        qkv: Buffer,
        layer: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        *,
        whole: bool = False,
        heads: int = 0,
    ) -> None:
        """Record: normalise and rotate the heads of `qkv` `[heads + 2 * kv_heads] * dim`; write K and V to pages.

        The norms are `[dim]`, of each head; with `whole` `[heads * dim]` and `[kv_heads * dim]`, of all heads of Q
        together and of all heads of K together. `qkv` may have more items after those of the heads. `layer`: number in
        the pool of the heads.
        """
        shape = self._heads[heads]
        assert qkv.width >= shape.qkv_width and 0 <= layer < shape.layers
        q_heads, k_heads = (shape.num_heads, shape.num_kv_heads) if whole else (1, 1)
        norms = self._norm(q_norm, q_heads * shape.dim), self._norm(k_norm, k_heads * shape.dim)
        self._op(self._library.pdk_op_place(self._handle, heads, qkv.number, layer, *norms, eps, whole))

    def attend(
        self,
        layer: int,
        out: Buffer,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        heads: int = 0,
    ) -> None:
        """Record: `out` `[heads * dim]` = attention of `place`'s output. `window` positions are visible; 0 for all."""
        shape = self._heads[heads]
        assert out.width == shape.num_heads * shape.dim and 0 <= layer < shape.layers and window >= 0 and softcap >= 0
        assert window or not shape.of_window, "pages behind a window are not those of the row"
        where = None if sinks is None else self._norm(sinks, shape.num_heads)
        self._op(self._library.pdk_op_attend(self._handle, heads, layer, out.number, window, softcap, where))

    def sigmoid(self, source: Buffer, gates: Buffer, out: Buffer, *, first: int = 0, add: bool = False) -> None:
        """Record: `out` = (with `add` +=) `source` times the sigmoid of its gates.

        The gates are the items of `gates` from `first` on, as many as `source` has. With `gates` of width 1 all items
        have the same gate. `out` may be `source`.
        """
        assert source.width == out.width and source.of_samples == gates.of_samples == out.of_samples
        one = gates.width == 1
        assert one or gates.width >= first + source.width
        self._op(self._library.pdk_op_sigmoid(self._handle, source.number, gates.number, first, one, out.number, add))

    def delta(
        self,
        source: Buffer,
        shape: DeltaShape,
        states: DeltaStates,
        conv: Tensor,
        decay: Tensor,
        bias: Tensor,
        norm: Tensor,
        eps: float,
        out: Buffer,
        gates: Buffer | None = None,
    ) -> None:
        """Record: `out` `[value_width]` = a GatedDeltaNet layer between its projections; see `pdk_op_delta`.

        `source` has Q, K, V, z, b and a. `conv` is `[conv_width, taps]`, `decay` and `bias` `[num_value_heads]`, `norm`
        `[value_dim]`. A state decays by `exp(decay * softplus(a + bias))`. With `channel_decay` of `shape`, `source`
        begins with Q, K, V and b, `gates` has a and z, and `bias` is `[num_value_heads * key_dim]`. Rows that begin at
        position 0 ignore what their slots hold. All layers have states with equally many pending tokens.
        """
        by_channel = shape.channel_decay
        assert source.width >= shape.width if by_channel else source.width == shape.width
        assert gates.width == shape.gate_width if gates is not None and by_channel else gates is None
        assert conv.shape == (shape.conv_width, shape.taps) and norm.shape == (shape.value_dim,)
        assert decay.shape == (shape.num_value_heads,) and bias.shape == (shape.num_decays,)
        assert out.width == shape.value_width
        self._kept.append(states)
        assert self._max_pending in (None, states.max_pending), "layers keep equally many pending tokens"
        self._max_pending = states.max_pending
        vectors = (self._keep(x.float().contiguous()) for x in (conv.t(), decay, bias, norm))
        self._op(
            self._library.pdk_op_delta(
                self._handle, ctypes.byref(states.pointers(shape)), source.number,
                -1 if gates is None else gates.number, *vectors, eps, out.number,
            )
        )  # fmt: skip

    def route(
        self, logits: Buffer, experts: Buffer, weights: Buffer, moe: MoeSpec, correction: Tensor | None = None
    ) -> None:
        """Record: the `experts` that a router with outputs `logits` chooses, int64, best first, and their `weights`.

        Both have the width `top_k` of `moe`. `correction` `[num_experts]` is the bias of `MoeSpec.correction_bias`.
        """
        assert experts.dtype == torch.int64 and experts.width == weights.width == moe.top_k <= logits.width
        assert logits.of_samples == experts.of_samples == weights.of_samples and logits.width == moe.num_experts
        assert logits.width % moe.num_groups == 0 and 1 <= moe.top_groups <= moe.num_groups
        how = PdkRouting(
            moe.top_k, moe.norm_top_k, moe.scoring == "sigmoid", moe.num_groups, moe.top_groups, moe.routed_scale,
            self._norm(correction, moe.num_experts),
        )  # fmt: skip
        number = self._library.pdk_op_route(
            self._handle, logits.number, ctypes.byref(how), experts.number, weights.number
        )
        self._op(number)

    def experts(
        self,
        source: Buffer,
        gate_up: Packed,
        down: Packed,
        experts: Buffer,
        weights: Buffer,
        out: Buffer,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        act: Activation = "silu",
        limit: float | None = None,
        counts: Tensor | None = None,
        add: bool = False,
    ) -> None:
        """Record: `out` = (or with `add` +=) the sum of a row's experts, `down(act(gate, up))`, times `weights`.

        `gate_up` and `down` have one layer per expert; `norm` is applied before. `limit`: see `pdk_op_gated`; None: no
        limit. The rows routed to each expert are added to `counts` int64 `[experts]`; None counts nothing.
        """
        num_experts, inner = len(gate_up.data), down.num_in
        assert len(down.data) == num_experts and gate_up.num_parts == 2 and gate_up.num_out == 2 * inner
        assert gate_up.inputs == down.inputs and source.width == gate_up.num_in
        assert out.width == down.num_out and out.dtype == torch.float32
        assert experts.dtype == torch.int64 and weights.dtype == torch.float32 and experts.width == weights.width
        assert source.of_samples == experts.of_samples == weights.of_samples == out.of_samples
        assert counts is None or (counts.dtype == torch.int64 and counts.shape == (num_experts,))
        counted = None if counts is None else self._keep(counts)
        self._op(
            self._library.pdk_op_experts(
                self._handle, source.number, self._norm(norm, source.width), eps, experts.number, weights.number,
                num_experts, self._weights(gate_up), self._weights(down), ACTIVATIONS.index(act),
                math.inf if limit is None else limit, counted, out.number, add,
            )
        )  # fmt: skip

    def add(self, source: Buffer, out: Buffer, *, norm: Tensor | None = None, eps: float = 0.0, scale: float) -> None:
        """Record: `out` += `scale` * `source`, which is normalised before if `norm` is given."""
        assert source.width == out.width and source.of_samples == out.of_samples
        assert source.dtype == out.dtype == torch.float32
        weight = self._norm(norm, source.width)
        self._op(self._library.pdk_op_add(self._handle, source.number, weight, eps, scale, out.number))

    def cap(self, buffer: Buffer, *, scale: float, softcap: float) -> None:
        """Record: each item x of `buffer` becomes `softcap * tanh(scale * x / softcap)`; `softcap` 0: `scale * x`."""
        assert buffer.dtype == torch.float32 and softcap >= 0
        self._op(self._library.pdk_op_cap(self._handle, buffer.number, scale, softcap))

    def select(self, source: Buffer, out: Buffer) -> None:
        """Record: `out` = the rows of `source` at the step's samples."""
        assert out.of_samples and not source.of_samples and out.width == source.width
        self._op(self._library.pdk_op_select(self._handle, source.number, out.number))

    def argmax(self, source: Buffer, out: Buffer) -> None:
        """Record: `out`, int64 of width 1, = the index of each row's maximum in `source`; ties go to the lower index.

        A NaN is skipped unless all items are NaN.
        """
        assert source.of_samples and out.of_samples and out.width == 1 and out.dtype == torch.int64
        self._op(self._library.pdk_op_argmax(self._handle, source.number, out.number))

    def begin(self, batch: ForwardBatch) -> None:
        """Begin a step and size the buffers for it. Keeps the batch's arrays until the next step."""
        columns, samples, host = batch.columns, batch.sample_index, batch.host
        assert columns.is_contiguous() and samples.is_contiguous() and columns.dtype == samples.dtype == torch.int64
        num_tokens, num_samples, first = columns.shape[1], samples.shape[0], columns.data_ptr()
        rows = [
            np.ascontiguousarray(array, dtype=np.int64)
            for array in (host.starts, host.ends, host.offsets, host.prompts)
        ]
        table = np.ascontiguousarray(host.pages, dtype=np.int32)
        window = None if host.window is None else np.ascontiguousarray(host.window, dtype=np.int32)
        slots = None if host.slots is None else np.ascontiguousarray(host.slots, dtype=np.int32)
        assert window is not None or not self._has_window, "a step of a model with a window has window pages"
        assert slots is not None or self._max_pending is None, "a step of a model with states has slots"
        drafts, folded = self._counts(host.num_drafts, 1), self._counts(host.num_folded, 0)
        adapters = None if host.adapters is None else adapter_pointers(host.adapters)
        step = Step(
            num_tokens, num_samples, len(table), first, first + 8 * num_tokens, first + 16 * num_tokens,
            first + 24 * num_tokens, samples.data_ptr(), *map(_address, rows), _address(table), table.shape[1],
            None if window is None else _address(window), 0 if window is None else window.shape[1],
            *(None if array is None else _address(array) for array in (slots, drafts, folded, adapters)),
        )  # fmt: skip
        self._step_kept = [columns, samples, rows, table, window, slots, drafts, folded, adapters, host.adapters]
        self._number(self._library.pdk_begin(self._handle, ctypes.byref(step)))

    def begin_fold(self, rows: HostRows) -> None:
        """Begin a step of rows without tokens, which only fold; see `fold_rows`. Run the operations `delta` alone."""
        self.begin(ForwardBatch(torch.empty(4, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), rows))

    def begin_samples(self, num_samples: int) -> None:
        """Begin a step without tokens, for operations over samples alone."""
        self._number(self._library.pdk_begin(self._handle, ctypes.byref(Step(0, num_samples, 0))))

    def run(self, first: int, last: int) -> None:
        """Run operations `[first, last)` of the step."""
        assert 0 <= first <= last <= self.num_ops
        if first < last:
            self._library.pdk_run(self._handle, first, last)

    def decode(
        self,
        facts: IntArray,
        tokens: npt.NDArray[np.int32],
        pages: npt.NDArray[np.int32],
        last: int,
        chosen: Buffer,
        window: npt.NDArray[np.int32] | None = None,
        slots: npt.NDArray[np.int32] | None = None,
        folded: IntArray | None = None,
        adapters: Adapters | None = None,
    ) -> list[int]:
        """Run a step of decode rows up to operation `last`, and return its tokens from `chosen`.

        Args:
            facts: int64 `[2, rows]`: each row's line in the tables, and the position of the token that it computes.
            tokens: int32 `[lines, ...]`, known tokens; each new token is written after its row's computed token.
            pages: int32 `[lines, ...]`, the page table.
            window: the page table of WINDOW groups, of the same shape; None without such groups.
            slots: int32 `[lines]`, the state slots; None without states.
            folded: int64 `[rows]`: see `HostRows.num_folded`; None: nothing is folded.
            adapters: see `HostRows.adapters`.
        """
        assert window is not None or not self._has_window, "a model with a window has window pages"
        assert slots is not None or self._max_pending is None, "a model with states has slots"
        folded = self._counts(folded, 0)
        num_rows = facts.shape[1]
        if num_rows > len(self._decoded):
            self._decoded = np.empty(num_rows, dtype=np.int64)
        first, out = _address(facts), self._decoded
        changes = None if adapters is None else adapter_pointers(adapters)
        rows = Decoding(
            num_rows, first, first + 8 * num_rows, _address(tokens), tokens.shape[1], _address(pages), pages.shape[1],
            None if window is None else _address(window), 0 if window is None else window.shape[1],
            *(None if array is None else _address(array) for array in (slots, folded, changes)),
        )  # fmt: skip
        number = self._library.pdk_decode(self._handle, ctypes.byref(rows), last, chosen.number, _address(out))
        self._number(number)
        found: list[int] = out[:num_rows].tolist()
        return found

    @property
    def _has_window(self) -> bool:
        return any(heads.of_window for heads in self._heads)

    def _counts(self, counts: IntArray | None, extra: int) -> IntArray | None:
        """Return counts of pending tokens by row; None where all are 0, or the program has no states.

        With `extra` 1 they are drafts, which pend behind one more token.
        """
        if counts is None or self._max_pending is None or not counts.any():
            return None
        assert counts.min() >= 0 and counts.max() + extra <= self._max_pending, (counts, self._max_pending)
        return np.ascontiguousarray(counts, dtype=np.int64)

    def _adapt(self, weights: Packed) -> None:
        """Give the operation that was recorded last adapters, if its layer has them."""
        site = self.adapted.get(id(weights))
        if site is not None:
            self._number(self._library.pdk_adapt(self._handle, self.num_ops - 1, site))

    def _op(self, number: int) -> None:
        assert self._number(number) == self.num_ops, "operations are numbered in order"
        self.num_ops += 1

    def _number(self, number: int) -> int:
        if number < 0:
            raise MemoryError("the kernels ran out of memory")
        return number

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _norm(self, weight: Tensor | None, width: int) -> int | None:
        if weight is None:
            return None
        assert weight.shape == (width,), (weight.shape, width)
        return self._keep(weight.float().contiguous())

    def _weights(self, weights: Packed) -> ctypes._CArgObject:
        self._kept.append(weights)
        return ctypes.byref(weights.pointers)
