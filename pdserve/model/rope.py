"""Rotary position embeddings as facts: which variant, with which numbers.

Read from a config by `config.py`; turned into angles by `layers/rotary.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pdserve.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
MAX_NUMBER = 1e30
"""No field of a config that is no count is as large."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One RoPE variant. `attention_factor` multiplies cos and sin.

    `freq_divisors` (one per pair of dimensions) is how gguf files carry llama3 scaling.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_divisors: tuple[float, ...] | None = None


def read_rope(config: Mapping[str, Any], max_positions: int, where: str) -> RopeSpec:
    """The variant in an HF config, by its new (`rope_parameters`) or old (`rope_theta`, `rope_scaling`) names.

    Raises:
        ModelError: a variant or a partial rotation that is not supported, or a number that is missing or none.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    params: dict[str, Any] = {**new, **old}
    kind = _rope_type(params, where)
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ModelError(f"{where}: partial_rotary_factor {partial} is not supported")
    theta = positive(params.get("rope_theta") or config.get("rope_theta"), "rope_theta", where, 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    length = "original_max_position_embeddings"
    original = int(positive(config.get(length) or params.get(length), length, where, max_positions))
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [] if kind == "yarn" else [key for key in needed if params.get(key) is None]
    if missing:
        raise ModelError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    factor = positive(params.get("factor"), "factor", where, max_positions / max(1, original))
    return RopeSpec(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=positive(params.get("low_freq_factor"), "low_freq_factor", where, 1.0),
        high_freq_factor=positive(params.get("high_freq_factor"), "high_freq_factor", where, 4.0),
        beta_fast=positive(params.get("beta_fast"), "beta_fast", where, 32.0),
        beta_slow=positive(params.get("beta_slow"), "beta_slow", where, 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=positive(yarn_attention_factor(factor, params), "attention_factor", where)
        if kind == "yarn"
        else 1.0,
    )


def positive(value: Any, name: str, where: str, default: float = 1.0) -> float:
    """A number above 0 that is not infinite, `default` for None and 0. Raises ModelError naming it."""
    value = value or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise ModelError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def _rope_type(params: Mapping[str, Any], where: str) -> RopeType:
    """The variant's name. Raises ModelError for one that is not supported."""
    name = params.get("rope_type") or params.get("type") or "default"
    for kind in _ROPE_TYPES:
        if kind == name:
            return kind
    raise ModelError(f"{where}: rope_type {name!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")


def yarn_attention_factor(factor: float, params: Mapping[str, Any]) -> float:
    """The factor on cos and sin that YaRN (arXiv:2309.00071, eq. 22) asks for, with DeepSeek's two mscales."""
    given = params.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all_dim))
    return _mscale(factor, 1.0)


def _mscale(scale: float, mscale: float) -> float:
    """0.1 * mscale * ln(scale) + 1 for scales above 1."""
    return 1.0 if scale <= 1.0 else 0.1 * mscale * math.log(scale) + 1.0
