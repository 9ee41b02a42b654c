"""Expert placement: a table of expert slots per layer, and the placement at server start.

Pure. Made by the executor factory, identically on every rank. Read by `layers/expert_parallel`. `eplb` computes better
placements at run time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.errors import ConfigError
from pdserve.model.eplb import Row, balanced
from pdserve.model.layer_spec import MoeSpec

TRIVIAL = "trivial"
_FIELD = "init_expert_location"


@dataclasses.dataclass(frozen=True)
class ExpertMap:
    """Placement of experts on ranks. `rows[layer]` lists rank 0's slots, then rank 1's, and so on.

    Every expert occurs in every row. `rows` has an entry for each layer with experts, by index in the model. All ranks
    have the same number of slots. Copies of an expert are on different ranks and share its tokens.
    """

    rows: dict[int, Row]
    num_ranks: int

    def digest(self) -> int:
        """Return a 63-bit hash that is equal for equal placements."""
        text = json.dumps(sorted(self.rows.items())).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def slots_of(row: Sequence[int], num_ranks: int, rank: int) -> Row:
    """Return rank `rank`'s part of a row."""
    num_slots = len(row) // num_ranks
    return tuple(row[rank * num_slots : (rank + 1) * num_slots])


def num_slots_for(moe: MoeSpec, num_ranks: int, num_redundant: int) -> int:
    """Return the slots per rank for all experts and `num_redundant` copies. Slots left over also hold copies.

    Raises:
        ConfigError: a rank would hold an expert twice.
    """
    num_slots = -(-(moe.num_experts + num_redundant) // num_ranks)
    if num_slots > moe.num_experts:
        raise ConfigError(
            f"--ep-num-redundant-experts {num_redundant} gives each of {num_ranks} ranks {num_slots} experts, "
            f"but the model has {moe.num_experts}",
            field="ep_num_redundant_experts",
        )
    return num_slots


def first_placement(
    moe: MoeSpec, layers: Sequence[int], num_ranks: int, num_redundant: int, location: str
) -> ExpertMap:
    """Build the placement of `layers`, ascending, at start.

    `location` is "trivial" (experts in order, repeated) or the path of a JSON file.

    The file holds SGLang's `physical_to_logical_map`, `[layers][slots of all ranks]`, or `logical_count`,
    `[layers][experts]` or a list of such tables. `logical_count` is tokens routed to each expert; it is balanced.

    Raises:
        ConfigError: the file cannot be read, or does not fit the model. The error names the flag.
    """
    num_slots = num_slots_for(moe, num_ranks, num_redundant)
    trivial: Row = tuple(index % moe.num_experts for index in range(num_ranks * num_slots))
    if location == TRIVIAL:
        return ExpertMap(dict.fromkeys(layers, trivial), num_ranks)
    facts = _read(Path(location))
    if "physical_to_logical_map" in facts:
        table = _table(facts["physical_to_logical_map"], location, "physical_to_logical_map")
        rows = _rows(table, layers, location, num_ranks * num_slots)
        for layer, row in rows.items():
            _check(row, moe, num_ranks, f"{location}: layer {layer}")
        return ExpertMap(rows, num_ranks)
    if "logical_count" in facts:
        counts = _table(facts["logical_count"], location, "logical_count")
        loads = _rows(counts, layers, location, moe.num_experts)
        return ExpertMap({layer: balanced(load, num_ranks, trivial) for layer, load in loads.items()}, num_ranks)
    raise ConfigError(f"{location} has neither physical_to_logical_map nor logical_count", field=_FIELD)


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--init-expert-location {path} cannot be read: {error}", field=_FIELD) from error
    if not isinstance(facts, dict):
        raise ConfigError(f"--init-expert-location {path} is not a JSON object", field=_FIELD)
    return facts


def _table(value: object, where: str, name: str) -> npt.NDArray[np.int64]:
    """Convert `value` to an array `[layers, n]`; a list of `logical_count` tables is summed."""
    try:
        table = np.array(value, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        table = np.empty(0, dtype=np.int64)
    if table.ndim == 3 and name == "logical_count":
        table = table.sum(0)
    if table.ndim != 2 or table.min(initial=0) < 0:
        raise ConfigError(f"{where}: {name} is not a table of numbers, one row per layer", field=_FIELD)
    return table


def _rows(table: npt.NDArray[np.int64], layers: Sequence[int], where: str, width: int) -> dict[int, Row]:
    """Return rows by layer of the model. The table's first row is layer 0's, even when layer 0 is dense."""
    if table.shape[0] <= max(layers) or table.shape[1] != width:
        raise ConfigError(
            f"{where} has {table.shape[0]} rows of {table.shape[1]}, expected {max(layers) + 1} of {width}",
            field=_FIELD,
        )
    return {layer: tuple(table[layer].tolist()) for layer in layers}


def _check(row: Row, moe: MoeSpec, num_ranks: int, where: str) -> None:
    if set(row) != set(range(moe.num_experts)):
        raise ConfigError(f"{where} must have each of {moe.num_experts} experts, and no others", field=_FIELD)
    for rank in range(num_ranks):
        held = slots_of(row, num_ranks, rank)
        if len(set(held)) < len(held):
            raise ConfigError(f"{where} gives rank {rank} an expert twice", field=_FIELD)
