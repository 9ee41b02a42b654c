"""Names of the code that the documents mention exist: `file.py: name`, `Class.member`, and `name` in `file.py`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pdserve"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OF_FILE = re.compile(r"([\w/]+\.py): (\w+(?:\.\w+)?(?:, \w+(?:\.\w+)?)*)")
MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)")
IN_FILE = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`) in `([\w/]+\.py)`")


def members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes that a class defines or sets on itself."""
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.attr)
    return found


@functools.cache
def definitions() -> dict[str, dict[str, set[str]]]:
    """Names at the top of each file of the package, with the members of those that are classes."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        names: dict[str, set[str]] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names[node.name] = members(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names[node.name] = set()
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                inside = (inner for target in targets for inner in ast.walk(target))
                names |= {inner.id: set() for inner in inside if isinstance(inner, ast.Name)}
        found[str(path.relative_to(PACKAGE))] = names
    return found


def missing(page: str) -> Iterator[str]:
    """References of a page to names that do not exist."""
    files = definitions()
    classes: dict[str, set[str]] = {}
    for names in files.values():
        for name, inner in names.items():
            classes.setdefault(name, set()).update(inner)
    for reference in re.findall(r"`([^`]+)`", page):
        of_file, member = OF_FILE.fullmatch(reference), MEMBER.fullmatch(reference)
        if of_file is not None:
            for name, _, inner_name in (each.partition(".") for each in of_file[2].split(", ")):
                names = files.get(of_file[1], {})
                if name not in names or (inner_name and inner_name not in names[name]):
                    yield reference
        elif member is not None and member[1] in classes and member[2] not in classes[member[1]]:
            yield reference
    for given, file in IN_FILE.findall(page):
        for name in re.findall(r"`(\w+)`", given):
            known = files.get(file)
            if known is not None and name not in known and not any(name in inner for inner in known.values()):
                yield f"{name} in {file}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_names_of_the_code_in_documents_exist(path: Path) -> None:
    page = " ".join(path.read_text().split())
    assert list(missing(page)) == [], "the document names code that is not there: correct it"
