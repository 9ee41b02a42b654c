"""Families whose layers attend to a window, by native code: their groups, and transformers' own greedy tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import build_executor
from pdserve.memory.layout import GroupKind
from pdserve.model.config import kv_layout, read_model_spec
from pdserve.model.hf.config import read_source
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES as MODELS
from tests.model_pair import running_models
from tests.reference import load_reference, reference_greedy
from tests.tiny import VOCAB_SIZE, WINDOW, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.model.native_kit import needs_kernels

NUM_TOKENS = 6
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 150, 300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Makes the tiny checkpoint of a family, once."""
    made: dict[Family, Path] = {}

    def make(family: Family) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            made[family] = make_tiny(family, path, eos_token_id=None, **WINDOW_FAMILIES[family])
        return made[family]

    return make


def expected_of(path: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    reference = load_reference(path)
    return [reference_greedy(reference, prompt, num_tokens) for prompt in prompts]


def test_layers_with_a_window_are_a_group_unless_all_have_one(checkpoint: Callable[[Family], Path]) -> None:
    full, window = kv_layout(read_model_spec(checkpoint("qwen3")), 16, "float32").groups
    assert (full.kind, full.layers, full.window) == (GroupKind.FULL, (1,), None)
    assert (window.kind, window.layers, window.window) == (GroupKind.WINDOW, (0, 2), WINDOW)
    (only,) = kv_layout(read_model_spec(checkpoint("mistral")), 16, "float32").groups
    assert (only.kind, only.layers) == (GroupKind.FULL, (0, 1, 2))


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_native_code_and_transformers_have_the_same_groups(
    family: Family, checkpoint: Callable[[Family], Path]
) -> None:
    path = checkpoint(family)
    source = read_source(path)
    native = kv_layout(read_model_spec(path), 16, "float32")
    assert native.fields() == source.layout(source.probe("float32"), 16).fields()


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, None), (16, 7), (64, 64), (48, 100)])
def test_tokens_equal_transformers(
    family: Family, page_size: int, chunk: int | None, checkpoint: Callable[[Family], Path]
) -> None:
    path = checkpoint(family)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    driver = Driver(build(path, page_size=page_size, model_impl="native"))
    assert driver.generate(prompts, NUM_TOKENS, chunk=chunk) == expected_of(path, prompts, NUM_TOKENS)


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_pair_gives_transformers_tokens_with_retractions_and_an_abort(
    family: Family, checkpoint: Callable[[Family], Path]
) -> None:
    path, rng = checkpoint(family), random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 63, 64, 65, 300)]
    expected, long = expected_of(path, prompts, 12), expected_of(path, prompts[1:4], 100)
    with running_models(
        path, pair=True, prefill_impl="native", model_impl="native", max_total_tokens=384, offload=family == "qwen3"
    ) as pair:
        assert [pair.generate([prompt], 12)[0] for prompt in prompts] == expected
        answers = pair.generate([*prompts[1:4], prompts[2], prompts[1]], 100, aborted={4: 5})
        assert answers[:4] == [*long, long[1]], "with too little memory"
        assert answers[4] == long[0][: len(answers[4])], "what came before the abort"
        assert pair.answering.state().counters["requests_retracted"] > 0
        pair.assert_idle()


@pytest.mark.parametrize("prefill_impl", ["native", "transformers"])
def test_a_native_and_a_transformers_server_are_a_pair(prefill_impl: str, checkpoint: Callable[[Family], Path]) -> None:
    path, rng = checkpoint("qwen3"), random.Random(2)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 65, 300)]
    decode_impl = "transformers" if prefill_impl == "native" else "native"
    with running_models(path, pair=True, prefill_impl=prefill_impl, model_impl=decode_impl) as pair:
        assert pair.generate(prompts, 12) == expected_of(path, prompts, 12)
        pair.assert_idle()


def test_mixtral_has_names_of_its_own_and_may_have_windows(tmp_path: Path) -> None:
    path = tmp_path / "mixtral"
    MODELS["mixtral"].write(path)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    expected = expected_of(path, prompts, NUM_TOKENS)
    assert Driver(build(path, model_impl="native")).generate(prompts, NUM_TOKENS, chunk=40) == expected
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))
    expected = expected_of(path, prompts, NUM_TOKENS)
    assert Driver(build(path, model_impl="native")).generate(prompts, NUM_TOKENS, chunk=40) == expected


@needs_kernels
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_pair_by_the_cpu_kernels_gives_the_tokens_of_the_monolith(
    family: Family, checkpoint: Callable[[Family], Path]
) -> None:
    path, prompts = checkpoint(family), [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    found = []
    for pair in (False, True):
        with running_models(
            path, pair=pair, prefill_impl="native", model_impl="native", dtype="bfloat16", max_total_tokens=2048
        ) as servers:
            assert {server.built.arithmetic != "torch" for server in servers.servers} == {True}
            found.append(servers.generate(prompts, 12))
            assert servers.generate(prompts, 12) == found[-1], "with prefix hits"
            assert servers.servers[0].state().counters["cached_tokens"] > 256
            servers.assert_idle()
    assert found[0] == found[1]


def test_the_pages_of_a_window_are_far_fewer_than_those_of_all_tokens(checkpoint: Callable[[Family], Path]) -> None:
    config = ServerConfig(
        model=ModelConfig(model_path=str(checkpoint("qwen3")), model_impl="native"),
        memory=MemoryConfig(page_size=16, max_total_tokens=4096),
        schedule=ScheduleConfig(chunked_prefill_size=64),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    built = build_executor(config, max_rows=2)
    assert [pool.num_pages for pool in built.executor.pools] == [256, 24]
    prompt = random_prompt(1000, VOCAB_SIZE)
    assert Driver(built).generate([prompt], 2, chunk=64) == expected_of(checkpoint("qwen3"), [prompt], 2)
