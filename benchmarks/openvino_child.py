"""OpenVINO GenAI as a peer: runs in its own environment and imports nothing of ours. Used by `compare_cpu`.

    .venv-peers/openvino/bin/python benchmarks/openvino_child.py MODEL.gguf THREADS

stdin, a JSON object a line: `{"prompts": [[ids]], "output_len": n, "concurrency": n}`. stdout: `READY`, then for each
line `DONE {"arrivals": [[s]], "duration_s": s, "cpu_s": s}`: when each token of each prompt came, since it was added.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

CACHE_GIB = 2
MAX_BATCH_TOKENS = 2048


def main() -> None:
    """Load, then serve lines until stdin ends."""
    path, threads = sys.argv[1], int(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipe = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    print("READY", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print("DONE " + json.dumps(run(pipe, job["prompts"], job["output_len"], job["concurrency"])), flush=True)


def run(
    pipe: genai.ContinuousBatchingPipeline, prompts: list[list[int]], output_len: int, concurrency: int
) -> dict[str, Any]:
    """All prompts, `concurrency` at a time."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.min_new_tokens, config.ignore_eos, config.do_sample = (
        output_len,
        output_len,
        True,
        False,
    )
    arrivals: list[list[float]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    running: dict[int, tuple[Any, float]] = {}
    began, cpu = time.perf_counter(), cpu_s()
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, prompt = waiting.pop(0)
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            running[number] = (pipe.add_request(number, ids, config), time.perf_counter())
        pipe.step()
        now = time.perf_counter()
        for number, (handle, added) in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    arrivals[number].extend([now - added] * len(output.generated_ids))
            if len(arrivals[number]) >= output_len:
                del running[number]
    while pipe.has_non_finished_requests():
        pipe.step()
    return {"arrivals": arrivals, "duration_s": time.perf_counter() - began, "cpu_s": cpu_s() - cpu}


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    main()
