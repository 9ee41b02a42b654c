"""The lines of `--log-kv-target` about decode steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.scheduler.kit import EOS, PROMPT, Mono


@pytest.mark.parametrize("overlap", [False, True])
def test_each_decode_step_has_its_tokens_and_where_the_kv_of_the_last_one_lies(overlap: bool) -> None:
    lines: list[dict[str, Any]] = []
    mono = Mono(chunk=None, overlap=overlap, write_line=lines.append)
    mono.executor.script = [41, 42, 43, EOS]
    mono.post("a", max_new_tokens=9)
    pages: list[int] = []
    while mono.step() or mono.scheduler.role.live:
        req = mono.scheduler.role.live.get("a")
        if req is not None and req.lease is not None:
            pages = list(req.lease.pages)
    assert {(line["event"], line["dp_rank"]) for line in lines} == {("decode.step", 0)}
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    rows = [row for line in lines for row in line["rows"]]
    assert [(row["last_token"], row["next_token"], row["finish_reason"]) for row in rows] == [
        (41, 42, None),
        (42, 43, None),
        (43, EOS, "stop"),
    ], "the first token is prefill's"
    page_tokens = mono.memory.layout.page_tokens
    for number, row in enumerate(rows):
        position = len(PROMPT) + number
        assert row["position"] == position
        assert row["kv_index"] == pages[position // page_tokens] * page_tokens + position % page_tokens
        assert row["rid"] == "a"


def test_requests_of_one_step_share_a_line() -> None:
    lines: list[dict[str, Any]] = []
    mono = Mono(chunk=None, write_line=lines.append)
    mono.post("a", max_new_tokens=3)
    mono.post("b", max_new_tokens=3)
    mono.run()
    assert [sorted(row["rid"] for row in line["rows"]) for line in lines] == [["a", "b"], ["a", "b"]]
    assert [row["finish_reason"] for row in lines[-1]["rows"]] == ["length", "length"]
