"""What must hold for copies to the host tier, and for other weights, beside steps on a device.

Shared by `check_cuda.py` and `tests/gpu`. Each check raises AssertionError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.ahead_checks import built_on
from benchmarks.gpu.executor_checks import NUM_NEW, Device, prompts
from pdserve.executor.interface import CopyHandle
from pdserve.executor.page_copies import pinned
from pdserve.executor.weights import WeightsSource
from pdserve.memory.layout import PageSpace, pages_for
from pdserve.memory.tiers.host_memory import HostMemory, PageCopies, zeros
from tests.driver import Driver

LIMIT_S = 60.0


class Decoding:
    """A request that decodes, a token at each `step`."""

    def __init__(self, driver: Driver, prompt: Sequence[int], limit: int) -> None:
        self._driver = driver
        self._row = driver.open(prompt, limit)
        self._start, self._end = 0, len(prompt)
        self.tokens: list[int] = []

    def step(self) -> None:
        """Compute the next token."""
        token = self._driver.step((self._row, self._start, self._end, True))[0]
        assert token is not None
        self.tokens.append(token.token_id)
        self._start, self._end = self._end, self._end + 1

    def step_until(self, has_ended: Callable[[], bool], most: int) -> None:
        """Compute tokens until `has_ended`, at most `most`."""
        while len(self.tokens) < most and not has_ended():
            self.step()


def check_host_tier(checkpoint: Path, device: Device, page_size: int) -> None:
    """Pages go to the host tier and into other pages beside the steps of another request, with equal bytes.

    The request of these pages goes on behind them with the tokens of an undisturbed one, and so does the other request.
    """
    prompt, other = prompts()[-1], prompts()[-2]
    num_other = 64
    with built_on(checkpoint, device, page_size) as built:
        driver, executor = Driver(built), built.executor
        count = pages_for(len(prompt), page_size)
        host = HostMemory(built.layout, {PageSpace.TOKENS: count}, pinned if device == "cuda" else zeros)
        executor.open_host_tier(host)
        (expected,) = driver.generate([prompt], NUM_NEW)
        (undisturbed,) = driver.generate([other], num_other)

        row = driver.open(prompt, len(prompt) + 1)
        first = driver.step((row, 0, len(prompt), True))[0]
        assert first is not None
        pages = tuple(int(page) for page in built.table.pages[row, :count])
        content = executor.pools[0].pages_as_bytes[list(pages)].cpu()
        beside = Decoding(driver, other, len(other) + num_other)
        slots = tuple(reversed(range(count)))
        save = executor.start_save([PageCopies(PageSpace.TOKENS, pages, slots)])
        beside.step_until(lambda: save.is_done, num_other // 2)
        wait(save)
        driver.close(row)
        executor.pools[0].pages_as_bytes[list(pages)] = 255
        if device == "cuda":
            torch.cuda.synchronize()  # the copies run in another stream
        again = driver.open([*prompt, first.token_id], len(prompt) + NUM_NEW, num_prompt=len(prompt))
        target = tuple(int(page) for page in built.table.pages[again, :count])
        load = executor.start_load([PageCopies(PageSpace.TOKENS, target, slots)])
        beside.step_until(lambda: load.is_done, num_other)
        wait(load)
        assert torch.equal(executor.pools[0].pages_as_bytes[list(target)].cpu(), content), "other bytes came back"
        tokens = [first.token_id]
        for position in range(len(prompt), len(prompt) + NUM_NEW - 1):
            token = driver.step((again, position, position + 1, True))[0]
            assert token is not None
            tokens.append(token.token_id)
        assert tokens == expected, f"page size {page_size}: {tokens}, not {expected}"
        beside.step_until(lambda: False, num_other)
        assert beside.tokens == undisturbed, "copies have changed the tokens of another request"


def check_other_weights(checkpoint: Path, other: Path, device: Device) -> None:
    """Weights that are loaded beside steps compute the tokens of a new executor with them, there and back."""
    prompt = prompts()[-1]

    def tokens_of(path: Path) -> list[int]:
        with built_on(path, device) as fresh:
            return Driver(fresh).generate([prompt], NUM_NEW)[0]

    expected, changed = tokens_of(checkpoint), tokens_of(other)
    assert expected != changed, "the checkpoints compute the same tokens: nothing is checked"
    with built_on(checkpoint, device) as built:
        assert built.weights is not None
        for path, former, latter in ((other, expected, changed), (checkpoint, changed, expected)):
            driver = Driver(built)
            loading = built.weights.prepare(WeightsSource(str(path)))
            found = driver.generate([prompt], NUM_NEW)[0]
            assert found == former, f"while {path} is loaded: {found}, not {former}"
            prepared = loading.result(timeout=LIMIT_S)
            assert prepared is not None
            built.weights.install(prepared)
            found = driver.generate([prompt], NUM_NEW)[0]
            assert found == latter, f"after {path} was installed: {found}, not {latter}"


def wait(handle: CopyHandle) -> None:
    """Wait for the end of copies. Raises what made them fail."""
    ended = threading.Event()
    handle.on_end(ended.set)
    assert ended.wait(LIMIT_S) and handle.is_done, f"copies have not ended within {LIMIT_S:g} s"
