"""Decides whether a model runs natively or through transformers, and loads it for the latter.

`factory` imports it where a model may need transformers, whose import takes seconds.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError, ModelError
from pdserve.memory.layout import KVLayout
from pdserve.model.config import ModelSpec
from pdserve.model.hf.config import TransformersSource, read_source
from pdserve.model.hf.model import TransformersModel, load_transformers_model
from pdserve.model.hf.probe import CacheProbe
from pdserve.model.parallel import Parallel

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TransformersPlan:
    """A model that transformers runs, before its weights are read."""

    source: TransformersSource
    found: CacheProbe
    layout: KVLayout

    @property
    def spec(self) -> ModelSpec:
        """Configuration of the model."""
        return self.source.spec

    def load(self, config: ServerConfig, dtype: str, device: torch.device, parallel: Parallel) -> TransformersModel:
        """Load the weights. Raises ModelError."""
        model = load_transformers_model(
            self.source, self.found, dtype, device, parallel,
            load_format=config.model.load_format, seed=config.model.random_seed,
        )  # fmt: skip
        if not model.can_split_prompts:
            _LOG.info(
                "prompts are computed in one chunk: the model's code ignores its recurrent state when several tokens "
                "follow"
            )
        return model


def plan_transformers(source: TransformersSource, config: ServerConfig, dtype: str) -> TransformersPlan:
    """Check the flags, and probe the model.

    Raises:
        ConfigError: a flag asks for what models through transformers cannot do.
        ModelError: a layer caches in a way that pdserve cannot hold.
    """
    _check(config)
    found = source.probe(dtype)
    plan = TransformersPlan(source, found, source.layout(found, config.memory.page_size))
    groups = ", ".join(f"{group.name} ({group.num_layers} layers)" for group in plan.layout.groups)
    _LOG.info("%s runs through transformers; KV groups: %s", plan.spec.architectures[0], groups)
    return plan


def find_source(path: Path, native_error: ModelError | None) -> TransformersSource:
    """Read the checkpoint for transformers.

    `native_error`: why the model does not run natively; None: it is not meant to. Raises ModelError.
    """
    try:
        return read_source(path)
    except ModelError as error:
        if native_error is None:
            raise
        raise ModelError(f"{native_error}; through transformers: {error}") from error


def _check(config: ServerConfig) -> None:
    """Raise ConfigError, which names the flag, for what models through transformers cannot do."""
    parallel = config.parallel
    wrong = {
        "tp_size": parallel.tp_size > 1,
        "pp_size": parallel.pp_size > 1,
        "ep_size": parallel.ep_size > 1,
        "enable_dp_attention": parallel.enable_dp_attention,
        "enable_deterministic_inference": config.kernels.enable_deterministic_inference,
        "quantization": config.model.quantization is not None,
        "enable_lora": config.lora.is_on,
        "kv_cache_dtype": config.memory.kv_cache_dtype != "auto",
        "attention_backend": config.kernels.attention_backend not in ("auto", "torch"),
    }
    reasons = {
        "tp_size": "its weights are not split over tensor ranks",
        "pp_size": "its layers are not split over stages",
        "ep_size": "its experts are not split over ranks",
        "enable_dp_attention": "its feed-forward layers are not split over ranks",
        "enable_deterministic_inference": "its products may depend on the batch",
        "quantization": "its linear layers are not packed",
        "enable_lora": "its linear layers take no adapters",
        "kv_cache_dtype": "its KV cache has the model's dtype",
        "attention_backend": "its attention runs with torch",
    }
    for field, is_wrong in wrong.items():
        if is_wrong:
            flag = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{flag} does not fit a model through transformers: {reasons[field]}", field=field)
