"""Rows whose output follows a grammar: their matcher states, and the masks that a step applies to its logits.

Owned by the `LocalExecutor` of the rank that samples; other ranks see only which rows failed. A row's matcher state is
a function of the grammar and the output ids. The matcher starts with the ids known so far, and accepts each sampled
token once, before it makes the mask of the next token.

    prepare  ──> grammar is compiled                               threads `grammar-open`, before a request is planned
    step n   ──> first step: a copy replays the output so far      threads `grammar`, concurrently with the forward pass
                 the token of step n - 1 is accepted, mask is made
                 logits are masked ──> a token is sampled

Clients send grammars: one that passed the server's check may still be slow to follow. A row has a budget of processor
time for slow tokens. Beyond that budget the row fails, and other rows of the grammar get a smaller budget for a while.
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
from pdserve.executor.input_batch import StepParams
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.compile_jobs import SMALL_CHARS
from pdserve.grammar.matcher import MaskWords, Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.protocol.sampling import CoreSamplingParams, Grammar

_LOG = logging.getLogger(__name__)
NUM_THREADS = 4
NUM_OPENING = 2
"""Threads that compile small grammars, and as many for large ones, apart from those that make masks."""
STACK_BYTES = 16 << 20
"""Stack of each thread: four times the compile worker's, so that a grammar that compiled there fits here."""
MAX_PREPARED = 64
"""Grammars that stay compiled for later requests."""
MAX_PREPARED_S = 3.0
"""Most processor seconds that compiling the kept grammars took: one second makes about 100 MB at most."""
QUICK_S = 0.02
"""Seconds per token; a token that takes longer is slow."""
SLOW_S = 0.5
"""Processor seconds that the slow tokens of a row may take in all: the other rows of its steps wait for them."""
SUSPECT_SLOW_S, SUSPECT_S = 0.05, 60.0
"""The same for rows whose grammar was too slow in another row, and for how many seconds that limit applies."""
_BITS = np.uint8(1) << np.arange(8, dtype=np.uint8)
"""The bits of a byte of a mask, in the order of tokens."""

Arrival = Callable[[], IntArray]
"""Waits for a step's tokens; int64 `[S]` on the host."""


class OpenedGrammar:
    """A compiled grammar, shared by all rows that follow it. `opening` gives a matcher in the initial state.

    `now` is the clock of `SUSPECT_S`, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.opening: Future[Matcher] = Future()
        self.spent_s = 0.0
        self._suspect_until = 0.0

    def given_up(self, work: Future[None]) -> None:
        """Cancel `opening` when its task was cancelled by a shutdown, so that its waiters end."""
        if work.cancelled():
            self.opening.cancel()

    def check(self, slow_s: float) -> None:
        """Compare the `slow_s` seconds that a row's slow tokens have taken with the budget.

        Raises:
            GrammarError: the slow tokens have exceeded the budget.
        """
        now = self._now()
        if slow_s > (SUSPECT_SLOW_S if self._suspect_until > now else SLOW_S):
            self._suspect_until = now + SUSPECT_S
            raise GrammarError("it takes too long to follow")


class RowGrammar:
    """The matcher state of the request in one row. One thread of the pool uses it at a time, step after step."""

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
        """Record that the step under way samples this row's token at `index` of `tokens`."""
        self._awaited = (tokens, index)

    def mask(self, bans: tuple[int, ...]) -> MaskWords:
        """Return the mask of the next token. Bans `bans`, and EOS while it is ignored, as long as other tokens are
        allowed.

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
        """Return the output tokens that the matcher has not accepted; waits for the last step's token."""
        arrived, self._known = self._known, []
        if self._awaited is not None:
            tokens, index = self._awaited
            self._awaited = None
            arrived.append(int(tokens()[index]))
        return arrived

    def _follow(self, matcher: Matcher, tokens: list[int]) -> MaskWords:
        for token in tokens:
            if not matcher.ended:  # a step launched before the end was known may add tokens
                matcher.accept([token])
        return matcher.mask()


