"""What the hosts of a replica must have in common, though no flag says it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config.groups import ModelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.config.tier_group import StorageConfig, TierConfig
from pdserve.engine.build_storage import storage_namespace
from pdserve.engine.kv_events import key_namespace
from pdserve.engine.replica import ReplicaEngine, check_rank_facts, rank_facts
from pdserve.errors import ConfigError
from pdserve.ranks.messages import RankReady
from tests.driver import build
from tests.tiny import Family
from tests.unit.model.native_kit import needs_kernels


@needs_kernels
def test_all_ranks_have_the_kernels_or_none(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Their hidden states have other number formats; other levels of the kernels do not matter."""
    native, torch = (build(tiny_checkpoint("llama"), dtype="bfloat16", cpu_kernels=who) for who in ("native", "torch"))
    other_level = dataclasses.replace(native, arithmetic="another level")
    check_rank_facts(native, [ready(rank_facts(native)), ready(rank_facts(other_level))])
    for ours, theirs in ((native, torch), (torch, native)):
        with pytest.raises(ConfigError, match="rank 2 has cpu_kernels") as caught:
            check_rank_facts(ours, [ready(rank_facts(ours)), ready(rank_facts(theirs))])
        assert caught.value.field == "cpu_kernels"


def ready(facts: dict[str, str]) -> RankReady:
    return RankReady(facts=facts, memory=None, samples={}, drain_timeout_s=0.0, fence_drain_timeout_s=0.0)


def test_keys_of_pages_depend_on_the_configuration(tiny_checkpoint: Callable[[Family], Path], tmp_path: Path) -> None:
    """One set of weights with another rotary embedding, as with YaRN, computes other KV."""
    roots = []
    for theta in (1e4, 2e4):
        path = shutil.copytree(tiny_checkpoint("llama"), tmp_path / str(theta))
        config = json.loads((path / "config.json").read_text())
        config.pop("rope_parameters", None)
        (path / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
        engine = ReplicaEngine(build(path), None, None)  # type: ignore[arg-type]
        roots.append(key_namespace(ServerConfig(model=ModelConfig(model_path=str(path))), engine).root())
    assert roots[0] != roots[1]


def test_events_and_the_store_have_the_same_keys_and_a_drafter_others(
    tiny_checkpoint: Callable[[Family], Path],
) -> None:
    """The drafter's KV is in the same pages."""
    path = tiny_checkpoint("llama")
    tier, store = TierConfig(enable_hierarchical_cache=True), StorageConfig(hicache_storage_backend="memory")
    config = ServerConfig(model=ModelConfig(model_path=str(path)), tier=tier, storage=store)
    roots = []
    for draft in (None, tiny_checkpoint("llama"), tiny_checkpoint("qwen3")):
        drafting = None
        if draft is not None:
            drafting = SpeculativeConfig(
                speculative_algorithm="STANDALONE",
                speculative_draft_model_path=str(draft),
                speculative_num_draft_tokens=3,
            )
        engine = ReplicaEngine(build(path, dtype="float32", speculative=drafting), None, None)  # type: ignore[arg-type]
        namespace = key_namespace(config, engine)
        assert namespace == storage_namespace(config, engine) and not namespace.weights_are_sampled
        roots.append(namespace.root())
    assert len(set(roots)) == 3
