"""Rows whose output follows a grammar: their matcher states, and the masks that a step applies to its logits.

Owned by the `LocalExecutor` of the rank that samples; other ranks see only which rows failed. A row's matcher state is
a function of the grammar and the output ids. The matcher starts with the ids known so far, and accepts each sampled
token once, before it makes the mask of the next token.

    prepare  ──> grammar is compiled                               threads `grammar-open`, before a request is planned
    step n   ──> first step: a copy replays the output so far      threads `grammar`, concurrently with the forward pass
                 the token of step n - 1 is accepted, mask is made
                 logits are masked ──> a token is sampled

A row with drafts gets a mask for each position that it samples: the matcher accepts the drafts one by one, and rolls
back. Before that, at the launch, drafts behind the first one that the grammar forbids are cut off.

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
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import GrammarError
from pdserve.executor.input_batch import StepParams
from pdserve.executor.interface import BatchPlan
from pdserve.executor.verify import num_accepted
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.compile_jobs import SMALL_CHARS
from pdserve.grammar.matcher import FreeMatcher, MaskWords, Matcher, OutputMatcher
from pdserve.grammar.thinking import Piece, ThinkingMatcher
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

    `now` is the clock of `SUSPECT_S`, in seconds. `piece` is set when `opening` is done: see `Vocabulary.piece`.
    """

    piece: Piece

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.opening: Future[OutputMatcher] = Future()
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
        self._matcher: OutputMatcher | None = None
        self._output = output_ids
        self._num_accepted = 0
        """Tokens of `_output` that the matcher has accepted."""
        self._slow_s, self._unchecked_s = 0.0, 0.0
        self._eos = eos_token_ids if sampling.ignore_eos else ()
        self._thinking = sampling.thinking
        self._awaited: tuple[Arrival, int] | None = None
        self._drafts: tuple[int, ...] = ()
        """Drafts of the step under way that have a mask behind them."""

    def sampled(self, tokens: Arrival, index: int) -> None:
        """Record that the step under way samples this row's tokens from `index` of `tokens` on."""
        self._awaited = (tokens, index)

    def masks(self, drafts: tuple[int, ...], bans: Sequence[tuple[int, ...]]) -> MaskWords:
        """Return the masks of the next token and of those behind the drafts: uint32 `[n, words]`, 1 <= n.

        Fewer than 1 + len(drafts) where a draft is forbidden, or where the grammar cannot be followed behind it. Each
        mask forbids its entry of `bans`, and EOS while it is ignored, as long as other tokens are allowed.

        Raises:
            GrammarError: the grammar cannot be followed any more, or takes too long to follow.
        """
        began_s, matcher, num_tokens = self._follow()
        masks = [self._without(matcher.mask(), bans[0])]
        try:
            masks += self._look_ahead(matcher, drafts, masks[0], bans[1:])
        except GrammarError:
            self._matcher, self._num_accepted = None, 0  # the engine keeps its error: the next step replays the output
            masks = masks[:1]
        self._drafts = drafts[: len(masks) - 1]
        self._count(began_s, num_tokens + len(masks) - 1)
        if self._unchecked_s:
            self._unchecked_s = 0.0
            self._prepared.check(self._slow_s)
        return np.stack(masks)

    def num_allowed(self, drafts: tuple[int, ...]) -> int:
        """Return how many of `drafts` the grammar allows, one after the other. Raises GrammarError as `masks` does."""
        began_s, matcher, num_tokens = self._follow()
        allowed = matcher.num_allowed(drafts)
        self._count(began_s, num_tokens + allowed)
        return allowed

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, empty where there is a choice. Raises GrammarError as `masks` does."""
        began_s, matcher, num_tokens = self._follow()
        forced = matcher.forced_tokens()
        self._count(began_s, num_tokens + len(forced))
        return forced

    def _follow(self) -> tuple[float, OutputMatcher, int]:
        """Accept the tokens that have arrived since the last call.

        Returns the thread's processor time before it, the matcher, and the number of tokens.
        """
        opened = self._prepared.opening.result()
        self._take_arrived()
        began_s = time.thread_time()
        if self._matcher is None:
            self._matcher = opened.copy()
            if self._thinking is not None:
                self._matcher = ThinkingMatcher(self._matcher, self._thinking, self._prepared.piece)
        arrived, self._num_accepted = self._output[self._num_accepted :], len(self._output)
        for token in arrived:
            if not self._matcher.ended:  # a step launched before the end was known may add tokens
                self._matcher.accept([token])
        return began_s, self._matcher, len(arrived)

    def _take_arrived(self) -> None:
        """Add the last step's sampled tokens to the output, up to the first that is no accepted draft; waits."""
        if self._awaited is not None:
            (tokens, index), drafts = self._awaited, self._drafts
            self._awaited, self._drafts = None, ()
            ids = tokens()[index : index + 1 + len(drafts)].tolist()
            self._output += ids[: 1 + num_accepted(drafts, ids)]

    def _look_ahead(
        self, matcher: OutputMatcher, drafts: tuple[int, ...], mask: MaskWords, bans: Sequence[tuple[int, ...]]
    ) -> list[MaskWords]:
        """Return the masks behind the drafts up to the first that `mask` or a mask behind it forbids."""
        masks: list[MaskWords] = []
        num_tokens = 0
        for draft, banned in zip(drafts, bans, strict=True):
            if not mask[draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
                break
            if not matcher.ended:
                matcher.accept([draft])
                num_tokens += 1
            mask = self._without(matcher.mask(), banned)
            masks.append(mask)
        matcher.roll_back(num_tokens)
        return masks

    def _without(self, mask: MaskWords, bans: tuple[int, ...]) -> MaskWords:
        """Return `mask` without `bans` and ignored EOS; with them where nothing else is allowed."""
        rest = mask.copy()
        for token in (*bans, *self._eos):
            rest[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        return rest if rest.any() else mask

    def _count(self, began_s: float, num_tokens: int) -> None:
        """Count the time since `began_s` that is beyond the time of `num_tokens` quick tokens."""
        slow_s = max(0.0, time.thread_time() - began_s - QUICK_S * max(1, num_tokens))
        self._slow_s += slow_s
        self._unchecked_s += slow_s


@dataclasses.dataclass(frozen=True)
class StepMasks:
    """The masks of one step, made concurrently. `where`: the rows of `StepParams` that follow grammars.

    `rows`: the grammars of the plan's rows; `counts`: how many entries of `where` each has, 1 + its drafts.
    """

    where: IntArray
    rows: tuple[RowGrammar | None, ...]
    counts: tuple[int, ...]
    making: tuple[Future[MaskWords] | None, ...]

    def apply(self, logits: Tensor) -> Tensor:
        """Set the logits `[S, V]` of forbidden tokens to minus infinity, in place.

        Waits for the masks, and so for the tokens of the step before, but not for later work of the device.

        Returns int64 `[len(where)]` on the device of `logits`, 1 where there is no mask: the grammar has failed, or it
        forbids a draft before.
        """
        words = np.full((len(self.where), -(-logits.shape[1] // 32)), 0xFFFFFFFF, dtype=np.uint32)
        failed = np.zeros(len(self.where), dtype=np.int64)
        at = 0
        for making, count in zip(self.making, self.counts, strict=True):
            error = GrammarError("no grammars here") if making is None else making.exception()
            if making is None or error is not None:
                failed[at : at + count] = 1
                _tell(error)
            else:
                masks = making.result()
                words[at : at + len(masks)] = masks[:, : words.shape[1]]
                failed[at + len(masks) : at + count] = 1
            at += count
        _forbid(logits, self.where, words)
        return to_device(failed, logits.device)

    def sampled(self, token_ids: Tensor) -> None:
        """Give the matchers the tokens of this step, int64 `[S]` on the device."""
        if any(row is not None for row in self.rows):
            tokens = _arrival(token_ids)
            at = 0
            for row, count in zip(self.rows, self.counts, strict=True):
                if row is not None:
                    row.sampled(tokens, int(self.where[at]))
                at += count


@dataclasses.dataclass(frozen=True)
class StepGrammars:
    """The rows of a step that follow a grammar: their matchers, as they were at its launch, and their drafts."""

    rows: tuple[RowGrammar | None, ...]
    drafts: tuple[tuple[int, ...], ...]


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

    def prepare(self, grammar: Grammar) -> Future[OutputMatcher] | None:
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

    def pick(self, params: StepParams, plan: BatchPlan | None = None) -> StepGrammars | None:
        """Return the grammars of the rows in `params.constrained`, as they are now; None without such rows.

        `plan`: the step, where it has drafts.
        """
        if params.all_greedy:
            return None
        table_rows = params.table_rows[params.constrained].tolist()
        if not table_rows:
            return None
        if plan is None:
            return StepGrammars(tuple(map(self._rows.get, table_rows)), ((),) * len(table_rows))
        constrained = set(table_rows)
        rows = [row for row in plan.rows if row.sample and row.row in constrained]
        return StepGrammars(tuple(self._rows.get(row.row) for row in rows), tuple(row.drafts for row in rows))

    def begin(self, params: StepParams, grammars: StepGrammars) -> StepMasks:
        """Begin to make the masks of a step. The step before it is computed, or is in the device's stream."""
        where, counts = params.constrained, tuple(1 + len(drafts) for drafts in grammars.drafts)
        making: list[Future[MaskWords] | None] = []
        at = 0
        for row, drafts, count in zip(grammars.rows, grammars.drafts, counts, strict=True):
            if row is None:
                making.append(None)
            else:
                bans = [params.bans.get(index, ()) for index in where[at : at + count].tolist()]
                making.append(self._pool.submit(row.masks, drafts, bans))
            at += count
        return StepMasks(where, grammars.rows, counts, tuple(making))

    def allowed(self, plan: BatchPlan) -> dict[int, int]:
        """Return how many drafts the grammar allows, by index of each row of `plan` with drafts and a grammar.

        The steps before have been resolved. Rows whose grammar has failed have 0.
        """
        asked = {
            index: self._pool.submit(grammar.num_allowed, row.drafts)
            for index, row in enumerate(plan.rows)
            if row.drafts and (grammar := self._rows.get(row.row)) is not None
        }
        return {index: _unless_failed(answer, 0) for index, answer in asked.items()}

    def forced(self, rows: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
        """Return the tokens that must follow in table rows `rows`, at most `most` each; rows without any are absent.

        The steps before have been resolved.
        """
        asked = {row: self._pool.submit(self._rows[row].forced_tokens) for row in rows if row in self._rows}
        found = {row: tuple(_unless_failed(answer, [])[:most]) for row, answer in asked.items()}
        return {row: forced for row, forced in found.items() if forced}

    def forced_drafts(self, plan: BatchPlan, failed: Sequence[int], most: int) -> dict[int, tuple[int, ...]]:
        """Return what is forced behind the rows of `plan` that have sampled, by index, without the rows `failed`."""
        indices = {row.row: i for i, row in enumerate(plan.rows) if row.sample and i not in failed}
        return {indices[row]: tokens for row, tokens in self.forced(list(indices), most).items()}

    def shut_down(self) -> None:
        """End the threads."""
        for opening in self._opening.values():
            opening.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)


T = TypeVar("T")


def _unless_failed(answer: Future[T], otherwise: T) -> T:
    """Wait for `answer`; `otherwise` for a grammar that fails, which the next mask reports."""
    try:
        return answer.result()
    except GrammarError:
        return otherwise


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
        prepared.piece = known.piece
        began_s = time.thread_time()
        matcher = _matcher(known, rules, grammar)
        matcher.mask()
        prepared.spent_s = time.thread_time() - began_s
    except BaseException as error:
        prepared.opening.set_exception(error)
    else:
        prepared.opening.set_result(matcher)


def _matcher(vocabulary: Vocabulary, rules: JsonRules, grammar: Grammar) -> OutputMatcher:
    if grammar.kind == "any_text":
        return FreeMatcher(vocabulary.num_mask_words)
    return Matcher(vocabulary, compile_grammar(grammar, rules, vocabulary))


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
