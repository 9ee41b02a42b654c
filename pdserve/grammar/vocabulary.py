"""The tokens of a model as grammars see them. One per process that checks or obeys grammars, shared by all matchers."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import GrammarError


class Vocabulary:
    """Bytes of every token of a model, in a trie. Immutable, safe in all threads. Takes about a second to make."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: a fast tokenizer as text. `vocab_size`: the width of the logits, padding included.

        `eos_token_ids` are allowed where a grammar may end, and nowhere else.

        Raises:
            GrammarError: the tokenizer is of a kind whose tokens are no byte strings, or the model has no EOS token.
        """
        from llguidance import LLTokenizer

        if not eos_token_ids:
            raise GrammarError("the model names no EOS token, so that an output could not end where its grammar does")
        eos = list(eos_token_ids)
        try:
            try:
                self.tokens = LLTokenizer(tokenizer_json, vocab_size, eos)
            except ValueError:  # it may have more tokens than the model has logits
                self.tokens = LLTokenizer(tokenizer_json, None, eos)
        except Exception as error:  # the engine raises what it likes: panics as well as ValueError
            raise GrammarError(f"grammars cannot be used with this model's tokenizer: {error}") from error

    @property
    def num_mask_words(self) -> int:
        """32-bit words of a mask, a bit for each token."""
        return -(-self.tokens.vocab_size // 32)

    def special_token(self, text: str) -> int | None:
        """The special token that is written `text`."""
        ids = self.tokens.tokenize_str(text, parse_special=True) if text else []
        return ids[0] if len(ids) == 1 and self.tokens.is_special_token(ids[0]) else None
