"""The arithmetic of a GatedDeltaNet layer in torch (arXiv:2412.06464), over a flat batch of rows with state slots.

Each value head has a state `S` `[key_dim, value_dim]`, float32. A token with query q, key k, value v, log decay g and
learning rate b does `S *= exp(g); S += outer(k, b * (v - S.T @ k)); out = S.T @ q`. A causal convolution over the
last `conv_kernel` tokens comes before. Key head i serves the value heads `i * r ... i * r + r - 1`. In Kimi Delta
Attention (arXiv:2510.26692) g has a value for each row of S.

Prompt tokens are computed in blocks of at most `BLOCK` tokens, which end at positions that are multiples of `BLOCK`.
Within a block the updates become one triangular solve (the UT transform, arXiv:2406.06484). All other tokens, which
were generated, take the recurrent step, also when a retracted request computes them again.

For one decomposition into blocks the values of a row do not depend on the other rows, as far as torch's batched
products do not. Chunks that all end at a multiple of `BLOCK`, or at the prompt's end, give the blocks of the unchunked
prompt, so the same bits. A chunk that ends elsewhere cuts a block in two: the result is the same up to rounding.

A state cannot be taken back, so a row with drafts does not write its slot. Its tokens become *pending*: each layer
keeps what they change. The next step with the slot first *folds* the accepted ones into the state, by the operations of
the recurrent step, and drops the others (`HostRows.num_folded`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.forward_batch import HostRows, IntArray, to_device
from pdserve.model.layers.channel_decay import decayed_scores

BLOCK = 64
"""Most tokens of a block."""
_L2_EPS = 1e-6
_VECTOR = 32
"""Elements that torch computes together: two vectors of AVX-512 in float32."""


CONV_PLANES = ("conv_q", "conv_k", "conv_v")
"""The planes of a layer's last inputs, in the order of its channels."""
MAX_PENDING = 32
"""Most tokens of a row with drafts: its first token and 31 drafts."""


