"""When look-ups of unknown addresses fail: with a client that answers as told, and a loop without real time."""

from __future__ import annotations

import asyncio
import selectors

import pytest

from pdserve.transfer import lookups
from pdserve.transfer.bootstrap_client import BootstrapError
from pdserve.transfer.events import Address, TransferEvent
from tests.unit.transfer.test_bootstrap import SECRET
from tests.unit.transfer.test_directory import FAILURE, HOST, PATIENCE_S, anonymous


class Skips(selectors.DefaultSelector):
    """Selects for a loop whose time skips to the next timer whenever nothing else is ready."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            assert timeout is not None, "nothing is left to happen"
            self.now_s += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop without real time: a second of `sleep` takes none."""

    def __init__(self) -> None:
        self._skips = Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.now_s


async def refused(address: Address) -> None:
    raise BootstrapError("no bootstrap server answers", code="bootstrap_unreachable")


async def wrong(address: Address) -> None:
    raise BootstrapError("no pdserve bootstrap server", code="bootstrap_refused", retryable=False)


async def late_and_wrong(address: Address) -> None:
    await asyncio.sleep(0.7 * PATIENCE_S)
    await wrong(address)


async def dripping(address: Address) -> None:
    while True:
        await asyncio.sleep(0.05)


async def never(address: Address) -> None:
    await asyncio.Event().wait()


async def broken(address: Address) -> None:
    await asyncio.sleep(0.1)
    raise BootstrapError("the bootstrap server is not ready (500)", code="bootstrap_unready")


ANSWERS = (refused, wrong, late_and_wrong, dripping, never, broken)


class AnsweredClient:
    """In place of `BootstrapClient`: the port is the number of an answer."""

    def __init__(self, host: str, port: int, *_: object) -> None:
        self._address = (host, port)

    async def __aenter__(self) -> AnsweredClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def replica(self, dp_rank: int) -> None:
        await ANSWERS[self._address[1]](self._address)


def test_all_failures_of_unknown_addresses_come_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "BootstrapClient", AnsweredClient)

    async def look_up() -> list[tuple[float, TransferEvent]]:
        posted: list[tuple[float, TransferEvent]] = []
        now = asyncio.get_running_loop().time
        look_ups = lookups.LookUps(lambda event: posted.append((now(), event)), SECRET, PATIENCE_S)
        for port in range(len(ANSWERS)):
            look_ups.start((HOST, port))
        while len(posted) < len(ANSWERS):
            await asyncio.sleep(0.01)
        return posted

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        posted = runner.run(look_up())
    assert [at for at, _ in posted] == pytest.approx([PATIENCE_S] * len(ANSWERS), abs=1e-6)
    assert [anonymous(event) for _, event in posted] == [FAILURE] * len(ANSWERS)
