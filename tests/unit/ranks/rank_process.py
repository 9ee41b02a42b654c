"""One rank of a replica with a real model, in a process of its own.

Run as `python rank_process.py RENDEZVOUS RANK MODEL TP PP MODE [FLAG]`. Rank 0 generates and prints, as one line of
JSON, the greedy tokens of two prompts and the sampled ones of a third; the others follow.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import (
    DisaggConfig,
    KernelConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
)
from pdserve.errors import ConfigError, ModelError
from pdserve.executor.factory import build_executor, join_replica
from pdserve.model.params import fingerprint_of
from pdserve.protocol.sampling import SamplingParams
from pdserve.ranks.follower import run_follower
from pdserve.ranks.followers import meet_followers
from pdserve.ranks.leader import GroupExecutor
from pdserve.ranks.rendezvous import open_store
from tests.driver import Driver, random_prompt

TOKEN = "secret"
PROMPTS = [random_prompt(length, 320) for length in (70, 23)]


def server_config(model: str, tp_size: int, pp_size: int, mode: str, *, overlap: bool) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(model_path=model, dtype="float32"),
        parallel=ParallelConfig(tp_size=tp_size, pp_size=pp_size),
        memory=MemoryConfig(page_size=8, max_total_tokens=2048),
        schedule=ScheduleConfig(max_running_requests=4, disable_overlap_schedule=not overlap),
        disagg=DisaggConfig(
            disaggregation_mode="prefill" if mode == "prefill" else "null", disaggregation_transfer_backend="fake"
        ),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )


def generate(driver: Driver) -> dict[str, object]:
    """What the test compares. The third row is sampled with a seed that nobody gave."""
    greedy = driver.generate(PROMPTS, 12, chunk=16)
    row = driver.open(PROMPTS[0], 100, SamplingParams(seed=11), top_logprobs=2)
    sampled = []
    for end in range(len(PROMPTS[0]), len(PROMPTS[0]) + 6):
        start = 0 if end == len(PROMPTS[0]) else end - 1
        (token,) = driver.step((row, start, end, True))
        assert token is not None and token.logprob is not None and len(token.top) == 2
        sampled.append(token.token_id)
    driver.close(row)
    return {"greedy": greedy, "sampled": sampled}


def lead(config: ServerConfig, shape: ParallelShape, rendezvous: str) -> None:
    store = open_store(rendezvous, 0, shape.num_ranks)
    followers = meet_followers(shape, store, TOKEN, host="127.0.0.1")
    parallel = join_replica(config, shape.place(0), store)
    built = build_executor(config, max_rows=4, parallel=parallel, agree_num_pages=followers.agree)
    ready = followers.wait_ready()
    driver = Driver(built)
    executor = GroupExecutor(built.executor, built.table, built.layout, followers)
    driver.built = dataclasses.replace(built, executor=executor)  # type: ignore[arg-type]
    answer = generate(driver)
    answer["weights"] = fingerprint_of([built.executor.weight_samples(), *(each.samples for each in ready)])
    answer["regions"] = [None if each.memory is None else len(each.memory.kv_regions) for each in ready]
    print(json.dumps(answer), flush=True)
    if "wait" in sys.argv:
        sys.stdin.readline()
        generate(driver)
    followers.close()
    built.executor.close()
    parallel.close()


def main() -> int:
    rendezvous, rank, model, tp_size, pp_size, mode = sys.argv[1:7]
    logging.basicConfig(format="%(message)s")
    shape = ParallelShape(tp_size=int(tp_size), pp_size=int(pp_size))
    config = server_config(model, shape.tp_size, shape.pp_size, mode, overlap="overlap" in sys.argv)
    try:
        if int(rank) == 0:
            lead(config, shape, rendezvous)
        else:
            place = shape.place(int(rank))
            run_follower(config, place, rendezvous, TOKEN)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
