"""How much CPU time servers take that have nothing to do: a monolith, and a router before 1P1D, after one request each.

    python -m benchmarks.bench_idle --write

Exit status 1 when a process takes more than `--limit` ms of CPU time a second. What is left are heartbeats (between
processes and servers, once a second or less often), and the router's questions after the servers' health.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence

import psutil

from benchmarks.report import Run, add_model_flags, add_write_flags, footer, markdown_table
from benchmarks.servers import monolith_and_pair

NOTES = ("CPU time, not elapsed time: that others use the cores changes little.",)
DRAIN_TIMEOUT_S = 10.0
"""After a request: prefixes are let go of, collectors of garbage run, and memory is committed ahead."""


def ask(url: str) -> None:
    """One request, so that everything has been used once."""
    body = {"text": "The", "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def named(process: psutil.Process, parent: str | None) -> str:
    """What a process of the servers is, by its command line."""
    words = process.cmdline()
    if parent is not None:
        return f"{parent}: {'engine' if 'spawn_main' in ' '.join(words) else 'helper'}"
    if "pdserve.launch_router" in words:
        return "router"
    mode = words[words.index("--disaggregation-mode") + 1] if "--disaggregation-mode" in words else "monolith"
    return f"{mode}: API"


def processes() -> dict[str, psutil.Process]:
    """All that we have started, by name; those that only keep track of resources have next to nothing to do."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process().children():
        name = named(child, None)
        found[name] = child
        for grandchild in child.children(recursive=True):
            found[named(grandchild, name.partition(":")[0])] = grandchild
    return found


def cpu_s(process: psutil.Process) -> float:
    """CPU time of all its threads."""
    times = process.cpu_times()
    return times.user + times.system


def measure(seconds: float) -> dict[str, float]:
    """Milliseconds of CPU time a second by process."""
    watched = processes()
    before = {name: cpu_s(process) for name, process in watched.items()}
    began = time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - began
    return {name: (cpu_s(process) - before[name]) / took * 1e3 for name, process in watched.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of the monolith; prefill and decode have half each")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--limit", type=float, default=20.0, help="milliseconds a second, by process")
    add_model_flags(parser)
    add_write_flags(parser, "idle")
    args = parser.parse_args(argv)
    run = Run("idle", argv)
    with monolith_and_pair(args.model, args.dtype, threads=args.threads) as urls:
        for url in urls.values():
            ask(url)
        time.sleep(DRAIN_TIMEOUT_S)
        taken = measure(args.seconds)
    rows = [[name, f"{each:.1f}", f"{each / 1e3:.2%}"] for name, each in sorted(taken.items())]
    table = markdown_table(["process", "CPU ms a second", "of a core"], rows)
    facts = run.facts(cpu_ms_per_s=taken, seconds=args.seconds)
    text = f"# Idle servers: CPU time over {args.seconds:.0f} s\n\n{table}\n\n{footer(facts, NOTES)}\n"
    run.publish(args, text, facts)
    return int(max(taken.values()) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
