"""1P+1D over NIXL: the reference's greedy tokens, alone and in a crowd, and everything free again after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.transfer.transports.nixl_engine import is_installed
from tests.e2e.test_parity import check_pair, make_prompts, reference
from tests.tiny import Family

pytestmark = pytest.mark.skipif(not is_installed(), reason="nixl is not installed; scripts/setup.sh says how")


@pytest.mark.parametrize("devices", ["all", pytest.param("tcp,self", marks=pytest.mark.slow)])
def test_tokens_over_nixl_are_the_reference_s(
    devices: str, tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`all`: on one host the sender writes into the receiver's memory by itself; `tcp,self`: as between hosts."""
    monkeypatch.setenv("UCX_TLS", devices)
    model = tiny_checkpoint("llama")
    prompts = make_prompts(vocab_size=320)
    flags = ("--disaggregation-transfer-backend", "nixl", "--chunked-prefill-size", "64", "--max-total-tokens", "32768")
    check_pair(model, prompts, reference(model, prompts), *flags)
