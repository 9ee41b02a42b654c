"""Quantized checkpoints are read as numpy dequantizes them, whole and in parts; what cannot be read is refused by name.

The checkpoints are written by `tests.quantized`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.grouped_weights import (
    GroupFormat,
    QuantizedWeight,
    common_format,
    quantize,
    stacked,
    within,
)
from pdserve.model.loader import quantization_of, quantized_formats, read_spec
from pdserve.model.params import Param, ParamSlots
from pdserve.model.quantization.config import read_quantization
from pdserve.model.quantization.layers import QuantizedLayers
from pdserve.model.tensor_sources import ParamPiece, QuantizedSource, TensorSource
from tests.driver import Driver, build, random_prompt
from tests.quantized import SCHEMES, edit_config, is_quantized, make_groups, write_quantized
from tests.tiny import VOCAB_SIZE, make_tiny

PROMPT = random_prompt(30, VOCAB_SIZE)
schemes = pytest.mark.parametrize("name", SCHEMES)


class InMemory:
    """Implements `TensorSource`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, part: tuple[slice, ...] | None) -> Tensor:
        return self.tensor if part is None else self.tensor[part]


def opened(directory: Path) -> dict[str, TensorSource]:
    """The model's tensors, unread."""
    tensors = {
        name: InMemory(tensor) for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    quantization = quantization_of(directory)
    assert quantization is not None
    layers = QuantizedLayers(tensors, quantization)
    return dict(layers.of_model(tensors.items(), tensors.__getitem__))


@schemes
def test_weights_are_what_numpy_dequantizes(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    plain = write_quantized(make_tiny("llama", tmp_path / "tiny"), tmp_path / "quantized", scheme)
    wanted, sources = load_file(plain / "model.safetensors"), opened(tmp_path / "quantized")
    assert sources.keys() == wanted.keys()
    for weight, source in sources.items():
        whole = wanted[weight]
        assert source.shape == whole.shape
        assert torch.equal(source.read(None), whole), weight
        if not is_quantized(weight):
            continue
        for rows, columns in (
            (slice(0, 16), slice(0, whole.shape[1])),
            (slice(16, whole.shape[0]), slice(0, whole.shape[1])),
            (slice(0, whole.shape[0]), slice(32, whole.shape[1])),
            (slice(3, 29), slice(7, 45)),
        ):
            assert torch.equal(source.read((rows, columns)), whole[rows, columns]), weight
        assert isinstance(source, QuantizedSource) == scheme.stays_packed
        if isinstance(source, QuantizedSource):
            kept = stacked([source.read_quantized(None)], source.format)
            assert torch.equal(kept.dequantized(), whole) and kept.values.dtype == torch.uint8
    formats = quantized_formats(tmp_path / "quantized", read_spec(tmp_path / "quantized"))
    assert formats.keys() == (set(filter(is_quantized, wanted)) if scheme.stays_packed else set())


@pytest.mark.parametrize("name", ["awq", "W4A16, actorder", "fp8, block"])
def test_a_model_of_torch_has_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    plain = write_quantized(make_groups("qwen3_moe", tmp_path / "tiny"), tmp_path / "quantized", SCHEMES[name])
    mine, wanted = build(tmp_path / "quantized", cpu_kernels="torch"), build(plain, cpu_kernels="torch")
    assert mine.executor.weights_fingerprint == wanted.executor.weights_fingerprint
    assert Driver(mine).generate([PROMPT], 4) == Driver(wanted).generate([PROMPT], 4)


def test_mxfp4_is_what_numpy_dequantizes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values, exponents = rng.integers(0, 16, (3, 48, 64)), rng.integers(110, 140, (3, 48, 2))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
    signed = np.where(values < 8, 1, -1) * table[values % 8]
    wanted = (signed * np.exp2(exponents.repeat(32, -1) - 127.0)).astype(np.float32).transpose(0, 2, 1)
    packed = (values[..., 0::2] | values[..., 1::2] << 4).astype(np.uint8).reshape(3, 48, 2, 16)
    tensors = {
        "mlp.experts.down_proj_blocks": torch.from_numpy(packed),
        "mlp.experts.down_proj_scales": torch.from_numpy(exponents.astype(np.uint8)),
        "mlp.experts.down_proj_bias": torch.zeros(3, 48),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    sources = opened(tmp_path)
    assert sources.keys() == {"mlp.experts.down_proj", "mlp.experts.down_proj_bias"}
    source = sources["mlp.experts.down_proj"]
    assert source.shape == (3, 64, 48) and np.array_equal(source.read(None).float().numpy(), wanted)
    part = (slice(1, 2), slice(7, 41), slice(16, 48))
    assert np.array_equal(source.read(part).float().numpy(), wanted[part])
    assert isinstance(source, QuantizedSource) and source.format == GroupFormat(4, 32, is_float=True)
    kept = source.read_quantized(part)
    assert np.array_equal(kept.dequantized().numpy(), wanted[part][0].T) and kept.scale.shape == (32, 2)


def _compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({}, "None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 64}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, "bits 8"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\]"),
        (_compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "'nvfp4-pack-quantized'"),
        (_compressed("marlin-24", num_bits=4, type="int", strategy="group"), "'marlin-24'"),
        (_compressed(num_bits=3, type="int", strategy="group"), "num_bits 3"),
        (_compressed("int-quantized", num_bits=4, type="int", strategy="group"), "num_bits 4"),
        (_compressed("float-quantized", num_bits=8, type="float", strategy="group"), "'group'"),
        (_compressed(num_bits=4, type="int", strategy="group", group_size=64, actorder="often"), "actorder 'often'"),
        (_compressed() | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (_compressed(num_bits=4, type="int", strategy="group", group_size=64) | {"ignore": ["re:("]}, r"re:\("),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_a_scheme_that_is_not_built_is_named_before_weights_are_read(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path / "tiny")
    edit_config(path, quantization_config=config or {"bits": 4})
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"quantization_config.*{named}"):
        read_spec(path)


def _edited(directory: Path, change: str) -> None:
    """Damage a checkpoint of GPTQ."""
    path = directory / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    layer = "model.layers.1.mlp.down_proj"
    if change == "no zeros":
        del tensors[f"{layer}.qzeros"]
    elif change == "shape":
        tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"][1:].contiguous()
    elif change == "zeros":
        tensors[f"{layer}.qzeros"] += 1
    elif change.startswith("group"):
        tensors[f"{layer}.g_idx"][0] = int(change.split()[1])
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("no zeros", r"no tensor model\.layers\.1\.mlp\.down_proj\.qzeros"),
        ("shape", r"tensor model\.layers\.1\.mlp\.down_proj\.scales is \[2, 64\], expected \[3, 64\]"),
        ("zeros", r"sym true, but model\.layers\.1\.mlp\.down_proj\.qzeros"),
        ("group 3", r"model\.layers\.1\.mlp\.down_proj has 3 groups of inputs, but its g_idx has groups 0 to 3"),
        ("group -1", r"model\.layers\.1\.mlp\.down_proj has 3 groups of inputs, but its g_idx has groups -1 to 2"),
    ],
)
def test_a_wrong_tensor_is_named(change: str, named: str, tmp_path: Path) -> None:
    scheme = SCHEMES["gptq, desc_act" if change.startswith("group") else "gptq"]
    write_quantized(make_tiny("llama", tmp_path / "tiny"), tmp_path / "quantized", scheme)
    _edited(tmp_path / "quantized", change)
    with pytest.raises(ModelError, match=named):
        build(tmp_path / "quantized")


def test_weights_that_cannot_stay_packed_are_named(tmp_path: Path) -> None:
    """FP8 that is not a number, and MXFP4 beyond the range of bfloat16."""
    values = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
    values.view(torch.uint8)[3, 5] = 0xFF
    sources = {"up.weight": InMemory(values), "up.weight_scale": InMemory(torch.ones(()))}
    quantization = read_quantization({"quantization_config": SCHEMES["fp8, tensor"].config}, "config")
    assert quantization is not None
    (_, source), *_ = QuantizedLayers(sources, quantization).of_model(sources.items(), sources.__getitem__)
    assert isinstance(source, QuantizedSource)
    with pytest.raises(ModelError, match=r"tensor up\.weight has values that are not a number"):
        source.read_quantized(None)
    assert len(source.read_quantized((slice(0, 3), slice(0, 64))).values) == 3
    blocks, scales = torch.full((1, 4, 2, 16), 0x11, dtype=torch.uint8), torch.full((1, 4, 2), 255, dtype=torch.uint8)
    blocks[0, 0] = 0
    experts = {"up_blocks": InMemory(blocks), "up_scales": InMemory(scales)}
    quantization = read_quantization({"quantization_config": {"quant_method": "mxfp4"}}, "config")
    assert quantization is not None
    (_, source), *_ = QuantizedLayers(experts, quantization).of_model(experts.items(), experts.__getitem__)
    assert isinstance(source, QuantizedSource)
    with pytest.raises(ModelError, match=r"tensor up_scales has exponents beyond"):
        source.read_quantized(None)
    zeros = source.read_quantized((slice(0, 1), slice(0, 64), slice(0, 1)))
    assert torch.equal(zeros.dequantized(), torch.zeros(1, 64)), "an exponent of zeros is not used"


@pytest.mark.parametrize(
    ("end", "named"),
    [
        (".weight_zero_point", r"weight_zero_point is \[7, 2\], expected \[8, 2\]"),
        (".weight_packed", r"weight_packed is \[63, 8\], but .*weight_shape is \[64, 64\]"),
    ],
)
def test_a_wrong_shape_of_compressed_tensors_is_named(end: str, named: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    tensors, _ = SCHEMES["W4A16, zeros"].write(weight)
    sources = {f"o_proj{name}": InMemory(tensor[1:] if name == end else tensor) for name, tensor in tensors.items()}
    quantization = read_quantization({"quantization_config": SCHEMES["W4A16, zeros"].config}, "config")
    assert quantization is not None
    with pytest.raises(ModelError, match=named):
        dict(QuantizedLayers(sources, quantization).of_model(sources.items(), sources.__getitem__))


@pytest.mark.parametrize("order", ["group", "dynamic", True, "weight", "static", None])
def test_groups_follow_their_index_with_the_orders_that_have_one(order: str | bool | None) -> None:
    config = _compressed(num_bits=4, type="int", strategy="group", group_size=32, actorder=order)
    quantization = read_quantization({"quantization_config": config}, "config")
    assert quantization is not None
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    reorders = order in ("group", "dynamic", True)
    tensors, wanted = SCHEMES["W4A16, actorder" if reorders else "W4A16"].write(weight)
    sources = {f"o_proj{name}": InMemory(tensor) for name, tensor in tensors.items()}
    ((_, source),) = QuantizedLayers(sources, quantization).of_model(sources.items(), sources.__getitem__)
    assert torch.equal(source.read(None), torch.from_numpy(wanted))
    assert isinstance(source, QuantizedSource) != reorders


def test_layers_that_are_not_quantized_are_read_plainly(tmp_path: Path) -> None:
    """The config may name them; a quantized weight of such a layer is an error, as is a weight of bytes alone."""
    path = make_tiny("llama", tmp_path / "tiny")
    write_quantized(path, tmp_path / "quantized", SCHEMES["W8A8"])
    config = dict(SCHEMES["W8A8"].config)
    edit_config(tmp_path / "quantized", quantization_config=config | {"ignore": ["re:.*q_proj", "lm_head"]})
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj is not to be quantized"):
        build(tmp_path / "quantized")
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        tensors = load_file(tmp_path / "quantized" / file)
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("q_proj.weight_scale")}
        save_file(kept, tmp_path / "quantized" / file)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight is int8"):
        build(tmp_path / "quantized")
    file_path = tmp_path / "quantized" / "model-00001-of-00002.safetensors"
    tensors, plain = load_file(file_path), load_file(path / "model.safetensors")
    tensors |= {name: tensor for name, tensor in plain.items() if "q_proj" in name}
    save_file(tensors, file_path)
    built = build(tmp_path / "quantized")
    assert len(Driver(built).generate([PROMPT], 2)[0]) == 2


def test_parts_of_one_quantized_tensor_are_parameters_of_their_own() -> None:
    """As in checkpoints that have queries, keys and values in one tensor, whose rows belong to several parameters."""
    weight = torch.randn(24, 96)
    tensors, _ = SCHEMES["awq"].write(weight.numpy())
    quantization = read_quantization({"quantization_config": SCHEMES["awq"].config}, "config")
    assert quantization is not None
    sources = {f"attn.qkv_proj{end}": InMemory(tensor) for end, tensor in tensors.items()}
    ((name, source),) = QuantizedLayers(sources, quantization).of_model(sources.items(), sources.__getitem__)
    params = ParamSlots(torch.float32, torch.device("cpu"))
    pieces = [ParamPiece("q.weight", (16, 96)), ParamPiece("k.weight", (8, 96), first=16)]
    wholes = [
        params.stacked(Param("q.weight", (16, 96), 1, range(32, 96)), Param("k.weight", (8, 96), 1, range(32, 96)))
    ]
    params.divide(name, (24, 96), pieces)
    assert params.names_of(name) == ["q.weight", "k.weight"]
    params.keep_quantized(wholes[0])
    params.fill(name, source)
    assert torch.equal(wholes[0], source.read(None)[:, 32:])
    kept = stacked(params.take_quantized(wholes[0]), GroupFormat(4, 32, has_mins=True))
    assert torch.equal(kept.dequantized(), wholes[0])


@pytest.mark.parametrize(
    ("pattern", "layer", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.0", "model.layers.0.mlp.gate_proj", True),
        ("model.layers.1", "model.layers.10.mlp.gate_proj", False),
        ("re:.*mlp.*", "model.layers.0.mlp.gate_proj", True),
        ("re:.*visual.*", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_names_of_layers_that_are_not_quantized(pattern: str, layer: str, fits: bool) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [pattern]}}
    quantization = read_quantization(config, "config")
    assert quantization is not None and quantization.ignores(layer) == fits
    assert (quantization.method_of(layer) is None) == fits


def test_groups_of_layers_have_methods_of_their_own() -> None:
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    config = _compressed(**weights)
    config["config_groups"] |= {
        "group_0": {"targets": ["re:.*down_proj"], "weights": weights | {"num_bits": 8}},
        "group_1": {"targets": ["Linear"], "weights": weights},
    }
    quantization = read_quantization({"quantization_config": config}, "config")
    assert quantization is not None
    down, up = (quantization.method_of(f"model.layers.0.mlp.{name}") for name in ("down_proj", "up_proj"))
    assert down != up and getattr(down, "bits", None) == 8 and getattr(up, "bits", None) == 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_in", [32, 70, 128])
def test_rounding_is_no_worse_than_to_the_largest_of_a_group(bits: int, num_in: int) -> None:
    """A scale such that the largest magnitude becomes -8 or 127, as in Q4_0 and Q8_0, is the worst one allowed."""
    torch.manual_seed(num_in)
    weight = torch.randn(5, num_in)
    weight[1] = 0.0
    found = quantize(weight, GroupFormat(bits, 32)).dequantized()
    for first in range(0, num_in, 32):
        part, got = weight[:, first : first + 32], found[:, first : first + 32]
        largest = part.gather(1, part.abs().argmax(1, keepdim=True))
        scale = largest / -8 if bits == 4 else largest.abs() / 127
        plain = (part / scale).round().clamp(-8 if bits == 4 else -127, 7 if bits == 4 else 127).nan_to_num() * scale
        error, worst = ((each - part).square().sum(1) for each in (got, plain))
        assert (error <= worst * (1 + 1e-5)).all()
    assert (found[1] == 0).all()


def test_formats_that_hold_several_weights() -> None:
    four, eight = GroupFormat(4, 128), GroupFormat(8, 32, has_mins=True)
    assert common_format([four, four]) == four
    assert common_format([four, eight]) == GroupFormat(8, 32, has_mins=True)
    fp8, mxfp4 = GroupFormat(8, 128, is_float=True), GroupFormat(4, 32, is_float=True)
    assert common_format([fp8, dataclasses.replace(fp8, group=64)]) == dataclasses.replace(fp8, group=64)
    assert common_format([fp8, mxfp4]) is None and common_format([fp8, GroupFormat(8, 128)]) is None
    assert within(four, range(256, 512)) == four
    assert within(four, range(64, 192)) == GroupFormat(4, 64)
    assert within(four, range(48, 96)) == GroupFormat(4, 128), "all in one group"
    assert within(four, range(48, 196)) is None
    torch.manual_seed(0)
    rows = [quantize(torch.randn(3, 256), each) for each in (GroupFormat(4, 128), GroupFormat(8, 64))]
    common = common_format([GroupFormat(4, 128), GroupFormat(8, 64)])
    assert common is not None
    both: QuantizedWeight = stacked(rows, common)
    assert torch.equal(both.dequantized(), torch.cat([each.dequantized() for each in rows]))
    with_mins = stacked(rows, GroupFormat(8, 32, has_mins=True))
    torch.testing.assert_close(with_mins.dequantized(), both.dequantized(), rtol=1e-6, atol=1e-6)
