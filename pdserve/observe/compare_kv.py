"""`python -m pdserve.observe.compare_kv LOG...`: compares the KV that prefill sent with the KV that decode received.

Reads the lines of `--log-kv-target` of both sides (files or directories), joins them by transfer, and prints the
layers, heads, planes and pages in which a transfer differs. Exit status: 0 when all transfers with lines of both sides
agree, 1 when one differs, 2 when there is no such transfer.

Cells (layer, plane, head) are compared for any split over ranks. Pages are compared if each side's ranks hold every
head of a page once; if ranks share a head (more tensor ranks than KV heads), only cells are.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

Cell = tuple[str, int, str, int]
"""Group, layer, plane, head."""
Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A transfer whose ends differ. `pages` are `(number, source page, destination page, plane)`."""

    key: str
    rid: str
    cells: tuple[Cell, ...]
    pages: tuple[tuple[int, int, int, str], ...]
    other: str | None = None
    """A sentence about a difference that is not in the content; None for one in the content."""

    def sentence(self) -> str:
        """Describe the difference in one line."""
        if self.other is not None:
            return f"{self.key} ({self.rid}): {self.other}"
        places = ", ".join(
            f"{name} {_ranges(sorted({str(cell[index]) for cell in self.cells}, key=_order))}"
            for index, name in ((1, "layers"), (3, "heads"), (2, "planes"))
        )
        pages = sorted({(number, source, target) for number, source, target, _ in self.pages})
        where = ", ".join(f"{number} ({source} -> {target})" for number, source, target in pages[:16])
        more = f" and {len(pages) - 16} more" if len(pages) > 16 else ""
        return f"{self.key} ({self.rid}): differs in {places}; pages {where or 'unknown'}{more}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a comparison. `unmatched` are transfers with a line of one side only."""

    num_equal: int
    differences: tuple[Difference, ...]
    unmatched: tuple[str, ...]

    @property
    def status(self) -> int:
        """The exit status."""
        if self.differences:
            return 1
        return 0 if self.num_equal else 2


def compare(lines: Iterable[Line]) -> Report:
    """Compare all transfers in `lines`, which are of both sides, in any order."""
    sides: dict[str, dict[str, Line]] = {"kv.sent": {}, "kv.received": {}}
    for line in lines:
        if line.get("event") in sides:
            sides[line["event"]][line["key"]] = line
    sent, received = sides["kv.sent"], sides["kv.received"]
    found = [_differ(sent[key], received[key]) for key in sent if key in received]
    differences = tuple(difference for difference in found if difference is not None)
    unmatched = tuple(key for key in (*sent, *received) if (key in sent) != (key in received))
    return Report(len(found) - len(differences), differences, unmatched)


def _differ(sent: Line, received: Line) -> Difference | None:
    """Return the difference of one transfer's ends; None when they agree."""
    key, rid = str(sent["key"]), str(sent["rid"])
    for field in ("layout_fingerprint", "num_tokens", "first_page"):
        if sent[field] != received[field]:
            return Difference(key, rid, (), (), f"{field} is {sent[field]} on prefill, {received[field]} on decode")
    ours = list(_cells(sent))
    cells: dict[Cell, str] = {}
    for cell, value in ours:
        if cells.setdefault(cell, value) != value:
            return Difference(key, rid, (), (), f"prefill ranks have different copies of {cell}")
    wrong = tuple(dict.fromkeys(cell for cell, value in _cells(received) if cells.get(cell) != value))
    missing = set(cells) - {cell for cell, _ in _cells(received)}
    if missing:
        return Difference(key, rid, (), (), f"decode has no {min(missing)}")
    pages = _wrong_pages(sent, received)
    return Difference(key, rid, wrong, pages) if wrong or pages else None


def _cells(line: Line) -> Iterator[tuple[Cell, str]]:
    for rank in line["ranks"]:
        for group in rank["groups"]:
            for plane, layers in group["cells"].items():
                for layer, heads in enumerate(layers, group["layers"][0]):
                    for head, value in enumerate(heads, group["heads"][0]):
                        yield (group["name"], layer, plane, head), value


def _wrong_pages(sent: Line, received: Line) -> tuple[tuple[int, int, int, str], ...]:
    ours, theirs = _pages(sent), _pages(received)
    if ours is None or theirs is None:
        return ()
    return tuple(
        (sent["first_page"] + number, sent["pages"][number], received["pages"][number], plane)
        for (number, plane), total in ours.items()
        if theirs.get((number, plane)) != total
    )


def _pages(line: Line) -> dict[tuple[int, str], int] | None:
    """Sum over ranks by page and plane; None if ranks hold the same head, which would be counted twice."""
    cells = [cell for cell, _ in _cells(line)]
    if len(set(cells)) != len(cells):
        return None
    totals: dict[tuple[int, str], int] = {}
    for rank in line["ranks"]:
        for group in rank["groups"]:
            for plane, pages in group["pages"].items():
                for number, value in enumerate(pages):
                    where = (number, f"{group['name']}.{plane}")
                    totals[where] = (totals.get(where, 0) + int(value, 16)) % (1 << 32)
    return totals


def _order(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


def _ranges(names: Sequence[str]) -> str:
    """Format numbers as ranges, such as `1-3, 7`; other names are joined."""
    if not all(name.isdigit() for name in names):
        return ", ".join(names)
    runs: list[list[int]] = []
    for number in map(int, names):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_lines(paths: Sequence[Path]) -> Iterator[Line]:
    """Read the lines of files, and of all .jsonl files in directories; skips lines that are not JSON objects."""
    for path in paths:
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            for raw in file.read_bytes().splitlines():
                try:
                    line = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(line, dict):
                    yield line


def main(argv: Sequence[str] | None = None) -> int:
    """Print the differences; return the exit status of the report, 2 when a file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.observe.compare_kv", description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="file of JSON lines, or directory of them")
    try:
        report = compare(read_lines(parser.parse_args(argv).logs))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for difference in report.differences:
        print(difference.sentence())
    if report.unmatched:
        print(f"on one side only: {', '.join(report.unmatched[:16])}{' ...' if len(report.unmatched) > 16 else ''}")
    print(
        f"{report.num_equal} transfers agree, {len(report.differences)} differ, "
        f"{len(report.unmatched)} are on one side only"
    )
    return report.status


if __name__ == "__main__":
    sys.exit(main())
