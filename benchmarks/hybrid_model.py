"""Write a checkpoint of random weights with the shape of Qwen3.5-0.8B, for servers that are compared.

    python -m benchmarks.hybrid_model .venv-peers/Qwen3.5-0.8B

It has SmolLM2's tokenizer, and as many tokens: a head of 49,152 rows instead of 248,320. Where `scripts/setup_peers.sh
llama` has run, llama.cpp's converter writes the same weights to `<directory>-bf16.gguf`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.shapes import HYBRID_MODELS
from benchmarks.peers import HOME
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

SHAPE = "Qwen3.5-0.8B"
VOCAB_SIZE = 49152
"""SmolLM2's."""


def write(directory: Path) -> None:
    """Write weights, configuration and tokenizer to `directory`, as transformers does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = HYBRID_MODELS[SHAPE] | {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer = resolve_tokenizer_path(resolve_model_path("smollm2"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, directory / name)


def convert(directory: Path) -> None:
    """Write the file for llama.cpp beside `directory`. Raises CalledProcessError: the converter failed."""
    for script in sorted(HOME.glob("llama/sources/*/llama.cpp/convert_hf_to_gguf.py")):
        target = directory.with_name(f"{directory.name}-bf16.gguf")
        command = [sys.executable, str(script), str(directory), "--no-mtp", "--outtype", "bf16"]
        subprocess.run([*command, "--outfile", str(target)], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args(argv)
    write(args.directory)
    convert(args.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
