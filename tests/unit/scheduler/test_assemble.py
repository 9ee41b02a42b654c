"""How many prompt tokens keep a processor at its peak, by device and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config.cli import parse_server_args
from pdserve.engine.assemble import saturation_tokens
from pdserve.errors import ConfigError
from tests.driver import build
from tests.tiny import Family

FLAG = "--prefill-saturation-tokens"


@pytest.mark.parametrize(("family", "tokens"), [("llama", 128), ("qwen3_moe", 384)])
def test_each_expert_needs_as_many_as_a_dense_layer(
    family: Family, tokens: int, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    built = build(tiny_checkpoint(family))
    config = parse_server_args(["--model-path", "m"])
    assert saturation_tokens(config, built) == tokens
    for arithmetic, times in (("amx bfloat16", 2), ("amx int8", 1), ("avx512_bf16 bfloat16", 1)):
        assert saturation_tokens(config, dataclasses.replace(built, arithmetic=arithmetic)) == times * tokens
    assert saturation_tokens(config, dataclasses.replace(built, device=torch.device("cuda"))) is None
    for words, asked in ((f"{FLAG} 7", 7), (f"{FLAG} -1", None)):
        assert saturation_tokens(parse_server_args(["--model-path", "m", *words.split()]), built) == asked


@pytest.mark.parametrize("tokens", ["0", "-2"])
def test_a_step_of_no_tokens_is_refused(tokens: str) -> None:
    with pytest.raises(ConfigError, match="at least 1, or -1") as caught:
        parse_server_args(["--model-path", "m", FLAG, tokens])
    assert caught.value.field == "prefill_saturation_tokens"
