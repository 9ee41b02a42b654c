"""Checkpoints of embedding models: how they pool, and names and architectures of the base model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ModelError, UnsupportedModelError
from pdserve.model.pooling import read_embedding_spec, read_pooling
from pdserve.protocol.hidden_states import Pooling

_CONFIG = {
    "architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512,
    "vocab_size": 320, "tie_word_embeddings": False,
}  # fmt: skip
_PREFIX = "sentence_transformers.models."


def _modules(path: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> Path:
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": _PREFIX + kind} for i, kind in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_checkpoint_without_modules(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, "auto") == Pooling(mode="last", normalize=True)
    assert read_pooling(tmp_path, "mean") == Pooling(mode="mean", normalize=True)
    assert read_pooling(tmp_path / "model.gguf", "auto") == Pooling()


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
    ],
)
def test_modules_say_how(config: dict[str, Any], mode: Any, tmp_path: Path) -> None:
    path = _modules(tmp_path, "Transformer", "Pooling", pooling=config)
    assert read_pooling(path, "auto") == Pooling(mode=mode, normalize=False)
    assert read_pooling(path, "last") == Pooling(mode="last", normalize=False)


def test_normalize(tmp_path: Path) -> None:
    path = _modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode_lasttoken": True})
    assert read_pooling(path, "auto") == Pooling()


@pytest.mark.parametrize(
    "config", [{"pooling_mode_cls_token": True}, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, {}]
)
def test_other_poolings_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    path = _modules(tmp_path, "Transformer", "Pooling", pooling=config)
    with pytest.raises(UnsupportedModelError, match=r"1_Pooling.*pooling"):
        read_pooling(path, "auto")


def test_damaged_and_unknown_modules(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="Dense"):
        read_pooling(_modules(tmp_path, "Transformer", "Pooling", "Dense"), "auto")
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_pooling(tmp_path, "auto")


def test_the_base_model_is_read_as_the_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    spec = read_embedding_spec(tmp_path)
    assert spec.architectures == ("Qwen3ForCausalLM",) and spec.tied_embeddings
    assert ("embed_tokens", "model.embed_tokens") in spec.names.renamed
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG | {"architectures": ["Qwen3ForCausalLM"]}))
    assert read_embedding_spec(tmp_path) == spec


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_to_later_tokens_is_refused(field: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG | field))
    with pytest.raises(UnsupportedModelError, match=next(iter(field))):
        read_embedding_spec(tmp_path)
