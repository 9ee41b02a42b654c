"""Rows whose output follows a grammar: where each stands, and the masks that the logits of a step get.

Owned by the `LocalExecutor` of the rank that samples; other ranks see only which rows failed. A row's place in its
grammar is a function of the grammar and its output ids: it is opened with those known so far, and each token sampled
after is accepted once, before the mask of the next is made.

    prepare  ──> grammar is opened                                 threads `grammar-open`, before a request is planned
    step n   ──> at first: a copy, the output so far is replayed   threads `grammar`, beside the forward pass
                 token of step n - 1 is accepted, mask is made
                 logits are masked ──> a token is sampled

A grammar is a client's: one that passed the server's check may still be slow to follow. A row has a budget of
processor time for that; beyond it the row has failed, and other rows of the grammar have a smaller budget for a while.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import GrammarError
from pdserve.executor.sampling_metadata import StepParams
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.compile_jobs import SMALL_CHARS
from pdserve.grammar.matcher import MaskWords, Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.protocol.failure import Grammar
from pdserve.protocol.sampling import CoreSamplingParams

_LOG = logging.getLogger(__name__)
NUM_THREADS = 4
NUM_OPENING = 2
"""Threads that open small grammars, and as many for large ones, apart from those that make masks."""
STACK_BYTES = 16 << 20
"""Of each thread: four times what the compile worker has, so that what passed there is not too deep here."""
MAX_PREPARED = 64
"""Grammars that are kept open for the next request."""
MAX_PREPARED_S = 3.0
"""Processor time that opening those has taken: about 100 MB a second at most."""
QUICK_S = 0.02
"""A token of a row that takes longer is slow."""
SLOW_S = 0.5
"""Processor time that the slow tokens of a row may take in all: the others in its steps wait for them."""
SUSPECT_SLOW_S, SUSPECT_S = 0.05, 60.0
"""The same of rows whose grammar was too slow in another row, for how long. A row with quick tokens goes on."""
_BITS = np.uint8(1) << np.arange(8, dtype=np.uint8)
"""The bits of a byte of a mask, in order of tokens."""

Arrival = Callable[[], IntArray]
"""Waits for a step's tokens; int64 `[S]` on the host."""


class OpenedGrammar:
    """A grammar that was opened once, for all rows that follow it. `opening` gives a matcher at its beginning."""

    def __init__(self) -> None:
        self.opening: Future[Matcher] = Future()
        self.spent_s = 0.0
        self._suspect_until = 0.0

    def given_up(self, work: Future[None]) -> None:
        """The threads have ended before they came to it: what waits for it must end as well."""
        if work.cancelled():
            self.opening.cancel()

    def check(self, slow_s: float) -> None:
        """Raises GrammarError: a row's slow tokens have taken too long, `slow_s` seconds in all."""
        now = time.monotonic()
        if slow_s > (SUSPECT_SLOW_S if self._suspect_until > now else SLOW_S):
            self._suspect_until = now + SUSPECT_S
            raise GrammarError("it takes too long to follow")


