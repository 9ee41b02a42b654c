"""A server whose model writes given texts, so that tests know which drafts are right."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.executor.interface import BatchPlan, BatchRow, HostPages, SampledToken, StepHandle, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import PageSpace
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import SpeculationStats
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.draft_length import StepCost
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.scheduler.request import PriorityRules
from pdserve.scheduler.speculation import NgramDrafter, Speculation
from tests.unit.scheduler.kit import CountingExecutor, Mono

FREE = StepCost(((1, 1.0), (1000, 1.0)), overlap_gain=0.0)
"""Drafts cost nothing."""
LINEAR = StepCost(((0, 0.0), (1000, 1000.0)), overlap_gain=0.0)
"""A step costs its tokens, so that no draft ever pays."""


class Saved:
    """KV in host memory."""

    num_bytes = 64


class TextExecutor(CountingExecutor):
    """Samples `texts[rid]`, token by token. Accepts the drafts that agree with it, as the interface says."""

    def __init__(self, layout_pages: int, table: PageTable) -> None:
        super().__init__(layout_pages, table)
        self.texts: dict[str, list[int]] = {}
        self.proposals: dict[str, int] = {}
        """By rid: the number of right drafts among those that the executor proposes; absent: it proposes none."""
        self.num_proposed: list[int | None] = []
        self._table_of_pages = table
        self._rows: dict[int, tuple[int, int]] = {}
        """By row: prompt tokens, and tokens whose values are known."""
        self._unresolved: dict[int, int] = {}
        self._num_under_way = 0
        self.most_under_way = 0
        """Most steps that were under way at once."""
        self.num_overlapping = 0
        """Steps that were launched while another one was under way."""

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
        draft_hidden: bytes = b"",
        hidden: HiddenParams | None = None,
        input_embeds: bytes = b"",
    ) -> None:
        self._rows[row] = num_prompt_tokens, len(token_ids)

    def close_row(self, row: int) -> None:
        del self._rows[row]

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        self.plans.append(plan)
        self.num_proposed.append(plan.num_proposals)
        self._num_under_way += 1
        self.most_under_way = max(self.most_under_way, self._num_under_way)
        self.num_overlapping += self._num_under_way > 1
        for row in plan.rows:
            self._check(row)
        results = [self._sample(row) for row in plan.rows]
        tokens = tuple(sampled[0] if sampled else None for sampled in results)
        more = {i: sampled[1:] for i, sampled in enumerate(results) if plan.rows[i].drafts}
        drafts = {
            i: self._propose(row, plan.num_proposals)
            for i, row in enumerate(plan.rows)
            if row.sample and row.rid in self.proposals and plan.num_proposals != 0
        }
        return StepHandle(plan, None, lambda: StepResult(plan.step, tokens, more=more, drafts=drafts))

    def resolve(self, handle: StepHandle) -> StepResult:
        self._num_under_way -= 1
        for row in handle.plan.rows:
            self._unresolved[row.row] -= 1
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        return Saved()

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        assert isinstance(saved, Saved)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        pass

    def poison(self, pages: list[int], space: PageSpace = PageSpace.TOKENS) -> None:
        pass

    def _check(self, row: BatchRow) -> None:
        """The rules of the interface."""
        num_prompt, num_known = self._rows[row.row]
        table = self._table_of_pages
        pages = table.pages[row.row, : -(-row.end // self.layout.page_tokens)]
        assert len(set(pages.tolist())) == len(pages), "a row with a page twice"
        under_way = self._unresolved.get(row.row, 0)
        self._unresolved[row.row] = under_way + 1
        if row.drafts:
            assert row.sample and row.end == row.start + 1 + len(row.drafts)
            assert num_known > num_prompt and row.start == num_known - 1, "drafts of a row that is not settled"
            assert under_way == 0, "a row with drafts beside another step of it"

    def _sample(self, row: BatchRow) -> tuple[SampledToken, ...]:
        if not row.sample:
            return ()
        num_prompt, _ = self._rows[row.row]
        sampled: list[SampledToken] = []
        for position in range(row.start + 1 if row.drafts else row.end, row.end + 1):
            token_id = self.texts[row.rid][position - num_prompt]
            sampled.append(SampledToken(token_id, -0.5))
            if position < row.end and row.drafts[position - row.start - 1] != token_id:
                break
        known = row.end - len(row.drafts) + len(sampled)
        self._rows[row.row] = num_prompt, known
        return tuple(sampled)

    def _propose(self, row: BatchRow, most: int | None) -> tuple[int, ...]:
        num_prompt, num_known = self._rows[row.row]
        following = self.texts[row.rid][num_known - num_prompt :][: 4 if most is None else most]
        return tuple(
            token if place < self.proposals[row.rid] else token + 1000 for place, token in enumerate(following)
        )


class Drafting(Mono):
    """A monolith with the n-gram drafter, or with that of the executor."""

    executor: TextExecutor

    def __init__(
        self,
        *,
        max_drafts: int = 4,
        ngram: bool = True,
        cost: StepCost = FREE,
        adaptive: bool = True,
        capacity: int = 4096,
        min_match: int = 2,
        num_pages: int = 64,
        num_rows: int = 4,
        overlap: bool = True,
        chunk: int | None = 16,
        num_stages: int = 1,
        offload_bytes: int = 0,
        prefix_cache: bool = False,
        saturation: int | None = None,
        conservativeness: float = 1.0,
        write_line: WriteLine | None = None,
        rules: PriorityRules | None = None,
    ) -> None:
        drafter = NgramDrafter(min_match, 8, capacity) if ngram else None
        self.speculation = Speculation(max_drafts, drafter, cost, adaptive=adaptive)
        super().__init__(
            num_pages=num_pages, num_rows=num_rows, overlap=overlap, chunk=chunk, width=num_pages,
            num_stages=num_stages, offload_bytes=offload_bytes, prefix_cache=prefix_cache, saturation=saturation,
            conservativeness=conservativeness, write_line=write_line, rules=rules,
            speculation=self.speculation, executor=TextExecutor,
        )  # fmt: skip

    def ask(self, rid: str, prompt: list[int], text: list[int], **sampling: object) -> None:
        """Post a request whose output is `text`, if no stop ends it before."""
        self.executor.texts[rid] = [*text, *[3] * 40]
        self.post(rid, prompt, **({"max_new_tokens": len(text)} | sampling))  # type: ignore[arg-type]

    def drafted(self, rid: str) -> list[tuple[int, ...]]:
        """The drafts of each row of a request that had some."""
        return [row.drafts for plan in self.executor.plans for row in plan.rows if row.rid == rid and row.drafts]

    def num_steps(self, rid: str) -> int:
        """Steps with a row of the request."""
        return sum(row.rid == rid for plan in self.executor.plans for row in plan.rows)

    def stats(self, rid: str) -> SpeculationStats | None:
        """What the last output says, and no other one."""
        found = [output.speculation for output in self.outputs(rid)]
        assert not any(found[:-1])
        return found[-1]

    def counters(self) -> dict[str, float]:
        """Counters of speculation."""
        counters = self.scheduler.state().counters
        return {name: number for name, number in counters.items() if name.startswith("spec_")}
