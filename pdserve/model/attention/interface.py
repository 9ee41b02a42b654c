"""Interface between decoder layers and the backends over the pools of a rank.

An attention backend belongs to one kind of attention over the pool of one FULL or WINDOW group; `StateSlots` in
`state_slots.py` to the pool of one STATE group. `LayerBackends` in `layer_backends.py` joins them for models with
several. A backend over a WINDOW group gets batches whose pages are the window's, see `ForwardBatch.in_window`: page
numbers within a request count from its first token, and the entries of pages behind the window are undefined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows, IntArray
from pdserve.model.layer_spec import AttentionSpec
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.gated_delta import PendingTokens
from pdserve.model.layers.kernels import rotate

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Output of a layer's q/k/v projection, and the inputs of the norm and rotation that precede attention.

    `qkv` is `[N, num_heads + 2 * num_kv_heads, head_dim]`, contiguous. With `has_gates` it is
    `[N, 2 * num_heads + 2 * num_kv_heads, head_dim]`: each query has a gate behind it, which backends skip. `q_norm`
    and `k_norm` are per-head norms, both or neither None. `cos` and `sin` come from `Rotary.tables`; None: nothing is
    rotated. A backend may fuse norm, rotation and the KV write. `sinks` float32 `[num_heads]` are scores of a key
    without a value; None: there are none.
    """

    qkv: Tensor
    num_heads: int
    num_kv_heads: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    cos: Tensor | None
    sin: Tensor | None
    has_gates: bool = False
    sinks: Tensor | None = None

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """Apply norms and rotation in torch.

        Returns queries `[N, num_heads, head_dim]`, keys and values `[N, num_kv_heads, head_dim]`.
        """
        num_rotated, qkv = self.num_heads + self.num_kv_heads, self.qkv
        if self.has_gates:
            behind = 2 * self.num_heads
            qkv = torch.cat((qkv[:, :behind:2], qkv[:, behind:]), 1)
        q_and_k, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            normed = self.q_norm(q_and_k[:, : self.num_heads]), self.k_norm(q_and_k[:, self.num_heads :])
            q_and_k = torch.cat(normed, 1)
        if self.cos is not None and self.sin is not None:
            q_and_k = rotate(q_and_k, self.cos, self.sin)
        return q_and_k[:, : self.num_heads], q_and_k[:, self.num_heads :], v


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRule:
    """How a backend makes scores; see `AttentionSpec`. `window` None: all positions are seen.

    `scale` None stands for `head_dim ** -0.5`, and `softcap` None for no cap.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    @staticmethod
    def of(op: AttentionSpec) -> ScoreRule:
        """Return the rule of a kind of attention."""
        return ScoreRule(window=op.window, scale=op.scale, softcap=op.softcap)


ALL_POSITIONS = ScoreRule()


class StateRows:
    """The rows of a step, for layers with a recurrent state.

    Row r computes the tokens `[offsets[r], offsets[r + 1])` of the flat batch, whose first position is `starts[r]`. A
    row that starts at 0 begins from a zero state, whatever its slot holds. `slots[r]` is its index in the planes of
    `LayerStates`. A negative one belongs to a row of padding: it reads no state, and none is kept of it. Tensors are
    int64 on the device: `slots` and `starts` `[R]`, `offsets` `[R + 1]`.

    `is_decode`: each row has one token. `host`: the same rows on the host; None in a captured step, whose rows change
    between replays.
    """

    def __init__(
        self, slots: Tensor, starts: Tensor, offsets: Tensor, host: HostRows | None, *, is_decode: bool
    ) -> None:
        self.slots, self.starts, self.offsets = slots, starts, offsets
        self.host, self.is_decode = host, is_decode
        self._made: dict[str, object] = {}

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.slots)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, called by the first layer that asks for `name` in this step."""
        if name not in self._made:
            self._made[name] = make()
        found: T = self._made[name]  # type: ignore[assignment]
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class LayerStates:
    """What a step offers to one layer with a recurrent state.

    `planes`: by name, a view `[num_slots + 1, heads, rows, width]` of the pool, which the layer reads and overwrites in
    place. The last slot belongs to no request. `pending`: what rows with drafts leave beside them; None: no row has
    drafts.
    """

    rows: StateRows
    planes: Mapping[str, Tensor]
    pending: PendingTokens | None = None


class StepStates(Protocol):
    """Recurrent states of one step."""

    def states(self, layer: int) -> LayerStates:
        """Return the states of this rank's layer `layer`."""
        ...


class StepAttention(Protocol):
    """Attention of one step. A layer calls it; the layers run in order."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Write the keys and values of `heads` into the pool, then attend with its queries.

        `layer` counts the layers of the backend's pool; for `LayerBackends` and models with one group, those of this
        rank.

        Every token sees its own row's positions up to and including itself. Returns `[N, num_heads * head_dim]`.
        """
        ...


class AttentionBackend(Protocol):
    """An attention implementation bound to one KV pool."""

    def begin(self, batch: ForwardBatch) -> StepAttention:
        """Compute once what all layers of a step share."""
        ...

    def capturing(self) -> CapturableBackend | None:
        """Return the backend itself when a CUDA graph can capture its decode steps, else None."""
        ...


@runtime_checkable
class StateBackend(AttentionBackend, Protocol):
    """A backend of a model with recurrent states."""

    def fold(self, slots: IntArray, counts: IntArray) -> None:
        """Fold the first `counts[i]` pending tokens of slot `slots[i]` into its states, in all layers of this rank.

        Both are int64 `[n]`, and no slot occurs twice. Call it before a slot is read or copied outside of a step whose
        row it is: at an offload. On CUDA in the current stream. Afterwards the slots have no pending tokens.
        """
        ...


class CapturedAttention(StepAttention, Protocol):
    """Attention of decode steps of one size, for capture in a CUDA graph. It reads tensors at fixed addresses.

    A token with a negative page is not written.
    """

    def filling(self, rows: HostRows) -> list[Filling]:
        """Return the fillings for `fill` that set up the next replay. `rows` has as many rows as the captured size.

        For a WINDOW group they are `HostRows.in_window`. The fillings are enqueued after earlier replays.
        """
        ...


class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured."""

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> CapturedAttention:
        """Return attention of `num_rows` rows with one new token and up to `max_pages` pages each.

        Called once for each size. `write_pages` and `write_slots` are as in `ForwardBatch`, at fixed addresses.
        """
        ...