class RowGrammar:
    """Where the request in one row stands. Used by one thread of the pool at a time, step after step."""

    def __init__(
        self,
        prepared: OpenedGrammar,
        output_ids: list[int],
        eos_token_ids: tuple[int, ...],
        sampling: CoreSamplingParams,
    ) -> None:
        self._prepared = prepared
        self._matcher: Matcher | None = None
        self._known = output_ids
        self._slow_s = 0.0
        self._eos = eos_token_ids if sampling.ignore_eos else ()
        self._awaited: tuple[Arrival, int] | None = None

    def sampled(self, tokens: Arrival, index: int) -> None:
        """The step that is under way gives this row the token at `index`."""
        self._awaited = (tokens, index)

    def mask(self, bans: tuple[int, ...]) -> MaskWords:
        """What may come next. Tokens of `bans`, and EOS where it is ignored, stay away while there is anything else.

        Raises:
            GrammarError: the grammar cannot be followed any more, or takes too long to follow.
        """
        opened = self._prepared.opening.result()
        tokens = self._arrived()
        began_s = time.thread_time()
        if self._matcher is None:
            self._matcher = opened.copy()
        mask = self._follow(self._matcher, tokens)
        slow_s = max(0.0, time.thread_time() - began_s - QUICK_S * max(1, len(tokens)))
        self._slow_s += slow_s
        if slow_s:
            self._prepared.check(self._slow_s)
        rest = mask.copy()
        for token in (*bans, *self._eos):
            rest[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return rest if rest.any() else mask

    def _arrived(self) -> list[int]:
        """Tokens of the output that the matcher has not seen; waits for the last step's."""
        arrived, self._known = self._known, []
        if self._awaited is not None:
            tokens, index = self._awaited
            self._awaited = None
            arrived.append(int(tokens()[index]))
        return arrived

    def _follow(self, matcher: Matcher, tokens: list[int]) -> MaskWords:
        for token in tokens:
            if not matcher.ended:  # else it was the end, and this step was launched before anybody knew
                matcher.accept([token])
        return matcher.mask()


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

    Without it every grammar fails. Scheduler thread, but for `prepare`.
    """

    def __init__(
        self, open_vocabulary: Callable[[], Vocabulary] | None, rules: JsonRules, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._rules = rules
        self._eos = eos_token_ids
        self._rows: dict[int, RowGrammar] = {}
        self._prepared: collections.OrderedDict[Grammar, OpenedGrammar] = collections.OrderedDict()
        self._pool = _threads(NUM_THREADS, "grammar")
        self._opening = {small: _threads(NUM_OPENING, "grammar-open") for small in (True, False)}
        # threads take what is submitted in order, so that what a task waits for has always begun
        self._vocabulary = None if open_vocabulary is None else self._opening[False].submit(open_vocabulary)

    def prepare(self, grammar: Grammar) -> Future[Matcher] | None:
        """Begin to open `grammar`, or find that it was begun; None where there are no grammars.

        A request that waits for it before it is planned keeps no other waiting.
        """
        found = self._prepare(grammar)
        return None if found is None else found.opening

    def open(self, row: int, grammar: Grammar, sampling: CoreSamplingParams, output_ids: Sequence[int]) -> None:
        """The request in `row` follows `grammar`, and has come to `output_ids`."""
        prepared = self._prepare(grammar)
        if prepared is not None:
            self._rows[row] = RowGrammar(prepared, list(output_ids), self._eos, sampling)

    def _prepare(self, grammar: Grammar) -> OpenedGrammar | None:
        if self._vocabulary is None:
            return None
        found = self._prepared.get(grammar)
        if found is None:
            found = self._prepared[grammar] = OpenedGrammar()
            opening = self._opening[len(grammar.text) <= SMALL_CHARS]
            work = opening.submit(_open, found, self._vocabulary, self._rules, grammar)
            work.add_done_callback(found.given_up)
            self._forget_old()
        self._prepared.move_to_end(grammar)
        return found

    def _forget_old(self) -> None:
        """Rows that follow one keep it."""
        spent_s = sum(prepared.spent_s for prepared in self._prepared.values())
        while len(self._prepared) > MAX_PREPARED or (spent_s > MAX_PREPARED_S and len(self._prepared) > 1):
            spent_s -= self._prepared.popitem(last=False)[1].spent_s

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
        for opening in self._opening.values():
            opening.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have begun, with a stack of `STACK_BYTES`."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        all_begun = threading.Barrier(count)
        for _ in range(count):
            pool.submit(all_begun.wait)
    finally:
        threading.stack_size(before)
    return pool


def _open(prepared: OpenedGrammar, vocabulary: Future[Vocabulary], rules: JsonRules, grammar: Grammar) -> None:
    """Give `prepared` a matcher with its first mask made, so that copies have it, too."""
    try:
        known = vocabulary.result()
        began_s = time.thread_time()
        matcher = Matcher(known, compile_grammar(grammar, rules, known))
        matcher.mask()
        prepared.spent_s = time.thread_time() - began_s
    except BaseException as error:
        prepared.opening.set_exception(error)
    else:
        prepared.opening.set_result(matcher)


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