@dataclasses.dataclass(frozen=True)
class StepMasks:
    """The masks of one step, made concurrently. `where`: the rows of `StepParams` that follow grammars."""

    where: IntArray
    rows: tuple[RowGrammar | None, ...]
    making: tuple[Future[MaskWords] | None, ...]

    def apply(self, logits: Tensor) -> Tensor:
        """Set the logits `[S, V]` of forbidden tokens to minus infinity, in place.

        Waits for the masks, and so for the tokens of the step before, but not for later work of the device.

        Returns int64 `[len(where)]` on the device of `logits`, 1 where a grammar failed.
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
        """Give the matchers the tokens of this step, int64 `[S]` on the device."""
        if any(row is not None for row in self.rows):
            tokens = _arrival(token_ids)
            for index, row in zip(self.where.tolist(), self.rows, strict=True):
                if row is not None:
                    row.sampled(tokens, index)


class GrammarRows:
    """All rows with a grammar, and the threads that compile grammars and make masks.

    A thread calls `open_vocabulary` at construction; None: every grammar fails. Scheduler thread, but for `prepare`.
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
        # a pool runs its tasks in order of submission, so a task waits only for tasks that have begun
        self._vocabulary = None if open_vocabulary is None else self._opening[False].submit(open_vocabulary)

    def prepare(self, grammar: Grammar) -> Future[Matcher] | None:
        """Begin to compile `grammar`, or return the compilation under way; None where no vocabulary is configured.

        A request that waits for it before admission delays no other request.
        """
        found = self._prepare(grammar)
        return None if found is None else found.opening

    def open(self, row: int, grammar: Grammar, sampling: CoreSamplingParams, output_ids: Sequence[int]) -> None:
        """Attach `grammar` to `row`, whose request has the output `output_ids` so far."""
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
        """Drop the grammars used longest ago. Rows that follow a grammar keep it alive."""
        spent_s = sum(prepared.spent_s for prepared in self._prepared.values())
        while len(self._prepared) > MAX_PREPARED or (spent_s > MAX_PREPARED_S and len(self._prepared) > 1):
            spent_s -= self._prepared.popitem(last=False)[1].spent_s

    def close(self, row: int) -> None:
        """Detach the grammar of `row`."""
        self._rows.pop(row, None)

    def pick(self, params: StepParams) -> tuple[RowGrammar | None, ...]:
        """Return the grammars of the rows in `params.constrained`, as they are now."""
        if params.all_greedy:
            return ()
        return tuple(self._rows.get(int(row)) for row in params.table_rows[params.constrained])

    def begin(self, params: StepParams, rows: tuple[RowGrammar | None, ...]) -> StepMasks:
        """Begin to make the masks of a step. The step before it is computed, or is in the device's stream."""
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
    """Make a pool of `count` started threads with stacks of `STACK_BYTES`."""
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
    """Compile `grammar` into a matcher with its first mask made, so that copies have the mask, too."""
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
    """Set rows `where` of `logits` to minus infinity where a token's bit in `words` is 0; bits are unpacked on the
    device.
    """
    index = to_device(where, logits.device)
    packed = to_device(words.astype("<u4", copy=False).view(np.uint8), logits.device)
    allowed = (packed[:, :, None] & to_device(_BITS, logits.device)).flatten(1)[:, : logits.shape[1]]
    rows = logits.index_select(0, index).masked_fill_(allowed == 0, -torch.inf)
    logits.index_copy_(0, index, rows)


def _arrival(token_ids: Tensor) -> Arrival:
    """Return a function that waits for `token_ids` on the host: for steps up to this one, not for later ones."""
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
    """Log a failed grammar; an exception other than `GrammarError` is logged with its traceback."""
    if isinstance(error, GrammarError):
        _LOG.warning("a grammar failed: %s", error)
    else:
        _LOG.error("a grammar failed", exc_info=error)
