"""The reader of strips: every word that attention reads is read once, in either order, by any number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import kernel_cases
from benchmarks.strip_reader import StripReader
from tests.share import rest_slow
from tests.unit.model.native_kit import needs_kernels

pytestmark = [needs_kernels, pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]


@pytest.mark.parametrize("num_threads", rest_slow([3, 1, 2]))
@pytest.mark.parametrize("by_heads", [True, False])
def test_all_words_are_read_once(monkeypatch: pytest.MonkeyPatch, num_threads: int, by_heads: bool) -> None:
    words: list[torch.Tensor] = []

    def random_pages(num_pages: int, num_layers: int) -> torch.Tensor:
        heads = kernel_cases.HEADS
        shape = (num_pages, num_layers, 2, heads.num_kv_heads, heads.page_tokens, heads.dim // 4)
        words.append(torch.randint(1 << 62, shape))
        return words[-1].view(torch.bfloat16)

    monkeypatch.setattr(kernel_cases, "pages_of", random_pages)
    case = kernel_cases.reading_case(StripReader(num_threads), "", 3, 128, by_heads=by_heads)
    assert case.times * case.num_bytes == words[-1].nbytes
    assert case.call() == np.bitwise_xor.reduce(words[-1].numpy().view(np.uint64), axis=None)


@pytest.mark.slow
def test_too_few_threads_are_an_error() -> None:
    code = (
        "from benchmarks import kernel_cases\n"
        "from benchmarks.strip_reader import StripReader\n"
        "kernel_cases.reading_case(StripReader(2), '', 1, 128, by_heads=True).call()"
    )
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "RuntimeError: OpenMP gives fewer threads than 2" in ended.stderr
