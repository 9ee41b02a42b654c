"""The embedded default model: converted once, tokenised as llama.cpp does, and giving transformers' tokens."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pdserve.base.startup_progress import ANNOUNCE, parse_status
from pdserve.errors import ModelError
from pdserve.model.paths import made_once, resolve_model_path, resolve_tokenizer_path
from tests.driver import Driver, build
from tests.reference import load_reference, reference_greedy


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(resolve_tokenizer_path(smollm2_directory))
    return loaded


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("x =  5", ["x", "Ġ=", "ĠĠ", "5"]),
        ("in 1984, 3.14", ["in", "Ġ", "1", "9", "8", "4", ",", "Ġ", "3", ".", "1", "4"]),
        ("a\n 7", ["a", "ĊĠ", "7"]),
        ("Hello world", ["Hello", "Ġworld"]),
    ],
)
def test_every_digit_is_a_token(tokenizer: PreTrainedTokenizerFast, text: str, tokens: list[str]) -> None:
    assert tokenizer(text).tokens() == tokens


def test_control_tokens_are_single_and_the_template_uses_them(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 49152
    assert tokenizer.encode("<|im_start|><repo_name><|im_end|>") == [1, 3, 2]
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str) and text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("12 don't é 🙂"), skip_special_tokens=True) == "12 don't é 🙂"


def test_greedy_tokens_equal_transformers_in_fp32(smollm2_directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["The", "What is the capital of France?", "def add(a, b):\n    return a", "1, 2, 3, 4, " * 12]
    prompts = [tokenizer.encode(text) for text in texts]
    reference = load_reference(smollm2_directory)
    built = build(smollm2_directory, dtype="float32", max_total_tokens=2048)
    assert built.spec.eos_token_ids == (2,)
    outputs = Driver(built).generate(prompts, 8, chunk=64)
    assert outputs == [reference_greedy(reference, prompt, 8) for prompt in prompts]


def test_torch_is_not_imported_to_find_the_files(smollm2_directory: Path) -> None:
    """For the API process: it would have a quarter of a gigabyte, and start seconds later."""
    program = """
import sys
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path
print(resolve_tokenizer_path(resolve_model_path("smollm2")))
sys.exit("torch" in sys.modules)
"""
    env = {**os.environ, "PDSERVE_CACHE": str(smollm2_directory.parent)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, str(smollm2_directory)), done.stderr


def test_auto_is_bfloat16(smollm2_directory: Path) -> None:
    assert build(smollm2_directory, load_format="dummy", max_total_tokens=256).dtype == "bfloat16"


def _slow_make(target: Path) -> None:
    for name in ("a", "b", "c"):
        (target / name).write_text(name * 100_000)


def _race(target: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait(30)
    assert sorted(path.name for path in made_once(target, _slow_make).iterdir()) == ["a", "b", "c"]


def test_processes_that_race_for_the_cache_all_see_a_whole_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [context.Process(target=_race, args=(tmp_path / "made", barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_conversion_is_the_status_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(target: Path) -> None:
        (target / "a").write_text("x")

    monkeypatch.setenv(ANNOUNCE, "1")
    made_once(tmp_path / "made", make)
    lines = capsys.readouterr().out.splitlines()
    assert [parse_status(line) for line in lines] == ["converting model files, once", "starting"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError):
        made_once(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_are_no_model_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model_path(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model_path(str(tmp_path))
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ModelError, match=r"expected a \.gguf file"):
        resolve_model_path(str(tmp_path / "weights.bin"))
