"""The vocabulary of a model for grammars. One per process that compiles or applies grammars, shared by all matchers."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import GrammarError


class Vocabulary:
    """The bytes of every token of a model, in a trie. Immutable and thread-safe. Takes about a second to build."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: a fast tokenizer as text. `vocab_size`: the width of the logits, padding included.

        `eos_token_ids` are allowed only where a grammar may end.

        Raises:
            GrammarError: the tokenizer's tokens are no byte strings, or the model has no EOS token.
        """
        from llguidance import LLTokenizer

        if not eos_token_ids:
            raise GrammarError("the model has no EOS token, which ends an output that follows a grammar")
        eos = list(eos_token_ids)
        try:
            try:
                self.tokens = LLTokenizer(tokenizer_json, vocab_size, eos)
            except ValueError:  # the tokenizer may have more tokens than the model has logits
                self.tokens = LLTokenizer(tokenizer_json, None, eos)
        except Exception as error:  # llguidance raises panics as well as ValueError
            raise GrammarError(f"grammars cannot be used with this model's tokenizer: {error}") from error

    @property
    def num_mask_words(self) -> int:
        """Number of 32-bit words of a mask, which has one bit per token."""
        return -(-self.tokens.vocab_size // 32)

    def special_token(self, text: str) -> int | None:
        """Return the id of the special token that is written `text`; None if there is none."""
        ids = self.tokens.tokenize_str(text, parse_special=True) if text else []
        return ids[0] if len(ids) == 1 and self.tokens.is_special_token(ids[0]) else None

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token; those of a special token are its text."""
        return self.tokens.decode_bytes([token_id])
