"""The requests of a run: random prompts, shared prefixes, conversations, a trace, or a file of one's own."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.bench.load import BenchSession, BenchTurn
from pdserve.bench.prompts import PromptMaker
from pdserve.errors import ConfigError

Json = dict[str, Any]
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block of `hash_ids` in Mooncake's traces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The flags of the datasets; lengths in tokens, or in words for text without a tokenizer."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 10
    suffix_len: int = 256
    turns: int = 4
    turn_pause_s: float = 0.0
    time_scale: float = 1.0
    length_scale: float = 1.0
    output_override: int | None = None


def make_sessions(options: DatasetOptions, maker: PromptMaker, seed: int) -> list[BenchSession]:
    """Return the sessions of a run: the same for the same options and seed.

    Raises:
        ConfigError: a file cannot be read, has no request, or a line of it lacks a field.
    """
    sessions = list(MAKERS[options.name](options, maker, random.Random(f"{seed}/{options.name}")))
    if not sessions:
        raise ConfigError(f"--dataset-path {options.path}: it has no request", field="dataset_path")
    return sessions


def background_turns(maker: PromptMaker, seed: int, input_len: int, output_len: int) -> Iterator[BenchTurn]:
    """Yield requests of random prompts of one length, without an end: the same for the same seed."""
    rng = random.Random(f"{seed}/background")
    while True:
        yield _turn(maker.prompt(rng, input_len), output_len)


def _length(rng: random.Random, length: int, ratio: float) -> int:
    """Return a length from `length * (1 - ratio)` to `length * (1 + ratio)`, at least 1."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, rng.randint(low, high))


def _turn(prompt: Any, output_len: int) -> BenchTurn:
    return BenchTurn(prompt=prompt, output_len=output_len)


def random_sessions(options: DatasetOptions, maker: PromptMaker, rng: random.Random) -> list[BenchSession]:
    """Return prompts of random tokens, behind one prefix that all share (`prefix_len`)."""
    prefix = [maker.prompt(rng, options.prefix_len)] if options.prefix_len else []
    sessions = []
    for _ in range(options.num_prompts):
        own = maker.prompt(rng, _length(rng, options.input_len, options.range_ratio))
        turn = _turn(maker.joined([*prefix, own]), _length(rng, options.output_len, options.range_ratio))
        sessions.append(BenchSession(turns=(turn,)))
    return sessions


def prefix_sessions(options: DatasetOptions, maker: PromptMaker, rng: random.Random) -> list[BenchSession]:
    """Return prompts in groups of equal size, one for each prefix, in random order."""
    sessions = []
    prefixes = [maker.prompt(rng, options.prefix_len) for _ in range(options.num_prefixes)]
    for index in range(options.num_prompts):
        suffix = maker.prompt(rng, options.suffix_len)
        turn = _turn(maker.joined([prefixes[index % len(prefixes)], suffix]), options.output_len)
        sessions.append(BenchSession(turns=(turn,)))
    rng.shuffle(sessions)
    return sessions


def conversation_sessions(options: DatasetOptions, maker: PromptMaker, rng: random.Random) -> list[BenchSession]:
    """Return conversations of `turns` turns, made up or of a file. Together they have about `num_prompts` turns.

    A file has JSON lines or one JSON array, each with `messages` (OpenAI) or `conversations` (ShareGPT). Its user turns
    are sent; the answers are the server's own.
    """
    if options.path is not None:
        return list(_until(_file_conversations(options), options.num_prompts))
    system = maker.text(rng, options.prefix_len) if options.prefix_len else None
    sessions = []
    for begun in range(0, options.num_prompts, options.turns):
        turns = [
            _turn(maker.text(rng, _length(rng, options.input_len, options.range_ratio)),
                  _length(rng, options.output_len, options.range_ratio))
            for _ in range(min(options.turns, options.num_prompts - begun))
        ]  # fmt: skip
        sessions.append(BenchSession(turns=tuple(turns), system=system, pause_s=options.turn_pause_s))
    return sessions


def _until(sessions: Iterator[BenchSession], num_requests: int) -> Iterator[BenchSession]:
    left = num_requests
    for session in sessions:
        if left <= 0:
            return
        yield dataclasses.replace(session, turns=session.turns[:left])
        left -= len(session.turns)


def _file_conversations(options: DatasetOptions) -> Iterator[BenchSession]:
    for where, row in _rows(options):
        said = row.get("messages", row.get("conversations", row.get("conversation")))
        if not isinstance(said, list) or not all(isinstance(one, dict) for one in said):
            raise ConfigError(f"{where}: messages (or conversations) must be a list of objects", field="dataset_path")
        texts = [(str(one.get("role", one.get("from"))), one.get("content", one.get("value"))) for one in said]
        if not all(isinstance(text, str) for _, text in texts):
            raise ConfigError(f"{where}: the content of each message must be text", field="dataset_path")
        system = next((str(text) for role, text in texts if role == "system"), None)
        turns = tuple(_turn(text, options.output_len) for role, text in texts if role in ("user", "human"))
        if turns:
            yield BenchSession(turns=turns, system=system, pause_s=options.turn_pause_s)


