"""MetadataBuffers: per-request data that prefill sends beside KV pages, in one fixed-size aux slot per request.

A slot is contiguous, so that one copy moves it. Every field is padded to 64 bytes (RDMA alignment). Prefill's scheduler
thread writes a slot, a transport copies it, and decode's scheduler thread reads it after SUCCESS.

A new field may use the padding of an older one: size and offsets of a slot stay, and an older sender leaves zeros.

A server whose drafter is a model has more fields at the end of each slot. They are sent to a peer with an equal drafter
alone; others get the common bytes of the slot, which all servers have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from pdserve.memory import shared
from pdserve.protocol.cached_tokens import CachedTokensDetails

MAX_TOP_LOGPROBS = 128
MAX_FIRST_DRAFTS = 16
"""Most drafts in a slot."""
_ALIGN = 64

_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("room", "<u8", 1),
    ("attempt", "<u8", 1),
    ("sent", "<i8", 3),
    ("first_token", "<i8", 1),
    ("cached_tokens", "<i8", 5),
    ("logprob", "<f8", 1),
    ("num_top", "<i8", 1),
    ("top_ids", "<i8", MAX_TOP_LOGPROBS),
    ("top_logprobs", "<f8", MAX_TOP_LOGPROBS),
)


@dataclasses.dataclass(frozen=True, slots=True)
class AuxRecord:
    """Content of one slot. `logprob` is None when the request wants no log probabilities.

    `num_tokens`: tokens whose KV, and whose recurrent state, was sent; 0 if the sender does not know. `state_type`:
    see `KVLayout.state_type`; `num_state_items`: slots and pages that were sent to the pools of those groups.

    `cached_details`: where the tokens of `cached_tokens` were; None: on the device, or the sender does not know.

    `drafts`: what the sender's drafter proposes behind the first token. `draft_hidden`: see `Executor.draft_hidden`.
    Both are empty without equal drafters.
    """

    room: int
    attempt: int
    first_token: int
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_tokens: int = 0
    state_type: str = "none"
    num_state_items: int = 0
    drafts: tuple[int, ...] = ()
    draft_hidden: bytes = b""


_NO_DETAILS, _WITHOUT_STORE, _WITH_STORE = range(3)
"""Which parts of `AuxRecord.cached_details` a slot has."""

_STATE_TYPES = ("mamba", "swa", "nsa")
"""Type i is bit i of a number in the slot."""


def _to_bits(state_type: str) -> int:
    return sum(1 << i for i, name in enumerate(_STATE_TYPES) if name in state_type.split(","))


def _from_bits(bits: int) -> str:
    return ",".join(name for i, name in enumerate(_STATE_TYPES) if bits >> i & 1) or "none"


def _cached_numbers(record: AuxRecord) -> tuple[int, int, int, int, int]:
    """Return the field `cached_tokens` of a slot: the number, which parts follow, and the three parts."""
    details = record.cached_details
    if details is None:
        return record.cached_tokens, _NO_DETAILS, 0, 0, 0
    parts = _WITHOUT_STORE if details.storage is None else _WITH_STORE
    return record.cached_tokens, parts, details.device, details.host, details.storage or 0


def _cached_details(numbers: Sequence[int]) -> CachedTokensDetails | None:
    """Return the parts of the field `cached_tokens`; None where there are none, or they do not add up."""
    total, parts, device, host, storage = numbers
    if parts not in (_WITHOUT_STORE, _WITH_STORE) or min(device, host, storage) < 0 or device + host + storage != total:
        return None
    return CachedTokensDetails(device=device, host=host, storage=storage if parts == _WITH_STORE else None)


def _draft_fields(hidden_bytes: int) -> tuple[tuple[str, str, int], ...]:
    """Return the fields of a server with a drafter whose hidden states have `hidden_bytes` bytes, maybe 0."""
    counts = (("num_drafts", "<i8", 1), ("drafts", "<i8", MAX_FIRST_DRAFTS), ("num_hidden", "<i8", 1))
    return (*counts, ("hidden", "u1", hidden_bytes)) if hidden_bytes else counts


def _slot_dtype(fields: Sequence[tuple[str, str, int]]) -> np.dtype[np.void]:
    """Return a structured dtype whose fields start at multiples of 64 bytes."""
    names, formats, offsets, offset = [], [], [], 0
    for name, scalar, count in fields:
        names.append(name)
        formats.append(np.dtype((scalar, (count,))) if count > 1 else np.dtype(scalar))
        offsets.append(offset)
        offset += -(-formats[-1].itemsize // _ALIGN) * _ALIGN
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


class MetadataBuffers:
    """`num_slots` slots in one buffer. `shareable`: other processes can map it, which costs a file descriptor.

    `draft_hidden_bytes`: bytes of `AuxRecord.draft_hidden`, 0 for a drafter without hidden states; None: no model
    drafts, and slots have no fields for it. `common_bytes`: leading bytes of a slot that every peer has.
    """

    def __init__(self, num_slots: int, *, shareable: bool = True, draft_hidden_bytes: int | None = None) -> None:
        common, count = _slot_dtype(_FIELDS), max(num_slots, 1)
        dtype = common if draft_hidden_bytes is None else _slot_dtype((*_FIELDS, *_draft_fields(draft_hidden_bytes)))
        self._hidden_bytes = draft_hidden_bytes
        self.common_bytes = common.itemsize
        num_bytes = count * dtype.itemsize
        memory = shared.allocate(num_bytes) if shareable else shared.allocate_private(num_bytes)
        self._slots = np.frombuffer(memory, dtype, count)
        self.slot_bytes = self._slots.dtype.itemsize

    @property
    def buffer(self) -> tuple[int, int]:
        """`(address, bytes)` for registration with a transport."""
        return int(self._slots.ctypes.data), self._slots.nbytes

    def write(self, slot: int, record: AuxRecord) -> None:
        """Fill a slot."""
        entry = self._slots[slot]
        entry["room"], entry["attempt"] = record.room, record.attempt
        entry["sent"] = record.num_tokens, record.num_state_items, _to_bits(record.state_type)
        entry["first_token"], entry["cached_tokens"] = record.first_token, _cached_numbers(record)
        entry["logprob"] = math.nan if record.logprob is None else record.logprob
        top = record.top[:MAX_TOP_LOGPROBS]
        entry["num_top"] = len(top)
        for i, (token, logprob) in enumerate(top):
            entry["top_ids"][i], entry["top_logprobs"][i] = token, logprob
        if self._hidden_bytes is not None:
            drafts, hidden = record.drafts[:MAX_FIRST_DRAFTS], record.draft_hidden
            assert len(hidden) in (0, self._hidden_bytes), (len(hidden), self._hidden_bytes)
            entry["num_drafts"], entry["num_hidden"] = len(drafts), len(hidden)
            entry["drafts"][: len(drafts)] = drafts
            if hidden:
                entry["hidden"] = np.frombuffer(hidden, dtype=np.uint8)

    def read(self, slot: int) -> AuxRecord:
        """Return the content of a slot."""
        entry = self._slots[slot]
        num_top = min(max(int(entry["num_top"]), 0), MAX_TOP_LOGPROBS)
        logprob = float(entry["logprob"])
        drafts, hidden = self._read_drafts(entry)
        cached = entry["cached_tokens"].tolist()
        return AuxRecord(
            room=int(entry["room"]),
            attempt=int(entry["attempt"]),
            first_token=int(entry["first_token"]),
            cached_tokens=cached[0],
            cached_details=_cached_details(cached),
            num_tokens=int(entry["sent"][0]),
            num_state_items=int(entry["sent"][1]),
            state_type=_from_bits(int(entry["sent"][2])),
            logprob=None if math.isnan(logprob) else logprob,
            top=tuple((int(entry["top_ids"][i]), float(entry["top_logprobs"][i])) for i in range(num_top)),
            drafts=drafts,
            draft_hidden=hidden,
        )

    def _read_drafts(self, entry: np.void) -> tuple[tuple[int, ...], bytes]:
        """Return the drafts and the hidden state in a slot; empty where there are none."""
        if self._hidden_bytes is None:
            return (), b""
        num_drafts = min(max(int(entry["num_drafts"]), 0), MAX_FIRST_DRAFTS)
        has_hidden = self._hidden_bytes > 0 and int(entry["num_hidden"]) == self._hidden_bytes
        return tuple(entry["drafts"][:num_drafts].tolist()), entry["hidden"].tobytes() if has_hidden else b""

    def take_out(self, slot: int) -> bytes:
        """Return the bytes of a slot."""
        return bytes(self._slots[slot].tobytes())

    def put_in(self, slot: int, content: bytes) -> None:
        """Fill a slot with the bytes of a slot of another buffer."""
        self._slots[slot] = np.frombuffer(content, self._slots.dtype)[0]

    def clear(self, slot: int) -> None:
        """Zero a slot, so that an unwritten slot cannot pass for a written one."""
        self._slots[slot] = np.zeros((), dtype=self._slots.dtype)
