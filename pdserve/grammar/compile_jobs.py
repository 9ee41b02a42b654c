"""Messages between compile pool and compile worker, and the check of one text. Pure except for the limits.

    server/request/compile_pool ── Setup, LoadVocabulary, CheckGrammar, CheckPattern ──> compile_worker
                                <── CompileResult, one for each except Setup ───────────

A frame is a length of 4 bytes, little endian, and a msgpack value.
"""

from __future__ import annotations

import os
import resource
import struct
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from pdserve.errors import GrammarError
from pdserve.grammar.bounds import MAX_STOP_REPEATED, check_pattern_size
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.sampling import Grammar

SMALL_CHARS = 4096
"""Longest small grammar in characters. Small grammars do not wait for larger ones."""
MAX_ERROR_CHARS = 500
"""Maximum length of an error. A frame with a result stays below `PIPE_BUF`, so that processes may share the pipe."""
PATTERN_CPU_S = 0.1
PATTERN_BYTES = 16 << 20
"""Maximum memory of one compiled stop pattern: the API process compiles it again and caches it."""
EMPTY_S = 0.1
_LENGTH = struct.Struct("<I")

Reason: TypeAlias = Literal["ok", "refused", "slow", "memory", "crashed", "busy"]
"""Outcome of a check. `busy` does not judge the text: the check had no time to run, or its worker exited."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message. `cpu_s`, `memory_bytes`: limits of one check; `wall_s`: its limit of wall-clock seconds."""

    rules: JsonRules
    cpu_s: float
    memory_bytes: int
    wall_s: float


class LoadVocabulary(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the vocabulary for all later grammars; see `Vocabulary`."""

    job: int
    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check whether an output can follow this grammar."""

    job: int
    grammar: Grammar


class CheckPattern(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check whether this is a valid regular expression for `stop_regex`."""

    job: int
    pattern: str


class CompileResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a question. `message`: why the check failed; None: it passed."""

    job: int
    reason: Reason = "ok"
    message: str | None = None


Check: TypeAlias = CheckGrammar | CheckPattern
Question: TypeAlias = Setup | LoadVocabulary | CheckGrammar | CheckPattern

_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_VERDICTS = msgspec.msgpack.Decoder(CompileResult)


def frame(message: Question | CompileResult) -> bytes:
    """Encode `message` as a frame."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_questions(buffer: bytearray) -> Iterator[Question]:
    """Remove the complete frames at the beginning of `buffer` and yield their questions."""
    for body in _take(buffer):
        yield _QUESTIONS.decode(body)


def receive_results(buffer: bytearray) -> Iterator[CompileResult]:
    """Remove the complete frames at the beginning of `buffer` and yield their results."""
    for body in _take(buffer):
        yield _VERDICTS.decode(body)


def _take(buffer: bytearray) -> Iterator[bytes]:
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield body


def compile_one(check: Check, rules: JsonRules, vocabulary: Vocabulary | None) -> CompileResult:
    """Compile one text and return the result. Runs in a process of its own: it may take any time and memory, or
    crash.
    """
    try:
        if isinstance(check, CheckPattern):
            _check_pattern(check.pattern)
        else:
            _check_grammar(check.grammar, rules, vocabulary)
    except GrammarError as error:
        return CompileResult(job=check.job, reason="refused", message=str(error)[:MAX_ERROR_CHARS])
    except MemoryError:
        return CompileResult(job=check.job, reason="memory", message="it needs too much memory to compile")
    except BaseException as error:  # a panic of llguidance is not an Exception
        text = f"it cannot be compiled: {error}"[:MAX_ERROR_CHARS]
        return CompileResult(job=check.job, reason="refused", message=text)
    return CompileResult(job=check.job)


def _check_grammar(grammar: Grammar, rules: JsonRules, vocabulary: Vocabulary | None) -> None:
    """Open the grammar and compute the mask of the first token."""
    if vocabulary is None:
        raise GrammarError("no vocabulary is loaded")
    matcher = Matcher(vocabulary, compile_grammar(grammar, rules, vocabulary))
    if not matcher.mask().any():
        raise GrammarError("no output can follow this grammar")


def _check_pattern(pattern: str) -> None:
    import regex

    check_pattern_size(pattern, MAX_STOP_REPEATED)
    before_bytes, begun_s = resident_bytes(), time.thread_time()
    try:
        found = regex.compile(pattern, cache_pattern=False).search("", timeout=EMPTY_S)
    except (regex.error, RecursionError, OverflowError) as error:
        raise GrammarError(f"it is not a regular expression: {error}") from error
    except TimeoutError as error:
        raise GrammarError("it takes too long on the empty text") from error
    spent_s, grown = time.thread_time() - begun_s, resident_bytes() - before_bytes
    if found is not None:
        raise GrammarError("it matches the empty text")
    if spent_s > PATTERN_CPU_S:
        raise GrammarError(f"it takes {spent_s:.2f} s to compile; the maximum is {PATTERN_CPU_S:g} s")
    if grown > PATTERN_BYTES:
        raise GrammarError(f"it takes {grown >> 20} MiB when compiled; the maximum is {PATTERN_BYTES >> 20} MiB")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _statm(1)


def limit_memory(extra_bytes: int) -> None:
    """Limit the address space of this process to its present size plus `extra_bytes`."""
    most = _statm(0) + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _statm(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
