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
        ModelError: a variant or a partial rotation that is not supported, or a missing number.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    params: dict[str, Any] = {**new, **old}
    kind = _rope_type(params, where)
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and float(partial) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor {partial} is not supported")
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    original = int(
        config.get("original_max_position_embeddings")
        or params.get("original_max_position_embeddings")
        or max_positions
    )
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [] if kind == "yarn" else [key for key in needed if params.get(key) is None]
    if missing:
        raise ModelError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    factor = float(params.get("factor") or max_positions / original)
    return RopeSpec(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=yarn_attention_factor(factor, params) if kind == "yarn" else 1.0,
    )


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
