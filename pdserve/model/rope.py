"""`RopeSpec`: the rotary position embedding variant of a model and its parameters.

Read from a config by `config.py`; turned into angles by `layers/kernels.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.fields import MAX_HEAD_DIM, ModelFacts, option, read_count, read_mapping, read_number

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RopeSpec(ModelFacts):
    """Parameters of one RoPE variant. `attention_factor` multiplies cos and sin.

    `freq_divisors` has one divisor per pair of dimensions; gguf files store llama3 scaling this way, and `longrope` is
    nothing else. None otherwise.
    `partial_rotary_factor`: share of a head's dimensions that are rotated, from the first one on.

    With `interleaved` the checkpoint's pairs are the neighbouring dimensions 2i and 2i + 1. The rows of its Q and K
    projections are reordered at load, so that the model rotates halves as in all other cases. Its keys in the cache
    have the reordered dimensions too.
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
    partial_rotary_factor: float = 1.0
    interleaved: bool = option(False)

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head of `head_dim` are rotated."""
        return int(head_dim * self.partial_rotary_factor)


def read_rope(config: Mapping[str, Any], max_positions: int, where: str, *, may_be_partial: bool = False) -> RopeSpec:
    """Read the variant of an HF config from new (`rope_parameters`) or old (`rope_theta`, `rope_scaling`) fields.

    Without `may_be_partial` a config that rotates a part of each head is refused.

    Raises:
        ModelError: the variant or a partial rotation is not supported, or a number is missing.
    """
    old, new = read_mapping(config, "rope_scaling", where), read_mapping(config, "rope_parameters", where)
    params: dict[str, Any] = {**new, **old}
    kind = _rope_type(params, where)
    key = "partial_rotary_factor"
    partial = read_number(params if params.get(key) else config, key, where, default=1.0)
    if partial > 1.0 or (partial != 1.0 and not may_be_partial):
        raise UnsupportedModelError(f"{where}: partial_rotary_factor {partial} is not supported")
    theta = read_number(params if params.get("rope_theta") else config, "rope_theta", where, default=10000.0)
    if kind == "default":
        return RopeSpec(theta=theta, partial_rotary_factor=partial)
    key = "original_max_position_embeddings"
    original = read_count(config if config.get(key) else params, key, where, default=max_positions)
    if kind == "longrope":
        return _longrope(params, theta, partial, max_positions, original, where)
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [] if kind == "yarn" else [key for key in needed if params.get(key) is None]
    if missing:
        raise ModelError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    factor = read_number(params, "factor", where, default=max_positions / original)
    return RopeSpec(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=read_number(params, "low_freq_factor", where, default=1.0),
        high_freq_factor=read_number(params, "high_freq_factor", where, default=4.0),
        beta_fast=read_number(params, "beta_fast", where, default=32.0),
        beta_slow=read_number(params, "beta_slow", where, default=1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=yarn_attention_factor(factor, params, where) if kind == "yarn" else 1.0,
        partial_rotary_factor=partial,
    )


def read_rope_of_kind(
    config: Mapping[str, Any], kind: str, max_positions: int, where: str, *, theta: float
) -> RopeSpec:
    """Read the variant of the layers of `kind`, a value of `layer_types`, from `rope_parameters` by kind.

    `theta` is the base of a config that names none for these layers. Raises ModelError.
    """
    params = {"rope_theta": theta, **read_mapping(read_mapping(config, "rope_parameters", where), kind, where)}
    return read_rope({"rope_parameters": params}, max_positions, where)


def has_ropes_by_kind(config: Mapping[str, Any], where: str) -> bool:
    """Whether `rope_parameters` has an object for each value of `layer_types`."""
    return any(isinstance(value, dict) for value in read_mapping(config, "rope_parameters", where).values())


def _longrope(
    params: Mapping[str, Any], theta: float, partial: float, max_positions: int, original: int, where: str
) -> RopeSpec:
    """Return LongRoPE (arXiv:2402.13753) with its `long_factor` where the context is longer than the original one.

    So all prompts have the same angles, whatever their length is. transformers takes `short_factor` for short ones.
    """
    name = "long_factor" if max_positions > original else "short_factor"
    divisors = params.get(name)
    if (
        not isinstance(divisors, list | tuple)
        or len(divisors) > MAX_HEAD_DIM
        or not all(isinstance(value, int | float) and 0 < value < 1e30 for value in divisors)
    ):
        raise ModelError(f"{where}: rope_type 'longrope' needs {name}, a list of positive numbers")
    factor = read_number(params, "factor", where, default=max_positions / original)
    usual = 1.0 if factor <= 1.0 or original == 1 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return RopeSpec(
        type="longrope",
        theta=theta,
        factor=factor,
        original_max_positions=original,
        attention_factor=read_number(params, "attention_factor", where, default=usual),
        freq_divisors=tuple(map(float, divisors)),
        partial_rotary_factor=partial,
    )


def _rope_type(params: Mapping[str, Any], where: str) -> RopeType:
    """Return the variant's name. Raises ModelError for an unsupported one."""
    name = params.get("rope_type") or params.get("type") or "default"
    name = "longrope" if name == "su" else name
    for kind in _ROPE_TYPES:
        if kind == name:
            return kind
    raise UnsupportedModelError(f"{where}: rope_type {name!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")


def yarn_attention_factor(factor: float, params: Mapping[str, Any], where: str) -> float:
    """Return YaRN's factor on cos and sin (arXiv:2309.00071, eq. 22), with DeepSeek's two mscales."""
    if params.get("attention_factor") is not None:
        return read_number(params, "attention_factor", where, default=1.0)
    if params.get("mscale") and params.get("mscale_all_dim"):
        mscale, of_all = (read_number(params, name, where, default=1.0) for name in ("mscale", "mscale_all_dim"))
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, of_all)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(scale: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(scale) + 1 for scales above 1, else 1."""
    return 1.0 if scale <= 1.0 else 0.1 * mscale * math.log(scale) + 1.0
