"""The arithmetic of a GatedDeltaNet layer in torch (arXiv:2412.06464), over a flat batch of rows with state slots.

Each value head has a state `S` `[key_dim, value_dim]`, float32. A token with query q, key k, value v, log decay g and
learning rate b does `S *= exp(g); S += outer(k, b * (v - S.T @ k)); out = S.T @ q`. A causal convolution over the
last `conv_kernel` tokens comes before. Key head i serves the value heads `i * r ... i * r + r - 1`.

Prompt tokens are computed in blocks of at most `BLOCK` tokens, which end at positions that are multiples of `BLOCK`.
Within a block the updates become one triangular solve (the UT transform, arXiv:2406.06484). All other tokens, which
were generated, take the recurrent step, also when a retracted request computes them again.

For one decomposition into blocks the values of a row do not depend on the other rows, as far as torch's batched
products do not. Chunks that all end at a multiple of `BLOCK`, or at the prompt's end, give the blocks of the unchunked
prompt, so the same bits. A chunk that ends elsewhere cuts a block in two: the result is the same up to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.forward_batch import HostRows, IntArray, to_device

BLOCK = 64
"""Most tokens of a block."""
_L2_EPS = 1e-6


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
    def _convs(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def conv_index(self, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices into the concatenation over rows of `num_kept` earlier inputs and the new tokens.

        `(earlier, tokens, last)`: int64 `[num_rows * num_kept]`, `[N]`, and the last inputs `[num_rows * num_kept]`.
        """
        if num_kept not in self._convs:
            rows, lengths, kept = np.arange(self.num_rows), self._lengths, np.arange(num_kept)
            begin = self._offsets + rows * num_kept
            tokens = np.arange(self.num_tokens) + (rows.repeat(lengths) + 1) * num_kept
            earlier, last = ((at[:, None] + kept).flatten() for at in (begin, begin + lengths))
            self._convs[num_kept] = tuple(to_device(index, self._device) for index in (earlier, tokens, last))  # type: ignore[assignment]
        return self._convs[num_kept]

    def _round(self, rows: IntArray, tokens: IntArray) -> Round:
        every = len(rows) == self.num_rows
        return Round(None if every else to_device(rows, self._device), to_device(tokens, self._device))


def causal_conv(x: Tensor, weight: Tensor, planes: Sequence[Tensor], rows: DeltaRows) -> Tensor:
    """Convolve each channel of `[N, channels]` with the last inputs of its row, then apply SiLU: float32.

    `weight` is `[channels, conv_kernel]`, the newest input last. `planes` `[slots, heads, head_dim, conv_kernel - 1]`
    are the last inputs of each request, oldest first. Their heads and widths together are the channels, in order.
    """
    num_kept = weight.shape[1] - 1
    earlier, tokens, last = rows.conv_index(num_kept)
    widths = [plane.shape[1] * plane.shape[2] for plane in planes]
    kept = torch.cat([rows.load(plane).flatten(1, 2) for plane in planes], 1).transpose(1, 2)
    inputs = x.new_empty(rows.num_rows * num_kept + rows.num_tokens, x.shape[1])
    inputs.index_copy_(0, earlier, kept.reshape(-1, x.shape[1]).to(x.dtype))
    inputs.index_copy_(0, tokens, x)
    left = inputs[last].view(rows.num_rows, num_kept, -1).transpose(1, 2)
    for plane, part in zip(planes, torch.split(left, widths, 1), strict=True):
        rows.store(plane, part.reshape(-1, *plane.shape[1:]))
    taps = weight.float().t()
    out = inputs[tokens - num_kept].float() * taps[0]
    for tap in range(1, num_kept + 1):
        out.addcmul_(inputs[tokens - num_kept + tap].float(), taps[tap])
    return F.silu(out, inplace=True)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, plane: Tensor, rows: DeltaRows
) -> Tensor:
    """Apply the gated delta rule to the N tokens of `rows`, and store the new states.

    `q` and `k` are `[N, key_heads, key_dim]`, `v` `[N, value_heads, value_dim]`, `log_decay` (at most 0) and `rate`
    `[N, value_heads]`, all float32. Queries and keys get norm 1; queries are scaled by `key_dim ** -0.5`. `plane` are
    the states, float32 `[slots, value_heads, key_dim, value_dim]`.

    Returns:
        float32 `[N, value_heads, value_dim]`.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = (_normalised(heads).repeat_interleave(shared, 1) for heads in (q, k))
    q = q * k.shape[-1] ** -0.5
    padded = [F.pad(x, (0,) * (2 * x.dim() - 1) + (1,)) for x in (q, k, v, log_decay, rate)]
    states = rows.load(plane)
    out = v.new_zeros(rows.num_tokens + 1, *v.shape[1:])
    for rounds, advance in ((rows.blocks, advance_block), (rows.steps, advance_step)):
        for turn in rounds:
            parts = [x[turn.tokens] for x in padded]
            if turn.rows is None:
                out[turn.tokens], states = advance(states, *parts)
            else:
                out[turn.tokens], states[turn.rows] = advance(states[turn.rows], *parts)
    rows.store(plane, states)
    return out[: rows.num_tokens]


def advance_block(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance n states `[n, heads, key_dim, value_dim]` by a block of C tokens each.

    `q` and `k` are `[n, C, heads, key_dim]`, `v` `[n, C, heads, value_dim]`, `log_decay` and `rate` `[n, C, heads]`.
    Tokens that are all zeros change nothing.

    Returns:
        The outputs `[n, C, heads, value_dim]` and the new states.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    log_decay, rate = log_decay.transpose(1, 2), rate.transpose(1, 2)[..., None]
    since_begin = log_decay.cumsum(-1)
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    between = (since_begin[..., :, None] - since_begin[..., None, :]).masked_fill(hidden, float("-inf")).exp()
    decay = since_begin.exp()[..., None]
    rated = k * rate
    system = (rated @ k.mT) * between
    right = torch.cat((v * rate, rated * decay), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    delta = values - reads @ states
    out = (q * decay) @ states + ((q @ k.mT) * between) @ delta
    to_end = (since_begin[..., -1:] - since_begin).exp()[..., None]
    states = states * decay[..., -1:, :] + (k * to_end).mT @ delta
    return out.transpose(1, 2), states


def advance_step(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance n states by one token each, as `advance_block` without its dimension C. Overwrites `states`."""
    states = states.mul_(log_decay.exp()[..., None, None])
    delta = (v - (k[..., None, :] @ states)[..., 0, :]) * rate[..., None]
    states += k[..., :, None] * delta[..., None, :]
    return (q[..., None, :] @ states)[..., 0, :], states


def log_decay_of(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the log decay `-exp(a_log) * softplus(a + dt_bias)` of `[N, value_heads]`: float32, at most 0."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight * rms_norm(x) * silu(z)` over the last dimension, float32; `x` and `z` have one shape."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * weight.float() * F.silu(z.float())


def _normalised(heads: Tensor) -> Tensor:
    """Return `heads` with norm 1 along the last dimension."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)
