"""Greedy tokens of 1P+1D by the native CPU kernels, in bfloat16 and 8 bits, are the monolith's with the same flags.

One request at a time, one thread, and chunks alike: so each server's steps have the same rows in both deployments, and
the kernels add in the same order. What is left that could differ is the KV on its way and who computes what.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Server, assert_idle, running, start_router, start_server
from tests.e2e.test_parity import ask, make_prompts
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, Family

FORMATS = pytest.mark.parametrize("quantization", rest_slow(["int8", None]))


def check(model: Path, vocab_size: int, chunk: str, quantization: str | None) -> None:
    """Every length alone, on both; prefixes are not kept, since only one of the two has decoded tokens in its cache."""
    flags = ["--dtype", "bfloat16", "--cpu-kernels", "native", "--chunked-prefill-size", chunk]
    flags += ["--disable-radix-cache", "--max-total-tokens", "32768"]
    flags += [] if quantization is None else ["--quantization", quantization]
    servers = [start_server(str(model), mode, *flags) for mode in ("null", "prefill", "decode")]
    with running(*servers):
        monolith, prefill, decode = servers
        router = start_router([prefill], [decode])
        with running(router):
            compare(monolith, router, make_prompts(vocab_size))
        assert prefill.counter("kv_transfer_bytes") > 0, "the KV must have gone through the transfer engine"
        assert_idle(*servers)


def compare(monolith: Server, router: Server, prompts: list[list[int]]) -> None:
    """The same tokens, and not the same for all prompts."""
    expected = [ask(monolith.url, prompt)["output_ids"] for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert ask(router.url, prompt)["output_ids"] == tokens, f"{len(prompt)} tokens"


@FORMATS
def test_tiny_model(quantization: str | None, tiny_checkpoint: Callable[[Family], Path]) -> None:
    check(tiny_checkpoint("qwen3"), VOCAB_SIZE, "64", quantization)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["-1", "512"])
@FORMATS
def test_smollm2(quantization: str | None, chunk: str, smollm2_directory: Path) -> None:
    check(smollm2_directory, 49152, chunk, quantization)
