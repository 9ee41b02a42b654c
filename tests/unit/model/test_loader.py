"""Weights: whole and sharded files, dtypes, dummies, and errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdserve.errors import ModelError
from pdserve.model.loader import empty_model, fill_model, read_spec
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, make_tiny

PROMPT = random_prompt(30, VOCAB_SIZE)


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    whole = make_tiny("llama", tmp_path / "whole")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = build(whole), build(sharded)
    assert one.executor.weights_fingerprint == many.executor.weights_fingerprint
    assert Driver(one).generate([PROMPT], 5) == Driver(many).generate([PROMPT], 5)


def test_progress_is_told_in_bytes_of_all_files(tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(make_tiny("llama", tmp_path / "whole"))
    model.save_pretrained(sharded, max_shard_size="100KB")
    size = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    told: list[tuple[int, int]] = []
    decoder = empty_model(read_spec(sharded), "float32", torch.device("cpu"))
    fill_model(decoder, sharded, load_format="auto", seed=0, on_progress=lambda *progress: told.append(progress))
    assert {total for _, total in told} == {size}
    assert told == sorted(told) and told[0][0] > 0 and told[-1][0] == size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_auto_takes_the_dtype_of_the_checkpoint(dtype: str, tmp_path: Path) -> None:
    built = build(make_tiny("qwen2", tmp_path, dtype=dtype))
    assert built.dtype == dtype
    assert built.executor.layout.groups[0].dtype == dtype
    tokens = Driver(built).generate([PROMPT, PROMPT[:7]], 3, chunk=8)
    assert [len(output) for output in tokens] == [3, 3]


def test_dtype_of_a_config_that_says_none_is_the_tensors(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, dtype="float16")
    text = (path / "config.json").read_text()
    assert '"dtype": "float16",' in text
    (path / "config.json").write_text(text.replace('"dtype": "float16",', ""))
    assert build(path).dtype == "float16"


def test_a_file_without_tensors_is_an_error_where_it_would_give_the_dtype(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in config.items() if "dtype" not in name}
    (path / "config.json").write_text(json.dumps(config))
    save_file({}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors has no tensors"):
        build(path)


def test_dummy_weights_need_no_files_and_follow_the_seed(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        build(path)
    first, second = (build(path, load_format="dummy") for _ in range(2))
    assert first.executor.weights_fingerprint == second.executor.weights_fingerprint
    outputs = Driver(first).generate([PROMPT], 4)
    assert outputs == Driver(second).generate([PROMPT], 4)
    assert all(0 <= token < VOCAB_SIZE for token in outputs[0])


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_wrong_tensor_is_named(change: str, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        name = "model.layers.0.self_attn.q_norm.weight"
        tensors[name] = torch.ones(16)
    else:
        tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        build(path)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a readable safetensors"):
        build(path)
