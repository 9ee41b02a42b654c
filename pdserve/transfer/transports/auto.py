"""`auto`: the fastest working transport for each peer: `shm` where both sides share a host and use no GPU, else
mooncake.

A server does not know its peers when it starts, so it opens both transports, and its address has both addresses. The
writing side chooses in `connect`, and logs the choice. A transport that does not work here (GPU memory cannot be
mapped, mooncake is not installed) is not offered; at least one must work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, Transport, TransportFacts

log = logging.getLogger(__name__)

_PREFIX = "auto:"


def open_each(openers: Mapping[str, Callable[[], Transport]]) -> AutoTransport:
    """Open the transports that can be opened, best first.

    Raises:
        ConfigError: the first transport's error, when none can be opened.
    """
    opened, errors = [], []
    for name, opener in openers.items():
        try:
            opened.append(opener())
        except ConfigError as error:
            log.warning("transfer backend auto continues without %s: %s", name, error)
            errors.append(error)
    if not opened:
        raise errors[0]
    return AutoTransport(opened)


class AutoTransport:
    """Combines the transports `ways`, best first. For threads see `Transport`."""

    name = "auto"

    def __init__(self, ways: Sequence[Transport]) -> None:
        self._ways = {way.name: way for way in ways}
        self._lock = threading.Lock()
        self._chosen: dict[str, tuple[Transport, str]] = {}

    @property
    def facts(self) -> TransportFacts:
        """Properties of the offered transports, best first; the one that carries the bytes is chosen for each peer."""
        limits = [limit for way in self._ways.values() if (limit := way.facts.max_outstanding) is not None]
        return TransportFacts(
            protocol=" or ".join(way.facts.protocol for way in self._ways.values()),
            moves_bytes=True,
            max_outstanding=min(limits, default=None),
            writers=max(way.facts.writers for way in self._ways.values()),
        )

    @property
    def drain_timeout_s(self) -> float:
        """The longest of all transports."""
        return max(way.drain_timeout_s for way in self._ways.values())

    @property
    def fence_drain_timeout_s(self) -> float:
        """The longest of all transports."""
        return max(way.fence_drain_timeout_s for way in self._ways.values())

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register with all transports; those that refuse are not offered.

        Raises:
            TransferError: the best transport's error, when all refuse.
        """
        errors: dict[str, TransferError] = {}
        for name, way in self._ways.items():
            try:
                way.register(regions)
            except TransferError as error:
                errors[name] = error
        if len(errors) == len(self._ways):
            raise next(iter(errors.values()))
        for name, refusal in errors.items():
            log.info("transfer backend auto continues without %s: %s", name, refusal)
            self._ways.pop(name).close()

    def address(self) -> str:
        """Return `auto:` and a JSON object of addresses by transport name."""
        return _address_of({name: way.address() for name, way in self._ways.items()})

    def open_receiver(self, peer: str) -> str:
        """Open a receiver on all transports, since the peer's choice is not known."""
        return _address_of({name: way.open_receiver(peer) for name, way in self._ways.items()})

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Allow the addresses on all transports."""
        for way in self._ways.values():
            way.allow_sources(peer, addresses)

    def fence(self, peer: str) -> bool:
        """Fence on all transports; True when all fences succeed."""
        fenced = [way.fence(peer) for way in self._ways.values()]
        return all(fenced)

    def connect(self, address: str) -> None:
        """Choose the best transport that reaches the peer; the choice is final."""
        with self._lock:
            if address in self._chosen:
                return
        offered = _addresses_in(address)
        way, inner = self._connect_best(offered)
        log.info("copies to the peer at %s use %s", inner, way.name)
        with self._lock:
            kept, _ = self._chosen.setdefault(address, (way, inner))
        if kept is not way:
            way.disconnect(inner)

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        with self._lock:
            chosen = self._chosen.pop(address, None)
        if chosen is not None:
            chosen[0].disconnect(chosen[1])

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Write through the chosen transport."""
        with self._lock:
            chosen = self._chosen.get(address)
        if chosen is None:
            raise TransferError(f"not connected to {address}", code="not_connected", retryable=False)
        chosen[0].write(chosen[1], copies)

    def close(self) -> None:
        """Close all transports."""
        with self._lock:
            self._chosen.clear()
        for way in self._ways.values():
            way.close()

    def _connect_best(self, offered: Mapping[str, str]) -> tuple[Transport, str]:
        errors: list[TransferError] = []
        for name, way in self._ways.items():
            if name not in offered:
                continue
            try:
                way.connect(offered[name])
                return way, offered[name]
            except TransferError as error:
                log.info("the peer at %s cannot be reached by %s: %s", offered[name], name, error)
                errors.append(error)
        if not errors:
            message = f"the peer offers {', '.join(offered)}, we have {', '.join(self._ways)}"
            raise TransferError(message, code="no_common_transport", retryable=False)
        raise errors[-1]


def _address_of(addresses: Mapping[str, str]) -> str:
    return _PREFIX + msgspec.json.encode(addresses).decode()


def _addresses_in(address: str) -> dict[str, str]:
    try:
        if not address.startswith(_PREFIX):
            raise ValueError("it does not begin as one")
        return msgspec.json.decode(address.removeprefix(_PREFIX), type=dict[str, str])
    except (ValueError, msgspec.MsgspecError) as error:
        message = f"not an auto address ({error}): {address[:100]!r}"
        raise TransferError(message, code="bad_address", retryable=False) from None
