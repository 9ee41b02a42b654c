"""Samples tokens from logits, and copies the results of a step to the host, without waiting for the device.

Called by `ModelRunner` and `LocalExecutor`.

Order: logit bias and penalties, bans, logit processors, temperature, then top-k, top-p and min-p together on the
resulting probabilities (as SGLang: each filter sees the unfiltered distribution), then one draw. A draw inverts the
cumulative distribution at a uniform number that is a hash of (seed, position). So a token depends on its logits, its
seed and its position, never on the rest of the batch or on the server that computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.executor.input_batch import StepParams
from pdserve.executor.interface import SampledToken
from pdserve.executor.logit_processors import LogitProcessors
from pdserve.executor.prompt_logprobs import PromptLogprobTensors
from pdserve.executor.token_outputs import TokenOutputs
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.gpu import runtime
from pdserve.model.parallel import Arrival
from pdserve.protocol.sampling import TOP_K_ALL

Columns = np.ndarray[tuple[int], np.dtype[np.void]]
"""Rows of `StepParams.columns`."""
_WINDOW = 1024
"""Top-p first inspects this many best tokens; sorting a whole vocabulary costs ten times as much."""


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The sampled tokens of a step, on the device.

    `token_ids` int64 `[S]`; `logprobs` float32 `[S]`; `top_ids` int64 and `top_logprobs` float32 `[S, n]`; `picked`
    float32 `[S, k]`, log probabilities of the ids that rows requested. A field is None where no row requested it.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    picked: Tensor | None = None
    failed: Tensor | None = None
    """int64 `[sampled tokens that follow a grammar]`, 1 where the grammar failed; such a token is undefined."""

    def tensors(self) -> list[Tensor]:
        """The tensors that are not None, in the order of the fields."""
        every = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs, self.picked, self.failed)
        return [x for x in every if x is not None]

    def failed_positions(self, params: StepParams) -> npt.NDArray[np.bool_] | None:
        """Return for each sampled token whether it is undefined, `[S]`; None where no token follows a grammar."""
        if self.failed is None:
            return None
        found = np.zeros(len(params.table_rows), dtype=np.bool_)
        found[params.constrained] = self.failed.numpy() > 0
        return found

    @staticmethod
    def blank(params: StepParams, vocab_size: int, device: torch.device) -> Sampled:
        """Return uninitialised tensors of the shapes that sampling these rows gives."""
        num_failed = len(params.constrained)
        failed = torch.empty(num_failed, dtype=torch.int64, device=device) if num_failed else None
        return dataclasses.replace(Sampled._blank(params, vocab_size, device), failed=failed)

    @staticmethod
    def _blank(params: StepParams, vocab_size: int, device: torch.device) -> Sampled:
        num_rows = len(params.table_rows)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        if not params.wants_logprobs:
            return Sampled(token_ids, None, None, None)
        logprobs = torch.empty(num_rows, device=device)
        picked = torch.empty(num_rows, params.num_picks, device=device) if params.picks else None
        num_top = min(params.num_top, vocab_size)
        if num_top == 0:
            return Sampled(token_ids, logprobs, None, None, picked)
        shape = (num_rows, num_top)
        top_ids = torch.empty(shape, dtype=torch.int64, device=device)
        return Sampled(token_ids, logprobs, top_ids, torch.empty(shape, device=device), picked)


def choose_with_torch(logits: Tensor, columns: Columns, points: npt.NDArray[np.float64]) -> Tensor:
    """Choose one token a row, int64 `[S]`, on any device.

    `points` `[S]` in [0, 1): where each row's cumulative distribution is inverted.
    """
    chosen = logits.argmax(-1)
    drawing = np.flatnonzero(~columns["greedy"])
    if len(drawing) == 0:
        return chosen
    if len(drawing) == len(columns):
        return _draw(logits, columns, points, chosen)
    index = to_device(drawing, logits.device)
    some = logits.index_select(0, index)
    drawn = _draw(some, columns[drawing], points[drawing], chosen.index_select(0, index))
    return chosen.index_copy(0, index, drawn)


TokenSampler = Callable[[Tensor, Columns, npt.NDArray[np.float64]], Tensor]
"""Signature of `choose_with_torch`; `NativeChooser` is another implementation."""


def sample(
    logits: Tensor,
    params: StepParams,
    tokens: Tensor,
    choose: TokenSampler = choose_with_torch,
    *,
    processed_logprobs: bool = False,
    process: Callable[[Tensor], Tensor] | None = None,
) -> Sampled:
    """Sample one token a row. `logits` float32 `[S, V]`; `tokens` int32 `[num_table_rows, context]`: known tokens.

    `processed_logprobs`: log probabilities after bias, penalties, bans, processors and temperature, instead of those of
    `logits`; of prompt tokens they are always the model's own. `process`: `StepProcessors.apply` of the step.
    """
    draws = not params.columns["greedy"].all()
    points = uniforms(params.columns["seed"], params.positions) if draws else np.zeros(len(params.positions))
    shaped = _shape(logits, params, tokens)
    if process is not None:
        shaped = process(shaped)
    chosen = choose(shaped, params.columns, points)
    if processed_logprobs and params.wants_logprobs:
        return _with_logprobs(chosen, _scaled(shaped, params.columns), params)
    return _with_logprobs(chosen, logits, params)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How a rank samples. `choose` picks tokens from logits; `processed_logprobs`: see `sample`."""

    choose: TokenSampler = choose_with_torch
    processed_logprobs: bool = False
    processors: LogitProcessors = dataclasses.field(default_factory=LogitProcessors)

    def __call__(self, logits: Tensor, params: StepParams, tokens: Tensor, failed: Tensor | None = None) -> Sampled:
        """Sample as `sample`. `failed`: see `Sampled.failed`; 1 also where a logit processor fails."""
        step = self.processors.begin(params)
        process = None if step is None else step.apply
        made = sample(logits, params, tokens, self.choose, processed_logprobs=self.processed_logprobs, process=process)
        if step is not None:
            assert failed is not None, "rows with a processor have a grammar, if only any_text"
            failed = step.mark(failed, params.constrained)
        return dataclasses.replace(made, failed=failed)


