"""Writes a gguf file as an HF directory, or only its tokenizer. Called by `paths`, which does not import torch."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.gguf_reader import GgufReader
from pdserve.model.params import torch_dtype

_DIGIT_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""`tokenizer.ggml.pre` values for which llama.cpp splits off every digit; transformers' conversion does not."""
_CONTROL_TOKEN = 3


def export_hf(path: Path, target: Path) -> None:
    """Write the gguf file `path` to the directory `target`: config, generation config, safetensors, tokenizer."""
    reader = gguf_file.open_gguf(path)
    config = gguf_file.hf_config(reader, path)
    spec = gguf_file.read_spec(path, reader)
    if any(rope.freq_divisors is not None for rope, _ in spec.rotations):
        raise ModelError(f"{path} has {gguf_file.ROPE_DIVISORS}, which no HF config expresses; run the file itself")
    dtype = torch_dtype(config["dtype"])
    weights = {name: value.to(dtype) for name, value in gguf_file.tensors(path, spec, reader)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    _write_json(target / "config.json", config)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(target / "generation_config.json", generation)
    export_tokenizer(path, reader, target)


def export_tokenizer(path: Path, reader: GgufReader, target: Path) -> None:
    """Save the tokenizer, and restore the digit splitter and control tokens that transformers' conversion loses.

    Raises:
        ModelError: the file has no tokenizer that transformers can convert.
    """
    from tokenizers import pre_tokenizers
    from transformers import TokenizersBackend  # AutoTokenizer reads the config too, which takes a minute

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = TokenizersBackend.from_pretrained(str(path.parent), gguf_file=path.name)
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{path} has no tokenizer that can be converted; give --tokenizer-path: {error}"
            ) from error
    backend = tokenizer.backend_tokenizer
    if str(reader.fields.get("tokenizer.ggml.pre")) in _DIGIT_PRE_TOKENIZERS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": _control_tokens(reader)})
    tokenizer.save_pretrained(target)


def _control_tokens(reader: GgufReader) -> list[str]:
    """Return the control tokens, such as <|im_start|>, which the tokenizer must not split."""
    kinds, texts = (reader.array(f"tokenizer.ggml.{name}") for name in ("token_type", "tokens"))
    return [str(text) for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL_TOKEN]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
