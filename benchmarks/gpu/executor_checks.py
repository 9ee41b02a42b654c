"""What must hold for the executor on a device: the tokens of the CPU. Shared by `check_cuda.py` and `tests/gpu`.

Each check raises AssertionError. The driver fills the whole KV pool with NaN first and scatters the pages, so a slot
that is read before it is written, or on the wrong page, shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pdserve.config.groups import AttentionBackendName
from pdserve.executor.factory import LoadedEngine
from pdserve.protocol.logprobs import Logprobs, PromptLogprobs, join
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE

Device = Literal["cpu", "cuda"]
PAGE_SIZES = (1, 16, 64)
PROMPT_LENGTHS = (1, 15, 16, 17, 100, 300)
NUM_NEW = 12
MIXED_CHUNK = 23
LOGPROB_TOLERANCE = 2e-3
SAMPLINGS = (
    CoreSamplingParams(temperature=1.2, seed=11, top_k=40),
    CoreSamplingParams(temperature=1.5, seed=12, top_p=0.95),
    CoreSamplingParams(temperature=1.0, seed=13, repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.01),
)


def prompts() -> list[list[int]]:
    """One prompt of each length."""
    return [random_prompt(length, VOCAB_SIZE) for length in PROMPT_LENGTHS]


def greedy_tokens(
    checkpoint: Path,
    device: Device,
    *,
    page_size: int,
    chunk: int | None,
    dtype: Literal["float32", "bfloat16"],
    attention_backend: AttentionBackendName = "auto",
    disable_cuda_graph: bool = False,
) -> list[list[int]]:
    """Greedy tokens of all prompts together; with `chunk`, some prefill while others decode."""
    built = build(
        checkpoint, page_size=page_size, device=device, dtype=dtype, attention_backend=attention_backend,
        disable_cuda_graph=disable_cuda_graph,
    )  # fmt: skip
    return Driver(built).generate(prompts(), NUM_NEW, chunk=chunk)


def check_greedy(
    checkpoint: Path,
    device: Device,
    page_size: int,
    expected: Sequence[Sequence[int]],
    *,
    attention_backend: AttentionBackendName = "auto",
    disable_cuda_graph: bool = False,
) -> None:
    """fp32 tokens in whole prefills, and in batches that mix chunks with decoding, equal `expected`."""
    for chunk in (None, MIXED_CHUNK):
        got = greedy_tokens(
            checkpoint, device, page_size=page_size, chunk=chunk, dtype="float32",
            attention_backend=attention_backend, disable_cuda_graph=disable_cuda_graph,
        )  # fmt: skip
        for length, have, want in zip(PROMPT_LENGTHS, got, expected, strict=True):
            assert have == list(want), f"page size {page_size}, chunk {chunk}, prompt of {length}: {have}, not {want}"


def logprobs_of(checkpoint: Path, device: Device, dtype: Literal["float32", "bfloat16"]) -> list[float]:
    """Log-probability of each greedy token of the longest prompt."""
    return [logprob for _, logprob in _run(build(checkpoint, device=device, dtype=dtype), GREEDY)]


def check_logprobs(checkpoint: Path, device: Device) -> float:
    """fp32 log-probabilities are those of the CPU; returns the largest difference."""
    pairs = zip(logprobs_of(checkpoint, device, "float32"), logprobs_of(checkpoint, "cpu", "float32"), strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    assert worst <= LOGPROB_TOLERANCE, f"log-probabilities differ by {worst:.2e}, allowed {LOGPROB_TOLERANCE:.0e}"
    return worst


def check_sampling(checkpoint: Path, device: Device) -> None:
    """Seeded sampling with every filter draws the tokens that the CPU draws."""
    for sampling in SAMPLINGS:
        have, want = (
            [token for token, _ in _run(build(checkpoint, device=where, dtype="float32"), sampling)]
            for where in (device, "cpu")
        )
        assert have == want, f"{sampling}: {have}, not {want}"


def check_finite_bf16(checkpoint: Path, device: Device) -> None:
    """In bfloat16 no NaN of the pool reaches a result."""
    found = logprobs_of(checkpoint, device, "bfloat16")
    assert all(math.isfinite(value) for value in found), f"log-probabilities {found}"


def check_hand_over(checkpoint: Path, device: Device, page_size: int) -> None:
    """Pages copied into other pages of a second pool, and the first token, are all that decode needs to go on."""
    prompt = prompts()[-1]
    monolith, prefill, decode = (
        Driver(build(checkpoint, page_size=page_size, device=device, dtype="float32"), seed=seed) for seed in range(3)
    )
    (expected,) = monolith.generate([prompt], NUM_NEW)
    source = prefill.open(prompt, len(prompt))
    first = prefill.step((source, 0, len(prompt), True))[0]
    assert first is not None
    tokens = [first.token_id]
    target = decode.open([*prompt, *tokens], len(prompt) + NUM_NEW, num_prompt=len(prompt))
    count = -(-len(prompt) // page_size)
    from_pages = prefill.built.table.pages[source, :count].tolist()
    to_pages = decode.built.table.pages[target, :count].tolist()
    decode.built.executor.pools[0].pages[to_pages] = prefill.built.executor.pools[0].pages[from_pages]
    for position in range(len(prompt), len(prompt) + NUM_NEW - 1):
        token = decode.step((target, position, position + 1, True))[0]
        assert token is not None
        tokens.append(token.token_id)
    assert tokens == expected, f"page size {page_size}: {tokens}, not {expected}"


def prompt_logprobs_of(checkpoint: Path, device: Device) -> PromptLogprobs:
    """Of the longest prompt, in chunks: of its tokens, of the three best at each place, and of two that were picked."""
    driver, prompt = Driver(build(checkpoint, device=device, dtype="float32")), prompts()[-1]
    row = driver.open(prompt, len(prompt) + 1, logprobs=Logprobs(top=3, token_ids=(5, 300), prompt_from=0))
    parts: list[PromptLogprobs] = []
    for start in range(0, len(prompt), MIXED_CHUNK):
        end = min(start + MIXED_CHUNK, len(prompt))
        parts += driver.result((row, start, end, end == len(prompt))).prompts.values()
    whole = join(parts, 1, len(prompt))
    assert whole is not None, [(part.start, part.num_tokens) for part in parts]
    return whole


def check_prompt_logprobs(checkpoint: Path, device: Device) -> float:
    """fp32 log-probabilities of a prompt are those of the CPU; returns the largest difference."""
    mine, theirs = (prompt_logprobs_of(checkpoint, where).arrays() for where in (device, "cpu"))
    worst = max(float(abs(mine[i] - theirs[i]).max()) for i in (0, 3, 4))  # own, of the best, of those picked
    assert worst <= LOGPROB_TOLERANCE, f"they differ by {worst}"
    return worst


def _run(built: LoadedEngine, sampling: CoreSamplingParams) -> list[tuple[int, float]]:
    """`(token, log-probability)` of NUM_NEW tokens after the longest prompt."""
    driver, prompt = Driver(built), prompts()[-1]
    row = driver.open(prompt, len(prompt) + NUM_NEW, sampling, top_logprobs=0)
    start, end, found = 0, len(prompt), []
    for _ in range(NUM_NEW):
        token = driver.step((row, start, end, True))[0]
        assert token is not None and token.logprob is not None
        found.append((token.token_id, token.logprob))
        start, end = end, end + 1
    return found
