"""A pair with keys and a control token, behind SGLang's real router and behind ours: who has the key is answered, who
has not is not, and a stranger at the ports between the servers changes nothing. Another pair takes its router only,
which has no token but the key that is derived from it, no API key, and no flag for it.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import psutil
import pytest
import requests
import zmq

from pdserve.http.session_proof import CHALLENGE_PATH, worker_secret
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
CONNECTS_S = 0.3
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


@pytest.fixture(scope="module")
def router(workers: tuple[Server, Server]) -> Iterator[Server]:
    """Ours, before both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_API_KEY", KEY)
        patch.setenv("PDSERVE_ADMIN_API_KEY", ROOT)
        started = start_router([workers[0]], [workers[1]])
    with running(started):
        yield started


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


def test_behind_our_router(router: Server, workers: tuple[Server, Server]) -> None:
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


@contextlib.contextmanager
def nothing_changes(router: Server, workers: tuple[Server, Server]) -> Iterator[None]:
    """In the memory of the engines, in their peers, in what their audits find, and in the answers."""

    def seen() -> tuple[Any, list[Any]]:
        answered = requests.post(f"{router.url}/generate", json=BODY, headers=CLIENT, timeout=60)
        assert answered.status_code == 200, answered.text
        assert_idle(*workers)
        states = [worker.state() for worker in workers]
        peers = [[(peer["endpoint"], peer["instance"], peer["state"]) for peer in one["peers"]] for one in states]
        assert [len(one) for one in peers] == [1, 1] and all(state["audit"] == [] for state in states)
        return answered.json()["output_ids"], [(one["memory"], one["failures"]) for one in states] + peers

    before = seen()
    yield
    assert seen() == before


def data_ports(worker: Server) -> list[tuple[str, int]]:
    """Of its transfer engine: all at which its processes listen and that are no others."""
    processes = [psutil.Process(worker.child.pid)]
    processes += processes[0].children(recursive=True)
    found = [one for process in processes for one in process.net_connections(kind="tcp") if one.status == "LISTEN"]
    known = {int(url.rpartition(":")[2]) for url in (worker.url, worker.state()["facts"]["control_endpoint"])}
    assert worker.ready is not None
    known |= {worker.ready.bootstrap_port}
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
    return sorted(
        {(everywhere.get(at.ip, at.ip), at.port) for at in (one.laddr for one in found) if at.port not in known}
    )


def reachable(ports: list[tuple[str, int]], source: str = "127.0.0.1") -> list[tuple[str, int]]:
    """The ports that take a connection from `source`; the others drop it."""
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for address in ports:
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.bind((source, 0))
            assert client.connect_ex(address) in (0, errno.EINPROGRESS)
            selector.register(client, selectors.EVENT_WRITE, address)
        found, deadline = [], time.monotonic() + CONNECTS_S
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.append(key.data)
        return sorted(found)


def say_all(host: str, port: int) -> None:
    """What strangers say, each in a connection of its own, which they leave at once."""
    for said in STRANGERS.values():
        with socket.create_connection((host, port), timeout=30) as stranger:
            stranger.sendall(said)


ASKED = (
    ("POST", "/generate"), ("POST", "/v1/chat/completions"), ("POST", "/health_pair"), ("POST", "/flush_cache"),
    ("POST", "/declare_peer_dead"), ("POST", "/pause_generation"), ("GET", "/get_server_info"), ("GET", "/observe"),
    ("GET", "/v1/models"),
)  # fmt: skip
"""Of servers and of the router. Both refuse a stranger before they look for the path."""


def test_a_stranger_on_every_port_changes_nothing(router: Server, workers: tuple[Server, Server]) -> None:
    with nothing_changes(router, workers):
        for server in (router, *workers):
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
                for method, path in ASKED:
                    answer = requests.request(method, server.url + path, json=BODY, headers=headers, timeout=30)
                    assert answer.status_code == 401, (path, answer.text)
            say_all("127.0.0.1", int(server.url.rpartition(":")[2]))
        for worker in workers:
            ports = data_ports(worker)
            assert ports, "mooncake listens"
            assert reachable(ports, "127.0.0.66") == []
            admitting = reachable(ports)
            assert bool(admitting) is (worker is workers[1]), "prefill's host reaches the engine that decode has for it"
            for host, port in admitting:
                say_all(host, port)


