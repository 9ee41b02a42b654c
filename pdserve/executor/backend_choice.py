"""Chooses what computes a model: attention backend, kernels between matrix products, native CPU kernels or torch.

Called by `factory`.

torch            torch's own operations everywhere: the reference, on any device
triton           Triton kernels for CUDA: attention reads pages in place, fused kernels run between products
flashinfer       the same, with attention by flashinfer
batch_invariant  batch-invariant kernels, for deterministic inference
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

import torch

from pdserve.base.native import Unavailable, best_level
from pdserve.config.groups import KernelConfig, ModelConfig
from pdserve.errors import ConfigError
from pdserve.memory.dtypes import EIGHT_BIT
from pdserve.model.attention.batch_invariant import BatchInvariantAttention
from pdserve.model.attention.flashinfer_pages import FlashInferAttention
from pdserve.model.attention.flashinfer_pages import cannot_run as flashinfer_cannot_run
from pdserve.model.attention.interface import ALL_POSITIONS, AttentionBackend, ScoreRule
from pdserve.model.attention.latent_pages import LatentPages
from pdserve.model.attention.layer_backends import MakeLatents
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.config import ModelSpec
from pdserve.model.decoder import Decoder
from pdserve.model.gated_delta_net import DeltaKernels, TorchDelta
from pdserve.model.gpu import runtime
from pdserve.model.grouped_weights import MIN_GROUP, GroupFormat
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, MLASpec, MoeSpec
from pdserve.model.layers.batch_invariant import BatchInvariantKernels
from pdserve.model.layers.kernels import FastKernels, Kernels
from pdserve.model.native import ops
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.resources import Threads
from pdserve.model.native.support import cannot_run
from pdserve.model.native.weights import Format

_LOG = logging.getLogger(__name__)
Choice = Literal["torch", "triton", "flashinfer", "batch_invariant"]


def choose_attention(
    kernels: KernelConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kv_dtype: str | None = None
) -> Choice:
    """Choose by `--attention-backend`. `auto`: flashinfer, then triton on CUDA where they run, torch elsewhere.

    `kv_dtype`: number format of the KV cache; None: that of the model.

    Raises:
        ConfigError: the requested backend cannot run this model here.
    """
    asked = kernels.attention_backend
    if kernels.enable_deterministic_inference:
        if asked not in ("auto", "torch"):
            raise _refusal(asked, "--enable-deterministic-inference has its own attention backend")
        if any(isinstance(op, MLASpec) for op in spec.operations):
            raise ConfigError(
                "--enable-deterministic-inference: attention over latents rounds differently in other batches",
                field="enable_deterministic_inference",
            )
        if any(isinstance(op, GatedDeltaSpec) for op in spec.operations):
            raise ConfigError(
                "--enable-deterministic-inference: the bits of gated delta layers depend on the chunks of a prompt",
                field="enable_deterministic_inference",
            )
        return "batch_invariant"
    if asked == "torch":
        return "torch"
    if asked == "auto":
        if device.type != "cuda" or runtime.cannot_run(device) is not None:
            return "torch"
        return "triton" if _no_flashinfer(spec, dtype, device, kv_dtype) is not None else "flashinfer"
    reason = _no_flashinfer(spec, dtype, device, kv_dtype) if asked == "flashinfer" else None
    reason = reason or runtime.cannot_run(device)
    if reason is not None:
        raise _refusal(asked, reason)
    return asked


def make_attention(
    choice: Choice,
    pool: KVPool,
    num_heads: int,
    device: torch.device,
    *,
    was_asked_for: bool = True,
    rule: ScoreRule = ALL_POSITIONS,
) -> AttentionBackend:
    """Make the backend over `pool`, for `num_heads` query heads.

    Raises:
        ConfigError: flashinfer cannot build its kernels here and `was_asked_for`; without it Triton is used
            instead.
    """
    if choice == "batch_invariant":
        return BatchInvariantAttention(pool, num_heads, device, rule)
    if choice == "torch":
        return TorchAttention(pool, num_heads, device, rule)
    if choice == "flashinfer":
        assert rule == ALL_POSITIONS, "choose_attention gives other models to other backends"
        try:
            backend = FlashInferAttention(pool, num_heads, device)
            backend.try_out()
            return backend
        except Exception as error:  # flashinfer compiles at first use: any exception may come from its compiler
            if was_asked_for:
                raise _refusal("flashinfer", f"{type(error).__name__}: {error}") from error
            _LOG.warning("flashinfer cannot run here, attention is by Triton: %s: %s", type(error).__name__, error)
    from pdserve.model.attention.triton_pages import TritonAttention

    return TritonAttention(pool, num_heads, device, rule)


def latents_maker(choice: Choice) -> MakeLatents:
    """Return what makes the backends over latents."""
    if choice in ("torch", "batch_invariant"):
        return LatentPages
    from pdserve.model.attention.triton_latents import TritonLatents

    return TritonLatents


def make_kernels(choice: Choice) -> Kernels:
    """Make the layer kernels of that choice."""
    if choice == "batch_invariant":
        return BatchInvariantKernels()
    if choice == "torch":
        return FastKernels()
    from pdserve.model.layers.triton_kernels import TritonKernels

    return TritonKernels()


def make_delta_kernels(choice: Choice) -> DeltaKernels:
    """Make the kernels of gated delta layers of that choice."""
    if choice in ("torch", "batch_invariant"):
        return TorchDelta()
    from pdserve.model.triton_delta import TritonDelta

    return TritonDelta()


def _no_flashinfer(spec: ModelSpec, dtype: torch.dtype, device: torch.device, kv_dtype: str | None) -> str | None:
    """Return why flashinfer cannot run; None when it can."""
    if kv_dtype in EIGHT_BIT:
        return f"it is not called with a KV cache in {kv_dtype}"
    if device.type != "cuda":
        return f"flashinfer is for CUDA, and the device is {device.type}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    beyond = _beyond_flashinfer(spec)
    if beyond is not None:
        return f"{beyond}, which flashinfer is not called with"
    (heads,) = spec.attentions
    return flashinfer_cannot_run(heads.head_dim, dtype)


def _beyond_flashinfer(spec: ModelSpec) -> str | None:
    """Name the first feature of a model for which flashinfer is not called; None: there is none."""
    if len(spec.attentions) > 1:
        return f"its layers have {len(spec.attentions)} kinds of attention"
    for op in spec.operations:
        if isinstance(op, MLASpec):
            return "it attends over latents"
        if isinstance(op, GatedDeltaSpec):
            return "it has gated delta layers"
        if isinstance(op, MoeSpec) and op.shared_intermediate_size:
            return "it has shared experts"
        if isinstance(op, AttentionSpec):
            if op.window is not None:
                return f"its layers attend to a window of {op.window} tokens"
            if op.output_gate:
                return "its attention has output gates"
            if op.scale is not None or op.softcap is not None or op.sinks:
                return "its attention has sinks, or scales or caps scores"
            if op.rope is None:
                return "it has attention without a rotary embedding"
            if op.rope.partial_rotary_factor != 1.0:
                return f"it rotates a part of each head (partial_rotary_factor {op.rope.partial_rotary_factor})"
    return "its norms add an offset to their weights" if spec.norm_offset else None


def _refusal(asked: str, reason: str) -> ConfigError:
    """The error of a backend that cannot run."""
    return ConfigError(f"--attention-backend {asked}: {reason}", field="attention_backend")


def choose_level(
    kernels: KernelConfig, model: ModelConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return the instruction-set level of the native kernels; None: torch. Logs the reason when `auto` falls back to
    torch.

    Raises:
        ConfigError: `--cpu-kernels native` or `--quantization` needs the kernels, and they cannot run this model
            here.
    """
    if kernels.cpu_kernels == "torch":
        reason: str | None = "cpu_kernels is torch"
    elif kernels.attention_backend != "auto":
        reason = f"attention_backend is {kernels.attention_backend}"
    else:
        reason = cannot_run(spec, dtype, device)
    if reason is None:
        try:
            return best_level()
        except Unavailable as unavailable:
            reason = str(unavailable)
    if model.quantization not in (None, "bf16"):
        raise ConfigError(
            f"quantization {model.quantization} needs the native CPU kernels: {reason}", field="quantization"
        )
    if kernels.cpu_kernels == "native":
        raise ConfigError(f"cpu_kernels is native, but {reason}", field="cpu_kernels")
    if device.type == "cpu" and kernels.cpu_kernels == "auto":
        _LOG.info("the model runs with torch: %s", reason)
    return None


