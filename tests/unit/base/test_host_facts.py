"""Facts of a host: RDMA devices and the states of their ports, from the kernel's files, and what every host has.

A port's file has a number and a name, such as `4: ACTIVE`. Devices come and go, so a file may be missing.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pdserve.base.host_facts import host_facts, rdma_devices, rdma_ports


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    """Two devices, the second with two ports, and one whose ports cannot be read."""
    for device, port, state in (
        ("mlx5_1", "1", "1: DOWN\n"),
        ("mlx5_1", "2", "2: INIT\n"),
        ("mlx5_0", "1", "4: ACTIVE\n"),
    ):
        folder = tmp_path / device / "ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    (tmp_path / "mlx5_2").mkdir()
    (tmp_path / "mlx5_3" / "ports" / "1").mkdir(parents=True)
    return tmp_path


def test_devices_and_the_states_of_their_ports(infiniband: Path) -> None:
    assert rdma_devices(infiniband) == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert rdma_ports(infiniband) == {"mlx5_0:1": "ACTIVE", "mlx5_1:1": "DOWN", "mlx5_1:2": "INIT"}


def test_a_host_without_devices_has_none(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "nowhere") == () and rdma_ports(tmp_path / "nowhere") == {}
    (tmp_path / "file").write_text("")
    assert rdma_ports(tmp_path) == {}, "a device is a folder"


def test_the_facts_of_this_host_are_json() -> None:
    facts = json.loads(json.dumps(dataclasses.asdict(host_facts())))
    assert facts["name"] and facts["time_s"] > 1e9
    assert set(facts) == {
        "name", "time_s", "memory_available_bytes", "memory_total_bytes", "shm_free_bytes", "rdma_devices",
        "rdma_ports",
    }  # fmt: skip
    assert all(port.partition(":")[0] in facts["rdma_devices"] for port in facts["rdma_ports"])
