"""`quantization_config` of a checkpoint: which method each layer has. Unknown schemes are refused by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from pdserve.errors import ModelError
from pdserve.model.fields import read_mapping, read_texts
from pdserve.model.quantization.schemes import MXFP4_MATRIX, Awq, Float8, Gptq, Grouped, Mxfp4, QuantMethod

METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4")
"""Values of `quant_method` that are read."""
_PATTERN = "re:"
_EVERY_LINEAR = "Linear"
_MXFP4 = "mxfp4-pack-quantized"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", _MXFP4)
"""Formats of compressed-tensors that are read."""
_REORDERING, _IN_ORDER = ("group", "dynamic", True), ("weight", "static", False)
"""Values of `actorder`: with the first ones `weight_g_idx` has the group of each input."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The methods of a checkpoint's layers: the first of `methods` one of whose targets names the layer.

    A layer that `ignored` names is not quantized. A name in `ignored` or a target is the layer's, the end of it, a
    module above the layer, or a pattern after `re:`; the target `Linear` stands for all layers.
    """

    name: str
    methods: tuple[tuple[tuple[str, ...], QuantMethod], ...]
    ignored: tuple[str, ...] = ()

    def ignores(self, layer: str) -> bool:
        """Return whether `layer` is not quantized."""
        return any(_names(pattern, layer) for pattern in self.ignored)

    def method_of(self, layer: str) -> QuantMethod | None:
        """Return the method of the layer called `layer`; None: it is not quantized."""
        for targets, method in () if self.ignores(layer) else self.methods:
            if any(target == _EVERY_LINEAR or _names(target, layer) for target in targets):
                return method
        return None


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Read `quantization_config` of an HF `config`; None when there is none.

    Raises:
        ModelError: pdserve does not support the method, its format, or its number of bits.
    """
    fields = read_mapping(config, "quantization_config", where)
    if not fields:
        return None
    where = f"{where}: quantization_config"
    name = fields.get("quant_method")
    if name in METHODS:
        where = f"{where} of {name}"
    ignored = _patterns(fields, "modules_to_not_convert", where)
    if name == "compressed-tensors":
        return _compressed_tensors(fields, where)
    if name in ("fp8", "fbgemm_fp8"):
        return _for_all("fp8", Float8(_block(fields.get("weight_block_size"), where)), ignored)
    if name == "awq":
        _require(fields, "version", ("gemm",), where, default="gemm")
        _require(fields, "bits", (4,), where)
        _require(fields, "zero_point", (True,), where, default=True)
        return _for_all("awq", Awq(_group(fields, where)), ignored)
    if name == "gptq":
        _require(fields, "bits", (4, 8), where)
        _require(fields, "checkpoint_format", ("gptq", "gptq_v2"), where, default="gptq")
        if fields.get("dynamic"):
            raise ModelError(f"{where}: dynamic (GPTQ settings by layer) is not supported")
        less_one = str(fields.get("checkpoint_format") or "gptq").lower() == "gptq"
        bits = int(fields["bits"])
        reorders, symmetric = bool(fields.get("desc_act", False)), bool(fields.get("sym", True))
        return _for_all("gptq", Gptq(bits, _group(fields, where), symmetric, reorders, less_one), ignored)
    if name == "mxfp4":
        return _for_all("mxfp4", Mxfp4(), ignored)
    raise ModelError(f"{where}: quant_method {name!r} is not supported; supported: {', '.join(METHODS)}")


def _for_all(name: str, method: QuantMethod, ignored: tuple[str, ...]) -> Quantization:
    return Quantization(name, (((_EVERY_LINEAR,), method),), ignored)


def _compressed_tensors(fields: Mapping[str, Any], where: str) -> Quantization:
    """Read the config of compressed-tensors, which has a scheme for each group of layers."""
    if fields.get("sparsity_config"):
        raise ModelError(f"{where}: sparsity_config is not supported")
    methods = []
    groups = read_mapping(fields, "config_groups", where)
    if not groups:
        raise ModelError(f"{where}: config_groups is missing")
    for key in groups:
        group, path = read_mapping(groups, key, where), f"{where}: config_groups.{key}"
        form = group.get("format") or fields.get("format")
        if form not in _FORMATS:
            raise ModelError(f"{path}: format {form!r} is not supported; supported: {', '.join(_FORMATS)}")
        weights = read_mapping(group, "weights", path)
        targets = _patterns(group, "targets", path)
        methods.append((targets, _weights_method(weights, str(form), f"{path}.weights")))
    return Quantization("compressed-tensors", tuple(methods), _patterns(fields, "ignore", where))


def _weights_method(weights: Mapping[str, Any], form: str, where: str) -> QuantMethod:
    """Return the method of the layers with these `weights` of a config group."""
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    _require(weights, "strategy", ("tensor", "channel", "group", "block"), where)
    if form == _MXFP4:
        for key, value in (("type", "float"), ("num_bits", 4), ("strategy", "group"), ("group_size", 32)):
            _require(weights, key, (value,), where)
        return MXFP4_MATRIX
    if kind == "float":
        _require(weights, "num_bits", (8,), where)
        if strategy == "group" or form == "pack-quantized":
            raise ModelError(f"{where}: {form} floats with strategy {strategy!r} are not supported")
        return Float8(_block(weights.get("block_structure"), where))
    _require(weights, "type", ("int",), where, default="int")
    is_packed = form == "pack-quantized"
    _require(weights, "num_bits", (4, 8) if is_packed else (8,), where)
    if form == "float-quantized" or strategy == "block":
        raise ModelError(f"{where}: {form} integers with strategy {strategy!r} are not supported")
    group = _group(weights, where) if strategy == "group" else None
    is_symmetric = weights.get("symmetric", True) is not False
    _require(weights, "actorder", (*_REORDERING, *_IN_ORDER), where, default=False)
    order = weights.get("actorder")
    reorders = (order.lower() if isinstance(order, str) else order) in _REORDERING
    return Grouped(int(weights["num_bits"]), group, is_packed, is_symmetric, reorders)


def _require(
    fields: Mapping[str, Any], key: str, values: tuple[object, ...], where: str, default: object = None
) -> None:
    """Raise ModelError unless the field `key` has one of `values`."""
    value = default if fields.get(key) is None else fields[key]
    if isinstance(value, str):
        value = value.lower()
    if value not in values:
        shown = ", ".join(str(each) for each in values)
        raise ModelError(f"{where}: {key} {value!r} is not supported; supported: {shown}")


def _group(fields: Mapping[str, Any], where: str) -> int | None:
    """Return `group_size`; None for -1, which stands for all inputs."""
    size = fields.get("group_size", -1)
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ModelError(f"{where}: group_size is {size!r}, expected -1 or a positive number")
    return None if size == -1 else size


def _block(value: object, where: str) -> tuple[int, int] | None:
    """Return the size of the blocks that share a scale; None: there are none."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise ModelError(f"{where}: the block size is {value!r}, expected two positive numbers")
    return value[0], value[1]


def _patterns(fields: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Read a list of names and patterns. Raises ModelError for a pattern that is not a regular expression."""
    found = read_texts(fields, key, where)
    for text in found:
        try:
            re.compile(text.removeprefix(_PATTERN) if text.startswith(_PATTERN) else "")
        except re.error as error:
            raise ModelError(f"{where}: {key} has {text!r}, which is no regular expression: {error}") from error
    return found


def _names(pattern: str, layer: str) -> bool:
    if pattern.startswith(_PATTERN):
        return re.match(pattern.removeprefix(_PATTERN), layer) is not None
    return f".{pattern}." in f".{layer}."
