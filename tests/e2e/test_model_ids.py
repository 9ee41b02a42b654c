"""Models by their id at the hub: served from the cache without a network, and downloaded once for a whole service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from pdserve import LLM, SamplingParams
from tests.e2e.harness import running_monolith
from tests.hub import fake_hub, files_of, lay_out
from tests.tiny import Family

REPO = "org/tiny-llama"
SMALL = ("--max-total-tokens", "4096", "--dtype", "float32")
END_S = 60.0


@pytest.fixture
def model(tiny_checkpoint: Callable[[Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory. The hub's cache of this test and of its servers is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tiny_checkpoint("llama")


def test_a_cached_id_is_served_under_its_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path / "hub", REPO, files_of(model))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with running_monolith(REPO, *SMALL, "--trust-remote-code", "--tokenizer-path", REPO) as server:
        (listed,) = requests.get(f"{server.url}/v1/models", timeout=30).json()["data"]
        assert listed["id"] == REPO
        info = requests.get(f"{server.url}/get_model_info", timeout=30).json()
        assert (info["model_path"], info["tokenizer_path"]) == (REPO, REPO)
        body = {"model": REPO, "prompt": "the cat", "max_tokens": 4, "temperature": 0}
        answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.slow
def test_an_offline_engine_takes_a_cached_id(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path / "hub", REPO, files_of(model), revision="v1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(f"{REPO}@v1", max_total_tokens=4096, dtype="float32", device="cpu", disaggregation=True) as llm:
        (output,) = llm.generate(["the cat"], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.slow
def test_a_local_service_downloads_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub({REPO: files_of(model)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        argv = [sys.executable, "-m", "pdserve.launch_local", "--model-path", REPO, "--router-port", "0", *SMALL]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                ready = next(line for line in process.stdout if line.startswith("ready: "))
                url = ready.split("OPENAI_BASE_URL=")[1].split()[0]
                (listed,) = requests.get(f"{url}/models", timeout=30).json()["data"]
                assert listed["id"] == REPO
            finally:
                process.terminate()
                process.wait(END_S)
        assert sum(path.startswith("GET ") and path.endswith("/model.safetensors") for path in hub.asked) == 1
