"""A pair with keys, behind SGLang's real router and behind ours: who has the key is answered, who has not is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server
from tests.e2e.sglang_router import running_sglang_router
from tests.tiny import Family

KEY, ROOT = "key-of-clients", "key-of-the-admin"
CLIENT, ADMIN = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {ROOT}"}
FLAGS = ("--served-model-name", "tiny", "--max-total-tokens", "4096", "--dtype", "float32")
BODY = {"text": "hello", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


@pytest.fixture(scope="module")
def workers(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[tuple[Server, Server]]:
    """Prefill and decode, whose keys are in their environment."""
    model = str(tiny_checkpoint("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_API_KEY", KEY)
        patch.setenv("PDSERVE_ADMIN_API_KEY", ROOT)
        prefill, decode = start_server(model, "prefill", *FLAGS), start_server(model, "decode", *FLAGS)
    prefill.headers = decode.headers = CLIENT
    with running(prefill, decode):
        yield prefill, decode


def refused_and_answered(url: str) -> None:
    """Through a router: not without the key, nor with another; with it by the real client."""
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert requests.post(f"{url}/generate", json=BODY, headers=headers, timeout=60).status_code == 401
    answer = requests.post(f"{url}/generate", json=BODY, headers=CLIENT, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 4, answer.text
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)
    events = client.completions.create(model="tiny", prompt="hello", max_tokens=4, stream=True)
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] in ("length", "stop")


def test_behind_sglangs_router(workers: tuple[Server, Server]) -> None:
    prefill, decode = workers
    with running_sglang_router([prefill], [decode], "--api-key", KEY) as router:
        refused_and_answered(router.url)
    assert_idle(*workers)


def test_behind_our_router(workers: tuple[Server, Server]) -> None:
    prefill, decode = workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_API_KEY", KEY)
        patch.setenv("PDSERVE_ADMIN_API_KEY", ROOT)
        router = start_router([prefill], [decode])
    with running(router):
        refused_and_answered(router.url)
        for headers, status in (({}, 401), (CLIENT, 401), (ADMIN, 200)):
            assert requests.post(f"{router.url}/flush_cache", headers=headers, timeout=60).status_code == status
        info = requests.get(f"{router.url}/get_server_info", headers=CLIENT, timeout=60)
        assert info.status_code == 200 and not {KEY, ROOT} & set(info.text.split('"'))
    assert_idle(*workers)
    for worker in workers:
        command_line = Path(f"/proc/{worker.child.pid}/cmdline").read_bytes()
        assert KEY.encode() not in command_line
        assert requests.get(f"{worker.url}/health", timeout=30).status_code == 200
        client = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="wrong", max_retries=0, timeout=60)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
