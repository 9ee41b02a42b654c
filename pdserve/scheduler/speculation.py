"""Speculative decoding in the scheduler: which rows of a step have drafts, and what follows from their acceptance.

    plan n     rows, results of plan n - 1 known     choose: drafts by row, as many as pay
    commit n   tokens of each row                    committed: counts, and the rates of acceptance
    plan n+1   no drafts pay for some steps          is_due is false: plain steps, which overlap

While drafting is on, a step is planned behind the results of the previous one only where drafts are likely: behind
accepted ones, or where the last known tokens have drafts that pay. All other steps overlap.

Drafts come from the n-gram drafter here, or from `StepResult.drafts` of the executor's drafter. The executor decides
what is accepted, so drafts never change the tokens of a request.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pdserve.scheduler.draft_length import (
    AMX_COST,
    AcceptanceModel,
    DraftSource,
    DraftSwitch,
    RequestSpeculation,
    StepCost,
    choose_lengths,
)
from pdserve.scheduler.ngram import NgramIndex, PastOutputs
from pdserve.scheduler.request import Req

VERIFY_STEPS, DRAFT_TOKENS, ACCEPTED_TOKENS = "spec_verify_steps", "spec_draft_tokens", "spec_accepted_tokens"
"""Counters: rows with drafts, their drafts, and those of them that became output."""
ACCEPTED_AT = "spec_accepted_at."
"""Prefix of counters by position, from 1 on: `spec_accepted_at.2` counts the verify steps whose second draft became
output.
"""
ATTEMPT_DRAFTS, ATTEMPT_SHARE = 3, 16
"""An attempt to resume drafting verifies at most `ATTEMPT_DRAFTS` drafts in one of `ATTEMPT_SHARE` rows, even where
they are not expected to pay.
"""


RECENT_STEPS = 4
"""Steps behind accepted drafts in which drafts are looked for, without overlap."""


class NgramDrafter:
    """Finds drafts in a request's tokens, and else in past outputs.

    Past outputs are those of requests without a cache salt, and drafts of such requests only: the speed of a request
    must not depend on tokens of another salt.
    """

    def __init__(self, min_match: int, max_match: int, capacity: int) -> None:
        """`min_match` and `max_match`: fewest and most last tokens that are compared. `capacity`: see `PastOutputs`."""
        self._windows = min_match, max_match
        self._past = PastOutputs(min_match, max_match, capacity)

    def find(self, req: Req, state: RequestSpeculation, num_tokens: int) -> tuple[tuple[int, ...], DraftSource, int]:
        """Return at most `num_tokens` drafts, their source, and the length of the match; no drafts without a match.

        The cost is that of the tokens that are new since the last call.
        """
        index = self._updated(req, state)
        source: DraftSource = "request"
        found = index.find()
        if found is None and not req.spec.cache_salt:
            found, source = self._past.find(index), "past"
        return ((), source, 0) if found is None else (found.drafts(num_tokens), source, found.length)

    def ended(self, req: Req) -> None:
        """Keep the output of a request that has ended, unless it has a cache salt."""
        if not req.spec.cache_salt:
            self._past.add(req.output_ids)

    def clear(self) -> None:
        """Forget all past outputs."""
        self._past.clear()

    def _updated(self, req: Req, state: RequestSpeculation) -> NgramIndex:
        """Return the index of the request, with all its tokens."""
        index, num_prompt = state.index, req.num_prompt
        if index is None:
            index = state.index = NgramIndex(*self._windows)
            index.extend(req.spec.input_ids)
        if len(index) < req.seq_len:
            index.extend(req.output_ids[len(index) - num_prompt :])
        return index


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    """A row that may have drafts."""

    req: Req
    state: RequestSpeculation
    drafts: tuple[int, ...]
    source: DraftSource
    number: int
    """Class of the drafts, see `AcceptanceModel`."""
    chances: list[float]


class Speculation:
    """Chooses the drafts of each step. `BatchPlanner` asks it; one per scheduler. Scheduler thread only."""

    def __init__(
        self,
        max_drafts: int,
        drafter: NgramDrafter | None = None,
        cost: StepCost = AMX_COST,
        *,
        adaptive: bool = True,
    ) -> None:
        """`max_drafts`: most drafts of a row. `drafter` None: drafts come from the executor alone.

        Not `adaptive`: each row gets all its drafts.
        """
        assert max_drafts >= 1
        self._max_drafts = max_drafts
        self._drafter = drafter
        self._cost = cost
        self._switch = DraftSwitch(cost.overlap_gain) if adaptive else None
        self._acceptance = AcceptanceModel()
        self._num_asked = 0
        self._num_verifying = 0
        self._num_without = RECENT_STEPS
        """Steps since the last one with accepted drafts."""
        self.mean_drafts = 0.0
        """Drafts per decode row of the last planned step."""
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------------ planning

    @property
    def is_due(self) -> bool:
        """True when the next step may have drafts: the results of all steps must be known when it is planned."""
        has_source = self._drafter is not None or self._num_asked > 0
        return has_source and (self._switch is None or self._switch.num_waiting == 0)

    def needs_sync(self, reqs: Collection[Req]) -> bool:
        """True when no step may be under way at the next plan: drafts are being verified, or are likely.

        `reqs`: the requests that decode. Drafts of their next tokens are likely where those of the last known ones pay.
        """
        if self._num_verifying > 0:
            return True
        if not self.is_due:
            return False
        switch = self._switch
        if switch is None or self._drafter is None or switch.is_attempt or self._num_without < RECENT_STEPS:
            return True
        found = [self._candidate(req, self._max_drafts) for req in reqs]
        chances = [candidate.chances for candidate in found if candidate is not None]
        return bool(chances) and any(choose_lengths(chances, len(reqs), 0, self._cost))

    def may_draft(self, req: Req) -> bool:
        """True when the request may have drafts at all."""
        return req.spec.sampling.speculative and not req.spec.probe

    def choose(
        self, reqs: Mapping[int, Req], most: Mapping[int, int], num_rows: int, num_prompt_tokens: int
    ) -> dict[int, tuple[int, ...]]:
        """Return the drafts of rows, by the keys of `reqs`; rows without drafts are absent.

        `reqs`: the requests that may have drafts; all their results are known. `most`: most drafts of each.
        `num_rows`: decode rows of the step. `num_prompt_tokens`: prompt tokens that the step computes beside them.
        """
        found: dict[int, _Candidate] = {}
        for key, req in reqs.items():
            candidate = self._candidate(req, min(most[key], self._max_drafts))
            if candidate is not None:
                found[key] = candidate
        candidates = list(found.values())
        lengths = self._lengths(candidates, num_rows, num_prompt_tokens)
        chosen: dict[int, tuple[int, ...]] = {}
        for (key, candidate), length in zip(found.items(), lengths, strict=True):
            if length:
                chosen[key] = candidate.drafts[:length]
                candidate.state.verifying = candidate.source, candidate.number
        return chosen

    def planned(self, num_rows: int, num_drafts: int, *, overlaps: bool) -> None:
        """Record that a step of `num_rows` decode rows was planned, with `num_drafts` drafts in all.

        `overlaps`: the previous step was under way, so that no row could have drafts.
        """
        self._num_verifying = num_drafts
        self._num_without += 1
        self.mean_drafts = num_drafts / num_rows
        if self._switch is not None:
            self._switch.planned(num_rows, overlaps=overlaps)

    def num_proposals(self, reqs: Collection[Req]) -> int:
        """Return how many drafts of each row the executor shall propose in the step that is planned now.

        `reqs`: the requests that decode; the step may be a prompt's alone.
        """
        self._num_asked = self._num_wanted(reqs)
        return self._num_asked

    @property
    def max_drafts(self) -> int:
        """Most drafts of a row."""
        return self._max_drafts

    # ------------------------------------------------------------------ results

    def received(self, req: Req, drafts: tuple[int, ...]) -> None:
        """Keep what the drafter of the prefill server proposes for the first row of `req`. The next step has a source
        of drafts then.
        """
        self.proposed(req, drafts)
        if self.may_draft(req):
            self._num_asked = max(self._num_asked, len(drafts))

    def proposed(self, req: Req, drafts: tuple[int, ...]) -> None:
        """Keep what the executor proposes for the next row of `req`."""
        if drafts and self.may_draft(req):
            _state(req).proposal = req.seq_len, drafts

    def committed(self, req: Req, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Count a row: its drafts, those that the executor accepted, and the tokens that became output.

        Where the output ends inside the accepted drafts, the rest of them does not count as accepted in the counters.
        """
        state, counters = _state(req), self.counters
        self._num_verifying = 0
        self._acceptance.add(state, num_drafts, num_accepted)
        if num_accepted:
            self._num_without = 0
        if self._switch is not None:
            self._switch.accepted(num_accepted)
        used = min(num_accepted, num_emitted)
        state.count(num_drafts, used)
        if req.spec.probe:
            return
        counters[VERIFY_STEPS] += 1
        counters[DRAFT_TOKENS] += num_drafts
        counters[ACCEPTED_TOKENS] += used
        for position in range(1, used + 1):
            counters[f"{ACCEPTED_AT}{position}"] += 1

    def ended(self, req: Req) -> None:
        """Record that a request has ended, with its output so far."""
        if self._drafter is not None and not req.spec.probe:
            self._drafter.ended(req)
        if req.speculation is not None:
            req.speculation.index = None

    def forget_past(self) -> None:
        """Forget the outputs of past requests."""
        if self._drafter is not None:
            self._drafter.clear()

    def facts(self) -> dict[str, float]:
        """Return numbers for `/get_server_info` and `/metrics`."""
        return {
            "spec_is_drafting": float(self._switch is None or self._switch.num_waiting == 0),
            "spec_draft_length": self.mean_drafts,
        }

    # ------------------------------------------------------------------ inside

    def _candidate(self, req: Req, most: int) -> _Candidate | None:
        if most <= 0 or not self.may_draft(req):
            return None
        state = _state(req)
        source: DraftSource = "executor"
        seq_len, drafts = state.proposal
        number = 0
        if seq_len != req.seq_len or not drafts:
            if self._drafter is None:
                return None
            drafts, source, length = self._drafter.find(req, state, most)
            number = self._acceptance.class_of_match(length)
        drafts = drafts[:most]
        if not drafts:
            return None
        return _Candidate(
            req, state, drafts, source, number, self._acceptance.chances(state, source, number, len(drafts))
        )

    def _lengths(self, candidates: Sequence[_Candidate], num_rows: int, num_prompt_tokens: int) -> list[int]:
        """Return how many drafts each candidate gets."""
        if self._switch is None:
            return [len(candidate.drafts) for candidate in candidates]
        chances = [candidate.chances for candidate in candidates]
        lengths = choose_lengths(chances, num_rows, num_prompt_tokens, self._cost)
        if not any(lengths) and self._switch.is_attempt:
            likely = sorted(range(len(candidates)), key=lambda i: (-sum(chances[i]), i))
            for i in likely[: -(-num_rows // ATTEMPT_SHARE)]:
                lengths[i] = min(ATTEMPT_DRAFTS, len(candidates[i].drafts))
        return lengths

    def _num_wanted(self, reqs: Collection[Req]) -> int:
        """Return the drafts to ask the executor for: as many as the next step is likely to verify, or none where they
        do not pay for the drafter's passes.
        """
        if self._switch is None:
            return self._max_drafts
        if self._switch.num_waiting:
            return 0
        if self._drafter is not None:
            return self._max_drafts
        if self._switch.is_attempt:
            return 1
        states = [req.speculation or _UNKNOWN for req in reqs if self.may_draft(req)] or [_UNKNOWN]
        chances = [self._acceptance.chances(state, "executor", 0, self._max_drafts) for state in states]
        return max(choose_lengths(chances, max(1, len(reqs)), 0, self._cost, drafted=False))


_UNKNOWN = RequestSpeculation()
"""A request without drafts so far."""


def _state(req: Req) -> RequestSpeculation:
    if req.speculation is None:
        req.speculation = RequestSpeculation()
    return req.speculation
