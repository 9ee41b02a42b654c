"""How the hash model draws tokens, and what its drafter proposes.

A token follows from the number that the layers make, and from its position: the seed's number at the position, the
output before it (penalties, grammar), and the bans of `min_new_tokens`. So a draw at another position, or after
another prefix, gives another token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pdserve.executor.interface import SampledToken
from pdserve.grammar.thinking import ThinkingState
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.sim.hash_layers import mix

VOCAB_SIZE = 50257
ECHO_TOKENS = 13
"""Tokens that echoes come from."""
GRAMMAR_CLASSES = 3
"""The grammar of the hash model: it allows the tokens of one class, which follows from the output before."""
_SHARES = 1 << 16


def echo_of(token: int) -> int:
    """Return the token that follows `token` where the model echoes: cycles of a few tokens, which n-grams predict."""
    return (token * 5 + 1) % ECHO_TOKENS


def piece(token: int) -> bytes:
    """Return the text of a token."""
    return b"<%d>" % token


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashDrafting:
    """A model drafter: it proposes `num_draft_tokens` tokens, each right with probability `chance` while those before
    are. `weights`: drafters with other numbers write other draft KV.
    """

    num_draft_tokens: int
    chance: float
    weights: int = 1

    def is_right(self, number: int, *, is_whole: bool = True) -> bool:
        """Return whether the draft of the token that is drawn from `number` is right: a coin seeded with `number`.

        Not `is_whole`: some draft KV is missing, and half as many drafts are right.
        """
        return mix(number ^ 0x7777) % _SHARES < (self.chance if is_whole else self.chance / 2) * _SHARES


class HashSampler:
    """Draws the tokens of one request. `echo`: share of the tokens that follow from the token before."""

    def __init__(
        self, sampling: CoreSamplingParams, num_prompt: int, logprobs: Logprobs | None = None, echo: float = 0.0
    ) -> None:
        self.num_prompt = num_prompt
        self.logprobs = logprobs
        self._sampling = sampling
        self._echo = echo
        self._has_classes = sampling.grammar is not None and sampling.grammar.kind != "any_text"

    def draw(self, carry: int, tokens: Sequence[int], position: int) -> int:
        """Return the token at `position`, from the number `carry` of the token before it.

        The first `position` of `tokens` are the tokens before it.
        """
        sampling, output = self._sampling, tokens[self.num_prompt : position]
        forced = self._thinking(output)[1]
        if forced:
            return forced[0]
        number = carry
        if not sampling.greedy:
            number = mix(number ^ self.number_at(position))
        if sampling.needs_history:
            number = mix(number + self.penalty(output))
        echoes = self._echo > 0.0 and mix(number) % _SHARES < self._echo * _SHARES
        token = echo_of(tokens[position - 1]) if echoes else number % VOCAB_SIZE
        step = 1
        if self._has_classes:
            token += (_grammar_class(output) - token) % GRAMMAR_CLASSES
            step = GRAMMAR_CLASSES
        while len(output) < sampling.min_new_tokens and token in sampling.stop_token_ids:
            token += step
        return token

    def number_at(self, position: int) -> int:
        """Return the random number of `position`, from the seed."""
        return mix((self._sampling.seed or 0) * 1_000_003 + position)

    def penalty(self, output: Sequence[int]) -> int:
        """Return the sum of the penalties of all output tokens."""
        return sum(map(mix, output))

    def allowed(self, drafts: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of `drafts`, which follow `tokens`, grammar and thinking budget allow; all without either."""
        thinking = self._sampling.thinking
        if thinking is None and not self._has_classes:
            return len(drafts)
        output = list(tokens[self.num_prompt :])
        state, forced = self._thinking(output)
        for count, draft in enumerate(drafts):
            if (
                draft != forced[0]
                if forced
                else self._has_classes and (draft - _grammar_class(output)) % GRAMMAR_CLASSES
            ):
                return count
            output.append(draft)
            if thinking is not None and state is not None:
                state = state.after(draft, thinking, piece)
                forced = state.forced(thinking)
        return len(drafts)

    def _thinking(self, output: Sequence[int]) -> tuple[ThinkingState | None, tuple[int, ...]]:
        """Return the state of the thinking budget after `output` (None: there is no budget), and the forced tokens."""
        budget = self._sampling.thinking
        if budget is None:
            return None, ()
        state = ThinkingState.first(budget)
        for token in output:
            state = state.after(token, budget, piece)
        return state, state.forced(budget)

    def sampled(self, token: int) -> SampledToken:
        """Return a drawn token with made-up log probabilities of the `token_ids` that the request wants."""
        picks = () if self.logprobs is None else self.logprobs.token_ids
        return SampledToken(token, picked=tuple(-float(token % (pick + 2)) for pick in picks))

    def of_prompt(self, numbers: Mapping[int, int]) -> PromptLogprobs | None:
        """Make up log probabilities of the prompt tokens at consecutive positions, the keys of `numbers`."""
        if not numbers or self.logprobs is None:
            return None
        own = np.array([-(value % 4096) / 64 for value in numbers.values()], dtype=np.float32)
        top = np.repeat(own[:, None], self.logprobs.top, 1)
        picked = np.repeat(own[:, None], len(self.logprobs.token_ids), 1)
        ids = np.zeros(top.shape, dtype=np.int32)
        return PromptLogprobs.pack(min(numbers), own, np.ones(len(own), dtype=np.int32), ids, top, picked)


def _grammar_class(output: Sequence[int]) -> int:
    """Return the class of the tokens that may follow `output`."""
    state = 0
    for token in output:
        state = mix(state + token)
    return state % GRAMMAR_CLASSES
