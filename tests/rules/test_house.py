"""Rules of the house that no linter knows. Each message says what to do."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from pdserve.config.cli import build_parser, flags
from pdserve.config.flags_doc import render
from pdserve.config.sglang_flags import SGLANG_FLAGS

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
PACKAGE = sorted((ROOT / "pdserve").rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
HOST_PATH = re.compile(r"(?<![\w.~$}/-])/(?:root|work|Users|home/[a-z])/[\w.]")
TEXT_SUFFIXES = {".py", ".md", ".sh", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg", ""}


def tracked_files() -> list[Path]:
    """Every file that git knows of, or all of the package and tests where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        return [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py"))]
    return [ROOT / name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def imports_of(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, however deep inside."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_says_what_it_owns(path: Path) -> None:
    text = path.read_text()
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines: split it by what it owns"
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "no docstring: what it owns, who calls it"


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_nothing_in_the_package_unpickles() -> None:
    offenders = {str(path.relative_to(ROOT)): bad for path in PACKAGE if (bad := imports_of(path) & UNSAFE_MODULES)}
    assert offenders == {}, "messages are msgspec structs; see protocol/codec.py"


def test_no_tracked_file_names_a_path_of_somebody_s_machine() -> None:
    offenders = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if HOST_PATH.search(line):
                    offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert offenders == []


def test_the_list_of_flags_is_up_to_date() -> None:
    listed = (ROOT / "docs" / "flags.md").read_text()
    assert listed == render(), "run: python -m pdserve.config.flags_doc > docs/flags.md"


def test_every_flag_says_what_it_does_and_is_in_the_help() -> None:
    text = build_parser().format_help()
    for flag in flags():
        assert len(flag.help) > 10, f"{flag.names[0]} needs a help text"
        for name in flag.names:
            assert name in text


def test_a_flag_is_ours_or_foreign_but_not_both() -> None:
    names = [name for flag in flags() for name in flag.names]
    assert len(names) == len(set(names))
    assert set(names) & SGLANG_FLAGS == set(), "a flag that became ours leaves config/sglang_flags.py"
