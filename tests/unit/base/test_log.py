"""One event is one line, with the role."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pdserve.base.log import setup_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Put the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_message_with_line_breaks_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "decode 50%")
    logging.getLogger("pdserve.test").info("first\nsecond %d", 7)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("I decode 50% pdserve.test: first\\nsecond 7")


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
