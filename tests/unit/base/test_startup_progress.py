"""What is told while a server starts: each part with its seconds, long parts meanwhile, one status for each part."""

from __future__ import annotations

import io

import pytest

from pdserve.base.startup_progress import ANNOUNCE, READY, STATUS_PREFIX, StartupProgress, parse_status, told
from pdserve.base.startup_times import IMPORTS, PACK, WEIGHTS
from pdserve.base.status_block import StatusBlock
from tests.waiting import wait_until


class Terminal(io.StringIO):
    """Text that is written to a terminal; `shown` is what its screen has, without the lines that were cleared."""

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        lines: list[str] = []
        for step in self.getvalue().split("\x1b["):
            text = step
            if step[:2] in ("1A", "2A", "3A"):
                del lines[-int(step[0]) :]
                text = ""
            elif step[:1] == "J":
                text = step[1:]
            lines += text.splitlines()
        return lines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_part_is_told_with_its_seconds_and_inner_parts_are_not() -> None:
    lines: list[str] = []
    clock = Clock()
    progress = StartupProgress(lines.append, clock=clock)
    progress.add(IMPORTS, 2.0)
    with progress.part(WEIGHTS):
        clock.now += 1.0
        for _ in range(3):
            with progress.part(PACK):
                clock.now += 0.5
    progress.close()
    assert lines == ["importing libraries: 2.0 s", "loading weights: 2.5 s"]
    assert progress.seconds == {IMPORTS: 2.0, PACK: 1.5, WEIGHTS: 1.0}


def test_a_part_that_takes_long_is_told_meanwhile() -> None:
    lines: list[str] = []
    progress = StartupProgress(lines.append, every_s=0.01)
    with progress.part(WEIGHTS):
        progress.loaded(30_000_000, 120_000_000)
        wanted = "loading weights, 25 % of 120 MB: 0 s so far"
        wait_until(lambda: wanted in lines, "a line while it loads", 10.0)
    progress.close()
    wait_until(lambda: lines[-1].startswith("loading weights: ") or "starting" in lines[-1], "the part's end", 10.0)


def test_status_lines_are_for_launch_local_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ANNOUNCE, raising=False)
    StartupProgress(lambda line: None).close()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(ANNOUNCE, "1")
    progress = StartupProgress(lambda line: None)
    with progress.part(WEIGHTS):
        pass
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [parse_status(line) for line in lines] == ["importing libraries", "loading weights", "starting"]
    assert parse_status("any other line") is parse_status(f"{STATUS_PREFIX}not json") is None


def test_what_fails_is_not_told_as_done() -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="broken"), told(lines.append, "converting"):
        raise ValueError("broken")
    assert lines == []
    with told(lines.append, "converting"):
        pass
    with told(lines.append, "checking", least_s=60.0):
        pass
    assert lines == ["converting: 0.0 s"]


def test_a_terminal_shows_one_line_for_each_part_below_all_other_output() -> None:
    screen = Terminal()
    with StatusBlock(screen) as block:
        block.set("prefill-0", "loading weights")
        block.set("decode-0", "importing libraries")
        block.above(lambda: print("a log line", file=screen))
        block.set("decode-0", READY)
        assert [line.split(" (")[0] for line in screen.shown] == [
            "a log line", "prefill-0  loading weights", "decode-0   ready",
        ]  # fmt: skip
        block.remove("decode-0")
        assert len(screen.shown) == 2
    assert screen.shown == ["a log line"]
    block.set("prefill-0", "late")
    assert screen.shown == ["a log line"]


def test_elsewhere_one_line_tells_of_the_parts_that_are_not_ready() -> None:
    out, lines = io.StringIO(), list[str]()
    with StatusBlock(out, lines.append, every_s=0.01) as block:
        block.set("prefill-0", "loading weights")
        block.set("decode-0", READY)
        wait_until(lambda: bool(lines), "a line", 10.0)
        block.above(lambda: print("ready", file=out))
    assert lines[0] == "not ready yet: prefill-0: loading weights (0 s)"
    assert out.getvalue() == "ready\n"
