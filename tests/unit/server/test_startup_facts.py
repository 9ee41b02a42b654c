"""What a server tells of its start and of its processes: in the log, in `/get_server_info` and in `/metrics`."""

from __future__ import annotations

import logging
import os

import pytest

from pdserve.base.process_use import OWN
from pdserve.protocol.engine_state import EngineReady
from pdserve.server.engine_client.engine_queries import log_startup
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

pytestmark = pytest.mark.timeout(60)


def ready(**facts: float) -> EngineReady:
    return EngineReady(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=10,
        context_length=10,
        max_total_tokens=10,
        eos_token_ids=[1],
        facts={"dtype": "float32", **facts},
    )


def test_one_line_has_the_parts_of_the_start_and_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_startup(ready(startup_imports_s=1.5, startup_load_weight_s=2.25, startup_scheduler_e2e_s=4.0))
    (record,) = caplog.records
    text = record.getMessage()
    assert "ready after 4.00 s (imports 1.50, load_weight 2.25, other 0.25); memory: api " in text
    assert " MB (peak " in text


async def test_info_has_what_every_process_takes(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        processes = (await b.http.get("/get_server_info")).json()["processes"]
        assert processes[OWN]["pid"] == os.getpid()
        assert processes[OWN]["peak_bytes"] >= processes[OWN]["anonymous_bytes"] > 1 << 20
