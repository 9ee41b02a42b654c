"""Real servers that a router finds through a Kubernetes API: a decode pod that is deleted loses no request.

The API is that of `tests/unit/router/fake_kube.py`. Pods are servers on three loopback addresses with one port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_server, until
from tests.tiny import Family
from tests.unit.router.fake_kube import DECODE, PREFILL, FakeKube

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SAMPLING = {"temperature": 0.8, "sampling_seed": 9, "max_new_tokens": 400, "ignore_eos": True}


class KubeThread:
    """The API server in a thread of its own."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self.kube.start())

    def put(self, name: str, ip: str, labels: dict[str, str], **changes: Any) -> None:
        """Add or change a pod."""

        async def put() -> None:
            self.kube.put(name, ip, labels, **changes)

        self._run(put())

    def close(self) -> None:
        """Stop the API server and its thread."""
        self._run(self.kube.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


class Cluster:
    """A prefill pod, two decode pods, and a router that only has their labels."""

    def __init__(self, model: str, stack: contextlib.ExitStack) -> None:
        self.api = KubeThread()
        stack.callback(self.api.close)
        flags = ("--timeout-graceful-shutdown", "60", "--max-total-tokens", "8192")
        self.prefill = start_server(model, "prefill", *flags, "--host", "127.0.0.1")
        stack.enter_context(running(self.prefill))
        self.port = str(urlsplit(self.prefill.url).port)
        self.decodes = [
            start_server(model, "decode", *flags, "--host", f"127.0.0.{index}", "--port", self.port) for index in (2, 3)
        ]
        stack.enter_context(running(*self.decodes))
        argv = ["--pd-disaggregation", "--port", "0", "--service-discovery", "--service-discovery-namespace", "ns"]
        argv += ["--prefill-selector", *(f"{k}={v}" for k, v in PREFILL.items()), "--decode-selector"]
        argv += [*(f"{k}={v}" for k, v in DECODE.items()), "--service-discovery-port", self.port]
        argv += ["--service-discovery-api", self.api.kube.url, "--drain-migrate", "--policy", "round_robin"]
        argv += ["--health-check-interval", "1", "--disable-pair-probes"]
        self.router = Server("router", "pdserve.launch_router", argv)
        stack.enter_context(running(self.router))

    def workers(self) -> dict[str, dict[str, Any]]:
        """The router's workers by address."""
        listed = requests.get(f"{self.router.url}/workers", timeout=30).json()["workers"]
        return {str(urlsplit(one["url"]).hostname): one for one in listed}

    def ask(self, prompt: list[int]) -> list[int]:
        """The tokens of one answer."""
        body = {"input_ids": prompt, "sampling_params": SAMPLING}
        answer = requests.post(f"{self.router.url}/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])


@pytest.fixture
def cluster(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(str(tiny_checkpoint("llama")), stack)


def test_a_decode_pod_that_is_deleted_passes_its_requests_on_and_ends(cluster: Cluster) -> None:
    router = cluster.router.url
    assert requests.get(f"{router}/readiness", timeout=30).status_code == 503
    cluster.api.put("prefill-0", "127.0.0.1", PREFILL)
    for index in (2, 3):
        cluster.api.put(f"decode-{index}", f"127.0.0.{index}", DECODE)
    until(lambda: requests.get(f"{router}/readiness", timeout=30).status_code == 200, 60, "a pair is found")
    until(lambda: sum(one["is_healthy"] for one in cluster.workers().values()) == 3, 60, "all pods are workers")
    prompts = [[5 + number] * 40 for number in range(4)]
    expected = [cluster.ask(prompt) for prompt in prompts]
    leaving = cluster.decodes[0]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(cluster.ask, prompt) for prompt in prompts]
        until(lambda: int(leaving.state()["num_running_reqs"]) >= 2, 60, "some run at the pod")
        # What Kubernetes does with a pod that is deleted: its object gets a time of deletion, its process SIGTERM.
        cluster.api.put("decode-2", "127.0.0.2", DECODE, terminating=True)
        os.kill(leaving.child.pid, signal.SIGTERM)
        found = [answer.result() for answer in answers]
    assert found == expected
    assert leaving.child.wait_exit(60.0)
    until(lambda: set(cluster.workers()) == {"127.0.0.1", "127.0.0.3"}, 60, "the pod's worker is removed")
    counters = requests.get(f"{router}/metrics", timeout=30).text
    moved = [
        line for line in counters.splitlines() if line.startswith('pdserve_router_migrations_total{result="moved"}')
    ]
    assert moved and float(moved[0].split()[-1]) >= 1, "the requests have moved"
    assert cluster.ask(prompts[0]) == expected[0]
    assert_idle(cluster.prefill, cluster.decodes[1], deadline_s=60)
