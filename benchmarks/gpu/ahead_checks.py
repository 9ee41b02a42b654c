"""What must hold for steps that are launched ahead on a device. Shared by `check_cuda.py` and `tests/gpu`.

Each check raises AssertionError.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.executor_checks import LOGPROB_TOLERANCE, Device, prompts
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.interface import BatchPlan, BatchRow, StepHandle
from pdserve.memory.layer_events import LayerEvents
from pdserve.memory.layout import pages_for
from pdserve.protocol.sampling import CoreSamplingParams
from tests.ahead import Request, build_ahead, generate_ahead, requests, sampled, token_ids, written_within
from tests.driver import Driver

DEPTHS = (1, 2)
LIMIT_S = 60.0
Launch = Callable[..., StepHandle]
OFFLOADED = CoreSamplingParams(temperature=1.2, seed=3, repetition_penalty=1.2, frequency_penalty=0.4)


def has_grammars() -> bool:
    """Whether what follows grammars is there: rows that do are left out of the checks else."""
    return importlib.util.find_spec("llguidance") is not None


@contextlib.contextmanager
def built_on(checkpoint: Path, device: Device, page_size: int = 16) -> Iterator[LoadedEngine]:
    """An executor with overlap, closed at the end."""
    built = build_ahead(checkpoint, overlap=True, device=device, page_size=page_size)
    try:
        yield built
    finally:
        built.executor.close()


def check_ahead(checkpoint: Path, device: Device) -> None:
    """At each depth the tokens and log-probabilities are the CPU's of steps one by one, penalties and all."""
    with built_on(checkpoint, "cpu") as built:
        expected = generate_ahead(built, _requests(), depth=1)
    for depth in DEPTHS:
        with built_on(checkpoint, device) as built:
            found = generate_ahead(built, _requests(), depth=depth)
        assert token_ids(found) == token_ids(expected), f"depth {depth}: tokens differ from those of the CPU"
        for have, want in zip(sampled(found), sampled(expected), strict=True):
            assert (have.logprob is None) == (want.logprob is None)
            if have.logprob is not None and want.logprob is not None:
                assert abs(have.logprob - want.logprob) <= LOGPROB_TOLERANCE, f"depth {depth}: {have}, not {want}"


def check_launch_never_waits(checkpoint: Path, device: Device) -> None:
    """No operation of a launch waits for the device, whatever is sampled; torch raises where one does.

    With layer events, and without, where decode steps are replays. What torch does not count is how rows that follow
    a grammar wait for their last token: by a thread, on an event behind the step before.
    """
    with built_on(checkpoint, device) as built:
        generate_ahead(built, _requests(), depth=2)
    for layer_events in (True, False):
        with built_on(checkpoint, device) as built:
            launch = built.executor.launch

            def watched(plan: BatchPlan, *, layer_events: bool = False, launch: Launch = launch) -> StepHandle:
                with _waiting_is_an_error(device):
                    return launch(plan, layer_events=layer_events)

            built.executor.launch = watched  # type: ignore[method-assign]
            generate_ahead(built, _requests(), depth=2, layer_events=layer_events)


def check_layer_events(checkpoint: Path, device: Device) -> None:
    """Another thread finds the KV of each layer in a pool of NaN as soon as its event comes."""
    prompt = prompts()[-1]
    with built_on(checkpoint, device) as built:
        row = Driver(built).open(prompt, len(prompt) + 1)
        whole = built.table.pages[row, : len(prompt) // 16].tolist()
        num_layers = built.executor.layout.groups[0].num_layers
        found: list[bool] = []

        def work(events: LayerEvents) -> None:
            for layer in range(num_layers):
                written = written_within(events, layer + 1, LIMIT_S)
                found.append(written and not bool(built.executor.pools[0].pages[whole, layer].isnan().any()))

        if device == "cuda":
            torch.cuda.synchronize()  # the driver's NaN
        handle = built.executor.launch(BatchPlan(0, (BatchRow("a", row, 0, len(prompt), True),)), layer_events=True)
        assert handle.layer_events is not None
        worker = threading.Thread(target=work, args=(handle.layer_events,))
        worker.start()
        built.executor.resolve(handle)
        worker.join(LIMIT_S)
        assert found == [True] * num_layers, f"layers whose KV was there when their event came: {found}"


def check_offload(checkpoint: Path, device: Device, page_size: int) -> None:
    """A request whose KV goes to the host and back into other pages goes on as if nothing had happened."""
    prompt, num_new, before = prompts()[-1], 12, 5
    limit = len(prompt) + num_new
    with built_on(checkpoint, device, page_size) as built:
        driver, executor = Driver(built), built.executor
        expected = _generate(driver, driver.open(prompt, limit, OFFLOADED), 0, len(prompt), num_new)
        row = driver.open(prompt, limit, OFFLOADED)
        tokens = _generate(driver, row, 0, len(prompt), before)
        computed = len(prompt) + before - 1
        pages = built.table.pages[row, : pages_for(computed, page_size)].tolist()
        content = executor.pools[0].pages[pages].view(torch.uint8).cpu()
        saved = executor.offload([pages])
        driver.close(row)
        executor.pools[0].pages[pages] = float("nan")
        again = driver.open([*prompt, *tokens], limit, OFFLOADED, num_prompt=len(prompt))
        target = built.table.pages[again, : len(pages)].tolist()
        executor.restore(saved, [target])
        tokens += _generate(driver, again, computed, computed + 1, num_new - before)
        assert tokens == expected, f"page size {page_size}: {tokens}, not {expected}"
        executor.restore(saved, [target])
        if device == "cuda":
            torch.cuda.synchronize()
        restored = executor.pools[0].pages[target].view(torch.uint8).cpu()
        assert torch.equal(restored, content), f"page size {page_size}: other bytes came back"


@contextlib.contextmanager
def _waiting_is_an_error(device: Device) -> Iterator[None]:
    """On CUDA: operations that wait for the device raise."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _requests() -> list[Request]:
    """All kinds of requests that can be had."""
    return requests(grammars=has_grammars())


def _generate(driver: Driver, row: int, start: int, end: int, num_tokens: int) -> list[int]:
    """Tokens of `row` by a step over `[start, end)` and decode steps behind it."""
    found = []
    for _ in range(num_tokens):
        token = driver.step((row, start, end, True))[0]
        assert token is not None
        found.append(token.token_id)
        start, end = end, end + 1
    return found
