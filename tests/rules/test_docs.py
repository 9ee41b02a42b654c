"""The documents beside the code: names exist, and every route, command and error code is on its page.

Names are `file.py: name`, `Class.member`, and `name` in `file.py`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.http.access import COMMANDS
from pdserve.http.page_files import DOCS_FILES, PAGE_FILES
from pdserve.router.app import make_app
from pdserve.router.config.config import RouterConfig
from pdserve.server.app import ROUTES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pdserve"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OF_FILE = re.compile(r"([\w/]+\.py): (\w+(?:\.\w+)?(?:, \w+(?:\.\w+)?)*)")
MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)")
IN_FILE = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`) in `([\w/]+\.py)`")
FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
ERROR_CODE = re.compile(r"[a-z]+(?:_[a-z]+)*")
CODE_AT = {"HttpRefusal": 2, "error_response": 2, "_closing": 2, "own_failure": 0, "_failure": 0, "_refuse_full": 1}
"""Functions that take an error code, and its place among the arguments. Others have the keyword `code`."""
MAKES_ERRORS = re.compile(rf"\bcode=|\b(?:{'|'.join(CODE_AT)})\(")
CONSTANT = re.compile(r"^([A-Z][A-Z_]+) = \"([a-z_]+)\"$", re.MULTILINE)
ENGINES = PACKAGE / "transfer" / "transports"


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
    page = " ".join(FENCED.sub("", path.read_text()).split())  # a fence would pair the marks of what follows it wrongly
    assert list(missing(page)) == [], "the document names code that is not there: correct it"


def error_codes() -> set[str]:
    """Error codes that the package names where it makes an error. Those of transports are left out."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    constants: dict[str, set[str]] = {}
    for text in texts.values():
        for name, value in CONSTANT.findall(text):
            constants.setdefault(name, set()).add(value)

    def values(node: ast.expr) -> set[str]:
        if isinstance(node, ast.Constant):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, ast.IfExp):
            return values(node.body) | values(node.orelse)
        found = constants.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return found if len(found) == 1 else set()  # a name that several files use says nothing

    codes: set[str] = set()
    for path, text in texts.items():
        is_engine = ENGINES in path.parents or path.relative_to(PACKAGE).parts[0] in ("sim", "cli", "bench")
        if is_engine or not MAKES_ERRORS.search(text):
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            place = CODE_AT.get(name, len(call.args))
            for given in (*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == "code")):
                codes |= {value for value in values(given) if ERROR_CODE.fullmatch(value)}
    return codes


def test_the_page_of_error_codes_has_them_all_and_no_others() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    listed = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert sorted(error_codes() - listed) == [], "docs/errors.md lacks error codes"
    package = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    gone = [code for code in sorted(listed) if f'"{code}"' not in package]
    assert gone == [], "docs/errors.md has codes that are gone"


def plain(path: str) -> str:
    """A path without parts that stand for a name, as `{name}` or `NAME`."""
    return re.sub(r"/(?:\{[^}]*\}|[A-Z]+)(?=/|$)", "", path)


def untold(routes: Iterable[str], page: str) -> list[str]:
    """Routes that a page does not have. It may tell in words of names under `/v1`, and of those with `get_`."""
    text = FENCED.sub("", (ROOT / "docs" / page).read_text())
    words = {plain(word) for mark in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[ ,?]+", mark)}
    found = []
    for route in map(plain, routes):
        names = {route, route.removeprefix("/v1"), route.replace("/get_", "/", 1), f"/get_{route[1:]}"}
        if not names & words:
            found.append(route)
    return sorted(found)


def test_the_page_of_the_api_has_every_route_of_a_server() -> None:
    assert untold({path for _, _, path, _ in ROUTES} | COMMANDS, "api.md") == []


async def test_the_page_of_the_router_has_every_route() -> None:
    runner = web.AppRunner(make_app(RouterConfig(pd=True)))
    await runner.setup()
    routes = {resource.canonical for resource in runner.app.router.resources()}
    await runner.cleanup()
    assert untold(routes - {PAGE_FILES, DOCS_FILES}, "router.md") == []


def test_the_page_of_security_has_every_command() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `--admin-api-key` | `PDSERVE_ADMIN_API_KEY` |"))
    assert set(re.findall(r"`(/[^`]+)`", row)) == COMMANDS


def test_the_chart_library_of_the_page_is_that_of_its_npm_package() -> None:
    """The digests are those of `npm pack uplot@1.6.32`: `dist/`, and its license."""
    page = ROOT / "pdserve" / "http" / "page"
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in page.glob("uPlot*")} == {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert "npm package 1.6.32" in (ROOT / "docs" / "dashboard.md").read_text()
