"""State of one output in its grammar; used by one thread at a time. `Matcher` is a typed wrapper of llguidance's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.errors import GrammarError
from pdserve.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MaskWords = npt.NDArray[np.uint32]


class OutputMatcher(Protocol):
    """What may follow the tokens accepted so far."""

    def copy(self) -> OutputMatcher:
        """Return an independent copy in the same state. Any thread."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens `token_ids` of the output.

        Raises:
            GrammarError: the grammar does not allow them, or it has become too complex to follow.
        """
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` may follow here, one after the other; the state stays as it is."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Return to the state before the last `num_tokens` accepted tokens.

        Raises:
            GrammarError: there are fewer tokens, or an earlier call has failed.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow here; empty where there is a choice."""
        ...

    @property
    def ended(self) -> bool:
        """True if only EOS may follow, or EOS was accepted."""
        ...

    def mask(self) -> MaskWords:
        """Return the mask of allowed next tokens: uint32 words, bit i is token i.

        Raises:
            GrammarError: the grammar has become too complex to follow.
        """
        ...


class FreeMatcher:
    """Implements `OutputMatcher` for any output (`any_text`): it has no state. `num_words`: words of a mask."""

    ended = False

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words

    def copy(self) -> FreeMatcher:
        """Return itself."""
        return self

    def accept(self, token_ids: Sequence[int]) -> None:
        """Accept any tokens."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the number of `token_ids`."""
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        """Do nothing."""

    def forced_tokens(self) -> list[int]:
        """Return no tokens."""
        return []

    def mask(self) -> MaskWords:
        """Return a mask that allows every token."""
        return np.full(self._num_words, 0xFFFFFFFF, dtype=np.uint32)


class Matcher:
    """Implements `OutputMatcher` for a grammar. Opening takes about a millisecond, more for large grammars."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        """`source` is the result of `compile_grammar`.

        Raises:
            GrammarError: the engine refuses the grammar, or it is larger than `_limits` allows.
        """
        from llguidance import LLMatcher

        self._num_words = vocabulary.num_mask_words
        self._matcher = LLMatcher(vocabulary.tokens, source, log_level=0, limits=_limits())
        self._check()

    def copy(self) -> Matcher:
        """See `OutputMatcher.copy`; takes 0.03 to 3 ms."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by the tokens `token_ids` of the output.

        Raises:
            GrammarError: the grammar does not allow them, or it has become too complex to follow.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            self._check()
            raise GrammarError(f"the grammar does not allow the tokens {list(token_ids)} here")

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids` may follow here, one after the other; the state stays as it is."""
        return 0 if self.ended else int(self._matcher.validate_tokens(list(token_ids)))

    def roll_back(self, num_tokens: int) -> None:
        """Return to the state before the last `num_tokens` accepted tokens.

        Raises:
            GrammarError: there are fewer tokens, or an earlier call has failed.
        """
        if num_tokens and not self._matcher.rollback(num_tokens):
            self._check()
            raise GrammarError(f"the grammar engine does not roll {num_tokens} tokens back")

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must follow here, as a tokenizer writes it; empty where there is a choice.

        The last token of the text is left out where further text may change it.
        """
        return [] if self.ended else list(self._matcher.compute_ff_tokens())

    @property
    def ended(self) -> bool:
        """True if only EOS may follow, or EOS was accepted."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> MaskWords:
        """Compute the mask of allowed next tokens: uint32 words, bit i is token i. EOS is allowed where the grammar may
        end.

        Raises:
            GrammarError: the grammar has become too complex to follow.
        """
        words = np.zeros(self._num_words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error().strip() or "the grammar engine failed without a reason")


def _limits() -> LLParserLimits:
    """Return the time and memory limits that differ from the engine's defaults; a lexer state takes 1 to 2 KB."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=300_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
