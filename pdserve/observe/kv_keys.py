"""Block hashes of prompts: what a reader of KV events needs to ask its copy of a cache for a prompt.

A replica says in the fact `KEYS_FACT` of its `/get_server_info` how it makes hashes (`ReplicaKeys`). A reader hashes
the pages of a prompt in the same way (`PromptKeys`), as far as it needs them. See `memory/page_keys.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pdserve.memory.page_keys import KEY_VERSION, KeyNamespace, short_hash
from pdserve.memory.prefix_cache import TOKEN_BYTES

KEYS_FACT = "kv_events_keys"
HASHED_AT_ONCE = 64
"""Pages that are hashed at a time: a prompt is hashed little further than it is cached."""
MAX_TOKEN_ID = (1 << 32) - 1
STATE_KIND = "mamba"
"""`Group.kind` of recurrent states; the name is vLLM's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """What events say about a group of the layout. `window`: tokens that a token reads; None: all before it."""

    index: int
    kind: str
    window: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """How a replica names cached blocks.

    `groups`: those that its events tell of, the group of all tokens first. `adapters`: digests of the loaded LoRA
    adapters by name. `version`: `KEY_VERSION` of the replica.
    """

    namespace: KeyNamespace
    groups: Sequence[Group]
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    version: int = KEY_VERSION

    def to_json(self) -> str:
        """Return the value of the fact `KEYS_FACT`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> ReplicaKeys:
        """Parse what `to_json` returned.

        Raises:
            ValueError: the text is of something else, or of a version of pdserve whose keys are made differently.
        """
        keys = msgspec.json.decode(text, type=cls)
        if keys.version != KEY_VERSION:
            raise ValueError(f"version is {keys.version}, but this version of pdserve needs {KEY_VERSION}")
        if not keys.groups or keys.namespace.page_tokens < 1:
            raise ValueError("groups and page_tokens must not be empty")
        return keys

    def root(self, prompt: PromptKeys) -> bytes | None:
        """Return the digest that the first page of a prompt continues; None: its adapter is not loaded."""
        if prompt.adapter is not None and prompt.adapter not in self.adapters:
            return None
        name = prompt.adapter or prompt.model
        return self.namespace.root("" if name is None else self.adapters.get(name, ""), prompt.salt)

    def first_hash(self, token_ids: Sequence[int], adapter: str | None, salt: str) -> int | None:
        """Return the hash of the first page of a prompt with these tokens; None: its adapter is not known.

        `token_ids`: of at least one page. A different hash in an event means that these keys are outdated.
        """
        prompt = PromptKeys(token_ids[: self.namespace.page_tokens], adapter=adapter, salt=salt)
        root = self.root(prompt)
        return None if root is None else prompt.hashes(self.namespace, root, 1)[0]

    def usable(self, cached: Sequence[int], has: Mapping[int, int]) -> int:
        """Return how many leading blocks of a prompt it can take from the cache.

        `cached`: hashes of the leading blocks that are in the cache. `has`: groups of a block by its hash, as bits by
        position in `groups`. A prompt continues only behind a recurrent state, and behind the window pages that its
        next token reads.
        """
        num, size = len(cached), self.namespace.page_tokens
        states = [1 << at for at, group in enumerate(self.groups) if group.kind == STATE_KIND]
        windows = [(1 << at, group.window) for at, group in enumerate(self.groups) if group.window is not None]
        while num:
            before = num
            if any(not has[cached[num - 1]] & bit for bit in states):
                num -= 1
            for bit, window in windows:
                first_read = max(0, num * size - window + 1) // size
                num = next((at for at in range(num - 1, first_read - 1, -1) if not has[cached[at]] & bit), num)
            if num == before:
                break
        return num


class PromptKeys:
    """The tokens of a prompt, and what else decides about the hashes of its pages.

    `adapter`: the LoRA adapter that the request names; None: none, or that of the name `model`, if there is one.
    `salt`: its cache salt; empty without one. Hashes are kept, so that a prompt is hashed once for equal replicas.

    Raises:
        ValueError: a token id is no number from 0 to `MAX_TOKEN_ID`.
    """

    def __init__(
        self, token_ids: Sequence[int], *, adapter: str | None = None, model: str | None = None, salt: str = ""
    ) -> None:
        try:
            ids = np.asarray(token_ids, dtype=np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError("token ids must be whole numbers") from error
        if ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() <= MAX_TOKEN_ID):
            raise ValueError(f"token ids must be a list of numbers from 0 to {MAX_TOKEN_ID}")
        self.num_tokens = len(ids)
        self.adapter, self.model, self.salt = adapter, model, salt
        self._tokens = ids.astype("<u4").tobytes()
        self._digests: dict[bytes, bytes] = {}
        self._hashes: dict[bytes, list[int]] = {}

    def num_pages(self, namespace: KeyNamespace) -> int:
        """Return the number of whole pages."""
        return self.num_tokens // namespace.page_tokens

    def hashes(self, namespace: KeyNamespace, root: bytes, num_pages: int) -> list[int]:
        """Return the hashes of the first pages below `root`: at least `num_pages`, as far as there are whole pages."""
        hashes = self._hashes.setdefault(root, [])
        missing = min(num_pages, self.num_pages(namespace)) - len(hashes)
        if missing > 0:
            size = namespace.page_tokens * TOKEN_BYTES
            at, last = len(hashes) * size, self._digests.get(root, root)
            digests = namespace.chain(last, self._tokens[at : at + max(missing, HASHED_AT_ONCE) * size])
            self._digests[root] = digests[-1]
            hashes += map(short_hash, digests)
        return hashes
