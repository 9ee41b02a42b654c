"""Request bodies of commands about weights and memory: other weights in a running server, reads by name, releases."""

from __future__ import annotations

from typing import Any

import msgspec


class WeightsUpdateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that all updates of the weights have. `weight_version`: name of the new version; null: it stays.

    `drain_timeout_secs`: seconds that running requests have to end, unless `abort_all_requests`. `keep_pause`: no
    request is computed until `/continue_generation`. `flush_cache` false is refused. `torch_empty_cache` changes
    nothing.
    """

    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    drain_timeout_secs: float | None = None
    torch_empty_cache: bool = False


class WeightsFromDiskBody(WeightsUpdateBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights_from_disk`. `model_path`: a checkpoint on this server's hosts.

    `prepare_only`: load, and keep for a later call. `token_step`, `is_async` and `recapture_cuda_graph` change nothing.
    """

    model_path: str
    prepare_only: bool = False
    is_async: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


class WeightsFromTensorBody(WeightsUpdateBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights_from_tensor`. `tensors`: safetensors bytes in base64, one text or several.

    `shared_memory`: names of POSIX shared-memory objects that have safetensors bytes, on the server's host.
    `prepare_only`: load, and keep for a later call with the same tensors.
    """

    tensors: str | list[str] | None = None
    shared_memory: str | list[str] | None = None
    prepare_only: bool = False


class WeightsFromDistributedBody(WeightsUpdateBody, forbid_unknown_fields=True, kw_only=True):
    """`POST /update_weights_from_distributed`: names, number formats and shapes of the tensors that the group
    `group_name` sends, in this order.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class WeightsGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /init_weights_update_group`: where a group of torch.distributed meets, and this server's ranks in it.

    `timeout_secs`: seconds for the meeting, and for each tensor.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"
    timeout_secs: float = 120.0


class LeaveGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class WeightVersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /update_weight_version`. The weights stay."""

    new_version: str
    abort_all_requests: bool = True


class WeightNameBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /get_weights_by_name`: name of a tensor of the checkpoint, and the number of rows that are returned."""

    name: str
    truncate_size: int = 100


class MemoryTagsBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /release_memory_occupation`, `/resume_memory_occupation`. `tags`: what; absent or empty: all memory."""

    tags: list[str] | None = None
