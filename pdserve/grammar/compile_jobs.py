"""What the compile worker is asked and what it answers, and what it does for one question. Pure but for the limits.

    server/compile_pool ── Setup, LoadVocabulary, CheckGrammar, CheckPattern ──> compile_worker
                        <── Verdict, one for each but Setup ───────────────────

Frames are a length of 4 bytes, little endian, and a msgpack value.
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
from pdserve.protocol.failure import Grammar

SMALL_CHARS = 4096
"""A grammar with more text is large: small ones do not wait for those."""
MAX_ERROR_CHARS = 500
"""A frame with a verdict stays below `PIPE_BUF`, so that processes may share the pipe."""
PATTERN_CPU_S = 0.1
PATTERN_BYTES = 16 << 20
"""Of one stop pattern, compiled: the API process compiles it again and keeps it."""
EMPTY_S = 0.1
_LENGTH = struct.Struct("<I")

Reason: TypeAlias = Literal["ok", "refused", "slow", "memory", "crashed", "busy"]
"""`busy` says nothing of the text: there was no time for it, or its worker has ended."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message. `cpu_s`, `memory_bytes`: what one check may take; `wall_s`: when it is given up at last."""

    rules: JsonRules
    cpu_s: float
    memory_bytes: int
    wall_s: float


class LoadVocabulary(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Grammars that follow are for this vocabulary; see `Vocabulary`."""

    job: int
    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckGrammar(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Can an output follow it?"""

    job: int
    grammar: Grammar


class CheckPattern(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Is it a regular expression for `stop_regex`?"""

    job: int
    pattern: str


class CompileResult(msgspec.Struct, frozen=True, kw_only=True):
    """`message` says why not, None where all is well."""

    job: int
    reason: Reason = "ok"
    message: str | None = None


Check: TypeAlias = CheckGrammar | CheckPattern
Question: TypeAlias = Setup | LoadVocabulary | CheckGrammar | CheckPattern

_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_VERDICTS = msgspec.msgpack.Decoder(CompileResult)


def frame(message: Question | CompileResult) -> bytes:
    """`message` with its length."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_questions(buffer: bytearray) -> Iterator[Question]:
    """The whole messages at the beginning of `buffer`, which they leave."""
    for body in _take(buffer):
        yield _QUESTIONS.decode(body)


def receive_results(buffer: bytearray) -> Iterator[CompileResult]:
    """The same of what the worker answers."""
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
    """Compile it and say how that went. In a process of its own: it may take any time and memory, or crash."""
    try:
        if isinstance(check, CheckPattern):
            _check_pattern(check.pattern)
        else:
            _check_grammar(check.grammar, rules, vocabulary)
    except GrammarError as error:
        return CompileResult(job=check.job, reason="refused", message=str(error)[:MAX_ERROR_CHARS])
    except MemoryError:
        return CompileResult(job=check.job, reason="memory", message="it takes too much memory to compile")
    except BaseException as error:  # a panic of the engine is no Exception
        text = f"it cannot be compiled: {error}"[:MAX_ERROR_CHARS]
        return CompileResult(job=check.job, reason="refused", message=text)
    return CompileResult(job=check.job)


def _check_grammar(grammar: Grammar, rules: JsonRules, vocabulary: Vocabulary | None) -> None:
    """Open the grammar and ask for the first tokens."""
    if vocabulary is None:
        raise GrammarError("there is no vocabulary")
    matcher = Matcher(vocabulary, compile_grammar(grammar, rules, vocabulary))
    if not matcher.mask().any():
        raise GrammarError("no output follows this grammar")


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
        raise GrammarError(f"it takes {spent_s:.2f} s to compile, at most {PATTERN_CPU_S:g} s are spent on it")
    if grown > PATTERN_BYTES:
        raise GrammarError(f"it takes {grown >> 20} MiB when compiled, at most {PATTERN_BYTES >> 20} MiB are given")


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return _statm(1)


def limit_memory(extra_bytes: int) -> None:
    """Let this process take `extra_bytes` of address space beyond what it has."""
    most = _statm(0) + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _statm(column: int) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
