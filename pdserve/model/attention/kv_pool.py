"""The KV pool of one layout group: page-aligned memory, seen as pages, blocks (one head of a page) and slots.

Owned by the executor; attention backends read and write it, transports know its address.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.memory import shared
from pdserve.memory.layout import KVGroup
from pdserve.model.dtypes import torch_dtype

_CUDA_ALIGN_BYTES = 2 << 20


class KVPool:
    """`pages` is `[num_pages, layer, 2, kv_head, page_tokens, head_dim]`.

    Behind the last page lies one more, the null page, always zero: padding of a gather points there. It is not
    part of `buffer`, so no peer can write it.

    `shareable`, on CPU: other processes can map it, as transfer backend shm asks. Where they need not, it lies in huge
    pages, which most systems give to private memory only.
    """

    def __init__(self, group: KVGroup, num_pages: int, device: torch.device, *, shareable: bool = True) -> None:
        self.group = group
        self.num_pages = num_pages
        self.null_page = num_pages
        dtype = torch_dtype(group.dtype)
        raw = _allocate((num_pages + 1) * group.page_bytes, device, shareable)
        self._all = raw.view(dtype).view(num_pages + 1, *group.page_shape)
        self.pages = self._all[:num_pages]
        self._block_rows = self._all.view(-1, group.page_tokens * group.head_dim)
        self._slot_rows = self._all.view(-1, group.head_dim)

    @property
    def buffer(self) -> tuple[int, int]:
        """`(address, bytes)` of the pages."""
        return self.pages.data_ptr(), self.num_pages * self.group.page_bytes

    def blocks(self, layer: int) -> Tensor:
        """`[_, page_tokens * head_dim]` from `layer` on: a block is row `page * page_blocks + kv * heads + head`."""
        return self._block_rows[layer * 2 * self.group.num_kv_heads :]

    def slots(self, layer: int, kv: int) -> Tensor:
        """`[_, head_dim]` from the first slot of `layer`'s K (`kv` 0) or V (1) on; rows as `slot_index` says."""
        return self._slot_rows[(layer * 2 + kv) * self.group.num_kv_heads * self.group.page_tokens :]

    def layer(self, layer: int) -> Tensor:
        """`[num_pages + 1, 2, kv_head, page_tokens, head_dim]`: K and V of one layer, the null page with them."""
        return self._all[:, layer]

    @property
    def page_blocks(self) -> int:
        """Blocks in one page: layer x k/v x head."""
        return self.group.num_layers * 2 * self.group.num_kv_heads

    def slot_index(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Rows of `slots()` for tokens at `(pages, slots)` `[N]`: int64 `[N * num_kv_heads]`, head fastest."""
        heads = torch.arange(self.group.num_kv_heads, device=pages.device)
        blocks = pages[:, None] * self.page_blocks + heads
        return (blocks * self.group.page_tokens + slots[:, None]).flatten()


def _allocate(num_bytes: int, device: torch.device, shareable: bool) -> Tensor:
    """Zeroed uint8 memory at a page-aligned address; on CPU it is committed as it is touched."""
    if device.type == "cpu":
        memory = shared.allocate(num_bytes) if shareable else shared.allocate_private(num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)
    raw = torch.zeros(num_bytes + _CUDA_ALIGN_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _CUDA_ALIGN_BYTES
    return raw[skip : skip + num_bytes]
