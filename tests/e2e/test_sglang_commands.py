"""Command lines of SGLang as they are, behind SGLang's own router, which is given no bootstrap port.

Only the model is another one: an id of the hub that is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.e2e.harness import Server, assert_idle, running, start_server
from tests.e2e.sglang_router import running_sglang_router
from tests.hub import files_of, lay_out
from tests.tiny import Family

COMMON = "--disaggregation-transfer-backend mooncake --mem-fraction-static 0.05 --disaggregation-bootstrap-port"
MODEL = "org/tiny-qwen3"
PREFILL = (
    "--trust-remote-code --disaggregation-mode prefill --tp 4 --enable-mixed-chunk --chunked-prefill-size 64 "
    "--enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through --hicache-io-backend kernel "
    f"--hicache-mem-layout page_first {COMMON}"
)
DECODE = (
    "--trust-remote-code --disaggregation-mode decode --tp 4 --disaggregation-prefill-pp 1 "
    "--disaggregation-decode-polling-interval 2 "
    f"--num-reserved-decode-tokens 64 --decode-log-interval 40 --cuda-graph-max-bs 32 {COMMON}"
)
BODY = {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


def _without_effect(server: Server) -> set[str]:
    told = (line.partition(" has no effect: ") for line in server.lines)
    return {before.split()[-1] for before, found, _ in told if found}


@pytest.mark.slow
def test_sglang_s_command_lines_start_and_its_router_serves_without_a_port(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path, MODEL, files_of(tiny_checkpoint("qwen3")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prefill = start_server(MODEL, "prefill", *PREFILL.split(), "0")
    with running(prefill):
        decode = start_server(MODEL, "decode", *DECODE.split(), str(prefill.bootstrap_port))
        with running(decode), running_sglang_router([prefill], [decode], ports=False) as router:
            answers = [requests.post(f"{router.url}/generate", json=BODY, timeout=120) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            assert [len(answer.json()["output_ids"]) for answer in answers] == [8, 8]
            batch = {"input_ids": [[5, 6, 7], [9, 10]], "sampling_params": BODY["sampling_params"]}
            both = requests.post(f"{router.url}/generate", json=batch, timeout=120)
            assert both.status_code == 200 and len(both.json()) == 2, both.text
            assert _without_effect(prefill) == {
                "--enable-mixed-chunk", "--hicache-io-backend", "--hicache-mem-layout"
            }  # fmt: skip
            assert _without_effect(decode) == {
                "--disaggregation-decode-polling-interval", "--decode-log-interval", "--cuda-graph-max-bs",
            }  # fmt: skip
            assert_idle(prefill, decode)
