"""The requests of each dataset: lengths, shared prefixes, times, and what a wrong file is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.datasets import DatasetOptions, make_sessions
from pdserve.bench.load import BenchSession
from pdserve.bench.prompts import PromptMaker
from pdserve.errors import ConfigError

IDS, TEXT = PromptMaker("ids"), PromptMaker("text")


def made(maker: PromptMaker = IDS, seed: int = 1, **options: Any) -> list[BenchSession]:
    return make_sessions(DatasetOptions(**options), maker, seed)


def prompts(sessions: list[BenchSession]) -> list[Any]:
    return [session.turns[0].prompt for session in sessions]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_random_prompts_have_their_lengths_and_depend_on_the_seed() -> None:
    found = made(num_prompts=20, input_len=50, output_len=10, prefix_len=5)
    assert [len(prompt) for prompt in prompts(found)] == [55] * 20
    assert len({tuple(prompt[:5]) for prompt in prompts(found)}) == 1
    assert len({tuple(prompt) for prompt in prompts(found)}) == 20
    assert {session.turns[0].output_len for session in found} == {10}
    assert found == made(num_prompts=20, input_len=50, output_len=10, prefix_len=5)
    assert found != made(num_prompts=20, input_len=50, output_len=10, prefix_len=5, seed=2)


def test_lengths_fill_their_range() -> None:
    found = made(num_prompts=400, input_len=10, output_len=4, range_ratio=0.5)
    assert {len(prompt) for prompt in prompts(found)} == set(range(5, 16))
    assert {session.turns[0].output_len for session in found} == set(range(2, 7))


def test_text_without_a_tokenizer_has_words() -> None:
    assert [len(prompt.split()) for prompt in prompts(made(TEXT, num_prompts=3, input_len=7))] == [7] * 3


def test_prefixes_repeat() -> None:
    found = prompts(made(name="prefix_repetition", num_prompts=12, num_prefixes=3, prefix_len=8, suffix_len=4))
    groups = {tuple(prompt[:8]): 0 for prompt in found}
    for prompt in found:
        groups[tuple(prompt[:8])] += 1
    assert sorted(groups.values()) == [4, 4, 4] and {len(prompt) for prompt in found} == {12}
    assert len({tuple(prompt[8:]) for prompt in found}) == 12


def test_conversations_have_as_many_turns_as_requests() -> None:
    found = made(TEXT, name="conversations", num_prompts=7, turns=3, input_len=4, prefix_len=6, turn_pause_s=1.5)
    assert [len(session.turns) for session in found] == [3, 3, 1]
    assert all(len(str(session.system).split()) == 6 and session.pause_s == 1.5 for session in found)


def test_conversations_of_a_file_send_its_user_turns(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "c.jsonl",
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
                      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]},
    )  # fmt: skip
    found = made(name="conversations", path=path, num_prompts=9, output_len=5)
    assert [[turn.prompt for turn in session.turns] for session in found] == [["a", "c"], ["d"]]
    assert [session.system for session in found] == ["s", None]
    path.write_text(json.dumps([json.loads(line) for line in path.read_text().splitlines()]))
    assert found == made(name="conversations", path=path, num_prompts=9, output_len=5), "one JSON array"
    assert len(made(name="conversations", path=path, num_prompts=1)[0].turns) == 1


def test_a_trace_has_scaled_lengths_times_and_shared_blocks(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {"timestamp": 1000, "input_length": 1000, "output_length": 40, "hash_ids": [1, 2]},
        {"timestamp": 1500, "input_length": 1400, "output_length": 20, "hash_ids": [1, 3, 4]},
        {"timestamp": 3000, "input_length": 100, "output_length": 1},
    )
    found = made(name="mooncake", path=path, length_scale=0.1, time_scale=2.0)
    assert [len(prompt) for prompt in prompts(found)] == [100, 140, 10]
    assert [session.at_s for session in found] == [0, 1, 4]
    assert [session.turns[0].output_len for session in found] == [4, 2, 1]
    first, second, _ = prompts(found)
    assert first[:51] == second[:51] and first[51:100] != second[51:100]
    assert len(made(name="mooncake", path=path, num_prompts=2)) == 2
    assert prompts(made(name="mooncake", path=path, seed=5))[0][:10] != first[:10]


def test_a_file_of_ones_own_repeats_until_there_are_enough(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    path = lines(
        tmp_path / "f.jsonl", {"prompt": "a", "output_tokens": 3}, {"prompt": [11, 12]}, {"messages": messages}
    )
    found = made(name="custom", path=path, num_prompts=4, output_len=9)
    assert prompts(found) == ["a", [11, 12], messages, "a"]
    assert [session.turns[0].output_len for session in found] == [3, 9, 9, 3]
    found = made(name="custom", path=path, num_prompts=2, output_len=9, output_override=9)
    assert [session.turns[0].output_len for session in found] == [9, 9]


def test_times_of_a_file_begin_with_its_first_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "timestamp": 1.7e12 + at_ms} for at_ms in (0, 500, 250)]
    found = made(name="custom", path=lines(tmp_path / "f.jsonl", *rows), num_prompts=9, time_scale=2.0)
    assert [session.at_s for session in found] == [0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("custom", '{"prompt": ""}', "line 1: prompt must be text or token ids"),
        ("custom", '{"prompt": [1, true]}', "line 1: prompt must be"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "output_tokens must be at least 1"),
        ("custom", "", "it has no request"),
        ("mooncake", "", "it has no request"),
        ("conversations", '{"messages": []}', "it has no request"),
        ("custom", '{"prompt": "a", "timestamp": 1}\n{"prompt": "a"}', "line 2: timestamp must be a number"),
        ("custom", "[1]", "entry 0: it is no JSON object"),
        ("custom", "[1", "it is no JSON"),
        ("mooncake", '{"timestamp": 1, "input_length": 2}', "line 1: output_length must be a number"),
        ("mooncake", '{"timestamp": -1, "input_length": 2, "output_length": 1}', "timestamp must be a number"),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": 3}',
            "hash_ids must be a list",
        ),
        ("mooncake", '\n{"timestamp"', "line 2 is no JSON"),
        ("conversations", '{"messages": "x"}', "must be a list of objects"),
        ("conversations", '{"messages": [{"role": "user"}]}', "must be text"),
    ],
)
def test_a_wrong_file_is_told_where(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        made(name=name, path=path)
    assert told in str(raised.value) and raised.value.field


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        made(name="custom", path=tmp_path / "none")
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        made(name="custom")
