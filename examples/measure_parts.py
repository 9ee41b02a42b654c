"""Says whether a deployment needs more prefill servers or more decode servers, by the parts of the requests' times.

    python examples/measure_parts.py URL [--requests N] [--rate R] [--prompt-words N] [--max-tokens N]

Sends completions at a steady rate, reads the timing of each, and prints means and a recommendation. Needs `requests`.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

PARTS = ("bootstrap_s", "queue_s", "prefill_s", "transfer_s", "first_decode_step_s")


def ask(url: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Send one request; return its timing, and its seconds per output token as `itl_s`."""
    body = {
        "model": "any", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_meta_info": True,
    }  # fmt: skip
    started = time.perf_counter()
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=600)
    answer.raise_for_status()
    seconds = time.perf_counter() - started
    timing: dict[str, Any] = answer.json()["pdserve"]
    ttft_s = sum(timing.get(part) or 0.0 for part in PARTS[:4])
    return timing | {"ttft_s": ttft_s, "itl_s": max(0.0, seconds - ttft_s) / max(1, max_tokens - 1)}


def advice(means: dict[str, float]) -> str:
    """Return what the means suggest."""
    wait = {"prefill": means["queue_s"], "decode": means["bootstrap_s"]}
    longest = max(wait, key=lambda role: wait[role])
    if wait[longest] < 0.2 * means["prefill_s"]:
        return "prompts wait little at either role: the ratio fits this load"
    if longest == "prefill":
        return "prompts wait for prefill: add a prefill server, or turn a decode server into one"
    return "prompts wait for KV memory of decode: add a decode server, or give decode more memory"


def main() -> int:
    """Run the load; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--prompt-words", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with ThreadPoolExecutor(max_workers=args.requests) as threads:
        asked = []
        for number in range(args.requests):
            prompt = f"{number} " + " ".join(f"word{number + place}" for place in range(args.prompt_words))
            asked.append(threads.submit(ask, args.url, prompt, args.max_tokens))
            time.sleep(1 / args.rate)
        timings = [one.result() for one in asked]
    means = {name: sum(one.get(name) or 0.0 for one in timings) / len(timings) for name in (*PARTS, "ttft_s", "itl_s")}
    for name, seconds in means.items():
        print(f"{name:<20}{1e3 * seconds:9.1f} ms")
    print(advice(means))
    return 0


if __name__ == "__main__":
    sys.exit(main())
