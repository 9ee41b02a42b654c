"""Which transfer engines are reported as missing, and with which instructions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.config import transfer_engines
from pdserve.config.transfer_engines import NIXL_MODULES, missing_engines

Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    """Makes `find_spec` find only the given packages: a folder with an engine's file."""
    (tmp_path / "engine.cpython-311-x86_64-linux-gnu.so").touch()

    def install(*names: str) -> None:
        def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
            if name not in names:
                return None
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(tmp_path)]
            return spec

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(transfer_engines, "SYSTEM_LIBRARIES", ("libc.so.6",))

    return install


def test_without_any_wheel_both_engines_are_missing(installed: Installed) -> None:
    installed()
    missing = missing_engines()
    assert set(missing) == {"mooncake", "nixl"}
    assert "pip install 'pdserve[mooncake]'" in missing["mooncake"]
    assert "pip install 'pdserve[nixl]'" in missing["nixl"]


@pytest.mark.parametrize("module", NIXL_MODULES)
def test_an_installed_engine_is_not_missing(installed: Installed, module: str) -> None:
    installed("mooncake", module)
    assert missing_engines() == {}


def test_a_system_library_that_the_engine_links_to_is_named(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("mooncake")
    monkeypatch.setattr(transfer_engines, "SYSTEM_LIBRARIES", ("libc.so.6", "libno-such.so.1"))
    assert "needs libno-such.so.1:" in missing_engines()["mooncake"]


def test_another_package_of_that_name_is_no_engine(installed: Installed, tmp_path: Path) -> None:
    installed("mooncake")
    for file in tmp_path.iterdir():
        file.unlink()
    assert "is not installed" in missing_engines()["mooncake"]
