"""A stored table of ratios, and what of it a new measurement has lost. Pure but for reading and writing the file.

Used by `regressions`. Ratios are of two things measured in the same rounds, more is better: a machine that is slower
as a whole changes them little, but what they were stored on is kept beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.report import QUIET_LOAD, Spread, markdown_table

TOLERANCE = 0.05
"""A ratio that is less by no more than this share has not fallen, however narrow the stored spread is."""
MEMORY_TOLERANCE = 0.15
"""Memory that is faster or slower by more than this share is another memory to the kernels that read it."""
Verdict = Literal["ok", "fell", "rose", "missing", "new"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Ratios by name, and what they were measured on. `load_1m`: what others kept the machine busy with before."""

    date: str
    revision: str
    command: str
    cpu_model: str
    cpus: int
    threads: int
    level: str
    load_1m: float
    note: str
    """For people who read the file: whether the cores were quiet."""
    memory_gbytes_per_s: Spread | None = None
    """How fast memory was read, once a pass. None in tables that were stored before it was kept."""
    ratios: dict[str, Spread]
    """Of the medians of several passes; last, where `write` puts them."""

    @property
    def on_quiet_cores(self) -> bool:
        """Whether nobody else was busy before the run."""
        return self.load_1m < QUIET_LOAD


@dataclasses.dataclass(frozen=True)
class Line:
    """One ratio then and now."""

    name: str
    stored: Spread | None
    measured: Spread | None

    @property
    def verdict(self) -> Verdict:
        """Fallen or risen: the new median is outside of the stored ones, and further from the middle than noise."""
        if self.measured is None:
            return "missing"
        if self.stored is None:
            return "new"
        was, now = self.stored, self.measured.median
        if now < min(was.low, was.median * (1 - TOLERANCE)):
            return "fell"
        if now > max(was.high, was.median * (1 + TOLERANCE)):
            return "rose"
        return "ok"

    def show(self) -> list[str]:
        """As a row of the report."""
        stored, measured = ("" if spread is None else spread.show(2) for spread in (self.stored, self.measured))
        change = ""
        if self.stored is not None and self.measured is not None and self.stored.median > 0:
            change = f"{self.measured.median / self.stored.median - 1:+.0%}"
        return [self.name, stored, measured, change, self.verdict]


def compare(stored: Mapping[str, Spread], measured: Mapping[str, Spread]) -> list[Line]:
    """Stored ratios in their order, then those that are not stored."""
    names = [*stored, *(name for name in measured if name not in stored)]
    return [Line(name, stored.get(name), measured.get(name)) for name in names]


def is_worse(lines: Sequence[Line]) -> bool:
    """Whether a ratio has fallen, or is not measured any more."""
    return any(line.verdict in ("fell", "missing") for line in lines)


def doubts(stored: Table, now: Table) -> list[str]:
    """Why the two may differ for other reasons than the code."""
    found = []
    for name, was, own in (
        ("CPU", stored.cpu_model, now.cpu_model),
        ("cores", stored.cpus, now.cpus),
        ("threads", stored.threads, now.threads),
        ("instruction set", stored.level, now.level),
    ):
        if was != own:
            found.append(f"{name}: stored on {was}, measured on {own}")
    for which, table in (("stored", stored), ("measured", now)):
        if not table.on_quiet_cores:
            found.append(f"others used the cores when it was {which} (load {table.load_1m:.1f} before)")
    if stored.memory_gbytes_per_s and now.memory_gbytes_per_s:
        was_fast, is_fast = stored.memory_gbytes_per_s.median, now.memory_gbytes_per_s.median
        if abs(is_fast / was_fast - 1) > MEMORY_TOLERANCE:
            found.append(
                f"memory: stored at {was_fast:.0f} GB/s, measured at {is_fast:.0f}: a kernel's share of the limit falls"
                " where memory is faster, and rises where it is slower"
            )
    return found


def report_of(lines: Sequence[Line], notes: Sequence[str]) -> str:
    """The comparison for people: what is worse, all of it, and why to doubt it."""
    worse = [line.name for line in lines if line.verdict in ("fell", "missing")]
    title = f"{len(worse)} of {len(lines)} ratios are worse: {', '.join(worse)}" if worse else "No ratio has fallen."
    table = markdown_table(["ratio", "stored", "measured", "change", "verdict"], [line.show() for line in lines])
    return "\n".join([title, "", table, "", *(f"- {note}" for note in notes)]).rstrip()


def read(path: Path) -> Table:
    """The stored table.

    Raises:
        OSError: there is none.
        msgspec.ValidationError: it is of another form.
    """
    return msgspec.json.decode(path.read_bytes(), type=Table)


def write(path: Path, table: Table) -> None:
    """Store `table`, a ratio a line, so that a change of it can be read."""
    rounded = {
        name: Spread(*(round(value, 4) for value in (spread.median, spread.low, spread.high)))
        for name, spread in table.ratios.items()
    }
    encoded = msgspec.json.encode(dataclasses.replace(table, ratios={}))
    head = msgspec.json.format(encoded, indent=2).decode().removesuffix('"ratios": {}\n}')
    lines = ",\n".join(f"    {quoted(name)}: {quoted(spread)}" for name, spread in rounded.items())
    path.write_text(f'{head}"ratios": {{\n{lines}\n  }}\n}}\n')


def quoted(value: object) -> str:
    """As JSON on one line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
