"""Cached tokens of a prompt: where they were found (on the device, in host memory, or in the store), and the salt.

The scheduler counts them when a request starts. Prefill sends the numbers to decode in the aux slot
(`transfer/aux.py`). Answers, metrics, resume states of streams, and snapshots have them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that a prefix cache had, by the place where they were: device, host memory, or the store.

    The parts add up to `cached_tokens`. `storage` is None without a store.
    """

    device: int
    host: int
    storage: int | None = None

    @property
    def num_tokens(self) -> int:
        """Sum of the parts."""
        return self.device + self.host + (self.storage or 0)

    def plus(self, other: CachedTokensDetails) -> CachedTokensDetails:
        """Return the sums of the parts of both."""
        storage = None if self.storage is other.storage is None else (self.storage or 0) + (other.storage or 0)
        return CachedTokensDetails(device=self.device + other.device, host=self.host + other.host, storage=storage)

    def shown(self, storage_backend: str | None) -> dict[str, Any]:
        """Return `cached_tokens_details` of an answer, with SGLang's names; `storage` only with a store.

        `storage_backend`: of the server that answers; None without one. The store can be that of its prefill server.
        """
        fields: dict[str, Any] = {"device": self.device, "host": self.host}
        if self.storage is not None:
            fields["storage"] = self.storage
            if storage_backend is not None:
                fields["storage_backend"] = storage_backend
        return fields


def joined_salt(*parts: str | None) -> str:
    """Return the cache salt of a request from its `cache_salt` and `extra_key`; empty where both are None.

    One of them alone is the salt; both together are another salt than either.
    """
    return "\0".join(part for part in parts if part is not None)