@dataclasses.dataclass(frozen=True)
class PendingTokens:
    """The pending tokens of one layer in all slots of its pool, in order; at most P for each slot.

    `inputs` `[slots, P, channels]`: inputs of the convolution, in the dtype of its planes. float32: `keys`
    `[slots, P, key_heads, key_dim]`, of norm 1; `deltas` `[slots, P, value_heads, value_dim]`: a token adds the outer
    product of key and delta to the state; `decays` `[slots, P, value_heads]`: the state is multiplied by it before.
    Where each row of a state has a decay, `decays` is `[slots, P, value_heads, key_dim]`.
    """

    inputs: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor

    @property
    def most(self) -> int:
        """P, the most tokens of a row with drafts."""
        return self.inputs.shape[1]

    @property
    def changes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, deltas and decays: what the tokens change in a state."""
        return self.keys, self.deltas, self.decays


@dataclasses.dataclass(frozen=True)
class Fold:
    """Rows that fold a pending token. int64 `[n]`: `rows` of the step, and their `slots`."""

    rows: Tensor
    slots: Tensor


@dataclasses.dataclass(frozen=True)
class DraftedRows:
    """The rows with drafts, int64 `[n]`. Their T tokens: slots, numbers within the row, flat indices, int64 `[T]`."""

    rows: Tensor
    slots: Tensor
    numbers: Tensor
    tokens: Tensor


@dataclasses.dataclass(frozen=True)
class Round:
    """Rows that advance together. `rows` int64 `[n]`; None: all rows of the step, in order.

    `tokens` int64: flat indices, `[n, BLOCK]` for blocks and `[n]` for recurrent steps. Index N of a batch of N tokens
    stands for no token.
    """

    rows: Tensor | None
    tokens: Tensor


class DeltaRows:
    """Index tensors of a step's rows that its layers share.

    `slots` and `starts` are int64 `[R]` on the device; a row with a negative slot is padding. `host` are the same rows;
    None: each row has one token, which was generated.
    """

    def __init__(self, slots: Tensor, starts: Tensor, host: HostRows | None) -> None:
        self._slots, self._device = slots, slots.device
        self.num_rows, may_begin = len(slots), True
        if host is None:
            self._starts = self._recurrent = np.zeros(self.num_rows, dtype=np.int64)
            self._lengths = np.ones(self.num_rows, dtype=np.int64)
        else:
            assert host.slots is not None, "rows of a model with state have slots"
            may_begin = bool((host.starts == 0).any() or (host.slots < 0).any())
            self._starts, self._lengths = host.starts, host.ends - host.starts
            self._recurrent = np.clip(host.prompts, host.starts, host.ends)
        self._num_drafts = _without_zeros(None if host is None else host.num_drafts)
        self._num_folded = _without_zeros(None if host is None else host.num_folded)
        self._host_slots = None if host is None else host.slots
        self._begins = ((starts == 0) | (slots < 0)).view(-1, 1, 1, 1) if may_begin else None
        self._offsets: IntArray = self._lengths.cumsum() - self._lengths
        self.num_tokens = int(self._lengths.sum())

    def load(self, plane: Tensor) -> Tensor:
        """Return a copy of each row's slot of `plane`, `[R, heads, rows, width]`; zeros for rows that begin there."""
        states = plane[self._slots]
        return states if self._begins is None else states.masked_fill_(self._begins, 0.0)

    def store(self, plane: Tensor, states: Tensor) -> None:
        """Overwrite each row's slot of `plane`. Rows of padding write the last slot, which belongs to no request."""
        plane[self._slots] = states.to(plane.dtype)

    @functools.cached_property
    def blocks(self) -> list[Round]:
        """The blocks of prompt tokens, in order: round i has block i of each row with that many blocks."""
        starts, ends = self._starts, self._recurrent
        first = starts // BLOCK
        counts = np.where(ends > starts, -(-ends // BLOCK) - first, 0)
        rounds = []
        for i in range(int(counts.max(initial=0))):
            rows = np.flatnonzero(counts > i)
            begin = (first[rows] + i) * BLOCK
            positions = np.maximum(begin, starts[rows])[:, None] + np.arange(BLOCK)
            tokens = positions + (self._offsets - starts)[rows, None]
            tokens[positions >= np.minimum(begin + BLOCK, ends[rows])[:, None]] = self.num_tokens
            rounds.append(self._round(rows, tokens))
        return rounds

    @functools.cached_property
    def steps(self) -> list[Round]:
        """The recurrent steps, in order: round i has generated token i of each row with that many."""
        counts = self._starts + self._lengths - self._recurrent
        rounds = []
        for i in range(int(counts.max(initial=0))):
            rows = np.flatnonzero(counts > i)
            rounds.append(self._round(rows, (self._offsets + self._recurrent - self._starts)[rows] + i))
        return rounds

    @functools.cached_property
    def folds(self) -> list[Fold]:
        """The rows that fold pending tokens, in order: entry i has those that fold token i of their slots."""
        counts, slots = self._num_folded, self._host_slots
        if counts is None or slots is None:
            return []
        by_token = [np.flatnonzero(counts > i) for i in range(int(counts.max()))]
        return [
            Fold(to_device(rows, self._device), to_device(slots[rows].astype(np.int64), self._device))
            for rows in by_token
        ]

    @functools.cached_property
    def folded(self) -> Tensor | None:
        """The pending tokens that each row of `folds[0]` folds, int64 `[n]`; None: no row folds any."""
        counts = self._num_folded
        return None if counts is None else to_device(counts[counts > 0], self._device)

    @functools.cached_property
    def drafted(self) -> DraftedRows | None:
        """The rows with drafts; None without such rows."""
        if self._num_drafts is None or self._host_slots is None:
            return None
        rows = np.flatnonzero(self._num_drafts)
        lengths = self._lengths[rows]
        assert (lengths == self._num_drafts[rows] + 1).all(), "a row with drafts has one other token"
        assert (self._recurrent[rows] == self._starts[rows]).all(), "a row with drafts is beyond its prompt"
        numbers = np.arange(int(lengths.sum())) - (lengths.cumsum() - lengths).repeat(lengths)
        slots = self._host_slots[rows].astype(np.int64).repeat(lengths)
        tokens = numbers + self._offsets[rows].repeat(lengths)
        return DraftedRows(*(to_device(index, self._device) for index in (rows, slots, numbers, tokens)))

    def check(self, pending: PendingTokens | None) -> None:
        """Assert that the layer keeps as many pending tokens as the rows have and fold."""
        most = 0 if pending is None else pending.most
        assert self._num_drafts is None or self._num_drafts.max() < most, "more drafts than the layer keeps"
        assert self._num_folded is None or self._num_folded.max() <= most, "more tokens to fold than the layer keeps"

    @functools.cached_property
    def _convs(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def conv_index(self, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices into the concatenation over rows of `num_kept` earlier inputs and the new tokens.

        `(earlier, tokens, last)`: int64 `[num_rows * num_kept]`, `[N]`, and `[num_rows * num_kept]`: the last inputs
        that a row's slot keeps, which are the earlier ones in a row with drafts.
        """
        if num_kept not in self._convs:
            rows, lengths, kept = np.arange(self.num_rows), self._lengths, np.arange(num_kept)
            begin = self._offsets + rows * num_kept
            tokens = np.arange(self.num_tokens) + (rows.repeat(lengths) + 1) * num_kept
            written = lengths if self._num_drafts is None else np.where(self._num_drafts > 0, 0, lengths)
            earlier, last = ((at[:, None] + kept).flatten() for at in (begin, begin + written))
            self._convs[num_kept] = tuple(to_device(index, self._device) for index in (earlier, tokens, last))  # type: ignore[assignment]
        return self._convs[num_kept]

    def _round(self, rows: IntArray, tokens: IntArray) -> Round:
        every = len(rows) == self.num_rows
        return Round(None if every else to_device(rows, self._device), to_device(tokens, self._device))


def causal_conv(
    x: Tensor, weight: Tensor, planes: Sequence[Tensor], rows: DeltaRows, pending: PendingTokens | None = None
) -> Tensor:
    """Convolve each channel of `[N, channels]` with the last inputs of its row, then apply SiLU: float32.

    `weight` is `[channels, conv_kernel]`, the newest input last. `planes` `[slots, heads, head_dim, conv_kernel - 1]`
    are the last inputs of each request, oldest first. Their heads and widths together are the channels, in order. With
    `pending` the rows fold its inputs, and rows with drafts leave theirs.
    """
    rows.check(pending)
    num_kept = weight.shape[1] - 1
    earlier, tokens, last = rows.conv_index(num_kept)
    kept = _last_inputs(planes, rows, pending)
    if pending is not None and rows.drafted is not None:
        drafted = rows.drafted
        pending.inputs[drafted.slots, drafted.numbers] = x[drafted.tokens].to(pending.inputs.dtype)
    inputs = x.new_empty(rows.num_rows * num_kept + rows.num_tokens, x.shape[1])
    inputs.index_copy_(0, earlier, kept.reshape(-1, x.shape[1]).to(x.dtype))
    inputs.index_copy_(0, tokens, x)
    _store_inputs(inputs[last].view(rows.num_rows, num_kept, -1), planes, rows)
    taps = weight.float().t()
    out = inputs[tokens - num_kept].float() * taps[0]
    for tap in range(1, num_kept + 1):
        out.addcmul_(inputs[tokens - num_kept + tap].float(), taps[tap])
    return F.silu(out, inplace=True)


def _last_inputs(planes: Sequence[Tensor], rows: DeltaRows, pending: PendingTokens | None) -> Tensor:
    """Return the inputs before each row, oldest first, the folded ones among them: `[R, num_kept, channels]`."""
    kept = torch.cat([rows.load(plane).flatten(1, 2) for plane in planes], 1).transpose(1, 2)
    if pending is not None and rows.folded is not None:
        fold = rows.folds[0]
        recent = torch.cat((kept[fold.rows], pending.inputs[fold.slots].to(kept.dtype)), 1)
        index = rows.folded[:, None] + torch.arange(kept.shape[1], device=kept.device)
        kept[fold.rows] = recent.gather(1, index[..., None].expand(-1, -1, recent.shape[2]))
    return kept


def _store_inputs(kept: Tensor, planes: Sequence[Tensor], rows: DeltaRows) -> None:
    """Store the last inputs of each row, `[R, num_kept, channels]`."""
    widths = [plane.shape[1] * plane.shape[2] for plane in planes]
    for plane, part in zip(planes, torch.split(kept.transpose(1, 2), widths, 1), strict=True):
        rows.store(plane, part.reshape(-1, *plane.shape[1:]))


def fold_pending(convs: Sequence[Tensor], plane: Tensor, rows: DeltaRows, pending: PendingTokens) -> None:
    """Fold the pending tokens of `rows`, which have no tokens, into one layer's planes of inputs and of states."""
    _store_inputs(_last_inputs(convs, rows, pending), convs, rows)
    rows.store(plane, _folded(rows.load(plane), rows, pending))


def _folded(states: Tensor, rows: DeltaRows, pending: PendingTokens | None) -> Tensor:
    """Fold pending tokens into the states of the rows, `[R, value_heads, key_dim, value_dim]`. Overwrites `states`."""
    if pending is not None:
        for i, fold in enumerate(rows.folds):
            keys, deltas, decays = (x[fold.slots, i] for x in pending.changes)
            keys = keys.repeat_interleave(deltas.shape[1] // keys.shape[1], 1)
            states[fold.rows] = _changed(_decayed(states[fold.rows], decays), keys, deltas)
    return states


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    plane: Tensor,
    rows: DeltaRows,
    pending: PendingTokens | None = None,
) -> Tensor:
    """Apply the gated delta rule to the N tokens of `rows`, and store the new states.

    `q` and `k` are `[N, key_heads, key_dim]`, `v` `[N, value_heads, value_dim]`, `log_decay` (at most 0) and `rate`
    `[N, value_heads]`, all float32. Where each row of a state has a decay, `log_decay` is `[N, value_heads, key_dim]`.
    Queries and keys get norm 1; queries are scaled by `key_dim ** -0.5`. `plane` are the states, float32 `[slots,
    value_heads, key_dim, value_dim]`. With `pending` the rows first fold its tokens, and rows with drafts leave theirs.

    Returns:
        float32 `[N, value_heads, value_dim]`.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = _normalised(q), _normalised(k)
    keys = k
    q, k = (heads.repeat_interleave(shared, 1) for heads in (q, k))
    q = q * k.shape[-1] ** -0.5
    padded = [F.pad(x, (0,) * (2 * x.dim() - 1) + (1,)) for x in (q, k, v, log_decay, rate)]
    states = _folded(rows.load(plane), rows, pending)
    drafted = None if pending is None else rows.drafted
    settled = None if drafted is None else states[drafted.rows]
    out = v.new_zeros(rows.num_tokens + 1, *v.shape[1:])
    changes = None if drafted is None else (torch.empty_like(out), torch.empty_like(padded[3]))
    for turn in rows.blocks:
        parts = [x[turn.tokens] for x in padded]
        if turn.rows is None:
            out[turn.tokens], states = advance_block(states, *parts)
        else:
            out[turn.tokens], states[turn.rows] = advance_block(states[turn.rows], *parts)
    for turn in rows.steps:
        step = advance_step(states if turn.rows is None else states[turn.rows], *(x[turn.tokens] for x in padded))
        out[turn.tokens] = step.out
        if turn.rows is None:
            states = step.states
        else:
            states[turn.rows] = step.states
        if changes is not None:
            changes[0][turn.tokens], changes[1][turn.tokens] = step.delta, step.decay
    if pending is not None and drafted is not None and settled is not None and changes is not None:
        states[drafted.rows] = settled
        for kept, values in zip(pending.changes, (keys, *changes), strict=True):
            kept[drafted.slots, drafted.numbers] = values[drafted.tokens]
    rows.store(plane, states)
    return out[: rows.num_tokens]


def advance_block(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance n states `[n, heads, key_dim, value_dim]` by a block of C tokens each.

    `q` and `k` are `[n, C, heads, key_dim]`, `v` `[n, C, heads, value_dim]`, `log_decay` and `rate` `[n, C, heads]`.
    `log_decay` may be `[n, C, heads, key_dim]`. Tokens that are all zeros change nothing.

    Returns:
        The outputs `[n, C, heads, value_dim]` and the new states.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    log_decay, rate = log_decay.transpose(1, 2), rate.transpose(1, 2)[..., None]
    rated = k * rate
    if log_decay.dim() == 4:
        since_begin, scores, system = decayed_scores(q, rated, k, log_decay)
        decay = since_begin.exp()
        to_end, kept = (since_begin[..., -1:, :] - since_begin).exp(), decay[..., -1, :, None]
    else:
        since_begin = log_decay.cumsum(-1)
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        between = (since_begin[..., :, None] - since_begin[..., None, :]).masked_fill(hidden, float("-inf")).exp()
        decay = since_begin.exp()[..., None]
        scores, system = (q @ k.mT) * between, (rated @ k.mT) * between
        to_end, kept = (since_begin[..., -1:] - since_begin).exp()[..., None], decay[..., -1:, :]
    right = torch.cat((v * rate, rated * decay), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    delta = values - reads @ states
    out = (q * decay) @ states + scores @ delta
    states = states * kept + (k * to_end).mT @ delta
    return out.transpose(1, 2), states


@dataclasses.dataclass(frozen=True)
class Advanced:
    """A recurrent step of n states: outputs `[n, heads, value_dim]`, new states, and what `PendingTokens` keeps.

    `delta` is `[n, heads, value_dim]`, `decay` `[n, heads]` or `[n, heads, key_dim]`.
    """

    out: Tensor
    states: Tensor
    delta: Tensor
    decay: Tensor


def advance_step(states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor) -> Advanced:
    """Advance n states by one token each, as `advance_block` without its dimension C. Overwrites `states`."""
    decay = log_decay.exp()
    states = _decayed(states, decay)
    delta = (v - (k[..., None, :] @ states)[..., 0, :]) * rate[..., None]
    states = _changed(states, k, delta)
    return Advanced((q[..., None, :] @ states)[..., 0, :], states, delta, decay)


def _decayed(states: Tensor, decay: Tensor) -> Tensor:
    """Multiply the rows of states by `decay`, `[n, heads]` or `[n, heads, key_dim]`. Overwrites `states`."""
    return states.mul_(decay.view(*states.shape[:2], -1, 1))


def _changed(states: Tensor, k: Tensor, delta: Tensor) -> Tensor:
    """Add the outer products of `k` `[n, heads, key_dim]` and `delta` `[n, heads, value_dim]`. Overwrites `states`."""
    states += k[..., :, None] * delta[..., None, :]
    return states


def log_decay_of(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the log decay `-exp(a_log) * softplus(a + dt_bias)` of `[N, value_heads]`: float32, at most 0.

    With a decay for each row of a state `a` is `[N, value_heads, key_dim]`, and the others broadcast.
    """
    return -a_log.float().exp() * in_whole_vectors(F.softplus, a.float() + dt_bias.float())


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single elements to `x` so that the bits of an element do not depend on its place.

    On CPU torch computes the elements behind the last whole vector of a contiguous run by other operations than those
    in vectors.
    """
    if x.device.type != "cpu":
        return function(x)
    return function(F.pad(x.reshape(-1), (0, -x.numel() % _VECTOR)))[: x.numel()].view(x.shape)


OutputGate = Literal["silu", "sigmoid"]
"""What the gate z of an output becomes."""


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: OutputGate = "silu") -> Tensor:
    """Return `weight * rms_norm(x) * gate(z)` over the last dimension, float32; `x` and `z` have one shape."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight.float() * (F.silu(z.float()) if gate == "silu" else torch.sigmoid(z.float()))


def _normalised(heads: Tensor) -> Tensor:
    """Return `heads` with norm 1 along the last dimension."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)


def _without_zeros(counts: IntArray | None) -> IntArray | None:
    """Return `counts`; None where all are zero."""
    return None if counts is None or not counts.any() else counts
