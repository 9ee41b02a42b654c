"""What native code prints on descriptor 2 reaches the parent's log, also from a process that crashes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection

import pytest

from pdserve.base.log import LogOrigin
from pdserve.base.native_stderr import MAX_LINE_BYTES, NUM_LAST, StderrReader, redirect_native_stderr


def crash(write_end: Connection, report: Connection) -> None:
    """Print on both ways, and crash as a C++ library does. `report` stands for the former stderr."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(report.fileno(), 2)
    redirect_native_stderr(write_end)
    os.write(2, b"E1128 native words\n")
    print("python words", file=sys.stderr)
    os.write(2, b"last words without a line break")
    os.abort()


def test_native_words_are_separate_from_python_and_survive_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdserve.native")
    context = multiprocessing.get_context("spawn")
    reader = StderrReader("decode scheduler")
    read_report, report = context.Pipe(duplex=False)
    process = context.Process(target=crash, args=(reader.write_end, report))
    process.start()
    report.close()
    reader.begin(process.pid or 0)
    process.join(60)
    assert process.exitcode == -signal.SIGABRT
    assert reader.last_lines()[:2] == ["E1128 native words", "last words without a line break"]
    assert os.read(read_report.fileno(), 1000) == b"python words\n"
    first = caplog.records[0]
    assert (first.levelno, first.getMessage()) == (logging.DEBUG, "E1128 native words")
    assert vars(first)["origin"] == LogOrigin("decode scheduler", process.pid or 0)


def test_many_and_long_lines_are_bounded() -> None:
    reader = StderrReader("decode scheduler")
    copy = os.dup(reader.write_end.fileno())
    reader.begin(1)
    for number in range(NUM_LAST + 5):
        os.write(copy, b"%d\n" % number)
    os.write(copy, b"x" * (3 * MAX_LINE_BYTES) + b"\n")
    os.close(copy)
    lines = reader.last_lines()
    assert len(lines) == NUM_LAST
    assert lines[0] == "6"
    assert lines[-1] == "x" * MAX_LINE_BYTES


def test_a_reader_without_a_child_releases_its_pipe() -> None:
    reader = StderrReader("decode scheduler")
    descriptor = reader.write_end.fileno()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert reader.last_lines() == []
