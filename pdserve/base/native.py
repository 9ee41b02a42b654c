"""Loads the shared library of CPU kernels and declares its C interface for ctypes.

`csrc/pdk.h` documents the functions; the model's native files, `memory/prefault.py` and the `shm` transport call them.
The package's build compiles the library. Without a compiler the model runs on torch, and pages are copied one by one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from ctypes import POINTER, Structure, c_char_p, c_float, c_int64, c_void_p
from pathlib import Path

from pdserve.errors import ConfigError

PATH_VARIABLE = "PDSERVE_KERNELS_LIBRARY"
"""Environment variable: path of the library to load instead of the file beside this module."""
LEVEL_VARIABLE = "PDSERVE_KERNELS_LEVEL"
"""Environment variable: the instruction-set level to use, one of LEVELS."""
LEVELS = ("amx", "zen4", "avx512_bf16", "avx512", "avx2")
"""`amx` is `avx512_bf16` plus tile products; `zen4` is `avx512_bf16` tuned for other cache sizes. The library selects
the best level."""
FILE = "libpdserve_kernels.so"
VERSION = 18


class Step(Structure):
    """`pdk_step`."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "samples", "rows")),
        *((name, c_void_p) for name in ("ids", "positions", "write_pages", "write_slots", "sample_index")),
        *((name, c_void_p) for name in ("starts", "ends", "offsets", "prompts", "table")),
        ("table_stride", c_int64),
        ("window_table", c_void_p),
        ("window_stride", c_int64),
        *((name, c_void_p) for name in ("slots", "drafts", "folded", "adapters")),
    )


class Decoding(Structure):
    """`pdk_decoding`."""

    _fields_ = (
        ("rows", c_int64),
        *((name, c_void_p) for name in ("lines", "positions", "tokens")),
        ("tokens_stride", c_int64),
        ("pages", c_void_p),
        ("pages_stride", c_int64),
        ("window_pages", c_void_p),
        ("window_stride", c_int64),
        *((name, c_void_p) for name in ("slots", "folded", "adapters")),
    )


class PdkHeads(Structure):
    """`pdk_heads`."""

    _fields_ = (
        ("base", c_void_p),
        *((name, c_int64) for name in ("page_stride", "layer_stride", "value_offset")),
        *((name, c_int64) for name in ("kv_heads", "page_tokens", "dim", "heads", "of_window", "kv_format")),
        ("scale", c_float),
    )


