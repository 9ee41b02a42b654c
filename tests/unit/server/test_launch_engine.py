"""What each rank's process is told."""

from __future__ import annotations

import dataclasses
import os

import pytest

from pdserve import launch_engine
from pdserve.base import cpu_affinity as cores
from pdserve.config import ServerConfig
from pdserve.config.cli import parse_server_args
from pdserve.errors import ConfigError
from pdserve.launch_engine import EngineProcesses, RankStartInfo, may_compute_natively, own_devices


def starts_of(*flags: str) -> list[RankStartInfo]:
    engine = EngineProcesses(parse_server_args(["--model-path", "m", *flags]), None)
    engine.end(told=False)  # nothing was started; the channels' directories go
    return engine.starts


def test_each_replica_has_its_own_channel_and_meeting_place_and_all_share_a_server() -> None:
    starts = starts_of("--dp-size", "2", "--tp-size", "2", "--pp-size", "2")
    assert [(start.dp_rank, start.rank) for start in starts] == [(dp, rank) for dp in (0, 1) for rank in range(4)]
    assert len({start.address for start in starts}) == len({start.rendezvous for start in starts}) == 2
    assert len({start.server for start in starts}) == 1
    assert [start.name for start in starts[:2]] == ["monolith 0 scheduler", "monolith 0 rank 1"]


def test_a_rank_that_is_alone_meets_nobody() -> None:
    (start,) = starts_of()
    assert start.rendezvous is None and start.name == "monolith scheduler"


@pytest.mark.parametrize("node", [0, 1])
def test_each_host_starts_its_share_of_the_ranks(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CONTROL_TOKEN", "t")
    split = ("--tp-size", "4", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:9000")
    starts = starts_of(*split, "--node-rank", str(node))
    assert [start.rank for start in starts] == [2 * node, 2 * node + 1]
    assert {start.rendezvous for start in starts} == {"tcp://10.0.0.1:9000"}


def test_cores_are_divided_among_the_ranks_of_this_host() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert {start.config.kernels.cpu_threads for start in starts_of("--tp-size", "2")} == {max(1, num_cores // 2)}
    assert {start.config.kernels.cpu_threads for start in starts_of("--dp-size", "4")} == {max(1, num_cores // 4)}
    assert starts_of()[0].config == ServerConfig(model=dataclasses.replace(ServerConfig().model, model_path="m"))


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cores, launch_engine):
        monkeypatch.setattr(module, "granted_cores", lambda: frozenset(range(6)))


def test_ranks_and_replicas_are_pinned_to_cores_that_no_other_has(six_cores: None) -> None:
    starts = starts_of("--dp-size", "2", "--tp-size", "2", "--cpu-threads", "4", "--cpu-pin", "5,4,3,2,1")
    assert [start.cores for start in starts] == [(5,), (4,), (3,), (2,)]
    starts = starts_of("--tp-size", "2", "--cpu-pin", "0-4")
    assert [(start.cores, start.config.kernels.cpu_threads) for start in starts] == [((0, 1), 2), ((2, 3), 2)]
    (alone,) = starts_of("--cpu-pin", "1-3")
    assert (alone.cores, alone.config.kernels.cpu_threads) == ((1, 2, 3), 3)
    assert [start.cores for start in starts_of("--tp-size", "2")] == [None, None]


@pytest.mark.parametrize(
    ("flags", "left"),
    [("--cpu-pin 0-3 --cpu-threads 3", [3]), ("--cpu-pin 0-4 --tp-size 2", [4]), ("--cpu-pin 0-3", [])],
)
def test_the_api_process_gets_what_is_left(flags: str, left: list[int], six_cores: None) -> None:
    engine = EngineProcesses(parse_server_args(["--model-path", "m", *flags.split()]), None)
    engine.end(told=False)
    assert engine.cores_left == left


@pytest.mark.parametrize("flags", ["--cpu-pin 0-2 --cpu-threads 4", "--cpu-pin 0 --dp-size 2", "--cpu-pin 4-6"])
def test_too_few_cores_are_refused(flags: str, six_cores: None) -> None:
    with pytest.raises(ConfigError, match="cpu-pin") as caught:
        starts_of(*flags.split())
    assert caught.value.field == "cpu_pin"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--device cpu", True),
        ("--device cpu --dtype bfloat16 --cpu-kernels native", True),
        ("--device cpu --cpu-kernels torch", False),
        ("--device cpu --attention-backend torch", False),
        ("--device cpu --dtype float32", False),
        ("--device cpu --enable-deterministic-inference", True),
        ("--device cuda", False),
    ],
)
def test_openmp_sleeps_where_the_kernels_have_threads_of_their_own(flags: str, expected: bool) -> None:
    assert may_compute_natively(parse_server_args(["--model-path", "m", *flags.split()])) is expected


def test_each_replica_sees_its_own_devices() -> None:
    starts = [start for start in starts_of("--dp-size", "2", "--tp-size", "2") if start.rank == 0]
    assert [own_devices(start, None) for start in starts] == ["0,1", "2,3"]
    assert [own_devices(start, "4, 5,GPU-a,7,8") for start in starts] == ["4,5", "GPU-a,7"]
    with pytest.raises(ConfigError, match="4 ranks need a CUDA device each"):
        own_devices(starts[1], "0,1,2")
    later = starts_of("--base-gpu-id", "2", "--tp-size", "2")[0]
    assert (own_devices(later, None), own_devices(later, "4,5,6,7")) == ("2,3", "6,7")
    with pytest.raises(ConfigError, match="from --base-gpu-id 2 on"):
        own_devices(later, "0,1,2")


def test_several_hosts_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_CONTROL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="PDSERVE_CONTROL_TOKEN"):
        starts_of("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:9000")
