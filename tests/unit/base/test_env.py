"""Environment variables are read typed, and refused when they cannot be used."""

from __future__ import annotations

import os

import pytest

from pdserve.base.env import (
    CONTROL_TOKEN,
    OPENMP_WAIT,
    RETURN_ORIGINAL_LOGPROB,
    TRANSFER_FAILURES,
    control_token,
    keep_openmp_from_spinning,
    returns_original_logprobs,
    transfer_failures,
)
from pdserve.errors import ConfigError


def test_the_control_token_is_empty_when_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTROL_TOKEN, raising=False)
    assert control_token() == ""


def test_the_control_token_is_read_without_the_newline_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, "secret-of-a-cluster\n")
    assert control_token() == "secret-of-a-cluster"


@pytest.mark.parametrize("value", ["two words", "schlüssel", "a\x01b", "a\r\nX-Evil: 1"])
def test_a_token_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, value)
    with pytest.raises(ConfigError, match=CONTROL_TOKEN):
        control_token()


@pytest.mark.parametrize(("text", "value"), [("", None), ("1", True), ("True", True), ("0", False), ("false", False)])
def test_original_logprobs_are_a_boolean_or_unset(
    monkeypatch: pytest.MonkeyPatch, text: str, value: bool | None
) -> None:
    monkeypatch.setenv(RETURN_ORIGINAL_LOGPROB, text)
    assert returns_original_logprobs() is value


def test_original_logprobs_that_are_no_boolean_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETURN_ORIGINAL_LOGPROB, "maybe")
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB must be true or false, got 'maybe'"):
        returns_original_logprobs()


def test_the_share_of_writes_that_fail_has_two_names_of_which_the_newer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    newer, older = TRANSFER_FAILURES
    for name in TRANSFER_FAILURES:
        monkeypatch.delenv(name, raising=False)
    assert transfer_failures() == 0
    monkeypatch.setenv(older, "0.05")
    assert transfer_failures() == 0.05
    monkeypatch.setenv(newer, " 1 ")
    assert transfer_failures() == 1


@pytest.mark.parametrize("value", ["5%", "-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(TRANSFER_FAILURES[0], value)
    with pytest.raises(ConfigError, match=TRANSFER_FAILURES[0]):
        transfer_failures()


def test_openmp_sleeps_unless_the_user_has_said_how_it_shall_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPENMP_WAIT, "active")
    keep_openmp_from_spinning()
    assert os.environ[OPENMP_WAIT] == "active"
    monkeypatch.delenv(OPENMP_WAIT)
    keep_openmp_from_spinning()
    assert os.environ[OPENMP_WAIT] == "passive"
