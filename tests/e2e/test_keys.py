"""A pair with keys and a control token, behind SGLang's real router and behind ours: who has the key is answered, who
has not is not, and a stranger at the ports between the servers changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import openai
import pytest
import requests
import zmq

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server, until
from tests.e2e.sglang_router import running_sglang_router
from tests.tiny import Family
from tests.unit.transfer.test_bootstrap import route
from tests.unit.transfer.test_control_curve import STRANGERS
from tests.unit.transfer.test_directory import Listener, answer

TOKEN = "a-token-of-these-two-servers"
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
        patch.setenv("PDSERVE_CONTROL_TOKEN", TOKEN)
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


def test_a_stranger_between_the_servers_changes_nothing(workers: tuple[Server, Server]) -> None:
    prefill, decode = workers
    url = f"http://127.0.0.1:{prefill.bootstrap_port}/route"
    theirs = msgspec.json.encode(route(host="127.0.0.2"))
    for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, CLIENT):
        assert requests.put(url, data=theirs, headers=headers, timeout=30).status_code == 401
        assert requests.get(url, headers=headers, timeout=30).status_code == 401
    for worker in workers:
        endpoint = worker.state()["facts"]["control_endpoint"]
        host, _, port = endpoint.rpartition(":")
        for said in STRANGERS.values():
            with socket.create_connection((host, int(port)), timeout=30) as stranger:
                stranger.sendall(said)
        public, secret = zmq.curve_keypair()
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.linger = 0
            push.curve_serverkey, push.curve_publickey, push.curve_secretkey = public, public, secret
            push.connect(f"tcp://{endpoint}")
            push.send(b"forged")
            until(lambda worker=worker: worker.counter("control_handshakes_failed") >= 1, 30, "a refused handshake")
        assert worker.counter("control_frames_refused") == 0
    generated(prefill, decode)
    assert_idle(*workers)


def test_who_names_a_bootstrap_address_learns_neither_the_token_nor_what_is_there(
    workers: tuple[Server, Server],
) -> None:
    prefill, decode = workers
    listener = Listener(answer("403 Forbidden", b"INTERNAL of whatever listens here"))
    try:
        named = {"bootstrap_host": listener.address[0], "bootstrap_port": listener.address[1], "bootstrap_room": 7}
        told = requests.post(f"{decode.url}/generate", json=BODY | named, headers=CLIENT, timeout=60)
    finally:
        listener.close()
    assert told.status_code == 502 and told.json()["error"]["code"] == "prefill_not_found"
    assert "INTERNAL" not in told.text and "403" not in told.text
    assert listener.seen.startswith(b"GET /challenge?nonce=") and b"Proof" not in listener.seen
    assert TOKEN.encode() not in listener.seen
    generated(prefill, decode)
    assert_idle(*workers)


def generated(prefill: Server, decode: Server) -> None:
    """A request to both, as a router sends it, is answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_API_KEY", KEY)
        router = start_router([prefill], [decode])
    with running(router):
        answered = requests.post(f"{router.url}/generate", json=BODY, headers=CLIENT, timeout=60)
    assert answered.status_code == 200 and len(answered.json()["output_ids"]) == 4, answered.text
