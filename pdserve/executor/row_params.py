"""Sampling parameters of all table rows as columns, so that a step picks those of its rows with one index.

Written by `LocalExecutor.open_row`, read by the sampler.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from pdserve.model.forward_batch import IntArray
from pdserve.protocol.sampling import SamplingParams

_COLUMNS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i8"),
        ("min_p", "f4"),
        ("repetition", "f4"),
        ("frequency", "f4"),
        ("presence", "f4"),
        ("seed", "u8"),
        ("num_prompt", "i8"),
        ("min_new", "i8"),
        ("num_top", "i8"),
        ("logprob", "?"),
        ("greedy", "?"),
        ("history", "?"),
    ]
)


@dataclasses.dataclass(frozen=True)
class StepParams:
    """Columns of the rows that sample in this step, in plan order, and the position of the token each samples.

    `bans[i]` are tokens that row i may not take yet, `biases[i]` what is added to its logits; absent rows have none.
    """

    columns: np.ndarray[tuple[int], np.dtype[np.void]]
    lines: IntArray
    positions: IntArray
    bans: dict[int, tuple[int, ...]]
    biases: dict[int, dict[int, float]]

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asked for log-probabilities."""
        return bool(self.columns["logprob"].any())

    @property
    def num_top(self) -> int:
        """The most top entries that a row asked for."""
        return int(self.columns["num_top"].max())


class Seeds:
    """Seeds for requests that bring none. Where several ranks run one request, the leader gives it its seed."""

    def __init__(self, default_seed: int | None = None) -> None:
        self._random = np.random.default_rng(default_seed)

    def fix(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` with a seed: its own, or a new one."""
        if sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=int(self._random.integers(1 << 63)))


class RowParams:
    """The columns. `default_seed` makes seeds for requests that bring none."""

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...], default_seed: int | None = None) -> None:
        self._columns = np.zeros(num_rows, dtype=_COLUMNS)
        self._eos = eos_token_ids
        self._bans: dict[int, tuple[int, ...]] = {}
        self._biases: dict[int, dict[int, float]] = {}
        self._seeds = Seeds(default_seed)

    def set(self, row: int, num_prompt: int, sampling: SamplingParams, top_logprobs: int | None) -> None:
        """A request takes `row`."""
        self.clear(row)
        seed = self._seeds.fix(sampling).seed
        assert seed is not None, "fixed"
        self._columns[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            seed & ((1 << 64) - 1),
            num_prompt,
            sampling.min_new_tokens,
            top_logprobs or 0,
            top_logprobs is not None,
            sampling.greedy,
            sampling.needs_history,
        )
        if sampling.min_new_tokens:
            self._bans[row] = tuple(sorted({*self._eos, *sampling.stop_token_ids}))
        if sampling.logit_bias:
            self._biases[row] = sampling.logit_bias

    def clear(self, row: int) -> None:
        """The request has left `row`."""
        self._bans.pop(row, None)
        self._biases.pop(row, None)

    def pick(self, lines: IntArray, positions: IntArray) -> StepParams:
        """The parameters of table rows `lines`, which sample the tokens at `positions`."""
        columns = self._columns[lines]
        early = positions - columns["num_prompt"] < columns["min_new"]
        bans = {int(i): self._bans[int(lines[i])] for i in np.flatnonzero(early) if int(lines[i]) in self._bans}
        biases = {}
        if self._biases:
            biases = {i: self._biases[int(line)] for i, line in enumerate(lines) if int(line) in self._biases}
        return StepParams(columns, lines, positions, bans, biases)
