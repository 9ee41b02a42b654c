"""The documents as a site: its navigation is right, it builds without a warning, and loads nothing from other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LOADED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(https?:)?//|<link\b[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon)["']?[^>]*href=["']?(?:https?:)?//""")  # fmt: skip  # noqa: E501


def test_the_navigation_lists_pages_that_exist_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r": ([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert len(listed) == len(set(listed))
    of_docs = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES}
    assert {name for name in listed if name not in of_docs and not (ROOT / name).exists()} == set()
    unlisted = {name for name in of_docs - set(listed) if not name.startswith("benchmarks/")}
    assert unlisted == set(), "pages in no section"


def test_the_site_builds_strictly_and_works_offline(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed")
    command = [ROOT / "scripts" / "docs.sh", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    built = {str(path.relative_to(tmp_path / "site")): path for path in (tmp_path / "site").rglob("*.html")}
    for page in PAGES:
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in built
    foreign = [(name, found[0]) for name, path in built.items() if (found := LOADED.search(path.read_text()))]
    assert foreign == [], "the site must load nothing from other hosts"
    classes = built["reference/python.html"].read_text()
    assert "SamplingParams" in classes and "temperature" in classes
    assert "write_and_notify" in built["reference/interfaces.html"].read_text()
    assert r"bash|zsh|fish" in built["install.html"].read_text()
