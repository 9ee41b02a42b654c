"""Other weights of replicas that compute together: all ranks 0 come to the same end of a load, and know all samples."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.weights import LeaderWeights
from pdserve.errors import ModelError
from pdserve.protocol.weights import PrepareWeights
from pdserve.ranks.dp_sync import DpSync
from tests.unit.ranks.test_dp_sync import leaders
from tests.waiting import wait_until

Samples = dict[str, dict[int, float]]


class Loader:
    """Stands for `WeightsLoader`: a load ends when the test says so."""

    def __init__(self) -> None:
        self.source = SimpleNamespace(path="there", load_format="auto")
        self.groups = None
        self.future: Future[Any] = Future()
        self.num_installed = 0

    def prepare(self, source: object) -> Future[Any]:
        return self.future

    def install(self, prepared: object) -> None:
        self.num_installed += 1

    def end(self, samples: Samples) -> None:
        self.future.set_result(SimpleNamespace(samples=samples, draft_samples={}, digest="", source=self.source))


class Leader:
    """Rank 0 of a replica of one rank."""

    def __init__(self, dp_sync: DpSync, dp_rank: int) -> None:
        self.loader, self.samples = Loader(), [Samples()]
        coord = SimpleNamespace(rank=0, shape=SimpleNamespace(num_ranks=1))
        engine: Any = SimpleNamespace(
            built=SimpleNamespace(weights=self.loader, coord=coord), group=None, dp_sync=dp_sync,
            weights_fingerprint="f", change_weights=self._change,
        )  # fmt: skip
        self.weights = LeaderWeights(engine, "v1", lambda facts, weights: None, lambda: None, dp_rank)
        self.end: str | None = None

    def _change(self, samples: Sequence[Samples], draft_samples: Sequence[Samples], digest: str) -> None:
        self.samples = list(samples)

    def is_loaded(self) -> bool:
        """Look once a turn, as the scheduler does, until the load has ended."""
        self.end = self.weights.loaded() if self.end is None else self.end
        return self.end is not None


def begin(met: Sequence[DpSync]) -> list[Leader]:
    found = [Leader(dp_sync, number) for number, dp_sync in enumerate(met)]
    for one in found:
        one.weights.begin(PrepareWeights(query_id="q", model_path="there"))
    return found


def all_loaded(found: Sequence[Leader]) -> bool:
    """Look at all of them: each reports when it is asked."""
    return sum(one.is_loaded() for one in found) == len(found)


def test_all_replicas_know_the_samples_of_all() -> None:
    with leaders(2) as met:
        first, second = begin(met)
        first.loader.end({"w": {0: 1.0}})
        assert not first.is_loaded() and not second.is_loaded()
        second.loader.end({"w": {1: 2.0}})
        wait_until(lambda: all_loaded((first, second)), "all have loaded")
        assert first.end == second.end == ""
        second.weights.may_install("i")
        wait_until(lambda: first.weights.may_install("i") and second.weights.may_install("i"), "nothing runs")
        for one in (first, second):
            assert one.weights.install("v2").facts["weight_version"] == "v2" and one.loader.num_installed == 1
        assert first.samples == [{"w": {0: 1.0}}, {"w": {1: 2.0}}] and second.samples == first.samples[::-1]


@pytest.mark.parametrize("how", ["no memory", "different values of w"])
def test_no_replica_takes_weights_that_another_has_not(how: str) -> None:
    """One cannot load, or has loaded other ones."""
    with leaders(2) as met:
        first, second = begin(met)
        first.loader.end({"w": {0: 1.0}})
        if how == "no memory":
            second.loader.future.set_exception(ModelError(how))
        else:
            second.loader.end({"w": {0: 2.0}})
        wait_until(lambda: all_loaded((first, second)), "all have ended")
        assert how in (first.end or "") and how in (second.end or "")
        for one in (first, second):
            one.weights.install(None)
            assert one.loader.num_installed == 0


def test_a_refusal_ends_the_load_that_another_replica_has_begun() -> None:
    """Also where its other loads and refusals come in between."""
    with leaders(3) as met:
        first, second, third = begin(met[:1])[0], Leader(met[1], 1), Leader(met[2], 2)
        third.weights.refuse("q", "other weights are being loaded")
        for query_id in ("p", "r"):
            second.weights.refuse(query_id, "not this one")
        first.loader.end({"w": {0: 1.0}})
        wait_until(first.is_loaded, "the load has ended")
        assert first.end == "other weights are being loaded"
        first.weights.install(None)
        assert first.loader.num_installed == 0


def test_an_update_that_has_ended_waits_for_no_other_replica() -> None:
    with leaders(2) as met:
        first, _ = begin(met)
        first.loader.end({"w": {0: 1.0}})
        assert not first.is_loaded()
        first.weights.end_wait()
        assert first.is_loaded()


@pytest.mark.parametrize(("version", "is_logged"), [(None, True), ("v1", True), ("v2", False)])
def test_new_weights_that_have_the_former_name_are_logged(
    version: str | None, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The fingerprint stays as well, which is that of a sample."""
    alone: Any = None
    leader = begin([alone])[0]
    leader.loader.end({"w": {0: 1.0}})
    assert leader.is_loaded() and not leader.end
    leader.weights.install(version)
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert bool(warned) is is_logged and all("v1@f" in text and "weight_version" in text for text in warned)