def test_a_client_between_the_servers_changes_nothing(router: Server, workers: tuple[Server, Server]) -> None:
    """Its key opens neither the bootstrap server nor the control ports."""
    bootstrap = f"http://127.0.0.1:{workers[0].bootstrap_port}"
    with nothing_changes(router, workers):
        for method, path in (("GET", "/route"), ("PUT", "/route"), ("POST", "/generate"), ("GET", "/nowhere")):
            answer = requests.request(method, bootstrap + path, json=BODY, headers=CLIENT, timeout=30)
            assert answer.status_code in (401, 404, 405), (path, answer.text)
        for worker in workers:
            host, _, port = worker.state()["facts"]["control_endpoint"].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n\r\n" % KEY.encode())
                client.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    assert b"HTTP" not in client.recv(1 << 12)


def forge_control_frames(worker: Server) -> None:
    endpoint = worker.state()["facts"]["control_endpoint"]
    host, _, port = endpoint.rpartition(":")
    say_all(host, int(port))
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.curve_serverkey, push.curve_publickey, push.curve_secretkey = public, public, secret
        push.connect(f"tcp://{endpoint}")
        push.send(b"forged")
        until(lambda: worker.counter("control_handshakes_failed") >= 1, 30, "a refused handshake")
    assert worker.counter("control_frames_refused") == 0


def test_a_stranger_between_the_servers_changes_nothing(router: Server, workers: tuple[Server, Server]) -> None:
    prefill, decode = workers
    url = f"http://127.0.0.1:{prefill.bootstrap_port}/route"
    theirs = msgspec.json.encode(route(host="127.0.0.2"))
    with nothing_changes(router, workers):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, CLIENT):
            assert requests.put(url, data=theirs, headers=headers, timeout=30).status_code == 401
            assert requests.get(url, headers=headers, timeout=30).status_code == 401
        for worker in (prefill, decode):
            forge_control_frames(worker)


def test_who_names_a_bootstrap_address_learns_neither_the_token_nor_what_is_there(
    router: Server, workers: tuple[Server, Server]
) -> None:
    _, decode = workers
    listener = Listener(answer("403 Forbidden", b"INTERNAL of whatever listens here"))
    try:
        named = {"bootstrap_host": listener.address[0], "bootstrap_port": listener.address[1], "bootstrap_room": 7}
        told = requests.post(f"{decode.url}/generate", json=BODY | named, headers=CLIENT, timeout=60)
    finally:
        listener.close()
    assert told.status_code == 502 and told.json()["error"]["code"] == "prefill_not_found"
    message = told.json()["error"]["message"].replace(str(listener.address[1]), "PORT")
    assert "INTERNAL" not in told.text and "403" not in message
    assert "PDSERVE_CONTROL_TOKEN" in message, "one of the possible causes, whatever the cause is"
    assert listener.seen.startswith(b"GET /challenge?nonce=") and b"Proof" not in listener.seen
    assert TOKEN.encode() not in listener.seen
    answered = requests.post(f"{router.url}/generate", json=BODY, headers=CLIENT, timeout=60)
    assert_idle(*workers)
    assert answered.status_code == 200 and len(answered.json()["output_ids"]) == 4, answered.text


