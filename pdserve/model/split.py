"""Whether a model can be split as the flags say. Called by launchers, before anything is loaded, and by the factory.

Needs no torch, so that a wrong flag is refused in a moment.
"""

from __future__ import annotations

from pdserve.base.parallel import ParallelShape, check_split
from pdserve.errors import ConfigError
from pdserve.model.config import ModelSpec


def check_spec(spec: ModelSpec, shape: ParallelShape, ep_size: int, num_sharing: int = 1) -> None:
    """Raise ConfigError, naming `tp_size`, `pp_size` or `ep_size`, when the model cannot be split that way.

    `num_sharing` replicas share the feed-forward layers.
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
