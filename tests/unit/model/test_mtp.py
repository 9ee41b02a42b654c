"""The MTP module drafts what an independent computation of it drafts: behind prompts, chunks, steps, prefix hits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ConfigError, ModelError
from pdserve.executor.interface import BatchPlan, BatchRow, StepResult, run
from pdserve.memory.layout import GroupKind
from pdserve.model.drafting.mtp import mtp_spec
from pdserve.model.layer_spec import AttentionSpec, MoeSpec
from pdserve.model.loader import read_spec
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.model_families import HYBRIDS
from tests.mtp import MTPReference, write_with_mtp
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.model.native_kit import needs_kernels

NUM_DRAFTS, PAGE = 3, 16
NEXTN = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=NUM_DRAFTS)
Models = Callable[[str], tuple[Path, MTPReference]]


def drafting(path: Path, speculative: SpeculativeConfig = NEXTN, **changes: Any) -> Driver:
    """A driver with the module, in float32 with torch."""
    return Driver(build(path, **{"dtype": "float32", "cpu_kernels": "torch", **changes}, speculative=speculative))


def generate(driver: Driver, prompts: list[list[int]], num_new: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """The known tokens behind each step and its drafts, of prompts that run at once."""
    rows = [driver.open(prompt, len(prompt) + num_new) for prompt in prompts]
    known, starts, found = [list(prompt) for prompt in prompts], [0] * len(prompts), []
    for _ in range(num_new):
        result = driver.result(*[(row, s, len(k), True) for row, s, k in zip(rows, starts, known, strict=True)])
        for index, token in enumerate(result.tokens):
            assert token is not None
            starts[index] = len(known[index])
            known[index].append(token.token_id)
            found.append((list(known[index]), result.drafts[index]))
    for row in rows:
        driver.close(row)
    return found


@pytest.mark.parametrize("name", rest_slow(("qwen3_next", "qwen3_5_text", "qwen3_5_moe", "qwen3_5"), keep=3))
def test_drafts_equal_the_reference_behind_prompts_and_decode_steps(name: str, mtp_model: Models) -> None:
    path, reference = mtp_model(name)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (1, 15, 16, 40)]
    found = generate(drafting(path), prompts, 4)
    assert len({drafts for _, drafts in found}) > len(prompts), "drafts of different contexts differ"
    for tokens, drafts in found:
        assert list(drafts) == reference.drafts(tokens, NUM_DRAFTS), len(tokens)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_drafts_do_not_depend_on_how_a_prompt_is_cut(chunk: int, mtp_model: Models) -> None:
    path, reference = mtp_model("qwen3_5_text")
    driver = drafting(path)
    for length in (2, 17, 48):
        prompt = random_prompt(length, VOCAB_SIZE)
        row = driver.open(prompt, length + 1)
        for start in range(0, length, chunk):
            end = min(length, start + chunk)
            result = driver.result((row, start, end, end == length))
            assert len(result.drafts) == (end == length), "only rows that sample draft"
        (token,) = result.tokens
        assert token is not None
        driver.close(row)
        assert list(result.drafts[0]) == reference.drafts([*prompt, token.token_id], NUM_DRAFTS)


@pytest.mark.parametrize("num_cached", [PAGE, 2 * PAGE, 20])
def test_a_row_goes_on_behind_pages_of_another_one(num_cached: int, mtp_model: Models) -> None:
    """As behind a prefix hit, whose first slot has no hidden state; and as behind a retraction, within a page."""
    path, reference = mtp_model("qwen3_5_text")
    driver = drafting(path)
    layout, table = driver.built.layout, driver.built.table
    prompt = random_prompt(45, VOCAB_SIZE)
    first = driver.open(prompt, 60)
    driver.step((first, 0, num_cached, False))
    next_chunk = driver.result((first, num_cached, 45, True))
    tokens = [*prompt, next_chunk.tokens[0].token_id]  # type: ignore[union-attr]
    assert list(next_chunk.drafts[0]) == reference.drafts(tokens, NUM_DRAFTS)
    again = driver.open(prompt, 60)
    driver.step((again, 0, num_cached, False))
    pages = table.pages[[first, again], : layout.pages_for(num_cached)]
    for pool in driver.built.executor.pools:
        if pool.group.kind is GroupKind.DRAFT:
            pool.pages_as_bytes[pages[1]] = pool.pages_as_bytes[pages[0]]
    driver.built.executor.close_row(again)
    driver.built.executor.open_row(again, prompt, len(prompt), GREEDY, None)
    result = driver.result((again, num_cached, 45, True))
    assert [token.token_id for token in result.tokens if token is not None] == tokens[45:]
    begins = num_cached if num_cached % PAGE == 0 else 0
    assert list(result.drafts[0]) == reference.drafts(tokens, NUM_DRAFTS, begins)


def test_a_plan_says_how_many_drafts_it_wants(mtp_model: Models) -> None:
    """Without any the draft KV is written all the same: later drafts are as good."""
    path, reference = mtp_model("qwen3_5_text")
    driver = drafting(path)
    tokens = random_prompt(20, VOCAB_SIZE)
    row, start = driver.open(tokens, 40), 0
    for step, wanted in enumerate((0, 2, 0, 0, None, 9)):
        plan = BatchPlan(step, (BatchRow("r", row, start, len(tokens), True),), wanted)
        result: StepResult = run(driver.built.executor, plan)
        start = len(tokens)
        tokens = [*tokens, *(token.token_id for token in result.tokens if token is not None)]
        count = NUM_DRAFTS if wanted is None else min(wanted, NUM_DRAFTS)
        expected = {0: tuple(reference.drafts(tokens, count))} if count else {}
        assert result.drafts == expected


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_cpu_kernels_draft_mostly_what_the_reference_does(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    """They round to bfloat16 or 8 bits, and the tokens of a random model lie close together."""
    path = write_with_mtp(name, tmp_path / "model", linear_key_head_dim=32, linear_value_head_dim=16)
    reference = MTPReference.load(path, tmp_path / "reference")
    driver = drafting(path, dtype="bfloat16", cpu_kernels="native", quantization=quantization)
    found = generate(driver, [random_prompt(length, VOCAB_SIZE) for length in (1, 16, 40)], 12)
    same = sum(drafts[0] == reference.drafts(tokens, 1)[0] for tokens, drafts in found)
    assert same >= len(found) * (0.75 if quantization is None else 0.5), f"{same} of {len(found)}"


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_module_is_one_layer_of_full_attention(name: str, hybrid_checkpoint: Callable[[str], Path]) -> None:
    spec = read_spec(hybrid_checkpoint(name))
    (layer,) = mtp_spec(spec).layers
    assert [type(op) for op in layer.operations] == [type(op) for op in spec.layers[3].operations]
    assert isinstance(layer.operations[0], AttentionSpec)
    assert isinstance(layer.operations[1], MoeSpec) == (spec.moe is not None)


def test_the_layout_has_a_draft_group_with_the_pages_of_all_tokens(mtp_model: Models) -> None:
    path, _ = mtp_model("qwen3_5_text")
    plain, with_drafts = (drafting(path, each).built for each in (SpeculativeConfig(), NEXTN))
    assert with_drafts.layout.groups[:-1] == plain.layout.groups
    group = with_drafts.layout.groups[-1]
    assert (group.kind, group.name, group.layers, group.page_tokens) == (GroupKind.DRAFT, "draft", (3,), PAGE)
    assert with_drafts.layout.page_bytes == plain.layout.page_bytes + group.page_bytes
    pool = with_drafts.executor.pools[-1]
    assert pool.num_pages == with_drafts.num_pages + 8, "a scratch page for each row"


def test_a_checkpoint_without_the_module_is_refused_by_the_flag(
    hybrid_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    paths = [hybrid_checkpoint("qwen3_next"), make_tiny("llama", tmp_path / "llama")]
    for path, says in zip(paths, ("no tensors under mtp.", "no MTP module"), strict=True):
        with pytest.raises(ConfigError, match=says) as error:
            drafting(path)
        assert error.value.field == "speculative_algorithm"


def test_a_module_with_a_tensor_missing_or_too_many_is_damaged(mtp_model: Models, tmp_path: Path) -> None:
    path, _ = mtp_model("qwen3_5_text")
    tensors = load_file(path / "model.safetensors")
    for change, says in (("mtp.fc.weight", "the first is mtp.fc.weight"), ("mtp.layers.1.x", "mtp.layers.1.x")):
        damaged = shutil.copytree(path, tmp_path / change)
        kept = {name: tensor for name, tensor in tensors.items() if name != change}
        if len(kept) == len(tensors):
            kept[change] = tensors["mtp.fc.weight"].clone()
        save_file(kept, damaged / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=says):
            drafting(damaged)
