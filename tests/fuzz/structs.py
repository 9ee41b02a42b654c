"""Values of msgspec types, made up by a seed: valid ones, and msgpack trees that were valid before they were changed.

Knows no message by name, so it needs no change when messages get fields.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
from msgspec import inspect

MAX_ITEMS = 6
EDGES = (0, 1, -1, 2, 7, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "a" * 300,
    "\0",
    b"",
    b"\xff" * 9,
    0.5,
    float("nan"),
    [],
    {},
    [[]],
    {"": 0},
)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def sample(kind: Any, rng: random.Random, pins: dict[str, Any] | None = None) -> Any:
    """A valid value of type `kind`. `pins` gives fields of structs, by name, their values wherever they occur."""
    return _value(_info(kind), rng, pins or {})


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _value(info: inspect.Type, rng: random.Random, pins: dict[str, Any]) -> Any:
    match info:
        case inspect.IntType():
            low = info.ge if info.ge is not None else 0
            high = info.le if info.le is not None else 1 << 31
            edges = [edge for edge in EDGES if low <= edge <= high]
            return rng.choice(edges) if edges and rng.random() < 0.3 else rng.randint(low, min(high, low + 40))
        case inspect.FloatType():
            return rng.choice((0.0, 0.5, 1.0, 1e9, rng.random()))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.StrType():
            length = min(info.max_length or 12, rng.choice((1, 4, 12)))
            return "".join(rng.choice("abcdef0123456789") for _ in range(max(length, info.min_length or 0)))
        case inspect.BytesType():
            return rng.randbytes(rng.choice((0, 4, 16)))
        case inspect.NoneType():
            return None
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.EnumType():
            return rng.choice(list(info.cls))
        case inspect.UnionType():
            return _value(rng.choice(info.types), rng, pins)
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            least, most = info.min_length or 0, min(info.max_length or MAX_ITEMS, MAX_ITEMS)
            items = [_value(info.item_type, rng, pins) for _ in range(rng.randint(least, max(least, most)))]
            return tuple(items) if isinstance(info, inspect.VarTupleType) else items
        case inspect.TupleType():
            return tuple(_value(item, rng, pins) for item in info.item_types)
        case inspect.DictType():
            count = rng.randint(0, 3)
            return {_value(info.key_type, rng, pins): _value(info.value_type, rng, pins) for _ in range(count)}
        case inspect.StructType():
            return info.cls(**{f.name: pins[f.name] if f.name in pins else _field(f, rng, pins) for f in info.fields})
    raise NotImplementedError(f"no way to make up {info}")


def _field(field: inspect.Field, rng: random.Random, pins: dict[str, Any]) -> Any:
    if field.default is not msgspec.NODEFAULT and rng.random() < 0.5:
        return field.default
    return _value(field.type, rng, pins)


def change_tree(tree: Any, rng: random.Random, num_changes: int) -> Any:
    """A copy of a decoded msgpack or JSON value with some of its parts replaced, removed, repeated or renamed."""
    for _ in range(num_changes):
        tree = _changed(tree, rng)
    return tree


def _changed(tree: Any, rng: random.Random) -> Any:
    """Walk down at random, and change what is there."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        copy = dict(tree)
        match rng.randrange(12):
            case 0:
                del copy[key]
            case 1:
                copy[f"{key}_"] = copy.pop(key)
            case 2:
                copy[rng.choice(("type", "key", "x", "seq"))] = rng.choice(ODD)
            case _:
                copy[key] = _changed(tree[key], rng)
        return copy
    if isinstance(tree, list | tuple) and tree and rng.random() < 0.85:
        index = rng.randrange(len(tree))
        items = list(tree)
        match rng.randrange(10):
            case 0:
                del items[index]
            case 1:
                items[index:index] = [items[index]] * rng.choice((1, 3, 40))
            case _:
                items[index] = _changed(items[index], rng)
        return items
    if isinstance(tree, bool) or tree is None:
        return rng.choice(ODD)
    if isinstance(tree, int):
        number = rng.choice((tree + 1, tree - 1, tree * 2, -tree, rng.choice(EDGES), rng.getrandbits(63)))
        return min(max(number, _INT_MIN), _INT_MAX) if rng.random() < 0.8 else rng.choice(ODD)
    if isinstance(tree, str) and rng.random() < 0.6:
        return rng.choice((tree + tree, tree[:-1], tree.upper(), tree + "\0", "x" * rng.choice((255, 257, 5000))))
    return rng.choice(ODD)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of `data` replaced, removed, repeated or added."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDC, 0xDD, 0xDF, 0xFF))
            case 2:
                del changed[at : at + rng.choice((1, 4, 30))]
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 30)))
            case _:
                changed[at:at] = changed[at : at + rng.choice((2, 8, 64))]
    return bytes(changed)