def mooncake_sessions(options: DatasetOptions, maker: PromptMaker, rng: random.Random) -> list[BenchSession]:
    """Return the first requests of a trace of Mooncake: its times, lengths, and equal blocks where ids are equal.

    Lines have `timestamp` (ms), `input_length` and `output_length` (tokens), and perhaps `hash_ids` of blocks of 512
    tokens. A block's tokens depend on its id and on the seed alone.
    """
    seed = rng.random()
    sessions: list[BenchSession] = []
    first_ms: float | None = None
    for where, row in _rows(options):
        if len(sessions) == options.num_prompts:
            break
        at_ms = _number(where, row, "timestamp")
        length, output_len = _number(where, row, "input_length"), _number(where, row, "output_length")
        first_ms = at_ms if first_ms is None else first_ms
        length = max(1, round(length * options.length_scale))
        prompt = _blocks(maker, seed, where, row, length, options.length_scale)
        turn = _turn(prompt, max(1, round(output_len * options.length_scale)))
        at_s = max(0.0, (at_ms - first_ms) / 1e3 * options.time_scale)
        sessions.append(BenchSession(turns=(turn,), at_s=at_s))
    return sessions


def _blocks(maker: PromptMaker, seed: float, where: str, row: Json, length: int, scale: float) -> Any:
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: hash_ids must be a list", field="dataset_path")
    size = max(1, round(MOONCAKE_BLOCK_TOKENS * scale))
    pieces, left = [], length
    for block in ids:
        if left > 0:
            # A shortened block of ids is the beginning of the whole one: both are drawn from the same numbers.
            pieces.append(maker.prompt(random.Random(f"{seed}/block/{block}"), min(size, left)))
            left -= size
    if left > 0:
        pieces.append(maker.prompt(random.Random(f"{seed}/row/{where}"), left))
    return maker.joined(pieces)


def custom_sessions(options: DatasetOptions, maker: PromptMaker, rng: random.Random) -> list[BenchSession]:
    """Return the requests of a file of JSON lines, from its beginning again where it has too few.

    A line has `prompt` (text or token ids) or `messages`, and perhaps `output_tokens` (also `output_length`). When the
    first line has a `timestamp` (ms), each line has one; the first line is then at 0 s, and the file is not repeated.
    """
    rows = list(_rows(options))
    found = [_custom(options, where, row) for where, row in rows]
    if not found or "timestamp" not in rows[0][1]:
        return [found[index % len(found)] for index in range(options.num_prompts)] if found else []
    times_ms = [_number(where, row, "timestamp") for where, row in rows]
    offsets_s = [max(0.0, (at_ms - times_ms[0]) / 1e3 * options.time_scale) for at_ms in times_ms]
    timed = [dataclasses.replace(one, at_s=at_s) for one, at_s in zip(found, offsets_s, strict=True)]
    return timed[: options.num_prompts]


def _custom(options: DatasetOptions, where: str, row: Json) -> BenchSession:
    prompt = row.get("prompt", row.get("messages"))
    listed = prompt if isinstance(prompt, list) else []
    ids = bool(listed) and all(isinstance(one, int) and not isinstance(one, bool) for one in listed)
    messages = bool(listed) and all(isinstance(one, Mapping) for one in listed)
    if not ids and not messages and (not isinstance(prompt, str) or not prompt):
        raise ConfigError(f"{where}: prompt must be text or token ids, or messages a list of objects", field="prompt")
    name = next((name for name in ("output_tokens", "output_length") if name in row), None)
    output_len = options.output_len
    if options.output_override is None and name is not None:
        output_len = int(_number(where, row, name))
    if output_len < 1:
        raise ConfigError(f"{where}: {name} must be at least 1", field=name)
    return BenchSession(turns=(_turn(prompt, output_len),))


def _number(where: str, row: Json, name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: {name} must be a number of at least 0, not {value!r}", field=name)
    return value


def _rows(options: DatasetOptions) -> Iterator[tuple[str, Json]]:
    """Yield the objects of a file of JSON lines or of one JSON array, each with where it is."""
    if options.path is None:
        raise ConfigError(f"--dataset-name {options.name} needs --dataset-path", field="dataset_path")
    flag = f"--dataset-path {options.path}"
    try:
        with options.path.open() as file:
            rows = _parsed(file, options.path)
            for where, row in rows:
                if not isinstance(row, dict):
                    raise ConfigError(f"{where}: it is no JSON object", field="dataset_path")
                yield where, row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: cannot be read: {error}", field="dataset_path") from error


def _parsed(file: Iterator[str], path: Path) -> Iterator[tuple[str, Any]]:
    first = next(file, "")
    try:
        if first.lstrip().startswith("["):
            for index, row in enumerate(json.loads(first + "".join(file))):
                yield f"{path}: entry {index}", row
            return
    except ValueError as error:
        raise ConfigError(f"{path}: it is no JSON: {error}", field="dataset_path") from error
    for number, line in enumerate(_chained(first, file), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is no JSON: {error}", field="dataset_path") from error
            yield f"{path}: line {number}", row


def _chained(first: str, file: Iterator[str]) -> Iterator[str]:
    yield first
    yield from file


MAKERS: dict[str, Callable[[DatasetOptions, PromptMaker, random.Random], Sequence[BenchSession]]] = {
    "random": random_sessions,
    "prefix_repetition": prefix_sessions,
    "conversations": conversation_sessions,
    "mooncake": mooncake_sessions,
    "custom": custom_sessions,
}
