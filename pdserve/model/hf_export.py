"""Writes a gguf file as an HF directory, or only its tokenizer. Called by `paths`, which does not import torch."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.params import torch_dtype

if TYPE_CHECKING:
    from gguf import GGUFReader

_DIGIT_PRE_TOKENIZERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""`tokenizer.ggml.pre` values for which llama.cpp splits off every digit; transformers' conversion does not."""
_CONTROL_TOKEN = 3


def export_hf(path: Path, target: Path) -> None:
    """Write the gguf file `path` to the directory `target`: config, generation config, safetensors, tokenizer."""
    reader = gguf_file.open_gguf(path)
    config = gguf_file.hf_config(reader, path)
    spec = gguf_file.read_spec(path, reader)
    rope = spec.attentions[0].rope
    if rope is not None and rope.freq_divisors is not None:
        raise ModelError(f"{path} has {gguf_file.ROPE_DIVISORS}, which no HF config expresses; run the file itself")
    dtype = torch_dtype(config["dtype"])
    weights = {name: value.to(dtype) for name, value in gguf_file.tensors(path, spec, reader)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    _write_json(target / "config.json", config)
    generation: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(target / "generation_config.json", generation)
    export_tokenizer(path, reader, target)


def export_tokenizer(path: Path, reader: GGUFReader, target: Path) -> None:
    """Save the tokenizer, and restore the digit splitter and control tokens that transformers' conversion loses.

    Raises:
        ModelError: the file has no tokenizer that transformers can convert.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{path} has no tokenizer that can be converted; give --tokenizer-path: {error}"
            ) from error
    backend = tokenizer.backend_tokenizer
    pre = gguf_file.text_field(reader, "tokenizer.ggml.pre")
    if pre in _DIGIT_PRE_TOKENIZERS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": _control_tokens(reader)})
    tokenizer.save_pretrained(target)


def _control_tokens(reader: GGUFReader) -> list[str]:
    """Return the control tokens, such as <|im_start|>, which the tokenizer must not split."""
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    texts = reader.fields["tokenizer.ggml.tokens"].contents()
    return [str(text) for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL_TOKEN]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
