"""`pdserve top` against a service that answers as a router: the table, sorting, keys, and a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from pdserve.cli import fleet
from pdserve.cli.fleet import FleetClient
from pdserve.cli.top import COLUMNS, TopView, main, rows_of
from pdserve.errors import ConfigError, RequestError
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


@pytest.mark.parametrize("interval", ["0.1", "nan", "inf", "1e12"])
def test_an_interval_that_no_timer_has_is_refused(interval: str) -> None:
    with pytest.raises(ConfigError, match="--interval") as refused:
        main(["http://127.0.0.1:1", "--interval", interval])
    assert refused.value.field == "interval"


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


@pytest.mark.parametrize("value", [5, "x", [1], {"a": None}, [[]], [{"state": 5}], [{"observed": [1]}]])
@pytest.mark.parametrize("name", ["router", "workers", "pairs", "edges", "replicas", "server", "rates"])
def test_an_answer_of_another_form_is_one_line(
    service: FleetService, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    service.texts["/observe"] = json.dumps({name: value})
    status = main([service.url, "--once"])
    err = capsys.readouterr().err
    assert (status, err) == (0, "") or (status == 1 and err.count("\n") == 1 and "/observe has another form" in err)


def test_an_answer_that_is_nested_too_deeply_is_no_json(
    service: FleetService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.texts["/observe"] = "[" * 100_000
    assert main([service.url, "--once"]) == 1
    assert "/observe is not JSON" in capsys.readouterr().err


def test_an_answer_that_comes_byte_by_byte_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(fleet, "SHORT_TIMEOUT_S", 0.1)
    stop = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Write nothing."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not stop.wait(0.02):
                    self.wfile.write(b" ")

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server, FleetClient(url_of(server)) as client:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            for told in ("0.2 s", "0.2 s", "0.1 s"):
                with pytest.raises(RequestError, match=f"takes longer than {told}"):
                    client.get_json("/observe")
        finally:
            stop.set()
            server.shutdown()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"
