"""Which models the CPU kernels can compute. The executor factory asks before weights are read."""

from __future__ import annotations

import torch

from pdserve.model.config import ModelSpec
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec, MLASpec, Operation
from pdserve.model.native.delta import DELTA_UNIT
from pdserve.model.native.resources import MAX_GROUP, MAX_HEAD_DIM


def cannot_run(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot run this model; None when they can."""
    if device.type != "cpu":
        return f"the kernels are for the CPU, and the device is {device.type}"
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
    return next(filter(None, map(_cannot_compute, spec.operations)), None)


def _cannot_compute(op: Operation) -> str | None:
    """Return why the kernels cannot compute this operation; None when they can."""
    if isinstance(op, AttentionSpec):
        if op.head_dim % 2 or op.head_dim > MAX_HEAD_DIM:
            return f"heads of {op.head_dim} are odd or larger than {MAX_HEAD_DIM}"
        if op.num_heads > MAX_GROUP * op.num_kv_heads:
            return f"{op.num_heads // op.num_kv_heads} query heads share a KV head, more than {MAX_GROUP}"
    if isinstance(op, MLASpec):
        if op.latent_dim % 2 or op.latent_dim > MAX_HEAD_DIM:
            return f"latents of {op.latent_dim} are odd or larger than {MAX_HEAD_DIM}"
        if op.num_heads > MAX_GROUP:
            return f"{op.num_heads} heads share its latents, more than {MAX_GROUP}"
        if op.index is not None and (op.index.head_dim % 2 or op.index.head_dim > MAX_HEAD_DIM):
            return f"index keys of {op.index.head_dim} are odd or larger than {MAX_HEAD_DIM}"
        if op.index is not None and op.index.num_heads > MAX_GROUP:
            return f"{op.index.num_heads} index heads share a key, more than {MAX_GROUP}"
    if isinstance(op, GatedDeltaSpec) and (op.key_dim % DELTA_UNIT or op.value_dim % DELTA_UNIT):
        return f"key heads of {op.key_dim} and value heads of {op.value_dim} are not multiples of {DELTA_UNIT}"
    if isinstance(op, GatedDeltaSpec) and op.channel_decay and op.key_dim != op.value_dim:
        return f"key heads of {op.key_dim} and value heads of {op.value_dim} differ"
    return None
