"""Expert parallelism load balancing (EPLB): moves experts between ranks while the server runs.

Owned by the `LocalExecutor` of a rank that holds whole experts. `plan` and `place` are called on every rank at the same
point between two steps. All ranks have equal counts, so all make the same placement, and only weights are sent. A
thread makes the plan while steps go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pdserve.model.eplb import Row, balanced, balancedness
from pdserve.model.layers.expert_parallel import ExpertParallelMoe

Behind = Callable[[], contextlib.AbstractContextManager[object]]
"""See `StepRunner.behind`."""


class ExpertBalance:
    """The experts of `moe_layers` (by index in the model), which `num_ranks` ranks share. Scheduler thread."""

    def __init__(self, moe_layers: Mapping[int, ExpertParallelMoe], num_ranks: int, behind: Behind) -> None:
        assert moe_layers, "a stage without experts has nothing to balance"
        self._moe_layers = moe_layers
        self._num_ranks = num_ranks
        self._behind = behind
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="eplb")
        self._plan: Future[dict[int, Row]] | None = None
        self._seen = torch.zeros_like(self._counts(), device="cpu")
        self.num_moved = 0
        """Experts that this rank has received since start-up."""
        self.num_placed = 0
        """Calls of `place` since start-up."""

    @property
    def is_planning(self) -> bool:
        """True when a plan has begun and is not carried out yet."""
        return self._plan is not None

    @property
    def is_planned(self) -> bool:
        """True when `place` would not block."""
        return self._plan is not None and self._plan.done()

    @torch.inference_mode()
    def plan(self) -> None:
        """Begin to plan from the counts since the last plan, behind all launched steps."""
        assert self._plan is None, "one plan at a time"
        with self._behind():
            arrived = _to_host(self._counts())
        rows = {layer: moe.row for layer, moe in self._moe_layers.items()}
        self._plan = self._planner.submit(self._make, arrived, rows)

    @torch.inference_mode()
    def place(self) -> None:
        """Wait for the plan and carry it out together with the other ranks, behind all launched steps."""
        assert self._plan is not None, "nothing is planned"
        rows, self._plan = self._plan.result(), None
        with self._behind():
            for layer, row in rows.items():
                if row != self._moe_layers[layer].row:
                    self.num_moved += self._moe_layers[layer].move(row)
        self.num_placed += 1

    @torch.inference_mode()
    def change_layers(self, moe_layers: Mapping[int, ExpertParallelMoe]) -> None:
        """Balance other weights of the same layers, and move their experts to where the present ones are.

        All ranks do it together, behind all launched steps. A plan that has begun stays valid, and so do the counts,
        which the new layers have already.
        """
        with self._behind():
            for layer, moe in moe_layers.items():
                if moe.row != self._moe_layers[layer].row:
                    moe.move(self._moe_layers[layer].row)
        self._moe_layers = moe_layers

    def facts(self) -> dict[str, float]:
        """Facts for `/get_server_info`. `expert_balancedness` is over all counts since start-up, for the present
        placement; 1 is best. Waits for no step.
        """
        counts = self._counts().tolist()
        rows = [moe.row for moe in self._moe_layers.values()]
        balance = [balancedness(of_layer, self._num_ranks, row) for of_layer, row in zip(counts, rows, strict=True)]
        return {
            "expert_balancedness": round(sum(balance) / len(balance), 4),
            "expert_rebalances": self.num_placed,
            "experts_moved": self.num_moved,
        }

    def close(self) -> None:
        """End the planner thread."""
        self._planner.shutdown()

    def _counts(self) -> Tensor:
        """Return a copy of the counts, int64 `[layers, experts]`."""
        return torch.stack([moe.counts for moe in self._moe_layers.values()])

    def _make(self, arrived: Callable[[], Tensor], rows: Mapping[int, Row]) -> dict[int, Row]:
        """Make the plan. Planner thread."""
        counts = arrived()
        news, self._seen = (counts - self._seen).tolist(), counts
        return {
            layer: balanced(of_layer, self._num_ranks, row)
            for of_layer, (layer, row) in zip(news, rows.items(), strict=True)
        }


def _to_host(counts: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to the host; returns a function that waits for the copy, on any thread."""
    if counts.device.type != "cuda":
        return lambda: counts
    pinned = torch.empty_like(counts, device="cpu", pin_memory=True).copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def arrived() -> Tensor:
        copied.synchronize()
        return pinned

    return arrived
