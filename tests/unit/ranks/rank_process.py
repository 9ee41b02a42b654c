"""One rank of a replica with a real model, in a process of its own.

Run as `python rank_process.py RENDEZVOUS RANK MODEL TP PP [overlap] [wait]`. Rank 0 generates and prints, as one line
of JSON, the tokens of three requests by name, the third of which is sampled; the others follow.
"""

from __future__ import annotations

import json
import logging
import queue
import sys

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.engine.build import run_scheduler
from pdserve.engine.build_follower import run_follower
from pdserve.engine.build_transfer import ReplicaId
from pdserve.errors import ConfigError, ModelError
from pdserve.protocol.engine_state import SchedulerHeartbeat
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import (
    GenerateRequest,
    OutputBatch,
    Shutdown,
    ToApi,
    ToScheduler,
)
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import random_prompt

TOKEN = "secret"
GREEDY = CoreSamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
SAMPLED = CoreSamplingParams(seed=11, max_new_tokens=6, ignore_eos=True)
REQUESTS = {
    "long": GenerateRequest(rid="long", input_ids=random_prompt(70, 320), sampling=GREEDY),
    "short": GenerateRequest(rid="short", input_ids=random_prompt(23, 320), sampling=GREEDY),
    "sampled": GenerateRequest(
        rid="sampled", input_ids=random_prompt(70, 320), sampling=SAMPLED, logprobs=Logprobs(top=2)
    ),
}


class Client:
    """Implements `SchedulerChannel`: asks everything at once, prints what comes, and ends the scheduler then."""

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._asked: queue.SimpleQueue[ToScheduler] = queue.SimpleQueue()
        self.tokens: dict[str, list[int]] = {rid: [] for rid in REQUESTS}
        self._running = set(REQUESTS)
        for request in REQUESTS.values():
            self._asked.put(request)

    def recv(self, timeout_s: float) -> ToScheduler | None:
        try:
            return self._asked.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, message: ToApi) -> None:
        if not isinstance(message, OutputBatch):
            return
        for output in message.outputs:
            self.tokens[output.rid] += output.token_ids
            if output.finish is not None:
                assert output.finish.type == "length", output
                self._running.remove(output.rid)
        if not self._running:
            if self._waits:
                print(json.dumps(self.tokens), flush=True)
                sys.stdin.readline()
            self._asked.put(Shutdown())

    def beat(self, message: SchedulerHeartbeat) -> None: ...

    def close(self) -> None: ...


def server_config(model: str, tp_size: int, pp_size: int, *, overlap: bool) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(model_path=model, dtype="float32"),
        parallel=ParallelConfig(tp_size=tp_size, pp_size=pp_size),
        memory=MemoryConfig(page_size=8, max_total_tokens=2048),
        schedule=ScheduleConfig(max_running_requests=4, disable_overlap_schedule=not overlap, chunked_prefill_size=16),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )


def generate(config: ServerConfig, rendezvous: str | None, *, waits: bool = False) -> dict[str, list[int]]:
    """Lead, or be alone; the tokens by request."""
    client = Client(waits=waits)
    run_scheduler(config, client, ReplicaId(server="s", rendezvous=rendezvous), TOKEN)
    return client.tokens


def main() -> int:
    rendezvous, rank, model, tp_size, pp_size = sys.argv[1:6]
    logging.basicConfig(format="%(message)s")
    shape = ParallelShape(tp_size=int(tp_size), pp_size=int(pp_size))
    config = server_config(model, shape.tp_size, shape.pp_size, overlap="overlap" in sys.argv)
    try:
        if int(rank) == 0:
            print(json.dumps(generate(config, rendezvous, waits="wait" in sys.argv)), flush=True)
        else:
            run_follower(config, shape.coord(int(rank)), rendezvous, TOKEN)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
