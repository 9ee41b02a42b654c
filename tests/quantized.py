"""Writes tiny checkpoints in each quantization scheme, as the tools of that scheme lay them out, and dequantized.

The dequantized weights come from the integers and scales before they are packed, with numpy: no code of pdserve.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import Family, make_tiny

Floats = npt.NDArray[np.float32]
Stored = tuple[dict[str, Tensor], Floats]
"""Tensors of a layer by the end of their names, and its dequantized weight `[out, in]`."""
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, at each place of a word."""


def _words(values: npt.NDArray[np.int64], bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack values along `axis` into int32, the first into the lowest bits; `order` as `AWQ_ORDER`."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1)
    split = moved.reshape(*moved.shape[:-1], -1, count)
    packed = np.zeros(split.shape[:-1], dtype=np.uint64)
    for place in range(count):
        packed |= split[..., order[place] if order else place].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).astype(np.uint32).view(np.int32))


def _half(values: npt.NDArray[Any]) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _integers(
    weight: Floats, bits: int, group: int, *, symmetric: bool
) -> tuple[npt.NDArray[np.int64], Floats, npt.NDArray[np.int64]]:
    """Round a weight to unsigned values `[out, in]`, scales and zero points `[out, groups]`."""
    split = weight.reshape(len(weight), -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = _half(np.abs(split).max(-1) / (top // 2))
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(split.min(-1), 0), np.maximum(split.max(-1), 0)
        scale = _half((high - low) / top)
        zero = np.clip(np.rint(-low / scale), 1, top).astype(np.int64)
    values = np.clip(np.rint(split / scale[..., None]) + zero[..., None], 0, top).astype(np.int64)
    return values.reshape(weight.shape), scale, zero


def _value(values: npt.NDArray[np.int64], scale: Floats, zero: npt.NDArray[np.int64], index: Any) -> Floats:
    return ((values - zero[:, index]) * scale[:, index].astype(np.float64)).astype(np.float32)


def awq(group: int = GROUP) -> Callable[[Floats], Stored]:
    def write(weight: Floats) -> Stored:
        values, scale, zero = _integers(weight, 4, group, symmetric=False)
        index = np.arange(weight.shape[1]) // group
        tensors = {
            ".qweight": _words(values.T, 4, 1, AWQ_ORDER),
            ".qzeros": _words(zero.T, 4, 1, AWQ_ORDER),
            ".scales": torch.from_numpy(scale.T.astype(np.float16)),
        }
        return tensors, _value(values, scale, zero, index)

    return write


def awq_scheme(group: int = GROUP) -> Scheme:
    """AWQ with groups of `group` inputs."""
    return Scheme({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, awq(group))


def gptq(bits: int, *, symmetric: bool, reorders: bool, offset: int = 1) -> Callable[[Floats], Stored]:
    def write(weight: Floats) -> Stored:
        index = np.arange(weight.shape[1]) // GROUP
        if reorders:
            index = np.random.default_rng(weight.shape[1]).permutation(index)
        by_group = np.argsort(index, kind="stable")
        grouped, scale, zero = _integers(weight[:, by_group], bits, GROUP, symmetric=symmetric)
        values = np.empty_like(grouped)
        values[:, by_group] = grouped
        tensors = {
            ".qweight": _words(values.T, bits, 0),
            ".qzeros": _words(zero.T - offset, bits, 1),
            ".scales": torch.from_numpy(scale.T.astype(np.float16)),
            ".g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return tensors, _value(values, scale, zero, index)

    return write


def pack_quantized(*, symmetric: bool, group: int | None = GROUP, reorders: bool = False) -> Callable[[Floats], Stored]:
    def write(weight: Floats) -> Stored:
        size = group or weight.shape[1]
        index = np.arange(weight.shape[1]) // size
        if reorders:
            index = np.random.default_rng(weight.shape[1]).permutation(index)
        by_group = np.argsort(index, kind="stable")
        grouped, scale, zero = _integers(weight[:, by_group], 4, size, symmetric=symmetric)
        values = np.empty_like(grouped)
        values[:, by_group] = grouped
        tensors = {
            ".weight_packed": _words(values, 4, 1),
            ".weight_scale": torch.from_numpy(scale).bfloat16(),
            ".weight_shape": torch.tensor(weight.shape),
        }
        scale = tensors[".weight_scale"].float().numpy()
        if not symmetric:
            tensors[".weight_zero_point"] = _words(zero, 4, 0)
        if reorders:
            tensors[".weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
        return tensors, _value(values, scale, zero, index)

    return write


def int8(weight: Floats) -> Stored:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(weight / scale).astype(np.int8)
    tensors = {".weight": torch.from_numpy(values), ".weight_scale": torch.from_numpy(scale)}
    return tensors, values.astype(np.float32) * scale


def _float8(weight: Floats, scale: Floats, name: str, stored: Floats) -> Stored:
    """`scale` is as large as the weight, and `stored` is as it is in the checkpoint."""
    values = torch.from_numpy(weight / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": values, name: torch.from_numpy(stored), ".input_scale": torch.tensor(0.5)}
    return tensors, values.float().numpy() * scale


def fp8_tensor(weight: Floats) -> Stored:
    scale = np.float32(np.abs(weight).max() / 448)
    return _float8(weight, np.full_like(weight, scale), ".weight_scale", np.array(scale))


def fp8_channel(weight: Floats) -> Stored:
    scale = np.abs(weight).max(1, keepdims=True) / np.float32(448)
    return _float8(weight, np.broadcast_to(scale, weight.shape), ".weight_scale", scale)


def fp8_block(height: int, width: int) -> Callable[[Floats], Stored]:
    def write(weight: Floats) -> Stored:
        rows, columns = (-(-size // unit) for size, unit in zip(weight.shape, (height, width), strict=True))
        stored = np.empty((rows, columns), dtype=np.float32)
        for row in range(rows):
            for column in range(columns):
                block = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
                stored[row, column] = np.abs(block).max() / 448
        scale = stored.repeat(height, 0).repeat(width, 1)[: weight.shape[0], : weight.shape[1]]
        return _float8(weight, scale, ".weight_scale_inv", stored)

    return write


def mxfp4(weight: Floats) -> Stored:
    codes, exponents, wide = _mxfp4_blocks(weight)
    count = weight.shape[1]
    tensors = {".weight_packed": _pairs(codes.reshape(len(weight), -1)[:, :count]), ".weight_scale": exponents}
    return tensors, wide.reshape(len(weight), -1)[:, :count].copy()


def _mxfp4_blocks(weight: Floats) -> tuple[npt.NDArray[np.int64], Tensor, Floats]:
    """Round `[..., in]` to MXFP4: codes and weights `[..., blocks, 32]`, and stored exponents `[..., blocks]`."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    padding = [(0, 0)] * (weight.ndim - 1) + [(0, -weight.shape[-1] % 32)]
    blocks = np.pad(weight, padding).reshape(*weight.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6))
    scale = np.exp2(exponents)[..., None].astype(np.float32)
    codes = np.abs(np.abs(blocks / scale)[..., None] - magnitudes).argmin(-1)
    wide = np.where(blocks < 0, -1, 1).astype(np.float32) * magnitudes[codes] * scale
    return codes + 8 * (blocks < 0), torch.from_numpy((exponents + 127).astype(np.uint8)), wide


def _pairs(codes: npt.NDArray[np.int64]) -> Tensor:
    """Pack two codes into a byte, the first into the low bits."""
    return torch.from_numpy((codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8))


def _compressed(form: str, ignore: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if ignore is None else ignore,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A `quantization_config`, and how it stores a weight. `stays_packed`: the CPU kernels keep its format.

    `is_float`: its values are floats, so that products have the bits of those with dequantized weights.
    """

    config: Mapping[str, Any]
    write: Callable[[Floats], Stored]
    stays_packed: bool = True
    is_float: bool = False


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_W4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
SCHEMES = {
    "awq": awq_scheme(),
    "gptq": Scheme(_GPTQ | {"sym": True}, gptq(4, symmetric=True, reorders=False)),
    "gptq, zeros": Scheme(_GPTQ | {"sym": False}, gptq(4, symmetric=False, reorders=False)),
    "gptq, desc_act": Scheme(
        _GPTQ | {"sym": False, "desc_act": True}, gptq(4, symmetric=False, reorders=True), stays_packed=False
    ),
    "gptq_v2, 8 bits": Scheme(
        _GPTQ | {"bits": 8, "sym": True, "checkpoint_format": "gptq_v2"},
        gptq(8, symmetric=True, reorders=False, offset=0),
    ),
    "W4A16": Scheme(_compressed("pack-quantized", **_W4, symmetric=True), pack_quantized(symmetric=True)),
    "W4A16, zeros": Scheme(_compressed("pack-quantized", **_W4, symmetric=False), pack_quantized(symmetric=False)),
    "W4A16, channel": Scheme(
        _compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        pack_quantized(symmetric=True, group=None),
    ),
    "W4A16, actorder": Scheme(
        _compressed("pack-quantized", **_W4, actorder="group"),
        pack_quantized(symmetric=True, reorders=True),
        stays_packed=False,
    ),
    "W8A8": Scheme(_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "fp8, tensor": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, is_float=True),
    "fp8, channel": Scheme(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channel, is_float=True
    ),
    "fp8, block": Scheme({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8_block(48, 40), stays_packed=False),
    "fp8, block of groups": Scheme(
        {"quant_method": "fp8", "weight_block_size": [48, 32]}, fp8_block(48, 32), is_float=True
    ),
    "mxfp4": Scheme(
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4,
        is_float=True,
    ),
}


def make_groups(family: Family, directory: Path, **overrides: Any) -> Path:
    """Make a tiny checkpoint whose weights are whole groups."""
    if family == "qwen3_moe":
        overrides["moe_intermediate_size"] = 64
    return make_tiny(family, directory, **overrides)


def is_quantized(name: str) -> bool:
    """Whether a scheme here quantizes the weight: those of the layers' projections, the routers' excepted."""
    return name.endswith("_proj.weight")


def write_quantized(
    checkpoint: Path,
    directory: Path,
    scheme: Scheme,
    also: Collection[str] = (),
    skipped: Collection[str] = (),
) -> Path:
    """Write a tiny checkpoint quantized, to `directory`, and dequantized, to the directory that is returned.

    `also`: weights that are quantized beside those of `is_quantized`. `skipped`: weights that are not. The quantized
    tensors are in two files: a weight's scales are not beside its values.
    """
    plain = directory.with_name(f"{directory.name}-dequantized")
    shutil.copytree(checkpoint, directory)
    shutil.copytree(checkpoint, plain)
    values: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        dequantized[name] = tensor
        if (not is_quantized(name) and name not in also) or name in skipped:
            values[name] = tensor
            continue
        tensors, weight = scheme.write(tensor.float().numpy())
        dequantized[name] = torch.from_numpy(weight).to(tensor.dtype).contiguous()
        for end, part in tensors.items():
            (values if "weight" in end and "scale" not in end else scales)[name.removesuffix(".weight") + end] = (
                part.contiguous()
            )
    (directory / "model.safetensors").unlink()
    save_file(values, directory / "model-00001-of-00002.safetensors")
    save_file(scales, directory / "model-00002-of-00002.safetensors")
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config=scheme.config)
    return plain


def write_mxfp4(checkpoint: Path, directory: Path) -> Path:
    """Write a tiny checkpoint of gpt-oss with its experts in MXFP4, and dequantized; see `write_quantized`."""
    plain = directory.with_name(f"{directory.name}-dequantized")
    shutil.copytree(checkpoint, directory)
    shutil.copytree(checkpoint, plain)
    stored: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        dequantized[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        weight = tensor.float().numpy().transpose(0, 2, 1)
        codes, stored[f"{name}_scales"], wide = _mxfp4_blocks(weight)
        stored[f"{name}_blocks"] = _pairs(codes)
        dequantized[name] = torch.from_numpy(wide.reshape(weight.shape).transpose(0, 2, 1).copy()).to(tensor.dtype)
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(dequantized, plain / "model.safetensors", metadata={"format": "pt"})
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": not_converted})
    return plain


def edit_config(directory: Path, **fields: Any) -> None:
    """Overwrite fields of `config.json`."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
