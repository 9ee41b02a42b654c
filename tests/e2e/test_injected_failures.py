"""A pair whose transfers fail now and then: clients have their answer or an error, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve.base.env import TRANSFER_FAILURES
from tests.e2e.harness import assert_idle, running, start_router, start_server
from tests.tiny import Family

NUM_REQUESTS = 40
FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "16384")


def test_both_servers_are_well_after_a_tenth_of_their_writes_and_polls_failed(
    tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_checkpoint("llama"))
    monkeypatch.setenv(TRANSFER_FAILURES[1], "0.1")
    decode = start_server(model, "decode", *FLAGS)
    prefill = start_server(model, "prefill", *FLAGS)
    with running(prefill, decode):
        once = start_router([prefill], [decode], "--disable-retries", "--disable-circuit-breaker")
        again = start_router([prefill], [decode], "--disable-circuit-breaker", "--retry-max-retries", "20")
        with running(once, again):

            def ask(url: str, i: int) -> requests.Response:
                body: dict[str, Any] = {"text": f"page {i} " * 8, "sampling_params": {"max_new_tokens": 4}}
                return requests.post(f"{url}/generate", json=body, timeout=60)

            with ThreadPoolExecutor(8) as pool:
                single = list(pool.map(lambda i: ask(once.url, i), range(NUM_REQUESTS)))
                retried = list(pool.map(lambda i: ask(again.url, i), range(NUM_REQUESTS)))
        statuses = [answer.status_code for answer in single]
        assert set(statuses) == {200, 502}
        failed = next(answer.json()["error"] for answer in single if answer.status_code == 502)
        assert "injected failure" in failed["message"]
        assert [answer.status_code for answer in retried] == [200] * NUM_REQUESTS
        assert_idle(prefill, decode)
        names = [f"sglang:num_{phase}_failed_reqs_total" for phase in ("bootstrap", "transfer")]
        failures = [server.metrics()[name] for server in (prefill, decode) for name in names]
        assert all(failures), failures
        for server in (prefill, decode):
            assert requests.get(f"{server.url}/health_generate", timeout=30).status_code == 200
