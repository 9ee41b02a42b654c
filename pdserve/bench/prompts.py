"""Prompts of a wanted length: token ids, or text with or without a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

FIRST_ID = 10
"""Ids below this are often special ones."""
DEFAULT_VOCAB_SIZE = 1000
"""Without a tokenizer, ids are below this: every model has them."""
PROMPT_TYPES = ("ids", "text")
_TEXT = """the of and to in is that for it was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over"""
WORDS = tuple(_TEXT.split())


def open_tokenizer(name: str) -> RustTokenizer:
    """Open the tokenizer of a model: a directory, a file `tokenizer.json`, or what servers take as `--model-path`.

    Raises:
        ConfigError: there is none.
    """
    from pathlib import Path

    from tokenizers import Tokenizer as RustTokenizer

    from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

    try:
        path = Path(name)
        file = path if path.is_file() else resolve_tokenizer_path(resolve_model_path(name)) / "tokenizer.json"
        opened = RustTokenizer.from_file(str(file))
    except ModelError as error:
        raise ConfigError(f"--tokenizer {name}: {error}", field="tokenizer") from error
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"--tokenizer {name}: cannot be read: {error}", field="tokenizer") from error
    opened.no_truncation()
    opened.no_padding()
    return opened


class PromptMaker:
    """Makes prompts. `kind`: one of `PROMPT_TYPES`. Text has the wanted number of tokens where there is a tokenizer,
    else of words.
    """

    def __init__(self, kind: str, tokenizer: RustTokenizer | None = None, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        self.kind = kind
        self._tokenizer = tokenizer
        self._ids: Sequence[int] = range(FIRST_ID, vocab_size)
        if tokenizer is not None:
            special = {number for number, added in tokenizer.get_added_tokens_decoder().items() if added.special}
            size = tokenizer.get_vocab_size(with_added_tokens=False)
            self._ids = [number for number in range(FIRST_ID, size) if number not in special]

    def ids(self, rng: random.Random, length: int) -> list[int]:
        """Return random token ids."""
        return rng.choices(self._ids, k=length)

    def text(self, rng: random.Random, length: int) -> str:
        """Return text of about `length` tokens: exactly, unless its tokens join differently when they are encoded."""
        if self._tokenizer is None:
            return " ".join(rng.choices(WORDS, k=length))
        ids = self.ids(rng, length)
        for _ in range(3):  # encoding a decoded text again seldom gives the same number of tokens at once
            text = self._text_of(ids)
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
            if len(ids) == length:
                return text
            ids = ids[:length] + self.ids(rng, max(0, length - len(ids)))
        return self._text_of(ids)

    def _text_of(self, ids: Sequence[int]) -> str:
        """Decode ids. Other threads run meanwhile, as they do beside `encode_batch`, but not beside single texts."""
        assert self._tokenizer is not None
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]

    def prompt(self, rng: random.Random, length: int) -> str | list[int]:
        """Return a prompt of this maker's kind."""
        return self.ids(rng, length) if self.kind == "ids" else self.text(rng, length)

    def joined(self, pieces: Sequence[str | Sequence[int]]) -> str | list[int]:
        """Join prompts of this maker's kind."""
        if self.kind == "ids":
            return [int(number) for piece in pieces for number in piece]
        return " ".join(str(piece) for piece in pieces)
