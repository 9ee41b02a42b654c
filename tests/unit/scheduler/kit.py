"""An aggregated server in one object: the real scheduler on a model whose tokens the test chooses."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.config.schedule_group import SchedulePolicy
from pdserve.executor.interface import BatchPlan, SampledToken, StepHandle, StepResult
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import EngineCoreOutput, FinishReason, GenerateRequest, OutputBatch, ToApi
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import PriorityRules, WaitingQueue
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.speculation import Speculation
from pdserve.scheduler.state_report import LoadReporter
from pdserve.scheduler.step_log import DecodeStepLog
from pdserve.sim.hash_lm import HashExecutor, hash_layout

EOS = 2
PROMPT = [5, 6, 7, 8, 9]


class CountingExecutor(HashExecutor):
    """The hash model, but its sampled tokens are 100, 101, ... or what `script` says."""

    def __init__(self, layout_pages: int, table: PageTable) -> None:
        super().__init__(hash_layout(4), layout_pages, table)
        self.script: list[int] = []
        self.plans: list[BatchPlan] = []

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        self.plans.append(plan)
        return super().launch(plan, layer_events=layer_events)

    def resolve(self, handle: StepHandle) -> StepResult:
        result = super().resolve(handle)
        tokens = tuple(
            None if token is None else SampledToken(self.script.pop(0) if self.script else 100, -0.5, ((1, -0.5),))
            for token in result.tokens
        )
        return StepResult(result.step, tokens)


class Mono:
    """An aggregated server whose client is the test."""

    def __init__(
        self,
        *,
        num_pages: int = 16,
        num_rows: int = 2,
        chunk: int | None = 4,
        mixed: int | None = None,
        saturation: int | None = None,
        prefill: int = 16384,
        max_queued: int | None = None,
        width: int = 16,
        prefix_cache: bool = False,
        policy: SchedulePolicy = "fcfs",
        overlap: bool = False,
        late: bool = False,
        offload_bytes: int = 0,
        num_stages: int = 1,
        conservativeness: float = 1.0,
        num_gated: Callable[[], int] | None = None,
        write_line: WriteLine | None = None,
        rules: PriorityRules | None = None,
        speculation: Speculation | None = None,
        load_reporter: LoadReporter | None = None,
        executor: Callable[[int, PageTable], CountingExecutor] = CountingExecutor,
    ) -> None:
        self.sent: list[ToApi] = []
        table = PageTable(num_rows, width)
        self.executor = executor(num_pages, table)
        self.executor.late = late
        self.clock = ManualClock()
        self.memory = KVMemory(
            self.executor.layout, num_pages, table, num_aux=0, on_free=self.executor.poison, prefix_cache=prefix_cache
        )
        limits = StepLimits(
            chunk_tokens=chunk, mixed_chunk_tokens=mixed, offload_bytes=offload_bytes, eos_token_ids=frozenset({EOS}),
            saturation_tokens=saturation, prefill_tokens=prefill, num_stages=num_stages,
            conservativeness=conservativeness,
        )  # fmt: skip
        self.context = context = SchedulerContext(
            self.memory, self.executor, Outbox(self.sent.append), self.clock, limits, speculation
        )
        self.mailbox: Mailbox[Event] = Mailbox()
        step_log = None if write_line is None else DecodeStepLog(write_line, self.memory.layout, dp_rank=0)
        self.scheduler = Scheduler(
            MonolithRole(context, WaitingQueue(policy, 10.0, context.memory, rules), step_log),
            context,
            None,
            self.mailbox,
            max_queued=max_queued,
            overlap=overlap,
            num_gated=num_gated,
            rules=rules,
            load_reporter=load_reporter,
        )

    def post(
        self,
        rid: str,
        tokens: list[int] | None = None,
        top_logprobs: int | None = None,
        priority: int = 0,
        probe: bool = False,
        **sampling: object,
    ) -> None:
        params = CoreSamplingParams(**({"max_new_tokens": 4} | sampling))  # type: ignore[arg-type]
        self.mailbox.post(
            GenerateRequest(
                rid=rid,
                input_ids=tokens or PROMPT,
                sampling=params,
                logprobs=None if top_logprobs is None else Logprobs(top=top_logprobs),
                priority=priority,
                probe=probe,
            )
        )

    def step(self) -> dict[str, tuple[int, int]]:
        """One step; the rows it planned, `(start, end)` by rid."""
        before = len(self.executor.plans)
        self.clock.advance(0.01)
        self.scheduler.step()
        return {row.rid: (row.start, row.end) for plan in self.executor.plans[before:] for row in plan.rows}

    def run(self) -> None:
        """Until nothing lives, and nothing is under way."""
        for _ in range(600):
            if not self.step() and not self.scheduler.role.live:
                return
        raise AssertionError(self.scheduler.role.queues())

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs(rid) for token in output.token_ids]

    def finish(self, rid: str) -> FinishReason:
        """The one end of a request."""
        ends = [output.finish for output in self.outputs(rid) if output.finish is not None]
        assert len(ends) == 1 and self.outputs(rid)[-1].finish is not None, ends
        return ends[0]

    def outputs(self, rid: str) -> list[EngineCoreOutput]:
        """All that a request was sent."""
        return [o for message in self.sent if isinstance(message, OutputBatch) for o in message.outputs if o.rid == rid]

    def all_free(self) -> bool:
        counts = self.memory.counts()
        counts["pages_free"] += counts["pages_evictable"]
        return all(counts[f"{name}_free"] == counts[f"{name}_total"] for name in ("pages", "rows", "aux"))
