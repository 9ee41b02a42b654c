"""`pdserve top` against a service that answers as a router: the table, sorting, keys, and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from rich.console import Console

from pdserve.cli.top import COLUMNS, TopView, main, rows_of
from tests.fleet_service import FleetService


@pytest.fixture
def service() -> Iterator[FleetService]:
    made = FleetService()
    yield made
    made.close()


def shown(view: TopView, service: FleetService) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view.render(service.url, service._objects()["/observe"]))
    return console.export_text()


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width is the one without a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_once_prints_a_table_without_a_terminal(service: FleetService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([service.url, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "serving   queued 2   running 3   123 tokens/s" in lines[0]
    prefill, decode = (line.split() for line in lines[2:4])
    numbers = ["3", "1", "40%", "30%", "-", "25%", "1.25", "2", "-", "1m", "30s"]
    assert prefill == ["prefill", service.prefill, "ready", *numbers]
    assert decode[:2] == ["decode", service.decode]
    assert decode[7] == "123"
    assert "1.25 GB/s, 2 in flight, 3.00 GB in 7 transfers, 1 failed" in "\n".join(lines)


def test_a_server_alone_has_one_row(service: FleetService, capsys: pytest.CaptureFixture[str]) -> None:
    service.alone = True
    assert main([service.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "router" not in lines[0]
    assert service.url in lines[2]


def test_trouble_is_shown(service: FleetService) -> None:
    service.workers[0] |= {"is_healthy": False, "last_error": "connection refused"}
    service.observed[service.prefill] = {"error": None, "server": None, "replicas": [], "rates": None}
    service.pairs[0]["serving"] = False
    text = shown(TopView(), service)
    assert "1 PAIRS DOWN" in text
    dead = next(line for line in text.splitlines() if line.startswith("prefill"))
    assert dead.split()[2:5] == ["dead", "-", "-"]
    assert dead.endswith("connection refused")


def test_keys_sort_reverse_hide_and_quit(service: FleetService) -> None:
    view = TopView()
    for _ in range(3):
        assert view.press("s")
    assert COLUMNS[view.sort].heading == "run"
    busy = service.observed[service.decode]["replicas"][0]["state"]
    busy["running"] = 50
    order = [row.role for row in view.sorted_rows(rows_of(service.url, service._objects()["/observe"]))]
    assert order == ["prefill", "decode"]
    assert view.press("r")
    assert "run▼" in shown(view, service)
    assert shown(view, service).index("\ndecode") < shown(view, service).index("\nprefill")
    assert "KV transfers" in shown(view, service)
    assert view.press("e")
    assert "KV transfers" not in shown(view, service)
    assert not view.press("q")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_a_screen_has_the_columns_and_lines_that_fit(service: FleetService, width: int, height: int) -> None:
    for number in range(3, 70):
        url = f"http://10.0.0.{number}:30000"
        service.workers.append(service._worker("decode", url))
        service.observed[url] = service.observed[service.decode]
    service.workers[9]["last_error"], service.workers[9]["is_healthy"] = "cannot connect: " + "refused " * 9, False
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(TopView().render(service.url, service._objects()["/observe"], "not current: x", keys=True))
    lines = console.export_text().splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert lines[-1].startswith("s/S sort") and lines[-2] == "not current: x" and lines[-3].startswith("... more")
    dead = next(line for line in lines if "10.0.0.10:" in line)
    assert dead.split()[:3] == ["decode", "http://10.0.0.10:30000", "dead"] and "cannot" in dead
    heading = next(line for line in lines if line.startswith("role")).split()
    assert {"role▲", "server", "state", "run", "wait", "trouble"} <= set(heading)
    assert ("accept" in heading) is (width == 200)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_it_ends_at_q_in_a_terminal(service: FleetService, width: int, height: int) -> None:
    keyboard, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    command = [sys.executable, "-m", "pdserve", "top", service.url, "--interval", "0.2"]
    env = os.environ | {"TERM": "xterm-256color"}  # given, since readline has set COLUMNS behind Python's back
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env) as process:
        try:
            os.close(terminal)
            seen = b""
            while b"q quit" not in seen:
                seen += os.read(keyboard, 65536)
            assert service.prefill.encode() in seen.partition(b"role")[2]
            assert (b"accept" in seen) is (width == 200)
            os.write(keyboard, b"srq")
            with contextlib.suppress(OSError):  # the terminal is closed
                while os.read(keyboard, 65536):
                    pass
            assert process.wait(30) == 0
        finally:
            process.kill()
    os.close(keyboard)


def test_a_service_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:1", "--once"]) == 1
    assert capsys.readouterr().err.startswith("pdserve top: nothing answers at http://127.0.0.1:1/observe")
