"""What EAGLE-3 heads and draft models propose behind a step of the executor, and draft models that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.errors import ConfigError, ModelError
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.model.eagle_kit import (
    NUM_DRAFTS,
    TORCH,
    ReferenceHead,
    Way,
    head_drafts,
    make_eagle3,
    options,
    ways,
)

LENGTHS = (1, 15, 16, 40)
NUM_STEPS = 4


def proposals(driver: Driver, prompts: Sequence[list[int]], chunk: int) -> list[tuple[list[int], list[int]]]:
    """Prefill in chunks and decode, all rows in each step: known tokens and drafts behind each sampled token."""
    rows = [driver.open(prompt, len(prompt) + NUM_STEPS) for prompt in prompts]
    known, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    found = []
    while any(len(tokens) < len(prompt) + NUM_STEPS for tokens, prompt in zip(known, prompts, strict=True)):
        picked = [i for i, prompt in enumerate(prompts) if len(known[i]) < len(prompt) + NUM_STEPS]
        ends = [min(len(known[i]), starts[i] + chunk) for i in picked]
        plan = [(rows[i], starts[i], end, end == len(known[i])) for i, end in zip(picked, ends, strict=True)]
        result = driver.result(*plan)
        assert sorted(result.drafts) == [at for at, (*_, samples) in enumerate(plan) if samples]
        for at, (i, end) in enumerate(zip(picked, ends, strict=True)):
            starts[i] = end
            token = result.tokens[at]
            if token is not None:
                known[i].append(token.token_id)
                found.append((list(known[i]), list(result.drafts[at])))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("chunk", [11, 64])
def test_a_head_proposes_what_the_reference_drafts(family: Family, chunk: int, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    reference = load_reference(path)
    head = ReferenceHead(directory, reference.get_input_embeddings().weight)
    driver = Driver(build(path, **options(TORCH, "EAGLE3", directory)))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    for known, drafts in proposals(driver, prompts, chunk):
        assert drafts == head_drafts(reference, head, known), len(known)


@pytest.mark.parametrize("way", ways())
def test_a_draft_model_proposes_its_greedy_tokens(way: Way, tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "target", num_hidden_layers=4)
    small = make_tiny("llama", tmp_path / "draft", num_hidden_layers=2, num_key_value_heads=1, seed=3)
    reference = load_reference(small)
    driver = Driver(build(path, **options(way, "STANDALONE", small)))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    same = [
        drafts == reference_greedy(reference, known, NUM_DRAFTS) for known, drafts in proposals(driver, prompts, 11)
    ]
    assert same.count(True) >= (len(same) if way is TORCH else 0.7 * len(same)), same


def test_a_model_that_drafts_for_itself_is_always_right(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    driver = Driver(build(path, **options(TORCH, "STANDALONE", path)))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    longest: dict[int, list[int]] = {}
    found = proposals(driver, prompts, 64)
    for known, _ in found:
        longest[known[0]] = max(known, longest.get(known[0], []), key=len)
    for known, drafts in found:
        follows = longest[known[0]][len(known) : len(known) + NUM_DRAFTS]
        assert drafts[: len(follows)] == follows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 321}, "vocab_size is 321, and the model's is 320"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, more than the model's 3"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused_by_field(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = make_tiny("llama", tmp_path / "target")
    small = make_tiny("llama", tmp_path / "draft", **changes)
    with pytest.raises(ConfigError, match=message) as refused:
        build(path, **options(TORCH, "STANDALONE", small))
    assert refused.value.field == "speculative_draft_model_path"


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target")
    small = make_tiny("llama", tmp_path / "draft", num_hidden_layers=1)
    file = small / "tokenizer.json"
    content = file.read_text(encoding="utf-8")
    file.write_text(content.replace('"the"', '"eht"') if '"the"' in content else content.replace("<eos>", "<end>"))
    with pytest.raises(ConfigError, match="its tokenizer differs from the model's, first at token") as refused:
        build(path, **options(TORCH, "STANDALONE", small))
    assert refused.value.field == "speculative_draft_model_path"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (small / name).unlink()
    assert Driver(build(path, **options(TORCH, "STANDALONE", small))).built.num_pages > 0


def test_a_head_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    directory = make_eagle3(tmp_path / "head", path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] = VOCAB_SIZE
    save_file(tensors, file)
    with pytest.raises(ModelError, match="d2t names token"):
        build(path, **options(TORCH, "EAGLE3", directory))
