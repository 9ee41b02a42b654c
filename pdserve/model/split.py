"""Checks that a model can be split by the parallelism flags. Called by launchers and the executor factory.

Imports no torch, so that launchers reject a wrong flag at once, before anything is loaded.
"""

from __future__ import annotations

from pdserve.base.parallel import ParallelShape, check_split
from pdserve.errors import ConfigError
from pdserve.model.config import ModelSpec


def check_spec(spec: ModelSpec, shape: ParallelShape, ep_size: int, num_sharing: int = 1) -> None:
    """Raise ConfigError, which names `tp_size`, `pp_size` or `ep_size`, when the model cannot be split that way.

    `num_sharing` is the number of replicas that share the feed-forward layers (DP attention).
    """
    if ep_size > 1 and spec.moe is None:
        raise ConfigError(f"--ep-size {ep_size} is for models with experts, and this one has none", field="ep_size")
    columns = [spec.intermediate_size] if spec.num_dense else []
    if spec.moe is not None:
        columns.append(spec.moe.intermediate_size if ep_size == 1 else shape.tp_size * num_sharing)
    for intermediate_size in columns:
        check_split(
            shape,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            num_layers=spec.num_layers,
            intermediate_size=intermediate_size,
            num_sharing=num_sharing,
        )