_FORMATS: Mapping[str | None, Format] = {
    None: "bf16", "bf16": "bf16", "int8": "int8", "int4": GroupFormat(4, MIN_GROUP),
}  # fmt: skip
"""The format of weights that are not packed as the checkpoint has them, by `--quantization`."""


def make_native(
    model: Decoder,
    config: ModelConfig,
    level: str,
    packing: Callable[[], AbstractContextManager[object]],
    formats: Mapping[str, GroupFormat] | None = None,
    *,
    packs_embedding: bool = False,
    threads: Threads | None = None,
) -> NativeDecoder:
    """Take `model` over into the native kernels, with as many threads as torch has, or with those of another model.

    `formats`: those of quantized weights that are packed as they are, by their names in the checkpoint.
    `packs_embedding`: see `NativeDecoder`. `packing()` is a context around weight packing. Where the threads take all
    cores of this process, all but the calling thread are pinned to a core each: two of them on one core would wait for
    each other.
    """
    if threads is None:
        count = torch.get_num_threads()
        cores = sorted(os.sched_getaffinity(0))
        threads = Threads(count, cores[1:] if len(cores) == count else None)
        ops.use(threads, level)
        _LOG.info("the model runs with native kernels: %s, %d threads", level, count)
    form = _FORMATS[config.quantization]
    return NativeDecoder(model, threads, level, form, packing, formats=formats, packs_embedding=packs_embedding)
