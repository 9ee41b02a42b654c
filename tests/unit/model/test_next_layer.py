"""The MTP module of DeepSeek-V3 and GLM-4-MoE, the layer behind the last one: its drafts, and pairs with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ConfigError
from pdserve.memory.layout import GroupKind, Shard
from pdserve.model.drafting.mtp import mtp_spec
from pdserve.model.layer_spec import MoeSpec
from pdserve.model.loader import read_spec
from tests.deepseek_mtp import NextLayerReference, write_with_next_layer
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES, prompts_of
from tests.model_pair import running_models
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE
from tests.unit.model.native_kit import needs_kernels
from tests.unit.model.test_mtp import NEXTN, NUM_DRAFTS, drafting, generate

NEW_TOKENS = 8
FIXED = SpeculativeConfig(speculative_algorithm="NEXTN", speculative_num_steps=2, speculative_adaptive=False)
Models = Callable[[str], tuple[Path, NextLayerReference]]
NAMES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`model(name)`: the checkpoint of a family with an MTP module, and its reference."""
    made: dict[str, tuple[Path, NextLayerReference]] = {}

    def get(name: str) -> tuple[Path, NextLayerReference]:
        if name not in made:
            path = write_with_next_layer(name, tmp_path_factory.mktemp("next") / name)
            made[name] = path, NextLayerReference.load(path, path.parent / "reference")
        return made[name]

    return get


@pytest.mark.parametrize("name", rest_slow(NAMES, keep=2))
def test_drafts_equal_the_reference_behind_prompts_and_decode_steps(name: str, model: Models) -> None:
    path, reference = model(name)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (1, 16, 40)]
    found = generate(drafting(path), prompts, 3)
    assert len({drafts for _, drafts in found}) > len(prompts), "drafts of different contexts differ"
    for tokens, drafts in found:
        assert list(drafts) == reference.drafts(tokens, NUM_DRAFTS), len(tokens)


@pytest.mark.parametrize("name", rest_slow(NAMES, keep=2))
def test_the_module_is_the_last_kind_of_layer_and_is_read_with_the_flag_only(name: str, model: Models) -> None:
    path, _ = model(name)
    spec = read_spec(path)
    (layer,) = mtp_spec(spec).layers
    assert layer == spec.layers[-1] and isinstance(layer.operations[1], MoeSpec)
    plain, with_drafts = (build(path, dtype="float32", speculative=flags) for flags in (None, NEXTN))
    assert with_drafts.layout.groups[:-1] == plain.layout.groups
    assert with_drafts.layout.fields() == plain.layout.fields(), "a pair may have it on one side"
    group = with_drafts.layout.groups[-1]
    assert (group.kind, group.name, group.layers) == (GroupKind.DRAFT, "draft", (1,))
    if name == "deepseek_v3":
        assert [(p.name, p.num_heads, p.width, p.shard) for p in group.planes] == [
            ("latent", 1, 24, Shard.REPLICATED),
        ]  # fmt: skip
        assert group.of_rank(ParallelShape(tp_size=2).coord(1)).planes == group.planes
    prompts = prompts_of((1, 65))
    tokens = [Driver(built).generate(prompts, NEW_TOKENS) for built in (plain, with_drafts)]
    assert tokens[0] == tokens[1] == FAMILIES[name].reference_tokens(path, prompts, NEW_TOKENS)


@pytest.mark.parametrize("name", rest_slow(NAMES))
@pytest.mark.parametrize("agrees", [0.02, None])
def test_a_pair_with_the_module_gives_transformers_tokens(name: str, agrees: float | None, tmp_path: Path) -> None:
    path, prompts = write_with_next_layer(name, tmp_path, agrees=agrees), prompts_of((63, 150, 40))
    expected = FAMILIES[name].reference_tokens(path, prompts, 20)
    with running_models(
        path, pair=True, prefill_impl="native", model_impl="native", chunk=50, prefill_speculative=FIXED,
        speculative=FIXED,
    ) as pair:  # fmt: skip
        assert [pair.generate([prompt], 20)[0] for prompt in prompts] == expected
        assert pair.generate(prompts, 20) == expected, "at once"
        pair.assert_idle()


@needs_kernels
@pytest.mark.parametrize("name", rest_slow(NAMES))
def test_the_cpu_kernels_draft_mostly_what_the_reference_does(name: str, model: Models) -> None:
    path, reference = model(name)
    driver = drafting(path, dtype="bfloat16", cpu_kernels="native")
    found = generate(driver, [random_prompt(length, VOCAB_SIZE) for length in (1, 16, 40)], 12)
    same = sum(drafts[0] == reference.drafts(tokens, 1)[0] for tokens, drafts in found)
    assert same >= len(found) * 0.7, f"{same} of {len(found)}"


def test_a_checkpoint_without_the_module_is_refused_by_the_flag(family_checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"no tensors under model\.layers\.2\.") as error:
        drafting(family_checkpoint("deepseek_v3"))
    assert error.value.field == "speculative_algorithm"