class PdkStates(Structure):
    """`pdk_states`."""

    _fields_ = (
        *((name, c_void_p) for name in ("conv_q", "conv_k", "conv_v", "state")),
        *((name, c_int64) for name in ("slot_stride", "key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, c_void_p) for name in ("inputs", "keys", "deltas", "decays")),
        ("pending", c_int64),
    )


class Weights(Structure):
    """`pdk_weights`."""

    _fields_ = (
        *((name, c_int64) for name in ("format", "blocks", "inputs")),
        *((name, c_void_p) for name in ("data", "scale", "bias")),
        *((name, c_int64) for name in ("group", "mins")),
    )


class PdkLora(Structure):
    """`pdk_lora`."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("inputs", c_int64), ("low", c_int64))


class PdkAdapter(Structure):
    """`pdk_adapter`."""

    _fields_ = (("layers", c_void_p), ("most_low", c_int64))


class PdkRouting(Structure):
    """`pdk_routing`."""

    _fields_ = (
        *((name, c_int64) for name in ("top_k", "normalise", "sigmoid", "groups", "top_groups")),
        ("scale", c_float),
        ("correction", c_void_p),
    )


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "pdk_version": (_I, ()),
    "pdk_copy": (None, (_P, _I)),
    "pdk_touch": (None, (_P, _I, _I)),
    "pdk_supports": (_I, (c_char_p,)),
    "pdk_best_level": (c_char_p, ()),
    "pdk_arena_open": (_P, ()),
    "pdk_arena_close": (None, (_P,)),
    "pdk_arena_bytes": (_I, (_P,)),
    "pdk_arena_take": (_P, (_P, _I)),
    "pdk_weights_put": (None, (POINTER(Weights), _I, _I, _I, _P, _I, _I, _I, _P)),
    "pdk_weights_put_values": (None, (POINTER(Weights), _I, _I, _I, _P, _P, _P, _I, _I, _P)),
    "pdk_pool_open": (_P, (_I, POINTER(c_int64))),
    "pdk_pool_close": (None, (_P,)),
    "pdk_choose_bytes": (_I, (_P, _I)),
    "pdk_choose": (_I, (_P, c_char_p, _P, _I, _I, _P, _P, _P)),
    "pdk_program_open": (_P, (_P, c_char_p)),
    "pdk_program_close": (None, (_P,)),
    "pdk_add_heads": (_I, (_P, POINTER(PdkHeads))),
    "pdk_buffer": (_I, (_P, _I, _I, _I)),
    "pdk_buffer_data": (_P, (_P, _I)),
    "pdk_reserve": (_I, (_P, _I, _I)),
    "pdk_op_embed": (_I, (_P, _I, _P, _I, _F)),
    "pdk_op_embed_packed": (_I, (_P, _I, POINTER(Weights), _I, _F)),
    "pdk_op_angles": (_I, (_P, _I, _P, _I, _F)),
    "pdk_op_linear": (_I, (_P, _I, _P, _F, POINTER(Weights), _I, _I, _I, _F, _I)),
    "pdk_op_gated": (_I, (_P, _I, _P, _F, POINTER(Weights), _I, _F)),
    "pdk_op_norm": (_I, (_P, _I, _P, _F, _I)),
    "pdk_op_place": (_I, (_P, _I, _I, _I, _P, _P, _F, _I)),
    "pdk_op_head_product": (_I, (_P, _I, _I, _I, _I, _I, _I, POINTER(Weights), _I)),
    "pdk_op_place_latents": (_I, (_P, _I, _I, _I, _I, _I, _P, _F, _I)),
    "pdk_op_place_index": (_I, (_P, _I, _I, _I, _I, _P, _P, _F, _I)),
    "pdk_op_select_tokens": (_I, (_P, _I, _I, _I, _F, _I)),
    "pdk_op_attend_selected": (_I, (_P, _I, _I, _I, _I)),
    "pdk_op_attend": (_I, (_P, _I, _I, _I, _I, _F, _P)),
    "pdk_op_sigmoid": (_I, (_P, _I, _I, _I, _I, _I, _I)),
    "pdk_op_delta": (_I, (_P, POINTER(PdkStates), _I, _I, _P, _P, _P, _P, _F, _I)),
    "pdk_op_route": (_I, (_P, _I, POINTER(PdkRouting), _I, _I)),
    "pdk_op_experts": (_I, (_P, _I, _P, _F, _I, _I, _I, POINTER(Weights), POINTER(Weights), _I, _F, _P, _I, _I)),
    "pdk_op_add": (_I, (_P, _I, _P, _F, _F, _I)),
    "pdk_op_cap": (_I, (_P, _I, _F, _F)),
    "pdk_op_select": (_I, (_P, _I, _I)),
    "pdk_op_argmax": (_I, (_P, _I, _I)),
    "pdk_adapt": (_I, (_P, _I, _I)),
    "pdk_begin": (_I, (_P, POINTER(Step))),
    "pdk_run": (None, (_P, _I, _I)),
    "pdk_decode": (_I, (_P, POINTER(Decoding), _I, _I, _P)),
}


class Unavailable(Exception):
    """No CPU kernels are available on this machine; the message states the reason."""


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library once. Raises Unavailable."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"the CPU kernels are for Linux on x86-64, not {platform.system()} on {platform.machine()}")
    path = Path(os.environ.get(PATH_VARIABLE) or Path(__file__).with_name(FILE))
    if not path.is_file():
        raise Unavailable(f"{path.name} was not built: install pdserve where there is a C++ compiler")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path.name} cannot be loaded: {error}") from error
    version = getattr(loaded, "pdk_version", None)
    if version is None or version() != VERSION:
        found = "not of pdserve" if version is None else f"of version {version()}, not {VERSION}"
        raise Unavailable(f"{path.name} is {found}: rebuild it")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)  # cached by the CDLL object, unlike loaded[name]
        function.restype, function.argtypes = result, arguments
    return loaded


def supports(level: str) -> bool:
    """Whether this machine can run `level`. Raises Unavailable."""
    return bool(library().pdk_supports(level.encode()))


def arithmetic_of(level: str) -> str:
    """Return the level whose results `level` reproduces bit for bit."""
    return "avx512_bf16" if level == "zen4" else level


def best_level() -> str:
    """Return the instruction-set level to run: `PDSERVE_KERNELS_LEVEL`, else the best that this machine supports.

    Raises:
        Unavailable: the machine supports no level, or the library is missing.
        ConfigError: the environment names a level that the machine does not support.
    """
    asked = os.environ.get(LEVEL_VARIABLE)
    if asked is not None:
        if asked not in LEVELS or not supports(asked):
            raise ConfigError(f"{LEVEL_VARIABLE} is {asked!r}, which is not one of {', '.join(LEVELS)} that runs here")
        return asked
    best: bytes | None = library().pdk_best_level()
    if best is None:
        raise Unavailable(f"this CPU has none of {', '.join(LEVELS)}")
    return best.decode()
