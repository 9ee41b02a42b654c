"""`pdserve doctor` and `pdserve support-bundle` before real servers in bad states, each finding at its server.

One router before two prefill and four decode servers. One pair is healthy. The other servers are, by name:

    boxed     prefill: its HTTP port alone is reachable, as with one published port; its container's memory gets short
    old       decode of another version, whose clock is an hour ahead
    stranger  decode with another control token
    shared    decode with another transport and a small /dev/shm
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import PYTHON, Server, ranks_of, running, running_monolith, until
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN, OTHER_TOKEN = "control-token-of-this-test", "control-token-of-a-stranger"
KEY, ADMIN_KEY = "user-key-3141", "admin-key-2718"
PROMPT = "Whisper the word xylograph."
HOOK = """
import os, time
shift_s, version, now = float(os.environ.get("TEST_CLOCK_SHIFT_S", "0")), os.environ.get("TEST_VERSION"), time.time
if shift_s:
    time.time = lambda: now() + shift_s
if version:
    import pdserve
    pdserve.__version__ = version
"""
"""Imported by each new interpreter that has its folder in PYTHONPATH."""
OTHER_ADDRESS = "127.0.0.2"
HOUR_S = 3600
Findings = dict[str, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class BadFleet:
    """The router and the servers by name. `memory`: folder of the limit of `boxed`."""

    router: Server
    servers: dict[str, Server]
    urls: dict[str, str]
    memory: Path

    def post(self, path: str, **body: Any) -> requests.Response:
        """Ask the router with the user's key."""
        return requests.post(self.router.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=240)


def diagnosed(url: str, *keys: str) -> Findings:
    """The findings of `pdserve doctor --json`, by check."""
    argv = [PYTHON, "-m", "pdserve", "doctor", url, "--json", *keys]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["healthy"] else 1), done.stderr
    found: Findings = {}
    for one in told["findings"]:
        assert one["where"] and one["fix"]
        found.setdefault(one["check"], []).append(one)
    return found


def set_memory(folder: Path, limit: int, used: int) -> None:
    """Write the files of a control group."""
    folder.mkdir(exist_ok=True)
    for name, text in (("max", f"{limit}"), ("current", f"{used}"), ("stat", "inactive_file 0")):
        (folder / f"memory.{name}").write_text(text + "\n")


def in_box(command: str) -> list[str]:
    """What runs a server with other mounts."""
    return ["unshare", "--mount", "sh", "-c", f'{command} && exec "$@"', "sh"]


@contextlib.contextmanager
def published(port: int) -> Iterator[str]:
    """Forward one port of another address to this one, and no other port."""
    listener = socket.create_server((OTHER_ADDRESS, 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, server = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://{OTHER_ADDRESS}:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.fixture(scope="module")
def fleet(tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadFleet]:
    if os.geteuid() != 0 or subprocess.run(in_box("true"), check=False).returncode != 0:
        pytest.skip("other mounts need root")
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "sitecustomize.py").write_text(HOOK)
    memory = folder / "cgroup"
    set_memory(memory, 3 << 30, 1 << 30)
    model = str(tiny_checkpoint("llama"))

    def start(mode: str, name: str, *flags: str, before: list[str] | None = None, **variables: str) -> Server:
        argv = ["--model-path", model, "--port", "0", "--cpu-threads", "1", "--device", "cpu", "--page-size", "16"]
        argv += ["--max-total-tokens", "1024", "--served-model-name", "tiny", "--disaggregation-mode", mode]
        argv += ["--disaggregation-bootstrap-port", "0"] if mode == "prefill" else []
        variables = {
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', Path.cwd())}", "PDSERVE_CONTROL_TOKEN": TOKEN
        } | variables  # fmt: skip
        return Server(name, "pdserve.launch_server", [*argv, *flags], before=before or (), variables=variables)

    tmpfs = in_box("mount -t tmpfs -o size=64m none /dev/shm")
    old = {"TEST_VERSION": "0.0.9", "TEST_CLOCK_SHIFT_S": str(HOUR_S)}
    transport = ("--disaggregation-transfer-backend", "shm")
    servers = {
        "prefill": start("prefill", "prefill"),
        "boxed": start("prefill", "boxed", before=in_box(f"mount --bind {memory} /sys/fs/cgroup")),
        "decode": start("decode", "decode"),
        "old": start("decode", "old", before=["env"], **old),
        "stranger": start("decode", "stranger", PDSERVE_CONTROL_TOKEN=OTHER_TOKEN),
        "shared": start("decode", "shared", *transport, before=tmpfs),
    }
    with running(*servers.values()):
        with published(int(servers["boxed"].url.rpartition(":")[2])) as boxed_url:
            urls = {name: server.url for name, server in servers.items()} | {"boxed": boxed_url}
            argv = ["--pd-disaggregation", "--port", "0", "--health-check-interval", "1"]
            argv += ["--api-key", KEY, "--admin-api-key", ADMIN_KEY]
            for name, server in servers.items():
                place = [str(server.bootstrap_port)] if name in ("prefill", "boxed") else []
                argv += ["--prefill" if place else "--decode", urls[name], *place]
            router = Server("router", "pdserve.launch_router", argv, variables={"PDSERVE_CONTROL_TOKEN": TOKEN})
            with running(router):
                yield BadFleet(router, servers, urls, memory)


def places(found: Findings, check: str) -> set[tuple[str, ...]]:
    """The places of a check's findings."""
    return {tuple(one["where"]) for one in found.get(check, [])}


KEYS = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)


def test_each_bad_state_is_told_at_its_server(fleet: BadFleet) -> None:
    at = fleet.urls
    broken = {(at["boxed"], at["decode"]), (at["prefill"], at["old"]), (at["prefill"], at["shared"])}
    found: Findings = {}

    def is_probed() -> bool:
        nonlocal found
        found = diagnosed(fleet.router.url, *KEYS)
        return broken <= places(found, "pair") and "dead" in found

    until(is_probed, 60.0, "the router has probed the pairs")
    by_pair = {tuple(one["where"]): one for one in found["pair"]}
    assert "pdserve_version" in by_pair[at["prefill"], at["old"]]["what"]
    assert "transfer_backend" in by_pair[at["prefill"], at["shared"]]["what"]
    assert all("field equal" in by_pair[at["prefill"], at[name]]["fix"] for name in ("old", "shared"))
    assert "prefill_not_found" in by_pair[at["boxed"], at["decode"]]["what"]
    (dead,) = found["dead"]
    assert dead["where"] == [at["stranger"]] and "another control token" in dead["what"]
    assert "PDSERVE_CONTROL_TOKEN" in dead["fix"] and dead["severity"] == "error"
    (versions,) = found["versions"]
    assert versions["severity"] == "error" and f"0.0.9 at {at['old']};" in versions["what"]
    (clocks,) = found["clocks"]
    assert clocks["where"] == [at["old"]] and " ahead" in clocks["what"]
    (transport,) = found["transport"]
    assert f"'shm' at {at['shared']}" in transport["what"] and "flags" not in found
    assert places(found, "shared_memory") == {(at["shared"],)}
    (port,) = found["port"]
    assert port["where"] == [at["boxed"]] and f"bootstrap port {OTHER_ADDRESS}:" in port["what"]
    assert not {"host_memory", "kv_full", "not_checked", "unreadable"} & set(found)


def test_memory_of_a_container_that_is_short(fleet: BadFleet) -> None:
    set_memory(fleet.memory, 3 << 30, (3 << 30) - (90 << 20))
    found = diagnosed(fleet.router.url, *KEYS)
    assert places(found, "host_memory") == {(fleet.urls["boxed"],)}
    assert "0.09 of 3.0 GiB" in found["host_memory"][0]["what"]
    set_memory(fleet.memory, 3 << 30, 1 << 30)


def test_a_full_pool_is_told_while_requests_wait(fleet: BadFleet) -> None:
    """Pages are free, but reserved for the growth of running requests."""
    sampling = {"max_new_tokens": 700, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        bodies = [{"input_ids": [5 + number] * 200, "sampling_params": sampling} for number in range(12)]
        answers = [pool.submit(fleet.post, "/generate", **body) for body in bodies]
        found: Findings = {}

        def is_told() -> bool:
            nonlocal found
            found = diagnosed(fleet.router.url, *KEYS)
            return "kv_full" in found

        until(is_told, 60.0, "requests have waited for a second")
        assert [answer.result().status_code for answer in answers] == [200] * 12
    assert places(found, "kv_full") == {(fleet.urls["decode"],)}
    assert "for KV memory" in found["kv_full"][0]["what"] and "--max-inflight" in found["kv_full"][0]["fix"]
    until(lambda: "kv_full" not in diagnosed(fleet.router.url, *KEYS), 30.0, "it is over")


def test_no_key_token_or_prompt_is_in_a_bundle(fleet: BadFleet, tmp_path: Path) -> None:
    sent = [
        fleet.post("/generate", text=PROMPT, sampling_params={"max_new_tokens": 4}),
        fleet.post("/v1/chat/completions", model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=4),
        fleet.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=4, seed=PROMPT),
        fleet.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=4, regex=f"({PROMPT}"),
        fleet.post("/v1/chat/completions", model="tiny", messages=[{"role": PROMPT, "content": PROMPT}], max_tokens=4),
        requests.post(f"{fleet.router.url}/generate?text={PROMPT}&api_key={KEY}", data=PROMPT, timeout=60),
        requests.get(f"{fleet.router.url}/workers", headers={"x-api-key": f"{KEY}-{TOKEN}"}, timeout=60),
    ]
    assert [answer.status_code for answer in sent] == [200, 200, 400, 400, 200, 401, 401]
    output = tmp_path / "bundle.tar.gz"
    argv = [PYTHON, "-m", "pdserve", "support-bundle", fleet.router.url, "-o", str(output)]
    done = subprocess.run([*argv, *KEYS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(output) as archive:
        files = {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}  # type: ignore[union-attr]
    (ids,) = {one["control_token_id"] for one in json.loads(files["bundle/server_info.json"])["prefill"]}
    assert ids == "id 1"
    secrets = (TOKEN, OTHER_TOKEN, KEY, ADMIN_KEY, PROMPT, "xylograph", "Whisper%20the")
    assert [(name, one) for name, text in files.items() for one in secrets if one in text] == []
    assert any(name.startswith("bundle/logs/") for name in files)


def test_a_scheduler_that_hangs_is_told(fleet: BadFleet) -> None:
    """Last: it goes on afterwards."""
    (scheduler,) = ranks_of(fleet.servers["decode"])
    os.kill(scheduler.pid, signal.SIGSTOP)
    try:
        until(
            lambda: (fleet.urls["decode"],) in places(diagnosed(fleet.router.url, *KEYS), "replica"), 90.0, "it is told"
        )
    finally:
        os.kill(scheduler.pid, signal.SIGCONT)


def test_a_full_pool_of_a_server_without_a_router(tiny_checkpoint: Callable[[Family], Path]) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), "--max-total-tokens", "1024") as server:
        assert diagnosed(server.url) == {}
        body = {"input_ids": [7] * 200, "sampling_params": {"max_new_tokens": 700, "ignore_eos": True}}
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=240) for _ in range(8)]
            until(lambda: "kv_full" in diagnosed(server.url), 60.0, "requests have waited for a second")
            assert [answer.result().status_code for answer in answers] == [200] * 8
