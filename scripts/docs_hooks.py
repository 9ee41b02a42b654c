"""Hooks of mkdocs: pages from outside `docs/`, pages without a place, and links to files of the repository.

The documents link to each other as files of the repository, so that they work where they lie. The site has the files of
`OUTSIDE` as pages, too; `on_page_markdown` changes links to them to links within the site. A link to another file
of the repository becomes its path as text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "benchmarks/**/*.md", "benchmarks/results/*.svg")
HOME = {"README.md": "index.md"}
"""Files of the repository that another page of the site replaces."""
FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Add the pages that the navigation does not list, under "More"."""
    listed = set(listed_pages(config.nav or []))
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    if more := [page for page in pages if page not in listed]:
        config.nav = [*(config.nav or []), {"More": more}]
    return config


def listed_pages(entries: Any) -> Iterator[str]:
    """Yield the paths of the pages in a part of the navigation."""
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries.values() if isinstance(entries, dict) else entries:
        yield from listed_pages(entry)


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages from outside `docs/`, under their path in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if name not in HOME:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Change the links of a page from paths of the repository to paths of the site."""
    here = page.file.src_uri
    outside = any(Path(here).match(pattern) for pattern in OUTSIDE) and not (ROOT / "docs" / here).exists()
    folder = posixpath.dirname(here if outside else f"docs/{here}")

    def changed(found: re.Match[str]) -> str:
        target, hash_sign, anchor = found[3].partition("#")
        if not target or ":" in target:
            return found[0]
        name = posixpath.normpath(posixpath.join(folder, target))
        in_site = site_path(name)
        if files.get_file_from_path(in_site) is not None:
            link = posixpath.relpath(in_site, posixpath.dirname(here) or ".")
            return f"{found[1]}[{found[2]}]({link}{hash_sign}{anchor})"
        if (ROOT / name).exists() and not found[1]:
            return f"{found[2]} (`{name}`)" if name not in found[2] else found[2]
        return found[0]

    return outside_of_code(markdown, lambda text: TABLE_ROW.sub(plain_pipes, LINK.sub(changed, text)))


def plain_pipes(row: re.Match[str]) -> str:
    """Return a row of a table without backslashes before pipes in code: Python-Markdown shows them, GitHub does not."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def site_path(name: str) -> str:
    """Return the path in the site of a file with the path `name` in the repository."""
    return HOME.get(name, name.removeprefix("docs/"))


def outside_of_code(markdown: str, change: Any) -> str:
    """Apply `change` to the text between code blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])
