"""What the hosts of a replica must have in common, though no flag says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.replica import check_rank_facts, rank_facts
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
