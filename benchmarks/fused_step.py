"""A decode step of SmolLM2 as one C++ function, a `cstep.cpp` that is given: our kernels are held against it.

It knows this one model and computes nothing but the step. Called by `bench_cpu_step`, which says where the source is.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.compiled import build
from pdserve.model.paths import resolve_model_path

PAGE_TOKENS = 16
FORMATS = {"bf16": 0, "int8": 1}
_Size = ctypes.c_int


class FusedStep:
    """One step of `batch` rows that each have `context` tokens, again and again, over pages of zeros."""

    def __init__(self, source: Path, kind: str, batch: int, context: int, num_threads: int) -> None:
        self._lib = build(source / "cstep.cpp")
        path = resolve_model_path("smollm2")
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self._weights = load_file(path / "model.safetensors")
        self._kept: list[Tensor] = []
        self._format = FORMATS[kind]
        self._model = self._open(config, batch, num_threads)
        pages = -(-context // PAGE_TOKENS)
        elements = config["num_key_value_heads"] * 2 * PAGE_TOKENS * _head_dim(config)
        self._kv = torch.zeros(config["num_hidden_layers"], batch * pages, elements, dtype=torch.bfloat16)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
        self._table = order.int().view(batch, pages).contiguous()
        self._ids, self._next = torch.full((batch,), 500, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
        self._positions = torch.full((batch,), context - 1, dtype=torch.int32)

    def __call__(self) -> None:
        """Compute it."""
        self._lib.m_step(
            self._model, _Size(len(self._ids)), _at(self._ids), _at(self._positions), _at(self._table),
            _Size(self._table.shape[1]), _at(self._kv), ctypes.c_size_t(self._kv.stride(0)), _at(self._next),
        )  # fmt: skip

    def _open(self, config: dict[str, Any], batch: int, num_threads: int) -> ctypes.c_void_p:
        layers, hidden, wide = (config[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size"))
        heads, kv_heads, vocab = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
        dim = _head_dim(config)
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(8192).float(), 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
        sizes = map(_Size, (layers, hidden, heads, kv_heads, dim, wide, vocab))
        embedding = self._weights["model.embed_tokens.weight"]
        self._lib.m_new.restype = ctypes.c_void_p
        model = ctypes.c_void_p(
            self._lib.m_new(
                *sizes,
                ctypes.c_float(config["rms_norm_eps"]),
                _Size(batch),
                _Size(num_threads),
                self._keep(angles.cos()),
                self._keep(angles.sin()),
                self._keep(embedding),
            )
        )
        for index in range(layers):
            self._open_layer(model, index, hidden)
        self._lib.m_final(model, self._keep(self._weights["model.norm.weight"].float()), self._packed(embedding))
        return model

    def _open_layer(self, model: ctypes.c_void_p, index: int, hidden: int) -> None:
        def of(name: str) -> Tensor:
            return self._weights[f"model.layers.{index}.{name}.weight"]

        gate, up = (of(f"mlp.{name}_proj").view(-1, 32, hidden) for name in ("gate", "up"))
        self._lib.m_layer(
            model, _Size(index), self._packed(torch.cat([of(f"self_attn.{name}_proj") for name in "qkv"])),
            self._packed(of("self_attn.o_proj")), self._packed(torch.stack([gate, up], 1).reshape(-1, hidden)),
            self._packed(of("mlp.down_proj")), self._keep(of("input_layernorm").float()),
            self._keep(of("post_attention_layernorm").float()),
        )  # fmt: skip

    def _packed(self, weight: Tensor) -> ctypes.c_void_p:
        """bf16 `[out, in]`, in the order that the step reads."""
        self._lib.w_pack.restype = ctypes.c_void_p
        weight = weight.to(torch.bfloat16).contiguous()
        out, width = weight.shape
        return ctypes.c_void_p(self._lib.w_pack(_at(weight), _Size(out), _Size(width), _Size(self._format)))

    def _keep(self, x: Tensor) -> ctypes.c_void_p:
        self._kept.append(x.contiguous())
        return _at(self._kept[-1])


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
