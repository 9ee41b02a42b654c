"""Messages about an engine's device memory: weights by name, and memory that is given back to the system for a while.

Each is answered with a `CommandReply`. `scheduler/engine_memory.py` carries them out on all ranks.
"""

from __future__ import annotations

import msgspec

KV_CACHE, WEIGHTS, CUDA_GRAPH = "kv_cache", "weights", "cuda_graph"
MEMORY_TAGS = (KV_CACHE, WEIGHTS, CUDA_GRAPH)
"""Names of the parts that can be released, as SGLang has them."""


class GetWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the first `max_rows` rows of the tensor `name` of the checkpoint. The payload is a `WeightRows`."""

    query_id: str
    name: str
    max_rows: int


class WeightRows(msgspec.Struct, frozen=True):
    """Rows of a tensor: their `shape`, and the `values`, float32."""

    shape: tuple[int, ...]
    values: bytes


class ReleaseMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gives the memory of `tags` back to the system, once no transfer is under way; refused while requests are live.

    With `kv_cache` the sessions with all peers end, and no transport has memory registered. `timeout_s`: seconds until
    the last transfer must have ended.
    """

    query_id: str
    tags: tuple[str, ...]
    timeout_s: float


class ResumeMemory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Takes the memory of `tags` again. Weights are those from before the release, and the KV pool is empty.

    With `kv_cache` the replica has a new transfer manager. `server`: see `ReplicaId`, new for each resume.
    """

    query_id: str
    tags: tuple[str, ...]
    server: str


MemoryCommand = GetWeights | ReleaseMemory | ResumeMemory
