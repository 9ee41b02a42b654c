"""Mistakes at start-up are told once, with their cause and status 2, and torch is not imported for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.startup_mistakes import Mistake, Told, mistakes, run
from tests.share import rest_slow

NAMES = (
    "local: no such path",
    "code of the checkpoint",
    "router: misspelt flag",
    "port taken",
    "misspelt flag",
    "local: misspelt flag",
    "model not cached, offline",
)
MISTAKE = Mistake(name="m", argv=(), says="because")


@pytest.fixture(scope="module")
def by_name() -> Iterator[dict[str, Mistake]]:
    with mistakes() as all_of_them:
        yield {each.name: each for each in all_of_them}


@pytest.mark.parametrize("name", rest_slow(NAMES, keep=4))
def test_a_mistake_is_told_once_with_status_2_and_without_torch(by_name: dict[str, Mistake], name: str) -> None:
    told = run(by_name[name])
    assert (told.problem, told.status, told.imported) == ("", 2, ""), told.lines


@pytest.mark.slow
def test_every_mistake_is_told_so(by_name: dict[str, Mistake]) -> None:
    assert len(by_name) >= 20
    told = [run(each) for each in by_name.values()]
    assert {each.mistake.name: each.problem for each in told if each.problem} == {}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (Told(MISTAKE, 2, ["error: because"], "", 0.1), ""),
        (Told(MISTAKE, 1, ["error: because"], "", 0.1), "status 1"),
        (Told(MISTAKE, 2, ["error: because", "Traceback"], "", 0.1), "2 lines"),
        (Told(MISTAKE, 2, ["error: no"], "", 0.1), "does not say 'because'"),
        (Told(MISTAKE, 2, ["error: because"], "torch", 0.1), "imports torch"),
    ],
)
def test_the_script_sees_what_is_wrong(told: Told, problem: str) -> None:
    assert told.problem == problem
