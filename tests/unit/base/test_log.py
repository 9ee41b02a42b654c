"""One event is one dated line, with role, pid and request id."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from pdserve.base.log import (
    JsonLabel,
    LogOrigin,
    TextLabel,
    about,
    chosen_format,
    current_request_id,
    no_request,
    request_context,
    setup_logging,
)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put the root logger and the hooks back as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    yield
    setup_logging("info", "tests")  # the chosen format is text again
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks


def test_a_message_with_line_breaks_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "decode 50%")
    logging.getLogger("pdserve.test").info("first\nsecond %d", 7)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    dated = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO decode 50%\[" + str(os.getpid()) + r"\] pdserve\.test: "
    assert re.match(dated, lines[0])
    assert lines[0].endswith(": first\\nsecond 7")


def test_the_level_is_obeyed_and_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("debug", "a")
    setup_logging("warning", "b")
    logging.getLogger("pdserve.test").info("quiet")
    logging.getLogger("pdserve.test").warning("loud")
    assert capsys.readouterr().err.count("\n") == 1


def test_an_exception_is_shown_after_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "a")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("pdserve.test").exception("failed")
    text = capsys.readouterr().err
    assert "pdserve.test: failed\nTraceback" in text
    assert "ValueError: broken" in text


def test_a_line_has_the_request_id_of_its_task_or_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "a")
    log = logging.getLogger("pdserve.test")
    with request_context("req-1"):
        log.info("inside")
        log.info("of another", extra=about("req-2"))
    log.info("outside")
    with request_context("evil\n2026"):
        log.info("escaped")
    texts = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert texts == ["[req-1] inside", "[req-2] of another", "outside", "[evil\\n2026] escaped"]


async def test_a_task_that_outlives_its_request_has_no_request_id() -> None:
    async def look() -> str | None:
        return current_request_id()

    with request_context("req-1"):
        own = asyncio.create_task(look())
        background = asyncio.create_task(look(), context=no_request())
        assert current_request_id() == "req-1"
    assert (await own, await background) == ("req-1", None)


def test_json_lines_have_the_same_keys(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "decode", "json")
    assert chosen_format() == "json"
    log = logging.getLogger("pdserve.test")
    log.info("plain %d", 1)
    with request_context("req-1"):
        log.warning("a\nb", extra=about(origin=LogOrigin("decode rank 1", 7), fields={"num_pages": 3}))
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    plain, full, failed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    keys = ["time", "level", "role", "pid", "logger", "message", "request_id"]
    assert list(plain) == keys
    assert datetime.datetime.fromisoformat(plain["time"]).tzinfo is not None
    assert {name: plain[name] for name in keys[1:]} == {
        "level": "info",
        "role": "decode",
        "pid": os.getpid(),
        "logger": "pdserve.test",
        "message": "plain 1",
        "request_id": None,
    }
    assert list(full) == [*keys, "fields"]
    assert (full["role"], full["pid"], full["request_id"]) == ("decode rank 1", 7, "req-1")
    assert (full["message"], full["fields"]) == ("a\nb", {"num_pages": 3})
    assert list(failed) == [*keys, "traceback"]
    assert failed["traceback"].endswith("ValueError: broken")


def test_an_uncaught_exception_and_a_warning_are_json_lines() -> None:
    text = (
        "import sys; from pdserve.base.log import setup_logging; setup_logging('info', 'a', 'json'); import warnings;"
    )
    text += "warnings.warn('old'); raise ValueError('broken')"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    warned, failed = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (warned["level"], warned["logger"]) == ("warning", "py.warnings")
    assert "old" in warned["message"]
    assert (failed["level"], failed["message"]) == ("critical", "uncaught ValueError: broken")


def test_warnings_of_python_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setup_logging("info", "a")
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "WARNING a[" in lines[0]
    assert "an old name" in lines[0]


DATED = "2026-11-28 02:32:40.672 INFO"


@pytest.mark.parametrize(
    ("line", "labelled"),
    [
        (f"{DATED} decode[4711] x: text", f"{DATED} decode-0[4711] x: text"),
        (f"{DATED} decode scheduler[4711] x: text", f"{DATED} decode-0 scheduler[4711] x: text"),
        (f"{DATED} prefill[4711] x: after a role switch", f"{DATED} decode-0 prefill[4711] x: after a role switch"),
        ("Traceback (most recent call last):", "[decode-0] Traceback (most recent call last):"),
    ],
)
def test_the_name_of_a_process_takes_the_place_of_its_role(line: str, labelled: str) -> None:
    assert TextLabel("decode-0")(line) == labelled


def test_a_line_of_another_format_becomes_json() -> None:
    label = JsonLabel("decode-0")
    assert json.loads(label('{"time": "t", "message": "x"}')) == {"process": "decode-0", "time": "t", "message": "x"}
    other = json.loads(label("{not json"))
    assert (other["process"], other["level"], other["message"]) == ("decode-0", "info", "{not json")
    assert other["request_id"] is None
