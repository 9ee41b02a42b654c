"""`ModelSpec`: the model's configuration, read from an HF `config.json`.

Code above the loader reads only `ModelSpec`. Called by the executor factory and by the gguf reader. The gguf reader
builds the same HF-named dictionary from the file's metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.base.parallel import ParallelShape, check_split
from pdserve.errors import ConfigError, ModelError
from pdserve.model.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    read_count,
    read_counts,
    read_mapping,
    read_number,
    read_texts,
    read_token_ids,
)
from pdserve.model.rope import RopeSpec, read_rope

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DTYPES = ("bfloat16", "float16", "float32")
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Mixture-of-experts feed-forward layers. All other layers are dense.

    `layers` are indices in the model, ascending. Each token is routed to `top_k` experts, weighted by router
    probability. With `norm_top_k` the weights of a token add up to 1.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_top_k: bool
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Configuration of a grouped-query decoder. Sizes are element counts.

    `dtype` is the checkpoint's dtype; None when the config names none. `intermediate_size` is that of dense
    feed-forward layers. `moe` is None when all feed-forward layers are dense.
    """

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    moe: MoeSpec | None = None

    @property
    def num_dense(self) -> int:
        """Number of layers with a dense feed-forward."""
        return self.num_layers - (0 if self.moe is None else len(self.moe.layers))

    def digest(self) -> str:
        """Return a short hash of the fields that two peers must share. The KV layout carries the dtype instead."""
        facts = dataclasses.asdict(self)
        del facts["dtype"], facts["architectures"]
        facts["eos_token_ids"] = sorted(self.eos_token_ids)
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def read_model_spec(directory: Path) -> ModelSpec:
    """Read the spec of the HF checkpoint in `directory`.

    Raises:
        ModelError: `config.json` is missing or damaged, or pdserve does not support the architecture or a feature.
    """
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return spec_from_config(config, read_json(generation) if generation.is_file() else {}, where=str(directory))


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises ModelError when the file is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model directory needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelSpec:
    """Build a spec from HF-named `config` and `generation` dictionaries; errors name `where`. Raises ModelError."""
    model_type, architectures = _architecture(config, where)
    _refuse_unsupported(config, where)
    hidden = read_count(config, "hidden_size", where, most=MAX_WIDTH)
    heads = read_count(config, "num_attention_heads", where, most=MAX_HEADS)
    kv_heads = read_count(config, "num_key_value_heads", where, default=heads)
    default_dim = 128 if model_type == "qwen3" else hidden // heads
    head_dim = read_count(config, "head_dim", where, default=default_dim, most=MAX_HEAD_DIM)
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    max_positions = read_count(config, "max_position_embeddings", where, default=_DEFAULT_MAX_POSITIONS[model_type])
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        model_type=model_type,
        architectures=architectures,
        vocab_size=read_count(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=read_count(config, "intermediate_size", where, most=MAX_WIDTH),
        num_layers=read_count(config, "num_hidden_layers", where, most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read_number(config, "rms_norm_eps", where, default=1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True if model_type == "qwen2" else attention_bias,
        o_bias=False if model_type == "qwen2" else attention_bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        rope=read_rope(config, max_positions, where),
        max_positions=max_positions,
        eos_token_ids=read_token_ids((config.get("eos_token_id"), generation.get("eos_token_id")), where),
        dtype=_dtype(config, where),
        moe=_moe(config, where) if model_type == "qwen3_moe" else None,
    )


def _moe(config: Mapping[str, Any], where: str) -> MoeSpec | None:
    """Read the expert configuration; None when no layer has experts. Newer configs use `num_local_experts`."""
    name = "num_local_experts" if "num_experts" not in config else "num_experts"
    num_experts, top_k = (
        read_count(config, name, where, most=MAX_HEADS),
        read_count(config, "num_experts_per_tok", where, default=8),
    )
    if top_k > num_experts:
        raise ModelError(f"{where}: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    step, dense = (
        read_count(config, "decoder_sparse_step", where, default=1),
        read_counts(config, "mlp_only_layers", where),
    )
    num_layers = read_count(config, "num_hidden_layers", where, most=MAX_LAYERS)
    layers = tuple(index for index in range(num_layers) if index not in dense and (index + 1) % step == 0)
    if not layers:
        return None
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_count(config, "moe_intermediate_size", where, most=MAX_WIDTH),
        norm_top_k=bool(config.get("norm_topk_prob", False)),
        layers=layers,
    )


def _architecture(config: Mapping[str, Any], where: str) -> tuple[str, tuple[str, ...]]:
    """Return `(model_type, architectures)`. The first architecture decides the model type."""
    names = read_texts(config, "architectures", where)
    if not names:
        names = tuple(name for name, kind in ARCHITECTURES.items() if kind == config.get("model_type"))
    if not names or names[0] not in ARCHITECTURES:
        seen = names[0] if names else config.get("model_type")
        raise ModelError(f"{where}: architecture {seen!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]], names


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for features that would silently change the generated tokens."""
    layers = read_count(config, "num_hidden_layers", where, most=MAX_LAYERS)
    other = sorted({kind for kind in read_texts(config, "layer_types", where) if kind != "full_attention"})
    if other:
        raise ModelError(f"{where}: layer_types has {', '.join(other)}; only full_attention is supported")
    windowed = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    everywhere = config.get("model_type") == "qwen3_moe"
    some = config.get("layer_types") is None and layers > read_count(
        config, "max_window_layers", where, default=28, least=0
    )
    if windowed and (everywhere or some):
        raise ModelError(f"{where}: use_sliding_window is on; sliding-window attention is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{where}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        method = read_mapping(config, "quantization_config", where).get("quant_method")
        raise ModelError(f"{where}: quantization_config (quant_method {method!r}) is not supported")


def _dtype(config: Mapping[str, Any], where: str) -> str | None:
    """Return the checkpoint's dtype from `dtype` (new name) or `torch_dtype` (old name); None when absent."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise ModelError(f"{where}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return short


def check_spec(spec: ModelSpec, shape: ParallelShape, ep_size: int, num_sharing: int = 1) -> None:
    """Raise ConfigError, which names `tp_size`, `pp_size` or `ep_size`, when the model cannot be split that way.

    `num_sharing` is the number of replicas that share the feed-forward layers (DP attention).
    """
    if ep_size > 1 and spec.moe is None:
        raise ConfigError(f"--ep-size {ep_size} is for models with experts, and this one has none", field="ep_size")
    columns = [spec.intermediate_size] if spec.num_dense else []
    if spec.moe is not None:
        columns.append(spec.moe.intermediate_size if ep_size == 1 else shape.tp_size * num_sharing)
    for intermediate_size in columns:
        check_split(
            shape,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            num_layers=spec.num_layers,
            intermediate_size=intermediate_size,
            num_sharing=num_sharing,
        )
