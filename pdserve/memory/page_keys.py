"""Keys of cached KV pages: a chain of SHA-256 over their tokens, below the digest of a namespace.

    digest of a page = SHA-256(digest of the page before, or of the namespace || token ids of the page as uint32, LE)

The chain is SGLang's. Two servers give a page the same key only if they would compute the same KV for it: same weights,
architecture, drafter, page layout, dtype, page size and LoRA adapter. Prompts of different cache salts have different
keys, too. Keys are computed where they are needed, such as for KV events; the prefix cache itself compares tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from pdserve.memory.prefix_cache import TOKEN_BYTES

KEY_VERSION = 2
"""Part of the namespace; changes with the way in which keys are computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyNamespace:
    """Everything besides tokens that the KV of a page depends on.

    `weights`: fingerprint of the weights, and of the drafter's. `weights_are_sampled`: it covers only a sample of the
    values, so weights that differ elsewhere have the same one. `layout`: `KVLayout.fingerprint`. `page_tokens`: tokens
    of a page. `model`: `ModelSpec.digest`: two configurations of one set of weights, such as with and without YaRN,
    compute different KV.
    """

    weights: str
    weights_are_sampled: bool
    layout: str
    dtype: str
    page_tokens: int
    model: str = ""

    def root(self, adapter: str = "", salt: str = "") -> bytes:
        """Return the 32-byte digest that the first page of a prompt continues.

        `adapter`: digest of the LoRA adapter; empty without one. `salt`: cache salt of the request; empty without one.
        """
        fields = {"version": KEY_VERSION, "adapter": adapter, **dataclasses.asdict(self)}
        if salt:
            fields["salt"] = salt
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()

    def chain(self, before: bytes, tokens: bytes) -> list[bytes]:
        """Return the digest of each whole page of `tokens` (token ids as uint32, LE), which continue `before`."""
        size = self.page_tokens * TOKEN_BYTES
        digests = []
        for at in range(0, len(tokens) - size + 1, size):
            before = hashlib.sha256(before + tokens[at : at + size]).digest()
            digests.append(before)
        return digests


def short_hash(digest: bytes) -> int:
    """Return the first 8 bytes of a digest as a signed number, the form in which KV events name a block."""
    return int.from_bytes(digest[:8], "big", signed=True)
