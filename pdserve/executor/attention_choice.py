"""Chooses the attention backend of a model, and the kernels between matrix products. Called by `factory`.

torch        torch's own operations everywhere: the reference, on any device
triton       pdserve's Triton kernels for CUDA: attention reads pages in place, products have fused kernels between them
flashinfer   the same, with attention by flashinfer
fixed        batch-invariant kernels, for deterministic inference
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

import torch

from pdserve.config.groups import KernelConfig
from pdserve.errors import ConfigError
from pdserve.model.attention.batch_invariant import BatchInvariantAttention
from pdserve.model.attention.flashinfer_pages import FlashInferAttention
from pdserve.model.attention.flashinfer_pages import cannot_run as flashinfer_cannot_run
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.config import ModelSpec
from pdserve.model.gpu import runtime
from pdserve.model.layers.batch_invariant import BatchInvariantKernels
from pdserve.model.layers.kernels import FastKernels, Kernels

_LOG = logging.getLogger(__name__)
Choice = Literal["torch", "triton", "flashinfer", "fixed"]


def choose_attention(kernels: KernelConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Choice:
    """Choose by `--attention-backend`. `auto`: flashinfer, then triton on CUDA where they run, torch elsewhere.

    Raises:
        ConfigError: the requested backend cannot run this model here.
    """
    asked = kernels.attention_backend
    if kernels.enable_deterministic_inference:
        if asked not in ("auto", "torch"):
            raise _refusal(asked, "--enable-deterministic-inference has its own attention backend")
        return "fixed"
    if asked == "torch":
        return "torch"
    if asked == "auto":
        if device.type != "cuda" or runtime.cannot_run(device) is not None:
            return "torch"
        return "triton" if _no_flashinfer(spec, dtype, device) is not None else "flashinfer"
    reason = _no_flashinfer(spec, dtype, device) if asked == "flashinfer" else None
    reason = reason or runtime.cannot_run(device)
    if reason is not None:
        raise _refusal(asked, reason)
    return asked


def make_attention(
    choice: Choice, pool: KVPool, num_heads: int, device: torch.device, *, was_asked_for: bool = True
) -> AttentionBackend:
    """Make the backend over `pool`, for `num_heads` query heads.

    Raises:
        ConfigError: flashinfer cannot build its kernels here and `was_asked_for`; without it Triton is used
            instead.
    """
    if choice == "fixed":
        return BatchInvariantAttention(pool, num_heads, device)
    if choice == "torch":
        return TorchAttention(pool, num_heads, device)
    if choice == "flashinfer":
        try:
            backend = FlashInferAttention(pool, num_heads, device)
            backend.try_out()
            return backend
        except Exception as error:  # flashinfer compiles at first use: any exception may come from its compiler
            if was_asked_for:
                raise _refusal("flashinfer", f"{type(error).__name__}: {error}") from error
            _LOG.warning("flashinfer cannot run here, attention is by Triton: %s: %s", type(error).__name__, error)
    from pdserve.model.attention.triton_pages import TritonAttention

    return TritonAttention(pool, num_heads, device)


def make_kernels(choice: Choice) -> Kernels:
    """Make the layer kernels of that choice."""
    if choice == "fixed":
        return BatchInvariantKernels()
    if choice == "torch":
        return FastKernels()
    from pdserve.model.layers.triton_kernels import TritonKernels

    return TritonKernels()


def _no_flashinfer(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why flashinfer cannot run; None when it can."""
    if device.type != "cuda":
        return f"flashinfer is for CUDA, and the device is {device.type}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    return flashinfer_cannot_run(spec.head_dim, dtype)


def _refusal(asked: str, reason: str) -> ConfigError:
    """The error of a backend that cannot run."""
    return ConfigError(f"--attention-backend {asked}: {reason}", field="attention_backend")
