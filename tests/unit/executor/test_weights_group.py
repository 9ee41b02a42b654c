"""Tensors of a trainer: from its process group, and from files that end early."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.executor.weights_group import GroupAddress, WeightsGroups
from pdserve.model.tensor_file import tensors_in
from pdserve.model.tensor_sources import TensorInMemory
from pdserve.protocol.weights import SentTensor
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.trainer import free_port

CPU = torch.device("cpu")
PROMPT = random_prompt(40, VOCAB_SIZE)


@contextlib.contextmanager
def trainer(port: int, world_size: int, path: Path, names: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tests.trainer", str(port), str(world_size), "group", str(path), *names]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def address(port: int, timeout_s: float = 60.0, **changes: object) -> GroupAddress:
    found = GroupAddress("group", "127.0.0.1", port, 1, 2, "gloo", timeout_s)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def test_a_trainer_sends_tensors_to_a_group(tmp_path: Path) -> None:
    paths = [make_tiny("qwen3", tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    tensors = load_file(paths[1] / "model.safetensors")
    names = sorted(tensors)
    sent = [SentTensor(name, "bfloat16", tuple(tensors[name].shape)) for name in names]
    expected = Driver(build(paths[1], dtype="bfloat16")).generate([PROMPT], 8)
    driver, port = Driver(build(paths[0], dtype="bfloat16")), free_port()
    weights = driver.built.weights
    assert weights is not None and driver.generate([PROMPT], 8) != expected
    with trainer(port, 2, paths[1], names) as process:
        weights.groups.join(address(port))
        with pytest.raises(ModelError, match="group_name"):
            weights.groups.join(address(port))
        send(process)
        found = weights.groups.receive("group", sent)
        source = dataclasses.replace(
            weights.source, read_tensors=lambda: {name: TensorInMemory(found[name]) for name in found}
        )
        prepared = weights.prepare(source).result(60)
        assert prepared is not None
        weights.install(prepared)
        assert driver.generate([PROMPT], 8) == expected and weights.source.read_tensors is None
        weights.groups.leave("group")
        with pytest.raises(ModelError, match="in no group 'group'"):
            weights.groups.receive("group", sent)


@pytest.mark.slow
def test_a_trainer_that_does_not_come_or_leaves_is_named(tmp_path: Path) -> None:
    groups, port = WeightsGroups(CPU), free_port()
    with pytest.raises(ModelError, match="master_address: the group 'group' did not meet"):
        groups.join(address(port, 1.0))
    with pytest.raises(ModelError, match="backend: nccl needs a GPU"):
        groups.join(address(port, backend="nccl"))
    path = make_tiny("qwen3", tmp_path)
    name = "model.norm.weight"
    with trainer(port, 2, path, [name]) as process:
        groups.join(address(port, 5.0))
        process.kill()
        process.wait()
        with pytest.raises(ModelError, match="did not arrive, so the group 'group' is left"):
            groups.receive("group", [SentTensor(name, "bfloat16", (64,))])
    with pytest.raises(ModelError, match="in no group"):
        groups.leave("group")


def test_single_tensors_are_replaced_and_the_others_stay(tmp_path: Path) -> None:
    paths = [make_tiny("qwen3", tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    tensors = load_file(paths[1] / "model.safetensors")
    names, expected = sorted(tensors), Driver(build(paths[1], dtype="bfloat16")).generate([PROMPT], 8)
    driver = Driver(build(paths[0], dtype="bfloat16"))
    weights = driver.built.weights
    assert weights is not None
    for half in (names[::2], names[1::2]):
        save_file({name: tensors[name] for name in half}, tmp_path / "half")
        source = dataclasses.replace(weights.source, read_tensors=lambda: tensors_in(str(tmp_path / "half"), "half"))
        prepared = weights.prepare(source).result(60)
        assert prepared is not None
        weights.install(prepared)
    assert driver.generate([PROMPT], 8) == expected


def test_tensors_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "a")
    driver = Driver(build(path, dtype="bfloat16"))
    weights, before = driver.built.weights, driver.built.executor.weights_fingerprint
    assert weights is not None
    for name, tensor, why in (
        ("model.nothing.weight", torch.zeros(2), "model.nothing.weight that this architecture does not use"),
        ("model.norm.weight", torch.zeros(3), "model.norm.weight is \\[3\\], expected \\[64\\]"),
    ):
        save_file({name: tensor}, tmp_path / "file")
        source = dataclasses.replace(weights.source, read_tensors=lambda: tensors_in(str(tmp_path / "file"), "file"))
        with pytest.raises(ModelError, match=why):
            weights.prepare(source).result(60)
    assert driver.built.executor.weights_fingerprint == before
    packed = Driver(build(path, dtype="bfloat16", quantization="int8")).built.weights
    assert packed is not None
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "file")
    source = dataclasses.replace(packed.source, read_tensors=lambda: tensors_in(str(tmp_path / "file"), "file"))
    with pytest.raises(ModelError, match="tensors of all parameters must be sent"):
        packed.prepare(source).result(60)


@pytest.mark.parametrize("cut", [4, 60, -1])
def test_a_file_that_ends_early_is_an_error(cut: int, tmp_path: Path) -> None:
    whole, file = tmp_path / "whole", tmp_path / "cut"
    save_file({"a": torch.arange(64.0)}, whole)
    assert torch.equal(tensors_in(str(whole), "whole")["a"].read((slice(2, 5),)), torch.arange(2.0, 5.0))
    file.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"^entry 3 is (cut short|not)|^entry 3: "):
        tensors_in(str(file), "entry 3")
    opened = tensors_in(str(whole), "whole")["a"]
    whole.write_bytes(b"")
    with pytest.raises(ModelError, match="cut short within the tensor a"):
        opened.read(None)
    link = tmp_path / "link"
    link.symlink_to(whole)
    with pytest.raises(ModelError, match=r"^entry 4 cannot be read: Too many levels of symbolic links$"):
        tensors_in(str(link), "entry 4")
