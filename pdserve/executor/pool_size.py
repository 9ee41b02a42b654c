"""How many tokens the KV pool holds, when no flag says so. Called by `factory` after the weights are loaded."""

from __future__ import annotations

import torch

from pdserve.base.host_memory import available_bytes
from pdserve.config.groups import MemoryConfig
from pdserve.errors import ConfigError
from pdserve.memory.layout import KVLayout

CPU_CAP_BYTES = 4 << 30
"""The most that is taken when no flag asks for more."""
CPU_FRACTION = 0.2
"""Share of the available RAM; several servers of one host each take it, of which little is committed before it is used
(`memory/commit.py`)."""
CUDA_FRACTION = 0.88


def pool_tokens(
    memory: MemoryConfig,
    layout: KVLayout,
    device: torch.device,
    *,
    context_length: int,
    max_rows: int,
    num_sharing: int = 1,
    reserved_bytes: int = 0,
) -> int:
    """Token slots of the pool, a multiple of the page size. `layout` is what this rank holds.

    `num_sharing` ranks of the server have this host's RAM in common. `reserved_bytes` of a CUDA device are left to what
    comes after the pool (`step_memory`), whatever fraction is asked for.

    `max_total_tokens` when given; else what memory allows, and never more than `max_rows` requests can use.

    Raises:
        ConfigError: not even one page fits, or `mem_fraction_static` is out of range.
    """
    page = layout.page_tokens
    wanted = memory.max_total_tokens
    if wanted is None:
        most = max_rows * (-(-context_length // page) * page)
        wanted = min(
            _available_bytes(memory.mem_fraction_static, device, num_sharing, reserved_bytes) // layout.token_bytes,
            most,
        )
    if wanted < page:
        raise ConfigError(
            f"the KV pool would hold {wanted} tokens, less than one page of {page}; raise max_total_tokens "
            "or mem_fraction_static, or lower page_size"
            + (f" ({reserved_bytes >> 20} MB are left to steps and graphs)" if reserved_bytes else ""),
            field="max_total_tokens",
        )
    return wanted // page * page


def _available_bytes(fraction: float | None, device: torch.device, num_sharing: int, reserved: int) -> int:
    """Bytes for the pool.

    On CPU a share of what the server takes of this host. On CUDA the fraction is of all memory, and weights already
    loaded count against it.
    """
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise ConfigError(f"mem_fraction_static must be in (0, 1), got {fraction}", field="mem_fraction_static")
    if device.type == "cpu":
        available = available_bytes()
        taken = int(available * fraction) if fraction else min(CPU_CAP_BYTES, int(available * CPU_FRACTION))
        return taken // num_sharing
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - max(reserved, int(total * (1.0 - (fraction or CUDA_FRACTION)))))
