"""How long a role change takes in place, and with a reload of the engine, on one server in one run.

    python -m benchmarks.bench_role_switch --write

A prefill and a decode server are started. The first one changes between prefill and decode, `--rounds` times in place
and then with `"reload": true`. Each time counts from the request to its answer, which is sent when the server serves in
the new role. Behind each change back to prefill a prompt that it knew before is asked through the pair: its cached
tokens show whether the prefix cache is still there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.report import Run, add_model_flags, add_write_flags, footer, markdown_table, spread_of
from benchmarks.servers import GRACE_S, Server, server_flags
from pdserve.base.process import ServerReady, end_all

PROMPT_TOKENS = 1024
ROOMS = itertools.count(1)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=180) as answer:
        return dict(json.load(answer))


class Pair:
    """The two servers; `port` is the bootstrap port of the one that changes."""

    def __init__(self, changing: ServerReady, decode: ServerReady) -> None:
        self._changing, self._decode = changing, decode
        self._port = changing.bootstrap_port

    def change(self, role: str, *, reload: bool) -> float:
        """Seconds of a role change."""
        began = time.perf_counter()
        done = post(f"{self._changing.url}/pd_role_switch", {"new_role": role, "reload": reload})
        seconds = time.perf_counter() - began
        assert done["success"] and done["in_place"] is not reload, done
        self._port = done.get("bootstrap_port")
        return seconds

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that the changing server, now prefill, had in its cache."""
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": next(ROOMS)}
        body = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}, **room}
        with ThreadPoolExecutor(max_workers=2) as pool:
            prefill, _ = pool.map(lambda server: post(f"{server.url}/generate", body), (self._changing, self._decode))
        return int(prefill["meta_info"]["cached_tokens"])


def measure(pair: Pair, rounds: int, prompt: Sequence[int], *, reload: bool) -> dict[str, Any]:
    """Seconds of each change, and the cached tokens behind each change back."""
    seconds: list[float] = []
    cached: list[int] = []
    pair.cached_tokens(prompt)
    for _ in range(rounds):
        seconds += [pair.change(role, reload=reload) for role in ("decode", "prefill")]
        cached.append(pair.cached_tokens(prompt))
    return {"how": "reload" if reload else "in place", "seconds": seconds, "cached_tokens": cached}


def report(results: Sequence[dict[str, Any]], facts: dict[str, Any], model: str) -> str:
    """The results for people."""
    rows = [
        [one["how"], spread_of(one["seconds"]).show(2), str(len(one["seconds"])), str(min(one["cached_tokens"]))]
        for one in results
    ]
    table = markdown_table(["role change", "seconds", "changes", "least cached tokens afterwards"], rows)
    notes = [f"Model {model}. The prompt has {PROMPT_TOKENS} tokens. Median, and in parentheses least and most."]
    return f"# Role change: in place beside a reload\n\n{table}\n\n{footer(facts, notes)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    add_model_flags(parser)
    add_write_flags(parser, "role-switch")
    args = parser.parse_args(argv)
    run = Run("role-switch", argv, module="bench_role_switch")
    prompt = [10 + number % (args.vocab_size - 10) for number in range(PROMPT_TOKENS)]
    servers = [
        Server(role, "pdserve.launch_server", server_flags(args.model, args.dtype, role, args.threads), args.threads)
        for role in ("prefill", "decode")
    ]
    try:
        changing, decode = (server.wait() for server in servers)
        pair = Pair(changing, decode)
        results = [measure(pair, args.rounds, prompt, reload=False), measure(pair, 1, prompt, reload=True)]
    finally:
        end_all([server.child for server in servers], GRACE_S)
    facts = run.facts(results=results)
    run.publish(args, report(results, facts, args.model), facts)


if __name__ == "__main__":
    main()
