"""Reads fields of a checkpoint's config and validates each one, because checkpoint files are untrusted.

Called by `config` and `rope`. Every function raises ModelError, which names the file, the field and its value.
`ModelFacts` is the base class of the dataclasses that are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pdserve.errors import ModelError

T = TypeVar("T")
_OPTION = "option"


class ModelFacts:
    """Base of dataclasses whose `repr` goes into `ModelSpec.digest`: an `option` is shown where it is not its default.

    So a field that a later version adds changes no digest of the models that do not use it. Subclasses are dataclasses
    with `repr=False`.
    """

    def __repr__(self) -> str:
        assert dataclasses.is_dataclass(self)
        unused = unused_options(self)
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if (field.repr or _OPTION in field.metadata) and field.name not in unused
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"


def unused_options(facts: ModelFacts) -> set[str]:
    """Return the names of the options that have their defaults."""
    assert dataclasses.is_dataclass(facts)
    fields = dataclasses.fields(facts)
    return {field.name for field in fields if _OPTION in field.metadata and getattr(facts, field.name) == field.default}


def option(default: T) -> T:
    """Declare a field of a `ModelFacts` with this default."""
    declared: T = dataclasses.field(default=default, repr=False, metadata={_OPTION: True})
    return declared


MAX_COUNT = (1 << 31) - 1
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_WIDTH = 4096, 1 << 16, 1 << 13, 1 << 22
"""Far above any model, yet low enough that tables sized by them stay small before the first weight is read."""
MAX_TOKEN_IDS = 1024


def named_field(config: Mapping[str, Any], *names: str) -> str:
    """Return the first of a field's `names` that the config has; the first of all where it has none."""
    return next((name for name in names if config.get(name) is not None), names[0])


def read_count(
    config: Mapping[str, Any],
    key: str,
    where: str,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_COUNT,
) -> int:
    """Read an integer from `least` to `most`; `default` when the field is absent."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelError(f"{where}: {key} is {_shown(value)}, expected a positive integer, at most {most}")
    return value


def read_number(config: Mapping[str, Any], key: str, where: str, *, default: float) -> float:
    """Read a finite number above 0; `default` when the field is absent or 0."""
    value = config.get(key) or default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < 1e30
        or not math.isfinite(value)
    ):
        raise ModelError(f"{where}: {key} is {_shown(value)}, expected a positive number")
    return float(value)


def read_mapping(config: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Read an object; an empty one when the field is absent."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {key} is {_shown(value)}, expected an object")
    return value


def read_texts(config: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Read a list of strings; an empty one when the field is absent."""
    value = config.get(key) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{where}: {key} is {_shown(value)}, expected a list of strings")
    return tuple(value)


def read_counts(config: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Read a list of non-negative integers; an empty one when the field is absent."""
    return _whole(config.get(key) or (), key, where)


def read_token_ids(values: Iterable[Any], where: str) -> tuple[int, ...]:
    """Collect all ids in `values` (ints, lists of ints, or None) without duplicates, in order."""
    ids: dict[int, None] = {}
    for value in values:
        alone = isinstance(value, int) and not isinstance(value, bool)
        ids |= dict.fromkeys(_whole((value,) if alone else (() if value is None else value), "eos_token_id", where))
    return tuple(ids)


def _whole(value: Any, key: str, where: str) -> tuple[int, ...]:
    sound = isinstance(value, list | tuple) and len(value) <= MAX_TOKEN_IDS * 4
    if not sound or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_COUNT for n in value):
        raise ModelError(f"{where}: {key} is {_shown(value)}, expected non-negative integers")
    return tuple(value)


def _shown(value: Any) -> str:
    """Format a value for an error message; long values are truncated."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
