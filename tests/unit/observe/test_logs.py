"""Request logs as JSON lines, and the command that compares KV logs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.observe import json_lines
from pdserve.observe.compare_kv import main
from pdserve.observe.json_lines import JsonLines
from pdserve.protocol.messages import FinishReason, SpeculationStats
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


LABELS = '{engine_type="unified",model_name="tiny"}'


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def logged(b: Bench, path: Path, count: int) -> list[dict[str, Any]]:
    await until(lambda: len(lines_of(path)) >= count)
    return lines_of(path)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
async def test_each_level_says_more(tokenizer: Tokenizer, tmp_path: Path, level: int) -> None:
    observe = {"log_requests": True, "log_requests_level": level, "log_requests_target": str(tmp_path)}
    async with bench(tokenizer, observe=observe) as b:
        b.scheduler.speculation = SpeculationStats(num_verify_steps=1, num_draft_tokens=2, accepted_by_position=(1,))
        body = {"text": "hello " * 15, "rid": "mine"}
        answer = await b.http.post("/generate", json=body, headers={"X-Request-Id": "req-7"})
        assert answer.status_code == 200
        received, finished = await logged(b, tmp_path / "requests-unified.jsonl", 2)
    assert (received["event"], finished["event"]) == ("request.received", "request.finished")
    assert received["rid"] == finished["rid"] == "mine" and received["key"] == finished["key"]
    assert received["request_id"] == finished["request_id"] == "req-7"
    assert finished["outcome"] == "stop" and finished["completion_tokens"] == 3
    assert finished["speculation"] == {"num_verify_steps": 1, "num_draft_tokens": 2, "accepted_by_position": [1]}
    assert sum(finished["ttft_parts"].values()) == pytest.approx(finished["ttft_s"])
    assert ("sampling_params" in received) == (level >= 1)
    assert ("input_ids" in received) == ("output_ids" in finished) == (level >= 2)
    if level >= 2:
        assert received["text"] == "hello " * 15 and finished["text"] == answer.json()["text"]


async def test_a_failure_says_why(tokenizer: Tokenizer, tmp_path: Path) -> None:
    observe = {"log_requests": True, "log_requests_target": str(tmp_path / "mine.jsonl")}
    async with bench(tokenizer, observe=observe) as b:
        b.scheduler.script = lambda request: FinishReason(
            type="abort", message="gone", status_code=502, err_type="peer_gone"
        )
        assert (await b.http.post("/generate", json={"text": "hi"})).status_code == 502
        _, finished = await logged(b, tmp_path / "mine.jsonl", 2)
        assert f"pdserve:log_lines_dropped_total{LABELS} 0.0" in (await b.http.get("/metrics")).text
    assert finished["request_id"] is None
    assert (finished["error"], finished["code"], finished["status"]) == ("gone", "peer_gone", 502)


def test_lines_that_cannot_be_written_are_counted_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").symlink_to("/dev/full")
    lines = JsonLines(str(tmp_path), "x", "log_requests_target")
    for number in range(5):
        lines.write({"number": number})
    lines.close()
    assert lines.num_dropped == 5
    with pytest.raises(ConfigError) as refused:
        JsonLines("/dev/null/x.jsonl", "x", "log_requests_target")
    assert refused.value.field == "log_requests_target"


def test_closing_a_log_behind_a_stuck_disk_ends_and_says_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json_lines, "MAX_WAITING", 4)
    monkeypatch.setattr(json_lines, "CLOSE_TIMEOUT_S", 0.2)
    os.mkfifo(tmp_path / "x.jsonl")  # it is full after 64 KiB, and then writing waits for a reader
    read_end = os.open(tmp_path / "x.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    lines = JsonLines(str(tmp_path), "x", "log_requests_target")
    for _ in range(20):
        lines.write({"text": "x" * 100_000})
    closer = threading.Thread(target=lines.close, daemon=True)
    closer.start()
    closer.join(10.0)
    assert not closer.is_alive(), "closing hangs"
    assert lines.num_dropped == 20 and "20 lines" in caplog.text
    lines.write({"late": True})
    assert lines.num_dropped == 21, "what comes after the end is counted as well"
    os.close(read_end)


def test_a_closed_log_has_all_that_was_written(tmp_path: Path) -> None:
    lines = JsonLines(str(tmp_path), "x", "log_requests_target")
    for number in range(3000):
        lines.write({"number": number})
    lines.close()
    lines.close()
    assert [line["number"] for line in lines_of(tmp_path / "x.jsonl")] == list(range(3000)) and lines.num_dropped == 0


def kv_line(event: str, key: str, cell: str, **more: Any) -> dict[str, Any]:
    group = {"name": "full", "layers": [0, 1], "heads": [0, 1]}
    group |= {"cells": {"k": [[cell]], "v": [["00000002"]]}, "pages": {"k": [cell], "v": ["00000002"]}}
    known = {"layout_fingerprint": "f", "num_tokens": 3, "first_page": 0, "pages": [4]}
    return {"event": event, "key": key, "rid": "r", **known, "ranks": [{"rank": 0, "groups": [group]}], **more}


def test_the_command_says_what_differs_and_how_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(*lines: dict[str, Any]) -> list[str]:
        (tmp_path / "a.jsonl").write_text("no json\n" + "".join(json.dumps(line) + "\n" for line in lines))
        return [str(tmp_path)]

    good = [kv_line("kv.sent", "1/1/d", "0000000a"), kv_line("kv.received", "1/1/d", "0000000a")]
    assert main(write(*good)) == 0
    bad = [kv_line("kv.sent", "2/1/d", "0000000a"), kv_line("kv.received", "2/1/d", "0000000b")]
    assert main(write(*good, *bad)) == 1
    said = capsys.readouterr().out
    assert "2/1/d (r): differs in layers 0, heads 0, planes k; pages 0 (4 -> 4)" in said
    assert "1 transfers agree, 1 differ" in said
    other = [kv_line("kv.sent", "3/1/d", "0000000a"), kv_line("kv.received", "3/1/d", "0000000a", num_tokens=4)]
    assert main(write(*other)) == 1
    assert "num_tokens is 3 on prefill, 4 on decode" in capsys.readouterr().out
    assert main(write(good[0])) == 2
    assert "on one side only: 1/1/d" in capsys.readouterr().out
    assert main([str(tmp_path / "none.jsonl")]) == 2