def to_host(sampled: Sampled, params: StepParams) -> list[SampledToken]:
    """Convert the result to values; waits for the device."""
    ids = sampled.token_ids.tolist()
    if sampled.logprobs is None:
        return [SampledToken(token) for token in ids]
    logprobs = sampled.logprobs.tolist()
    top_ids = sampled.top_ids.tolist() if sampled.top_ids is not None else [[]] * len(ids)
    top_values = sampled.top_logprobs.tolist() if sampled.top_logprobs is not None else [[]] * len(ids)
    picked = {}
    if sampled.picked is not None:
        picked = {i: tuple(sampled.picked[i, : len(wanted)].tolist()) for i, wanted in params.picks.items()}
    columns = params.columns
    return [
        SampledToken(
            ids[i],
            logprobs[i],
            _possible(top_ids[i], top_values[i], int(columns["num_top"][i])),
            picked.get(i, ()),
        )
        if columns["logprob"][i]
        else SampledToken(ids[i])
        for i in range(len(ids))
    ]


def _possible(ids: list[int], logprobs: list[float], num_top: int) -> tuple[tuple[int, float], ...]:
    """Return the first `num_top` entries without those that a grammar or a ban forbids, which come last."""
    pairs = zip(ids[:num_top], logprobs[:num_top], strict=True)
    return tuple(pair for pair in pairs if pair[1] != -np.inf)


def uniforms(seeds: npt.NDArray[np.uint64], positions: IntArray) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): two rounds of splitmix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 output function."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _shape(logits: Tensor, params: StepParams, tokens: Tensor) -> Tensor:
    """Return the logits after penalties, bias and bans; `logits` is not changed."""
    history = params.columns["history"].nonzero()[0]
    if not len(history) and not params.bans and not params.biases:
        return logits
    shaped = logits.clone()
    if len(history):
        _penalise(shaped, params, history, tokens)
    pairs = [(row, token, bias) for row, entry in params.biases.items() for token, bias in entry.items()]
    pairs += [(row, token, -np.inf) for row, banned in params.bans.items() for token in banned]
    if pairs:
        where = to_device(np.array([(row, token) for row, token, _ in pairs], dtype=np.int64).T, logits.device)
        amounts = to_device(np.array([amount for _, _, amount in pairs], dtype=np.float32), logits.device)
        shaped.index_put_((where[0], where[1]), amounts, accumulate=True)
    return shaped


