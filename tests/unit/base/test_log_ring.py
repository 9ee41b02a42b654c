"""The ring of log lines: what a reader gets of it, in this process and from a child that has ended."""

from __future__ import annotations

import logging
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from pdserve.base import log_ring
from pdserve.base.log_ring import MAX_LINE_BYTES, RING_BYTES, LogRing, last_lines, parse_num_lines, ring_of_child
from pdserve.base.redaction import Redactor
from pdserve.errors import RequestError

CHILD = """
import logging, os, sys
from multiprocessing.connection import Connection
from pdserve.base.log import setup_logging
from pdserve.base.log_ring import keep_lines_in
keep_lines_in("child", Connection(int(sys.argv[1])))
setup_logging("info", "child")
logging.getLogger("child").info("its key is secret-value, line\\n%d", 2)
os._exit(1)
"""


def test_the_last_lines_stay_when_the_ring_is_full() -> None:
    ring = LogRing.create("x")
    assert ring.lines(10) == []
    for number in range(40_000):
        ring.write(f"line {number} ü")
    assert ring.lines(3) == [f"line {number} ü" for number in (39_997, 39_998, 39_999)]
    kept = ring.lines(1_000_000)
    assert kept == [f"line {number} ü" for number in range(40_000 - len(kept), 40_000)]
    assert RING_BYTES - 4 * MAX_LINE_BYTES < sum(len(line.encode()) + 1 for line in kept) < RING_BYTES
    ring.write("x" * 2 * MAX_LINE_BYTES)
    ring.write("\udc80")
    assert [len(line) for line in ring.lines(2)] == [MAX_LINE_BYTES, len("\\udc80")]


def test_the_lines_of_a_child_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "_rings", log_ring._rings.copy())
    ring = ring_of_child("child")
    handle = ring.handle
    with handle:
        argv = [sys.executable, "-c", CHILD, str(handle.fileno())]
        subprocess.run(argv, pass_fds=[handle.fileno()], timeout=60, check=False, stderr=subprocess.DEVNULL)
    found = next(one for one in last_lines(10, Redactor(["secret-value"])) if one["name"] == "child")
    (line,) = found["lines"]
    assert line.endswith("child: its key is [redacted], line\\n2") and "INFO child[" in line


def test_this_process_has_one_ring_under_its_newest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "_own", None)
    monkeypatch.setattr(log_ring, "_rings", log_ring._rings.__class__(maxlen=2))
    for name in ("prefill", "decode"):
        log_ring.ring_handler(name).emit(logging.LogRecord("a", logging.INFO, "", 0, "as %s", (name,), None))
    assert last_lines(5, Redactor([])) == [{"name": "decode", "lines": ["as prefill", "as decode"]}]
    assert isinstance(log_ring._rings[0].handle, Connection)


def test_the_number_of_lines_is_bounded() -> None:
    assert (parse_num_lines(None), parse_num_lines("7")) == (1000, 7)
    for text in ("0", "5001", "-1", "x", "1e3", "²", "9" * 5000):
        with pytest.raises(RequestError, match="lines must be 1 to 5000"):
            parse_num_lines(text)
