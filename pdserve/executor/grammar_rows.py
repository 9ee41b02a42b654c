"""Rows whose output follows a grammar: where each stands, and the masks that the logits of a step get.

Owned by the `LocalExecutor` of the rank that samples; other ranks see only which rows failed. A row's place in its
grammar is a function of the grammar and its output ids: it is opened with those known so far, and each token sampled
after is accepted once, before the mask of the next is made.

    open_row ──> matcher is opened, the output so far replayed      all three by threads of the pool,
    step n   ──> token of step n - 1 is accepted, mask is made      beside the forward pass
                 logits are masked ──> a token is sampled
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import GrammarError
from pdserve.executor.row_params import StepParams
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import MaskWords, Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.protocol.grammar import Grammar
from pdserve.protocol.sampling import SamplingParams

_LOG = logging.getLogger(__name__)
NUM_THREADS = 4
_BITS = np.uint8(1) << np.arange(8, dtype=np.uint8)
"""The bits of a byte of a mask, in order of tokens."""

Arrival = Callable[[], IntArray]
"""Waits for a step's tokens; int64 `[S]` on the host."""


class RowGrammar:
    """Where the request in one row stands. Used by one thread of the pool at a time, step after step."""

    def __init__(self, opening: Future[Matcher], eos_token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        self._opening = opening
        self._eos = eos_token_ids if sampling.ignore_eos else ()
        self._awaited: tuple[Arrival, int] | None = None

    def sampled(self, tokens: Arrival, index: int) -> None:
        """The step that is under way gives this row the token at `index`."""
        self._awaited = (tokens, index)

    def mask(self, bans: tuple[int, ...]) -> MaskWords:
        """What may come next. Tokens of `bans`, and EOS where it is ignored, stay away while there is anything else.

        Raises:
            GrammarError: the grammar cannot be followed any more.
        """
        matcher = self._opening.result()
        if self._awaited is not None:
            tokens, index = self._awaited
            self._awaited = None
            token = int(tokens()[index])
            if not matcher.ended:  # else it was the end, and this step was launched before anybody knew
                matcher.accept([token])
        mask = matcher.mask()
        rest = mask.copy()
        for token in (*bans, *self._eos):
            rest[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return rest if rest.any() else mask


@dataclasses.dataclass(frozen=True)
class StepMasks:
    """The masks of one step, while they are being made. `where`: the rows of `StepParams` that follow grammars."""

    where: IntArray
    rows: tuple[RowGrammar | None, ...]
    making: tuple[Future[MaskWords] | None, ...]

    def apply(self, logits: Tensor) -> Tensor:
        """Forbid in `logits` `[S, V]`, in place, what grammars forbid; int64 `[len(where)]`, 1 where a grammar failed.

        Waits for the masks, and so for the tokens of the step before, not for what the device computes since.
        """
        words = np.full((len(self.where), -(-logits.shape[1] // 32)), 0xFFFFFFFF, dtype=np.uint32)
        failed = np.zeros(len(self.where), dtype=np.int64)
        for place, making in enumerate(self.making):
            error = GrammarError("no grammars here") if making is None else making.exception()
            if making is None or error is not None:
                failed[place] = 1
                _tell(error)
            else:
                words[place] = making.result()[: words.shape[1]]
        _forbid(logits, self.where, words)
        return to_device(failed, logits.device)

    def sampled(self, token_ids: Tensor) -> None:
        """The step has sampled these, int64 `[S]` on the device."""
        if any(row is not None for row in self.rows):
            tokens = _arrival(token_ids)
            for index, row in zip(self.where.tolist(), self.rows, strict=True):
                if row is not None:
                    row.sampled(tokens, index)


class GrammarRows:
    """All rows with a grammar, and the threads that work for them. `open_vocabulary` is called at once, by one of them.

    Without it every grammar fails.
    """

    def __init__(
        self, open_vocabulary: Callable[[], Vocabulary] | None, rules: JsonRules, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._rules = rules
        self._eos = eos_token_ids
        self._rows: dict[int, RowGrammar] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        # threads take what is submitted in order, so that what a task waits for has always begun
        self._vocabulary = None if open_vocabulary is None else self._pool.submit(open_vocabulary)

    def open(self, row: int, grammar: Grammar, sampling: SamplingParams, output_ids: Sequence[int]) -> None:
        """The request in `row` follows `grammar`, and has come to `output_ids`."""
        if self._vocabulary is not None:
            opening = self._pool.submit(_open, self._vocabulary, self._rules, grammar, list(output_ids))
            self._rows[row] = RowGrammar(opening, self._eos, sampling)

    def close(self, row: int) -> None:
        """The request has left `row`."""
        self._rows.pop(row, None)

    def pick(self, params: StepParams) -> tuple[RowGrammar | None, ...]:
        """The rows of `params.constrained`, as they are now."""
        if params.takes_best:
            return ()
        return tuple(self._rows.get(int(line)) for line in params.lines[params.constrained])

    def begin(self, params: StepParams, rows: tuple[RowGrammar | None, ...]) -> StepMasks:
        """Begin to make the masks of a step. The step before it has been computed, or is in the device's stream."""
        where = params.constrained
        making = tuple(
            None if row is None else self._pool.submit(row.mask, params.bans.get(index, ()))
            for index, row in zip(where.tolist(), rows, strict=True)
        )
        return StepMasks(where, rows, making)

    def shut_down(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


def _open(vocabulary: Future[Vocabulary], rules: JsonRules, grammar: Grammar, output_ids: list[int]) -> Matcher:
    """A matcher that has come to `output_ids`."""
    known = vocabulary.result()
    matcher = Matcher(known, compile_grammar(grammar, rules, known))
    if output_ids:
        matcher.accept(output_ids)
    return matcher


def _forbid(logits: Tensor, where: IntArray, words: MaskWords) -> None:
    """Minus infinity in rows `where` of `logits` for tokens whose bit in `words` is 0; unpacked on the device."""
    index = to_device(where, logits.device)
    packed = to_device(words.astype("<u4", copy=False).view(np.uint8), logits.device)
    allowed = (packed[:, :, None] & to_device(_BITS, logits.device)).flatten(1)[:, : logits.shape[1]]
    rows = logits.index_select(0, index).masked_fill_(allowed == 0, -torch.inf)
    logits.index_copy_(0, index, rows)


def _arrival(token_ids: Tensor) -> Arrival:
    """`token_ids` once they are on the host. Steps up to this one are waited for, not what is launched next."""
    if token_ids.device.type != "cuda":
        return token_ids.numpy
    host = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True).copy_(token_ids, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> IntArray:
        done.synchronize()
        found: IntArray = host.numpy()
        return found

    return wait


def _tell(error: BaseException | None) -> None:
    """A grammar has failed; what is not the grammar's fault is told with where it happened."""
    if isinstance(error, GrammarError):
        _LOG.warning("a grammar failed: %s", error)
    else:
        _LOG.error("a grammar failed", exc_info=error)
