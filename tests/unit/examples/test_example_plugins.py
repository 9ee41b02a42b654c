"""The plug-ins of the tutorials: registered by their entry points, and doing what the tutorials say."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import HeliumConfig, HeliumForCausalLM

from pdserve.errors import ConfigError, TransferError
from pdserve.executor.input_batch import ProcessorCall
from pdserve.executor.logit_processors import LogitProcessors, StepProcessors
from pdserve.model import families
from pdserve.model.families import FAMILIES
from pdserve.router.config.config import PolicyConfig, WorkerRole
from pdserve.router.config.flags import config_from, make_parser
from pdserve.router.policies import Candidate, Policy, RoutedRequest, make_policy
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport
from tests.driver import Driver, build, random_prompt
from tests.example_plugins import installed_in
from tests.reference import load_reference, reference_greedy

VOCAB_SIZE = 320


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in installed_in(tmp_path / "installed"):
        monkeypatch.syspath_prepend(entry)


def save_helium(folder: Path, **changes: object) -> Path:
    torch.manual_seed(0)
    config = HeliumConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, bos_token_id=0, eos_token_id=1, pad_token_id=None, **changes,
    )  # fmt: skip
    model = HeliumForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("plugins")
def test_the_family_is_found_and_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = families._found()
    assert set(found) - set(FAMILIES) == {"HeliumForCausalLM"}
    monkeypatch.setitem(FAMILIES, "HeliumForCausalLM", found["HeliumForCausalLM"])
    path = save_helium(tmp_path / "helium", attention_bias=True, mlp_bias=True)
    prompt = random_prompt(40, VOCAB_SIZE)
    (tokens,) = Driver(build(path, dtype="float32", cpu_kernels="torch")).generate([prompt], 8)
    assert tokens == reference_greedy(load_reference(path), prompt, 8)


def test_packages_that_are_no_families_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    points = (
        "gone = no_such_package_here:F",
        "other = pdserve:OFFLINE_API",
        "ours = pdserve.model.families.llama:FAMILIES",
    )
    (info / "entry_points.txt").write_text("\n".join(["[pdserve.model_families]", *points]))
    monkeypatch.syspath_prepend(tmp_path)
    assert families._found() == FAMILIES
    for text in ("gone are not used", "entry point other of", "LlamaForCausalLM of the entry point ours exists"):
        assert text in caplog.text


def chosen(policy: Policy, loads: dict[str, float]) -> str:
    candidates = [Candidate(url, load) for url, load in loads.items()]
    return candidates[policy.choose(candidates, RoutedRequest(), random.Random(0))].url


@pytest.mark.usefixtures("plugins")
def test_the_policy_is_a_value_of_the_flag_and_packs() -> None:
    args = make_parser().parse_args(["--worker-urls", "http://a:1", "--policy", "packing"])
    policy = make_policy(config_from(args).policies, WorkerRole.REGULAR)
    assert chosen(policy, {"a": 0.0, "b": 3.0, "c": 8.0}) == "b"
    assert chosen(policy, {"a": 9.0, "b": 8.0, "c": 12.0}) == "b"
    assert chosen(policy, {"b": 0.0, "a": 0.0}) == "a"


def test_a_policy_that_does_not_exist_is_refused_by_its_flag() -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--policy", "packing"])
    with pytest.raises(ConfigError, match="--policy is 'packing'; there is "):
        make_policy(PolicyConfig(policy="packing"), WorkerRole.REGULAR)


@pytest.mark.usefixtures("plugins")
def test_the_logit_processor_keeps_the_tokens_of_each_request() -> None:
    processors = LogitProcessors.load(["only_tokens"])
    calls = {
        row: ProcessorCall("only_tokens", {"token_ids": ids}) for row, ids in {0: [3, 1], 2: [5], 3: ["x"]}.items()
    }
    step = StepProcessors(processors._known, calls)
    logits = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    found = step.apply(logits)
    assert [row.isfinite().nonzero().flatten().tolist() for row in found[[0, 2]]] == [[1, 3], [5]]
    assert torch.equal(found[[1, 3]], logits[[1, 3]]) and torch.equal(found[0, [1, 3]], logits[0, [1, 3]])
    assert step.failed == [3]


@pytest.fixture
def transports(plugins: None) -> Iterator[tuple[Transport, Transport]]:
    both = open_transport("socket", "127.0.0.1"), open_transport("socket", "127.0.0.1")
    yield both
    for one in both:
        one.close()


def test_the_transport_copies_until_it_is_fenced(transports: tuple[Transport, Transport]) -> None:
    sender, receiver = transports
    source, destination = ctypes.create_string_buffer(b"a" * 9000), ctypes.create_string_buffer(9000)
    for transport, memory in ((sender, source), (receiver, destination)):
        transport.register([MemoryRegion(ctypes.addressof(memory), 9000)])
    address = receiver.open_receiver("peer#1")
    with pytest.raises(TransferError, match="nothing answers"):
        sender.connect(address)
    receiver.allow_sources("peer#1", ["127.0.0.1", "a-name"])
    sender.connect(address)
    copy = Copy(ctypes.addressof(source) + 10, ctypes.addressof(destination) + 20, 4000)
    sender.write(address, [copy, Copy(copy.source, copy.destination, 0)])
    assert destination.raw[:4030] == b"\0" * 20 + b"a" * 4000 + b"\0" * 10
    with pytest.raises(TransferError, match="is not registered"):
        sender.write(address, [Copy(copy.source, copy.destination + 6000, 4000)])
    assert receiver.fence("peer#1")
    with pytest.raises(TransferError):
        sender.write(address, [copy])
    assert receiver.open_receiver("peer#1") != address
