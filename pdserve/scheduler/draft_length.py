"""How many drafts a step verifies: what is accepted is estimated, and weighed against the cost of the step.

Decisions depend on tokens alone, never on a clock, so all ranks of a replica decide alike.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Literal

from pdserve.protocol.messages import SpeculationStats
from pdserve.scheduler.ngram import NgramIndex

DraftSource = Literal["request", "past", "executor"]
"""Where drafts come from: the request's own tokens, past outputs, or the executor's drafter."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step by its tokens, relative to a step of one token.

    `points`: (tokens, cost), ascending; between them the cost is linear, and beyond them it goes on like the last
    piece. `overlap_gain`: share of a plain step that overlap with the previous step saves. A step with drafts has no
    overlap, because the results of the previous step are taken before it is planned. `draft_pass`: time of one pass of
    the executor's drafter, relative to a step of as many rows; 0: no model drafts. A draft of each row takes a pass.
    """

    points: tuple[tuple[int, float], ...]
    overlap_gain: float
    draft_pass: float = 0.0

    def of(self, num_tokens: int) -> float:
        """Return the cost of a step of `num_tokens` tokens."""
        index = bisect.bisect_left(self.points, num_tokens, hi=len(self.points) - 1, key=lambda point: point[0])
        (left, low), (right, high) = self.points[max(0, index - 1)], self.points[max(1, index)]
        return low + (high - low) * (num_tokens - left) / (right - left)


AMX_COST = StepCost(
    (
        (1, 1.0), (3, 1.02), (4, 1.09), (6, 1.18), (8, 1.27), (12, 1.39), (16, 1.5), (32, 2.05), (48, 2.5), (64, 3.1),
        (128, 5.9), (256, 11.5),
    ),
    overlap_gain=0.05,
)  # fmt: skip
"""Products in bfloat16 with AMX tiles. Measured: the CPU time of verify steps of SmolLM2-135M, 256 tokens of context,
one core. Steps of as many tokens cost the same within 5%: 16 rows, 4 rows with 3 drafts, or a row with 15 drafts.
"""
CPU_COST = StepCost(
    (
        (1, 1.0), (2, 1.11), (4, 1.2), (6, 1.36), (8, 1.52), (12, 1.76), (16, 2.2), (32, 4.1), (48, 5.75), (64, 7.7),
        (128, 14.8), (256, 29.7),
    ),
    overlap_gain=0.05,
)  # fmt: skip
"""Products without tiles. Measured in the same way with `--quantization int8`."""
CUDA_COST = StepCost(((1, 1.0), (16, 1.05), (64, 1.2), (128, 1.4), (256, 2.0), (512, 3.6)), overlap_gain=0.1)
"""A model of the roofline: up to some hundred tokens, reading the weights takes most of a step. Not measured."""

PRIOR_WEIGHT = 8.0
"""Drafts that the initial rate of a class weighs as much as."""
REQUEST_PRIOR_WEIGHT = 4.0
"""Drafts that the rate of a class weighs as much as, for a request's own rate."""
CLASS_MEMORY, REQUEST_MEMORY = 256.0, 24.0
"""Drafts after which the older ones count half."""
MAX_RATE, MIN_CHANCE = 0.97, 0.05
"""Highest rate that is believed; and the chance of acceptance below which no draft is considered."""
MATCH_LENGTHS = (3, 4, 6, 9)
"""First match lengths of the classes of n-gram drafts but the first."""
FIRST_RATES: dict[DraftSource, tuple[float, ...]] = {
    "request": (0.3, 0.4, 0.5, 0.65, 0.8),
    "past": (0.2, 0.3, 0.4, 0.6, 0.75),
    "executor": (0.7, 0.65, 0.6, 0.55, 0.5),
}
"""Rates before any draft is verified: by class of the match length, or by position for the executor's drafts."""


class AcceptanceRate:
    """The share of drafts that is accepted, over a window that forgets. Counts only drafts whose predecessors were."""

    __slots__ = ("_accepted", "_memory", "_tried")

    def __init__(self, memory: float, rate: float = 0.0, weight: float = 0.0) -> None:
        """`memory`: drafts after which older ones count half. It begins as if `weight` drafts had this `rate`."""
        self._memory = memory
        self._accepted, self._tried = rate * weight, weight

    def add(self, accepted: int, tried: int) -> None:
        """Count drafts."""
        self._accepted += accepted
        self._tried += tried
        if self._tried > self._memory:
            self._accepted *= 0.5
            self._tried *= 0.5

    @property
    def value(self) -> float:
        """The rate; some draft must be counted."""
        return self._accepted / self._tried

    def around(self, rate: float, weight: float) -> float:
        """Return the rate, with `weight` more drafts of the rate `rate`."""
        return (self._accepted + rate * weight) / (self._tried + weight)


