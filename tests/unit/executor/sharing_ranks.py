"""What each rank does in `test_dp_attention`: a module of its own, for processes import it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.errors import RankError
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.model.parallel import Parallel
from pdserve.model.params import WeightSamples
from tests.driver import Driver, random_prompt
from tests.unit.executor.expert_ranks import Precision, model_config

NUM_TOKENS = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """What one replica does: idle rounds, then tokens behind prompts of these lengths, in chunks where that says so."""

    lengths: Sequence[int] = ()
    chunk: int | None = None
    idle_rounds: int = 0
    num_tokens: int = NUM_TOKENS

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompts themselves."""
        return [random_prompt(length, vocab_size) for length in self.lengths]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has come to; `counts` by layer of the model, `pages` its whole pool."""

    greedy: list[list[int]]
    pages: torch.Tensor
    counts: dict[int, list[int]]
    samples: WeightSamples
    num_bytes: int


def build(
    parallel: Parallel,
    path: Path,
    flags: ParallelConfig,
    *,
    overlap: bool = False,
    deterministic: bool = False,
    precision: Precision = "auto",
) -> LoadedEngine:
    """An executor; `flags` say what is done with experts. In bfloat16 and int8 the CPU kernels compute."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="bfloat16") if deterministic else model_config(path, precision),
        parallel=flags,
        memory=MemoryConfig(page_size=16, max_total_tokens=4096),
        schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
        kernels=KernelConfig(
            device="cpu",
            cpu_threads=1,
            cpu_kernels="auto" if precision == "auto" else "native",
            enable_deterministic_inference=deterministic,
        ),
    )
    return build_executor(config, max_rows=8, parallel=parallel)


def replica_of(parallel: Parallel) -> int:
    """Number of this rank's replica."""
    return parallel.dp_attention_group.rank // parallel.coord.shape.num_ranks


class Rounds:
    """A driver that counts its rounds, so that all replicas do as many."""

    def __init__(self, built: LoadedEngine) -> None:
        self.driver = Driver(built)
        self.count = 0
        step = self.driver.step

        def counted(*rows: tuple[int, int, int, bool]):  # type: ignore[no-untyped-def]
            self.count += 1
            return step(*rows)

        self.driver.step = counted  # type: ignore[method-assign]

    def do(self, job: Job, vocab_size: int, total: int) -> list[list[int]]:
        """A job, and idle rounds before and behind it: `total` rounds since the beginning."""
        for _ in range(job.idle_rounds):
            self.driver.step()
        prompts = job.prompts(vocab_size)
        tokens = self.driver.generate(prompts, job.num_tokens, chunk=job.chunk) if prompts else []
        assert self.count <= total, f"{self.count} rounds"
        while self.count < total:
            self.driver.step()
        return tokens


def outcome(
    parallel: Parallel,
    path: Path,
    vocab_size: int,
    flags: ParallelConfig,
    jobs: Sequence[Job],
    overlap: bool,
    precision: Precision = "auto",
) -> Outcome:
    """Every replica does its job, in 30 rounds."""
    built = build(parallel, path, flags, overlap=overlap, precision=precision)
    greedy = Rounds(built).do(jobs[replica_of(parallel)], vocab_size, 30)
    built.executor.close()
    return Outcome(
        greedy=greedy,
        pages=built.executor.pools[0].pages.clone(),
        counts=built.executor.expert_counts(),
        samples=built.executor.weight_samples(),
        num_bytes=built.executor.weight_bytes,
    )


def in_bfloat16(parallel: Parallel, path: Path, vocab_size: int, flags: ParallelConfig) -> list[list[list[int]]]:
    """Deterministic mode: the first replica's prompts beside others in the second, beside none, one by one in chunks,
    and in the other replica."""
    rounds = Rounds(build(parallel, path, flags, deterministic=True))
    replica, lengths = replica_of(parallel), (3, 40, 77)
    beside = [rounds.do(Job(lengths) if replica == 0 else Job((1, 61, 20, 5)), vocab_size, 12)]
    alone = [rounds.do(Job(lengths) if replica == 0 else Job(), vocab_size, 24)]
    chunked = [rounds.do(Job(lengths, chunk=16) if replica == 0 else Job((9,)), vocab_size, 54)]
    other = [rounds.do(Job(lengths) if replica == 1 else Job(idle_rounds=1), vocab_size, 66)]
    return beside + alone + chunked if replica == 0 else other


def gathered(parallel: Parallel, sizes: Sequence[int]) -> bool:
    """Replica i has `sizes[i]` rows: what is gathered and added up is right on this rank, whatever the sizes."""
    group, replica, tp_size = parallel.dp_attention_group, replica_of(parallel), parallel.coord.shape.tp_size
    rows = [torch.full((size, 3), 10.0 * i) + torch.arange(size)[:, None] for i, size in enumerate(sizes)]
    everyone = torch.cat(rows)
    for step in range(2):
        group.begin(step, sizes[replica])
        token_share = group.token_share(sizes[replica])
        assert len(token_share.sizes) == len(sizes) * tp_size and sum(token_share.sizes) == sum(sizes)
        assert torch.equal(group.gather(rows[replica]), everyone)
        assert torch.equal(group.rejoin(rows[replica][token_share.mine], sizes[replica]), rows[replica])
        factors = sum(range(1, group.size + 1))
        assert torch.equal(group.reduce_sum(everyone * (1.0 + group.rank)), rows[replica] * factors)
    return True


def out_of_step(parallel: Parallel) -> str:
    """The second replica is a round ahead."""
    try:
        parallel.dp_attention_group.begin(5 + replica_of(parallel), 1)
    except RankError as error:
        return str(error)
    return ""


def with_other_weights(parallel: Parallel) -> str:
    """The second replica alone has other weights."""
    group = parallel.dp_attention_group
    group.begin(1, 1)
    if replica_of(parallel) == 1:
        group.change_weights()
    try:
        group.begin(2, 1)
    except RankError as error:
        return str(error)
    return ""