def _penalise(shaped: Tensor, params: StepParams, rows: IntArray, tokens: Tensor) -> None:
    """Apply the penalties in place.

    Repetition covers prompt and output (as transformers); frequency and presence cover the output (as OpenAI).
    """
    device, vocab = shaped.device, shaped.shape[1]
    columns, lengths = params.columns[rows], params.positions[rows]
    index = to_device(rows, device)
    known = tokens.index_select(0, to_device(params.table_rows[rows], device))[:, : int(lengths.max())].long()
    place = torch.arange(known.shape[1], device=device)
    present = place < to_device(lengths, device)[:, None]
    is_output = present & (place >= to_device(columns["num_prompt"].copy(), device)[:, None])
    known = torch.where(present, known, 0)
    zeros = torch.zeros(len(rows), vocab, device=device)
    seen = zeros.scatter_add(1, known, present.float()) > 0
    counts = zeros.scatter_add_(1, known, is_output.float())
    repetition, frequency, presence = (
        to_device(columns[name].copy(), device)[:, None] for name in ("repetition", "frequency", "presence")
    )
    values = shaped.index_select(0, index)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen, repeated, values)
    shaped.index_copy_(0, index, values - counts * frequency - (counts > 0) * presence)


def _draw(logits: Tensor, columns: Columns, points: npt.NDArray[np.float64], best: Tensor) -> Tensor:
    """Draw one token a row at its temperature, within its filters: int64 `[R]`.

    A row without a distribution (NaN or infinite logits, or no allowed token) takes its `best`.
    """
    device = logits.device
    temperature = to_device(columns["temperature"].copy(), device)[:, None]
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    least = _least_probability(probs, columns)
    if least is not None:
        probs = torch.where(probs >= least[:, None], probs, 0.0)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, to_device(points, device)[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    drawn = torch.minimum(index, last)[:, 0]
    return torch.where(total[:, 0].isfinite(), drawn, best)


def _least_probability(probs: Tensor, columns: Columns) -> Tensor | None:
    """Return the smallest probability that each row may draw, float32 `[R]`, ties included. None: no row filters."""
    device, vocab = probs.device, probs.shape[1]
    by_k = columns["top_k"] < min(vocab, TOP_K_ALL)
    by_p = columns["top_p"] < 1.0
    least = None
    if (columns["min_p"] > 0).any():
        least = probs.amax(-1) * to_device(columns["min_p"].copy(), device)
    only_p = by_p & ~by_k
    for rows, threshold_of in ((np.flatnonzero(by_k), _top_k_threshold), (np.flatnonzero(only_p), _top_p_threshold)):
        if len(rows):
            index = to_device(rows, device)
            found = threshold_of(probs.index_select(0, index), columns[rows])
            floor = torch.zeros(len(columns), device=device).index_copy_(0, index, found)
            least = floor if least is None else torch.maximum(least, floor)
    return least


def _top_k_threshold(probs: Tensor, columns: Columns) -> Tensor:
    """Return the probability of the last token that top-k keeps, and top-p where the row has it."""
    deepest = int(columns["top_k"].max())
    return _floor(probs.topk(deepest, sorted=True).values, columns)


def _top_p_threshold(probs: Tensor, columns: Columns) -> Tensor:
    """Return the probability of the last token that top-p keeps, for rows without top-k.

    Only the CPU checks whether a window suffices: on a device that check would wait for it.
    """
    if probs.device.type == "cuda" and runtime.is_installed():
        from pdserve.model.gpu.sampling import top_p_threshold

        return top_p_threshold(probs, to_device(columns["top_p"].copy(), probs.device))
    if probs.device.type == "cpu" and probs.shape[1] > _WINDOW:
        ranked = probs.topk(_WINDOW, sorted=True).values
        if bool((ranked.sum(-1) >= torch.from_numpy(columns["top_p"].copy())).all()):
            return _floor(ranked, columns)
    return _floor(probs.sort(-1, descending=True).values, columns)


def _floor(ranked: Tensor, columns: Columns) -> Tensor:
    """Return the probability of the last token that both top-k and top-p keep. `ranked` `[R, W]` descends."""
    device = ranked.device
    top_k = to_device(np.minimum(columns["top_k"], ranked.shape[1]), device)
    top_p = to_device(columns["top_p"].copy(), device)[:, None]
    before = ranked.cumsum(-1) - ranked
    kept = torch.where(top_p < 1.0, before < top_p, True).sum(-1)
    last = torch.minimum(kept, top_k).clamp(min=1) - 1
    return ranked.gather(1, last[:, None])[:, 0]


def _scaled(shaped: Tensor, columns: Columns) -> Tensor:
    """Return `shaped` at each row's temperature; rows with temperature 0 keep theirs, as in SGLang."""
    temperature = np.where(columns["temperature"] > 0, columns["temperature"], np.float32(1.0))
    if (temperature == 1.0).all():
        return shaped
    return (shaped - shaped.amax(-1, keepdim=True)) / to_device(temperature, shaped.device)[:, None]


def _with_logprobs(chosen: Tensor, logits: Tensor, params: StepParams) -> Sampled:
    """Add log probabilities of `logits` where a row requests them."""
    if not params.wants_logprobs:
        return Sampled(chosen, None, None, None)
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    picked = None
    if params.picks:
        wanted = np.zeros((len(logits), params.num_picks), dtype=np.int64)
        for row, ids in params.picks.items():
            wanted[row, : len(ids)] = ids
        picked = logprobs.gather(1, to_device(wanted, logits.device))
    num_top = min(params.num_top, logits.shape[1])
    if num_top == 0:
        return Sampled(chosen, own, None, None, picked)
    top = logprobs.topk(num_top, sorted=True)
    return Sampled(chosen, own, top.indices, top.values, picked)


Found = tuple[Sampled | None, TokenOutputs | None]


def d2h_copy_after(
    sampled: Sampled | None, outputs: TokenOutputs | None, arrival: Arrival, aside: torch.cuda.Stream | None
) -> Callable[[], Found]:
    """As `d2h_copy`, for tensors that are under way from another rank. Later steps do not wait for them.

    `aside`: the CUDA stream of the copies; None on CPU.
    """
    if aside is None:

        def wait() -> Found:
            arrival.wait()
            return sampled, outputs

        return wait
    with torch.cuda.stream(aside):
        arrival.wait()
        tensors = ([] if sampled is None else sampled.tensors()) + ([] if outputs is None else outputs.tensors())
        for tensor in tensors:
            tensor.record_stream(aside)
        return d2h_copy(sampled, outputs, aside.device)


def d2h_copy(sampled: Sampled | None, outputs: TokenOutputs | None, device: torch.device) -> Callable[[], Found]:
    """Begin the copy; returns a function that waits for all work enqueued so far and returns the host tensors.

    It waits also where nothing was sampled (None): the step's KV is written then.
    """
    if device.type != "cuda":
        return lambda: (sampled, outputs)
    copies = (None if sampled is None else _copy_sampled(sampled), None if outputs is None else _copy_outputs(outputs))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> Found:
        done.synchronize()
        return copies

    return wait


def _copy_sampled(sampled: Sampled) -> Sampled:
    """Return host tensors that the current stream fills."""
    return Sampled(
        _pinned(sampled.token_ids),
        None if sampled.logprobs is None else _pinned(sampled.logprobs),
        None if sampled.top_ids is None else _pinned(sampled.top_ids),
        None if sampled.top_logprobs is None else _pinned(sampled.top_logprobs),
        None if sampled.picked is None else _pinned(sampled.picked),
        None if sampled.failed is None else _pinned(sampled.failed),
    )


def _copy_outputs(outputs: TokenOutputs) -> TokenOutputs:
    """Return host tensors that the current stream fills."""
    scores, hidden = outputs.scores, outputs.hidden
    return TokenOutputs(
        None if scores is None else PromptLogprobTensors(*map(_pinned, scores.tensors())),
        None if hidden is None else _pinned(hidden),
    )


def _pinned(tensor: Tensor) -> Tensor:
    """Return a pinned host tensor that the current stream fills."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
