"""Weights of an executor's model by name, and the memory that they take. A base class of `LocalExecutor`."""

from __future__ import annotations

from pdserve.executor.drafter import ModelDrafter
from pdserve.model.interface import Model
from pdserve.model.named_weights import MemoryRange, NamedRows


class NamedWeights:
    """What `DeviceMemory` needs of the model in use. Scheduler thread; no step is under way."""

    _model: Model
    _drafter: ModelDrafter | None

    def weight_memory(self) -> list[MemoryRange]:
        """Return the memory of this rank's weights, those of its drafter included; see `Model.weight_memory`."""
        drafter = self._drafter
        return [*self._model.weight_memory(), *(() if drafter is None else drafter.weight_memory())]

    def read_weights(self, name: str, max_rows: int) -> list[NamedRows]:
        """See `ParamSlots.read`."""
        return self._model.params.read(name, max_rows)
