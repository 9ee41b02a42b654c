"""Threads that tokenize texts and render chat templates, with bounds on concurrent work.

The tokenizer owns a `TextWorkers`. The Rust tokenizer takes 50 to 160 bytes of memory per byte of text, and some
microseconds. A chat template holds the GIL while it runs. So long texts run one at a time, and short texts do not wait
for them. A text that cannot fit is refused before it is tokenized, or after a part of it was counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.base.host_memory import give_back_freed
from pdserve.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

T = TypeVar("T")

SHORT_CHARS = 8192
"""Texts up to this length are processed on the event loop: some milliseconds."""
LONG_CHARS = 1 << 18
"""Longer texts run one at a time."""
PIECE_CHARS = 1 << 16
"""Long texts are counted in pieces of this size, each some 50 ms."""
LOST_CHARS = 4
"""At most this many characters become one: NFC composes up to four. A text that mostly consists of characters that its
tokenizer drops is refused like a text that is too long.
"""
MAX_LONG = 32
"""Maximum number of long texts that wait or run. Further long texts get a 503."""
MAX_MIDDLE_CHARS = 1 << 27
"""Maximum characters of the medium texts (between the two limits) that wait or run. Further medium texts get a 503."""
NUM_THREADS = 2
"""Threads for medium texts; long texts have one more thread."""


class TextWorkers:
    """Runs work on a text on the event loop or in a thread, by the text's length. Call it on the event loop."""

    def __init__(self) -> None:
        self._some = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._num_long = 0
        self._middle_chars = 0

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `num_chars` characters. Returns its result, or raises its exception.

        Raises:
            RequestError: 503, too many texts wait or run.
        """
        if num_chars <= SHORT_CHARS:
            return work()
        if num_chars <= LONG_CHARS:
            return await self._run_middle(num_chars, work)
        if self._num_long >= MAX_LONG:
            message = f"{MAX_LONG} texts of over {LONG_CHARS} characters wait already; try again"
            raise RequestError(message, status=503, code="text_workers_busy", retry_after_s=1)
        self._num_long += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._long, lambda: _then_trimmed(work))
        finally:
            self._num_long -= 1

    async def _run_middle(self, num_chars: int, work: Callable[[], T]) -> T:
        if self._middle_chars + num_chars > MAX_MIDDLE_CHARS:
            message = f"texts of {self._middle_chars} characters wait to be tokenized already; try again"
            raise RequestError(message, status=503, code="text_workers_busy", retry_after_s=1)
        self._middle_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._some, work)
        finally:
            self._middle_chars -= num_chars


def _then_trimmed(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_back_freed()


class TextBound:
    """Detects texts with too many tokens without tokenizing all of them. `backend`: a tokenizer of `tokenizers`."""

    def __init__(self, backend: RustTokenizer) -> None:
        self._backend = backend

    @cached_property
    def longest_token(self) -> int:
        """Length in characters of the longest token of the vocabulary."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @cached_property
    def chars_per_token(self) -> int:
        """Upper bound of the characters of a text per token, on average."""
        spec = json.loads(self._backend.to_str())
        return self.longest_token * (LOST_CHARS if _loses_characters(spec) else 1)

    def exceeds(self, text: str, most_tokens: int) -> bool:
        """Return True only for texts of more than `most_tokens` tokens; False does not mean that the text fits.

        Takes time in proportion to `most_tokens`, not to the text.
        """
        if len(text) <= 2 * max(most_tokens, PIECE_CHARS):
            return False
        return len(text) > most_tokens * self.chars_per_token or self._counts_more(text, most_tokens)

    def _counts_more(self, text: str, most_tokens: int) -> bool:
        """Count tokens piece by piece. A cut adds at most `longest_token` tokens."""
        counted = 0
        for first in range(0, len(text), PIECE_CHARS):
            piece = text[first : first + PIECE_CHARS]
            counted += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            counted -= self.longest_token
            if counted > most_tokens:
                return True
        return False


_STEADY = {
    "ByteLevel",
    "Digits",
    "Lowercase",
    "Metaspace",
    "NFD",
    "NFKD",
    "Prepend",
    "Punctuation",
    "Split",
    "UnicodeScripts",
}
"""Normalizers and pre-tokenizers whose output has at least as many characters as their input."""


def _loses_characters(spec: dict[str, Any]) -> bool:
    """Whether normalization or pre-tokenization can shorten a text before the vocabulary lookup.

    `spec` is a tokenizer.json. Added tokens may absorb the blanks around them. Normalizers may compose or replace
    characters. A model whose vocabulary lacks a byte drops that byte.
    """
    if any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or []):
        return True
    steps = [*_steps(spec.get("pre_tokenizer"), "pretokenizers"), *_steps(spec.get("normalizer"), "normalizers")]
    return not _has_all_bytes(spec["model"]) or not all(map(_is_steady, steps))


def _steps(spec: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order."""
    if not spec:
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec[parts] for step in _steps(part, parts)]
    return [spec]


def _is_steady(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": " "} and bool(step.get("content"))
    return step["type"] in _STEADY and step.get("behavior") != "Removed"


def _has_all_bytes(model: dict[str, Any]) -> bool:
    """Whether every byte has a token: by byte fallback, or as a byte-level vocabulary with all 256 bytes."""
    vocabulary = model.get("vocab") or {}
    if model.get("byte_fallback"):
        words = vocabulary if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
        return all(f"<0x{byte:02X}>" in words for byte in range(256))
    return model.get("type") == "BPE" and all(char in vocabulary for char in byte_alphabet())


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet, inverted: printable character to byte.

    Printable bytes stand for themselves; the remaining bytes follow from code point 256.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet
