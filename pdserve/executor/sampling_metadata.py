"""Sampling parameters of all table rows as columns, so that a step picks those of its rows with one index.

Written by `LocalExecutor.open_row`, read by the sampler.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.parallel import Arrival
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams

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
        ("grammar", "?"),
        ("plain", "?"),
    ]
)


@dataclasses.dataclass(frozen=True)
class StepParams:
    """Columns of the rows that sample in this step, in plan order, and the position of the token each samples.

    `bans[i]` are tokens that row i may not take yet, `biases[i]` what is added to its logits, `picks[i]` the ids whose
    log-probabilities it wants; absent rows have none.
    """

    columns: np.ndarray[tuple[int], np.dtype[np.void]]
    lines: IntArray
    positions: IntArray
    bans: dict[int, tuple[int, ...]]
    biases: dict[int, dict[int, float]]
    picks: dict[int, tuple[int, ...]]
    takes_best: bool
    """Whether every row takes its likeliest token as the logits are, and nobody asks for more."""

    @property
    def constrained(self) -> IntArray:
        """The rows whose output follows a grammar."""
        return np.flatnonzero(self.columns["grammar"])

    def without_grammar_bans(self) -> StepParams:
        """The same, less the bans that the masks of grammars have seen to."""
        follows = self.columns["grammar"]
        return dataclasses.replace(self, bans={i: tokens for i, tokens in self.bans.items() if not follows[i]})

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asked for log-probabilities."""
        return bool(self.columns["logprob"].any())

    @property
    def num_top(self) -> int:
        """The most top entries that a row asked for."""
        return int(self.columns["num_top"].max())

    @property
    def num_picks(self) -> int:
        """The most ids whose log-probabilities a row asked for."""
        return max(map(len, self.picks.values()), default=0)


class Seeds:
    """Seeds for requests that bring none. Where several ranks run one request, the leader gives it its seed."""

    def __init__(self, default_seed: int | None = None) -> None:
        self._random = np.random.default_rng(default_seed)

    def fix(self, sampling: CoreSamplingParams) -> CoreSamplingParams:
        """`sampling` with a seed: its own, or a new one."""
        if sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=int(self._random.integers(1 << 63)))


class SamplingMetadata:
    """The columns. `default_seed` makes seeds for requests that bring none."""

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...], default_seed: int | None = None) -> None:
        self._columns = np.zeros(num_rows, dtype=_COLUMNS)
        self._eos = eos_token_ids
        self._bans: dict[int, tuple[int, ...]] = {}
        self._biases: dict[int, dict[int, float]] = {}
        self._picks: dict[int, tuple[int, ...]] = {}
        self.prompt_wishes: dict[int, tuple[int, Logprobs]] = {}
        """Prompt tokens and wish of rows that want log-probabilities of their prompt."""
        self._seeds = Seeds(default_seed)
        self._picked = b"", self._columns[:0], False
        """The last rows picked, their columns, and whether all are plain: decode steps have the same rows for long."""

    def set(self, row: int, num_prompt: int, sampling: CoreSamplingParams, logprobs: Logprobs | None) -> None:
        """A request takes `row`."""
        self.clear(row)
        seed = self._seeds.fix(sampling).seed
        assert seed is not None, "fixed"
        wants_output_logprobs = logprobs is not None and logprobs.output
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
            logprobs.top if logprobs is not None and wants_output_logprobs else 0,
            wants_output_logprobs,
            sampling.greedy,
            sampling.needs_history,
            sampling.grammar is not None,
            sampling.greedy and not (sampling.needs_history or sampling.grammar is not None or wants_output_logprobs),
        )
        if sampling.min_new_tokens:
            self._bans[row] = tuple(sorted({*self._eos, *sampling.stop_token_ids}))
        if sampling.logit_bias:
            self._biases[row] = sampling.logit_bias
        if logprobs is not None and wants_output_logprobs and logprobs.token_ids:
            self._picks[row] = logprobs.token_ids
        if logprobs is not None and logprobs.prompt_from is not None:
            self.prompt_wishes[row] = (num_prompt, logprobs)

    @property
    def num_prompt(self) -> IntArray:
        """Prompt tokens of every row, int64 `[num_rows]`."""
        return self._columns["num_prompt"]

    def clear(self, row: int) -> None:
        """The request has left `row`."""
        self._picked = b"", self._columns[:0], False
        self._bans.pop(row, None)
        self._biases.pop(row, None)
        self._picks.pop(row, None)
        self.prompt_wishes.pop(row, None)

    def pick(self, lines: IntArray, positions: IntArray) -> StepParams:
        """The parameters of table rows `lines`, which sample the tokens at `positions`."""
        key = lines.tobytes()
        if key != self._picked[0]:
            columns = self._columns[lines]
            self._picked = key, columns, bool(columns["plain"].all())
        _, columns, plain = self._picked
        bans, biases = {}, {}
        if self._bans:
            early = positions - columns["num_prompt"] < columns["min_new"]
            bans = {int(i): self._bans[int(lines[i])] for i in np.flatnonzero(early) if int(lines[i]) in self._bans}
        if self._biases:
            biases = {i: self._biases[int(line)] for i, line in enumerate(lines) if int(line) in self._biases}
        picks = {}
        if self._picks:
            picks = {i: self._picks[int(line)] for i, line in enumerate(lines) if int(line) in self._picks}
        return StepParams(columns, lines, positions, bans, biases, picks, plain and not bans and not biases)


@dataclasses.dataclass(frozen=True)
class _Late:
    """Tokens of a step that a later stage has yet to choose, and the rows they belong to."""

    params: StepParams
    token_ids: Tensor
    arrival: Arrival


class TokenPool:
    """`tensor` is int32 `[num_rows, width]`, `width` tokens a row. At most `num_late` steps' tokens are under way."""

    def __init__(self, num_rows: int, width: int, num_late: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._host = self.tensor.numpy() if device.type == "cpu" else None
        self._num_late = num_late
        self._late: deque[_Late] = deque()

    def begin(self, rows: Iterable[int], writes: Mapping[int, IntArray]) -> None:
        """A step begins that reads `rows`; requests in the rows of `writes` have come with these tokens."""
        if self._late:
            self._take({*rows, *writes})
        for row, ids in writes.items():
            self.tensor[row, : len(ids)] = to_device(ids, self.tensor.device)

    def put(self, params: StepParams, token_ids: Tensor) -> None:
        """The step has sampled `token_ids`, int64 `[S]` on the device, for the rows of `params`."""
        if self._host is not None:  # see `build_batch`
            self._host[params.lines, params.positions] = token_ids.numpy()
            return
        where = to_device(np.stack((params.lines, params.positions)), self.tensor.device)
        self.tensor.index_put_((where[0], where[1]), token_ids.int())

    def put_later(self, params: StepParams, token_ids: Tensor, arrival: Arrival) -> None:
        """As `put`, once they have arrived: before the next step that has one of these rows."""
        self._late.append(_Late(params, token_ids, arrival))

    def _take(self, rows: set[int]) -> None:
        """Put what is under way to one of `rows`, and all before it; and the oldest, where too much is under way."""
        wanted = [i for i, late in enumerate(self._late) if not rows.isdisjoint(late.params.lines.tolist())]
        num_left = min(len(self._late) - 1 - max(wanted, default=-1), self._num_late)
        while len(self._late) > num_left:
            late = self._late.popleft()
            late.arrival.wait()
            self.put(late.params, late.token_ids)
