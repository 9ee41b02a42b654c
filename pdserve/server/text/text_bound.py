"""Detects texts with too many tokens, so that the tokenizer refuses them before it has tokenized them."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdserve.server.text.detokenizer import byte_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

PIECE_CHARS = 1 << 16
"""Long texts are counted in pieces of this size, each some 50 ms."""
LOST_CHARS = 4
"""At most this many characters become one: NFC composes up to four. A text that mostly consists of characters that its
tokenizer drops is refused like a text that is too long.
"""


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
