"""Weights that a trainer sends under load: in bodies, in shared memory, and in a process group."""

from __future__ import annotations

import base64
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from safetensors.torch import load_file, save

from tests.e2e.harness import assert_idle, running_monolith, running_pair
from tests.e2e.test_weights import FLAGS, TWO, Load, Models, check
from tests.trainer import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("sent"))


def tensors_of(models: Models, number: int) -> dict[str, Any]:
    return load_file(models.paths[number] / "model.safetensors")


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(f"{url}{path}", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def under_load(models: Models, url: str, send: Callable[[int, str], None]) -> None:
    """Change to the other weights and back; every answer is wholly from the version that it names."""
    with Load(url, 4) as load:
        load.await_version("first")
        for step, number in enumerate((1, 0)):
            send(number, f"v{step}-{number}")
            load.await_version(f"v{step}-{number}")
    assert not load.failures, load.failures[0]
    assert check(models, load.answers, "first") == {"first", "v0-1", "v1-0"}


def test_tensors_arrive_in_a_body(models: Models) -> None:
    with running_monolith(str(models.paths[0]), *FLAGS, "--weight-version", "first") as server:

        def send(number: int, version: str) -> None:
            data = base64.b64encode(save(tensors_of(models, number))).decode()
            post(server.url, "/update_weights_from_tensor", {"tensors": data, "weight_version": version})

        under_load(models, server.url, send)
        assert_idle(server)


@pytest.mark.parametrize("flags", [("--tp-size", "2"), ("--pp-size", "2"), ("--dp-size", "2"), TWO], ids=str)
def test_tensors_arrive_in_shared_memory_of_several_ranks(flags: tuple[str, ...], models: Models) -> None:
    with running_monolith(str(models.paths[0]), *FLAGS, *flags, "--weight-version", "first") as server:

        def send(number: int, version: str) -> None:
            path = Path("/dev/shm", f"pdserve-test-{uuid.uuid4().hex}")
            path.write_bytes(save(tensors_of(models, number)))
            try:
                body = {"shared_memory": path.name, "weight_version": version}
                post(server.url, "/update_weights_from_tensor", body)
            finally:
                path.unlink()

        under_load(models, server.url, send)
        assert_idle(server)


@pytest.mark.parametrize("split", [(), ("--tp-size", "2"), ("--dp-size", "2"), TWO], ids=str)
def test_a_trainer_sends_to_both_servers_of_a_pair(split: tuple[str, ...], models: Models) -> None:
    flags, num_ranks = (*FLAGS, "--weight-version", "first", *split), 2 if split else 1
    with running_pair(str(models.paths[0]), *flags) as pair:
        tensors = tensors_of(models, 1)
        names, port, world_size = sorted(tensors), free_port(), 1 + 2 * num_ranks
        argv = [sys.executable, "-m", "tests.trainer", str(port), str(world_size), "g", str(models.paths[1]), *names]
        group = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size, "group_name": "g"}
        sent = {
            "names": names, "dtypes": ["bfloat16"] * len(names), "shapes": [list(tensors[n].shape) for n in names],
            "group_name": "g", "weight_version": "v0-1", "abort_all_requests": True,
        }  # fmt: skip

        def both(path: str, bodies: list[dict[str, Any]]) -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda server, body: post(server.url, path, body), pair.workers, bodies))

        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
            try:
                offsets = [{"rank_offset": 1 + number * num_ranks, "backend": "gloo"} for number in range(2)]
                both("/init_weights_update_group", [group | offset for offset in offsets])
                assert trainer.stdin is not None
                trainer.stdin.write("\n")
                trainer.stdin.flush()
                both("/update_weights_from_distributed", [sent, sent])
                both("/destroy_weights_update_group", [{"group_name": "g"}] * 2)
            finally:
                trainer.kill()
        for server in pair.workers:
            name = "model.layers.0.self_attn.k_proj.weight"
            rows = post(server.url, "/get_weights_by_name", {"name": name, "truncate_size": 2})
            assert rows == tensors[name][:2].bfloat16().float().tolist()
        assert_idle(*pair.workers)
