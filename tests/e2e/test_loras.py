"""LoRA adapters through a pair of real servers and its router, split over ranks: by name, loaded and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests

from pdserve import LLM, SamplingParams
from pdserve.llm.outputs import InvalidRequestError
from tests.adapters import merged, write_adapter
from tests.e2e.harness import assert_idle, running_pair
from tests.model_families import prompts_of
from tests.reference import load_reference, reference_greedy
from tests.tiny import make_tiny

NUM_NEW = 8
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4096", "--served-model-name", "tiny")


@pytest.mark.slow
def test_a_pair_serves_adapters_and_takes_new_ones(tmp_path: Path) -> None:
    base = make_tiny("qwen3", tmp_path / "base", eos_token_id=None)
    paths = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("first", "second"))}
    prompts = prompts_of((40, 90))
    models: dict[str, Path] = {name: merged(tmp_path / f"{name}-merged", base, path) for name, path in paths.items()}
    models["tiny"] = base
    expected: dict[str, list[list[int]]] = {}
    for name, path in models.items():
        reference = load_reference(path)
        expected[name] = [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]

    with running_pair(
        str(base), *FLAGS, "--enable-lora", "--lora-paths", f"first={paths['first']}",
        prefill_flags=("--tp-size", "2"),
    ) as pair:  # fmt: skip

        def post(path: str, body: dict[str, Any]) -> requests.Response:
            return requests.post(f"{pair.url}{path}", json=body, timeout=60)

        def tokens_of(name: str) -> list[list[int]]:
            sampling = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
            answer = post("/generate", {"input_ids": prompts, "sampling_params": sampling, "model": name})
            assert answer.status_code == 200, answer.text
            return [each["output_ids"] for each in answer.json()]

        assert all(tokens_of(name) == expected[name] for name in ("first", "tiny"))
        second = {"lora_name": "second", "lora_path": str(paths["second"])}
        assert post("/v1/completions", {"model": "second", "prompt": "x"}).status_code == 404
        assert post("/load_lora_adapter", second).status_code == 200
        models_of_router = requests.get(f"{pair.url}/v1/models", timeout=60).json()["data"]
        assert [model["id"] for model in models_of_router] == ["tiny", "first", "second"]
        assert all(tokens_of(name) == expected[name] for name in ("second", "first", "tiny"))
        assert post("/load_lora_adapter", second).status_code == 400
        wide = make_tiny("qwen3", tmp_path / "wide", eos_token_id=None, hidden_size=128)
        for name, of, rank, message in (
            ("wide", wide, 4, "down_proj.lora_B.weight has shape [128, 4]"),
            ("large", base, 128, "--max-lora-rank 64"),
        ):
            refused = {"lora_name": name, "lora_path": str(write_adapter(tmp_path / name, of, rank=rank))}
            answer = post("/load_lora_adapter", refused)
            assert answer.status_code == 400 and message in answer.text, answer.text
        assert post("/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
        assert post("/v1/completions", {"model": "second", "prompt": "x"}).status_code == 404
        assert_idle(*pair.workers)


@pytest.mark.slow
def test_the_offline_api_takes_adapters(tmp_path: Path) -> None:
    """Of a pair: by name, one for each prompt, loaded and unloaded."""
    base = make_tiny("qwen3", tmp_path / "base", eos_token_id=None)
    paths = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("first", "second"))}
    models: dict[str | None, Path] = {name: merged(tmp_path / f"{name}-m", base, path) for name, path in paths.items()}
    prompts = prompts_of((40, 90))
    expected = {
        name: [reference_greedy(load_reference(path), prompt, NUM_NEW) for prompt in prompts]
        for name, path in (models | {None: base}).items()
    }
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        str(base), dtype="float32", max_total_tokens=4096, disaggregation=True, enable_lora=True, max_loras=2,
        lora_paths={"first": str(paths["first"])},
    ) as llm:  # fmt: skip

        def tokens_of(adapters: str | list[str | None] | None) -> list[list[int]]:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_path=adapters)
            return [output.outputs[0].token_ids for output in outputs]

        assert tokens_of("first") == expected["first"] and tokens_of(None) == expected[None]
        assert tokens_of([None, "first"]) == [expected[None][0], expected["first"][1]]
        with pytest.raises(InvalidRequestError, match="'second'") as caught:
            tokens_of("second")
        assert caught.value.field == "lora_path"
        assert set(llm.load_lora_adapter("second", str(paths["second"]))) == {"first", "second"}
        assert tokens_of(["second", "first"]) == [expected["second"][0], expected["first"][1]]
        for name, path in (("second", paths["second"]), ("third", tmp_path / "nowhere")):
            with pytest.raises(InvalidRequestError):
                llm.load_lora_adapter(name, str(path))
        assert set(llm.unload_lora_adapter("second")) == {"first"}
        with pytest.raises(InvalidRequestError):
            llm.unload_lora_adapter("second")
        with pytest.raises(InvalidRequestError, match="3 entries"):
            tokens_of(["first"] * 3)
        assert tokens_of("first") == expected["first"]
    with LLM(str(base), dtype="float32", max_total_tokens=4096) as llm, pytest.raises(InvalidRequestError) as refused:
        llm.generate(prompts, params, use_tqdm=False, lora_path="first")
    assert "enable_lora" in str(refused.value)