@dataclasses.dataclass(slots=True)
class RequestSpeculation:
    """Speculation of one request: counts, its own rate, and its drafters' state."""

    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)
    rate: AcceptanceRate = dataclasses.field(default_factory=lambda: AcceptanceRate(REQUEST_MEMORY))
    index: NgramIndex | None = None
    """Of the request's tokens, as many as the drafter has read."""
    proposal: tuple[int, tuple[int, ...]] = (0, ())
    """Drafts of the executor, and the tokens of the request for which they hold."""
    verifying: tuple[DraftSource, int] = ("request", 0)
    """Source and class of the drafts under way."""

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Count a verify step."""
        self.num_verify_steps += 1
        self.num_draft_tokens += num_drafts
        counts = self.accepted_by_position
        counts += [0] * (num_accepted - len(counts))
        for position in range(num_accepted):
            counts[position] += 1

    @property
    def stats(self) -> SpeculationStats | None:
        """The counts; None before the first verify step."""
        if not self.num_verify_steps:
            return None
        return SpeculationStats(
            num_verify_steps=self.num_verify_steps,
            num_draft_tokens=self.num_draft_tokens,
            accepted_by_position=tuple(self.accepted_by_position),
        )


class AcceptanceModel:
    """Estimates the chance that drafts are accepted, from those of the same class and those of the same request."""

    def __init__(self) -> None:
        self._rates = {
            source: [AcceptanceRate(CLASS_MEMORY, rate, PRIOR_WEIGHT) for rate in rates]
            for source, rates in FIRST_RATES.items()
        }

    @staticmethod
    def class_of_match(length: int) -> int:
        """Return the class of n-gram drafts behind a match of `length` tokens."""
        return bisect.bisect_right(MATCH_LENGTHS, length)

    def chances(self, state: RequestSpeculation, source: DraftSource, number: int, num_drafts: int) -> list[float]:
        """Return the chances that a step accepts at least 1, 2, ... drafts, down to `MIN_CHANCE`.

        `number`: the class of n-gram drafts.
        """
        rates = self._rates[source]
        chances: list[float] = []
        chance = 1.0
        for position in range(num_drafts):
            rate = rates[min(position, len(rates) - 1) if source == "executor" else number].value
            chance *= min(MAX_RATE, state.rate.around(rate, REQUEST_PRIOR_WEIGHT))
            if chance < MIN_CHANCE:
                break
            chances.append(chance)
        return chances

    def add(self, state: RequestSpeculation, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a verify step of the class `state.verifying`."""
        source, number = state.verifying
        num_tried = min(num_accepted + 1, num_drafts)
        state.rate.add(num_accepted, num_tried)
        rates = self._rates[source]
        if source != "executor":
            rates[number].add(num_accepted, num_tried)
            return
        for position in range(num_tried):
            rates[min(position, len(rates) - 1)].add(position < num_accepted, 1)


def choose_lengths(
    chances: Sequence[Sequence[float]], num_rows: int, num_others: int, cost: StepCost, *, drafted: bool = True
) -> list[int]:
    """Return how many drafts each candidate gets, so that the step yields the most tokens in its time.

    `chances`: by candidate, see `AcceptanceModel.chances`. `num_rows`: rows of the step that decode, candidates among
    them. `num_others`: prompt tokens of the step. All 0 where a plain step, with overlap, is as good. Not `drafted`: a
    model has to draft them, all rows in each of its passes, so the passes are part of the time.
    """
    ordered = sorted((-chance, place, row) for row, chain in enumerate(chances) for place, chance in enumerate(chain))
    tokens = float(num_rows)
    best = tokens / (cost.of(num_rows + num_others) * (1 - cost.overlap_gain))
    num_taken, passes = 0, 0.0
    pass_cost = 0.0 if drafted else cost.draft_pass * cost.of(num_rows)
    for number, (chance, place, _) in enumerate(ordered, start=1):
        tokens -= chance
        passes = max(passes, (place + 1) * pass_cost)
        ratio = tokens / (cost.of(num_rows + num_others + number) + passes)
        if ratio > best:
            best, num_taken = ratio, number
    lengths = [0] * len(chances)
    for _, _, row in ordered[:num_taken]:
        lengths[row] += 1
    return lengths


FIRST_WAIT, MAX_WAIT = 8, 64
"""Plain steps after drafting was given up, at first and at most: the wait doubles with each attempt in vain."""
FIRST_STEPS, MAX_STEPS, ATTEMPT_STEPS = 8, 32, 2
"""Steps without a gain after which drafting is given up: at first, after long success, and in an attempt to resume."""
MIN_PRICE = 0.01
OVERLAPPING_SHARE = 0.5
"""Price of a step that overlaps although drafting is on, as a share of the others' price."""


class DraftSwitch:
    """Switches drafting off while it does not pay, so that steps overlap again, with rare attempts to resume.

    Its credit is in tokens per row: a step that may have drafts costs the gain of overlap, and earns the drafts that
    became accepted in it, divided by the rows of the step. Drafting is given up when the credit is used up.
    """

    def __init__(self, overlap_gain: float) -> None:
        """`overlap_gain`: see `StepCost`."""
        self._price = max(MIN_PRICE, overlap_gain)
        self._credit = FIRST_STEPS * self._price
        self._wait = FIRST_WAIT
        self._num_accepted, self._num_rows = 0, 1
        self.num_waiting = 0
        """Plain steps before the next attempt; 0: the next step may have drafts."""
        self.is_attempt = False
        """True when the next step is the first one after a wait."""

    def planned(self, num_rows: int, *, overlaps: bool = False) -> None:
        """Record that a step of `num_rows` decode rows was planned. All results of steps with drafts are known.

        `overlaps`: it overlaps with the previous step, so looking for drafts has cost less than the overlap.
        """
        has_gained = self._num_accepted > 0
        self._credit = min(MAX_STEPS * self._price, self._credit + self._num_accepted / self._num_rows)
        self._num_accepted, self._num_rows, self.is_attempt = 0, num_rows, False
        if self.num_waiting:
            self.num_waiting = 0 if has_gained else self.num_waiting - 1
            if not self.num_waiting and not has_gained:
                self._credit, self.is_attempt = ATTEMPT_STEPS * self._price, True
            return
        self._credit -= OVERLAPPING_SHARE * self._price if overlaps else self._price
        if self._credit >= FIRST_STEPS * self._price:
            self._wait = FIRST_WAIT
        if self._credit < self._price / 2:
            self.num_waiting, self._wait = self._wait, min(2 * self._wait, MAX_WAIT)

    def accepted(self, num_drafts: int) -> None:
        """Record the accepted drafts of a row of the last planned step."""
        self._num_accepted += num_drafts
