"""Checkpoints that the libraries of quantization schemes pack, beside what the same libraries dequantize.

Each test is skipped where its library is not installed. `pip install --no-deps compressed-tensors loguru autoawq
auto-gptq accelerate` is enough; of AutoAWQ and AutoGPTQ the modules that pack a layer are used, on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.driver import Driver, build, random_prompt
from tests.quantized import edit_config, is_quantized
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.test_quantized_checkpoints import opened

GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors of a layer by the end of their names, and its dequantized weight `[out, in]`."""
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    "W4A16, zeros": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "W8A16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "W8A8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8, channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8, tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8, block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
}  # fmt: skip
"""By name, the format and the arguments of its weights."""


def check(directory: Path, plain: Path) -> None:
    """Assert that pdserve reads the weights of `plain` from `directory`, and generates the same tokens."""
    wanted, sources = load_file(plain / "model.safetensors"), opened(directory)
    assert sources.keys() == wanted.keys()
    for name, source in sources.items():
        assert torch.equal(source.read(None).float(), wanted[name].float()), name
    prompt = random_prompt(30, VOCAB_SIZE)
    found = [
        Driver(build(path, dtype="float32", cpu_kernels="torch")).generate([prompt], 6) for path in (directory, plain)
    ]
    assert found[0] == found[1]


def part_of(package: str, path: str) -> Any:
    """Import one module of a package without the package itself, which imports more than its layers need."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    names = path.split(".")[:-1]
    for depth in range(len(names) + 1):
        name = ".".join([package, *names[:depth]])
        if name not in sys.modules:
            stub = types.ModuleType(name)
            stub.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            stub.__spec__.submodule_search_locations = [str(Path(found.submodule_search_locations[0], *names[:depth]))]
            stub.__path__ = stub.__spec__.submodule_search_locations
            sys.modules[name] = stub
    return importlib.import_module(f"{package}.{path}")


def written(directory: Path, config: dict[str, Any], pack: Callable[[nn.Linear], Packed]) -> tuple[Path, Path]:
    """Write a tiny checkpoint with the projections as `pack` stores them, and one with them dequantized."""
    plain = make_tiny("llama", directory / "plain")
    packed = make_tiny("llama", directory / "packed")
    stored, dequantized = {}, load_file(plain / "model.safetensors")
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not is_quantized(name):
            stored[name] = tensor
            continue
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
        linear.weight.data.copy_(tensor)
        tensors, weight = pack(linear)
        dequantized[name] = weight.float().contiguous()
        stored |= {name.removesuffix(".weight") + end: part.contiguous() for end, part in tensors.items()}
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    edit_config(packed, quantization_config=config)
    return packed, plain


def affine(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales that float16 has, and zero points, `[out, groups]`, of 4 bits."""
    split = weight.detach().reshape(len(weight), -1, GROUP)
    low, high = split.amin(-1).clamp(max=0), split.amax(-1).clamp(min=0)
    scale = ((high - low) / 15 * 1.001).half().float()
    return scale, (-low / scale).round().clamp(1, 15)


def test_awq(tmp_path: Path) -> None:
    layers, packing = part_of("awq", "modules.linear.gemm"), part_of("awq", "utils.packing_utils")

    def pack(linear: nn.Linear) -> Packed:
        scale, zero = affine(linear.weight)
        with torch.no_grad():
            made = layers.WQLinear_GEMM.from_linear(
                linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
            )
        tensors = {".qweight": made.qweight, ".qzeros": made.qzeros, ".scales": made.scales}
        weight = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
        return tensors, weight.T

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    check(*written(tmp_path, config, pack))


def test_gptq(tmp_path: Path) -> None:
    module = part_of("auto_gptq", "nn_modules.qlinear.qlinear_cuda")

    def pack(linear: nn.Linear) -> Packed:
        made = module.QuantLinear(4, GROUP, linear.in_features, linear.out_features, False, weight_dtype=torch.float32)
        with torch.no_grad():
            made.pack(linear, *affine(linear.weight))
            weight = made(torch.eye(linear.in_features)).T
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {f".{name}": getattr(made, name) for name in names}
        return {**tensors, ".scales": tensors[".scales"].half()}, weight

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    check(*written(tmp_path, config, pack))


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    utils = importlib.import_module("compressed_tensors.quantization.utils")
    form, arguments = COMPRESSED[name]
    tiny = make_tiny("llama", tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    weights = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
    quantization.apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                low, high = bounds(module.weight, weights, module.weight_scale.shape)
                scale, zero = utils.calculate_qparams(low, high, weights)
                module.weight_scale.copy_(scale.bfloat16())  # as in checkpoints, where products of scales are exact
                if hasattr(module, "weight_zero_point"):
                    module.weight_zero_point.copy_(zero)
        compressor = library.ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        packed, plain = tmp_path / "packed", tmp_path / "plain"
        save(model.state_dict(), tiny, packed)
        compressor.update_config(str(packed))
        compressor.decompress_model(model)
    wanted = load_file(tiny / "model.safetensors").keys()
    save({key: tensor for key, tensor in model.state_dict().items() if key in wanted}, tiny, plain)
    assert json.loads((packed / "config.json").read_text())["quantization_config"]["format"] == form
    check(packed, plain)


def bounds(weight: Tensor, arguments: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each part of a weight that has a scale of its own, `shape`."""
    if arguments.strategy == "tensor":
        return weight.amin().reshape(shape), weight.amax().reshape(shape)
    rows, columns = weight.shape[0] // shape[0], weight.shape[1] // shape[1]
    split = weight.reshape(shape[0], rows, shape[1], columns)
    return split.amin((1, 3)), split.amax((1, 3))


def save(tensors: dict[str, Tensor], like: Path, directory: Path) -> None:
    """Write a checkpoint with the config and tokenizer of `like`."""
    directory.mkdir()
    for path in like.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