@pytest.mark.parametrize("token", ["", "another-token-of-16-or-more"])
def test_a_server_with_another_token_is_named_before_it_gets_a_request(
    workers: tuple[Server, Server], tiny_checkpoint: Callable[[Family], Path], token: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_API_KEY", KEY)
        patch.setenv("PDSERVE_ADMIN_API_KEY", ROOT)
        patch.setenv("PDSERVE_CONTROL_TOKEN", token)
        decode = start_server(str(tiny_checkpoint("llama")), "decode", *FLAGS)
        with running(decode):
            patch.delenv("PDSERVE_CONTROL_TOKEN")  # the router sends keys
            router = start_router([workers[0]], [decode], probes=True)
            with running(router):
                told = requests.post(f"{router.url}/generate", json=BODY, headers=CLIENT, timeout=60)
                ready = requests.get(f"{router.url}/readiness", timeout=60)
                (pair,) = requests.get(f"{router.url}/observe", headers=ADMIN, timeout=60).json()["pairs"]
                for server in (workers[0], decode):
                    until(lambda s=server: any("PDSERVE_CONTROL_TOKEN" in line for line in s.lines), 20, "a line")
    assert (told.status_code, told.json()["error"]["code"]) == (502, "control_token_mismatch")
    assert "PDSERVE_CONTROL_TOKEN" in told.text
    assert ready.status_code == 503 and "PDSERVE_CONTROL_TOKEN" in ready.text
    assert not pair["serving"] and "PDSERVE_CONTROL_TOKEN" in pair["error"]
    assert any("PDSERVE_CONTROL_TOKEN" in line and decode.url in line for line in router.lines)


# ---------------------------------------------------------------------- worker HTTP behind the proof


@pytest.fixture(scope="module")
def proven(tiny_checkpoint: Callable[[Family], Path]) -> Iterator[tuple[Server, Server, Server]]:
    """Prefill, decode and router: the servers take requests with a proof only, prefill as it has no key, decode by the
    flag.
    """
    model = str(tiny_checkpoint("llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CONTROL_TOKEN", TOKEN)
        prefill = start_server(model, "prefill", *FLAGS)
        decode = start_server(model, "decode", *FLAGS, "--require-control-proof", "--api-key", KEY)
    with running(prefill, decode):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PDSERVE_WORKER_PROOF_KEY", worker_secret(TOKEN).hex())
            router = start_router([prefill], [decode], "--pair-probe-interval-secs", "0.5", probes=True)
        with running(router):
            yield prefill, decode, router


def chats(url: str) -> None:
    """A whole answer and a stream."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert whole.usage is not None and whole.usage.completion_tokens == 4
    events = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, stream=True)
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] in ("length", "stop")


def test_a_router_that_proves_the_token_is_served(proven: tuple[Server, Server, Server]) -> None:
    _, _, router = proven
    chats(router.url)
    for method, path in (
        ("GET", "/get_load"), ("GET", "/get_server_info"), ("GET", "/v1/models"), ("GET", "/observe"),
        ("GET", "/engine_metrics"), ("POST", "/flush_cache?timeout=10"), ("POST", "/tokenize"),
        ("GET", "/health_generate"),
    ):  # fmt: skip
        body = {"prompt": "hello"} if path == "/tokenize" else None
        answer = requests.request(method, router.url + path, json=body, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
    assert len(requests.get(f"{router.url}/get_load", timeout=60).json()) == 2
    seen = f"{router.url}/metrics"
    until(
        lambda: 'pair_probes_total{result="ok"}' in requests.get(seen, timeout=30).text, 30, "a token through the pair"
    )


def test_who_asks_a_server_directly_is_refused_with_a_key_as_well(proven: tuple[Server, Server, Server]) -> None:
    for worker in proven[:2]:
        for headers in ({}, CLIENT, {"Authorization": f"Bearer {TOKEN}"}, {"Pdserve-Proof": "w1"}):
            for method, path in ASKED:
                answer = requests.request(method, worker.url + path, json=BODY, headers=headers, timeout=30)
                assert answer.status_code == 401, (path, answer.text)
                assert "control" in answer.json()["error"]["code"]
        for path in ("/health", "/metrics", f"{CHALLENGE_PATH}?nonce={'0' * 32}"):
            assert requests.get(worker.url + path, timeout=30).status_code == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_WORKER_PROOF_KEY", worker_secret(TOKEN + "x").hex())
        stranger = start_router([proven[0]], [proven[1]])
    keyed = start_router([proven[0]], [proven[1]], "--api-key", KEY)
    with running(stranger, keyed):
        for router, why in ((stranger, "another control token"), (keyed, "--no-require-control-proof")):
            told = requests.get(f"{router.url}/workers", headers=CLIENT, timeout=30).json()["workers"]
            assert len(told) == 2 and all(why in worker["last_error"] for worker in told)
            assert requests.post(f"{router.url}/generate", json=BODY, headers=CLIENT, timeout=60).status_code == 503


@pytest.mark.slow
def test_a_server_that_changes_its_role_is_believed_again(proven: tuple[Server, Server, Server]) -> None:
    """Its application begins anew, and with it its sessions."""
    _, decode, router = proven
    for role in ("prefill", "decode"):
        body = {"worker_url": decode.url, "new_role": role}
        answer = requests.post(f"{router.url}/pd_role_switch", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
    chats(router.url)
