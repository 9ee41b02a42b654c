"""Limits the new bootstrap addresses that each client may name on a decode server.

An address is new until KV has arrived from its server. The transfer manager looks up 64 new addresses at a time, for
all clients together. A client that names many new addresses would delay the look-ups of other clients, so each client
may have `MAX_NEW_OF_CLIENT` in its running requests. A client's pair probes have a separate limit of the same size. A
router's probes therefore find its prefill servers while its requests exhaust their limit. Owned by the engine client,
on its event loop.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence

from pdserve.config.groups import ServerConfig
from pdserve.errors import RequestError
from pdserve.protocol.messages import FAKE_BOOTSTRAP_HOST, EngineCoreOutput, GenerateRequest, RoomAddress

MAX_NEW_OF_CLIENT = 16
"""Maximum new addresses in the running requests of one client, and separately in its probes. 64 look-ups run at a
time."""
MAX_SERVED = 1024
"""Number of addresses that have served which are remembered; the least recently used is dropped."""

TOO_MANY = "bootstrap_busy"
"""Error code of the refusal."""
Address = tuple[str, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class NewAddress:
    """The bootstrap address of a running sequence that was new when the sequence was submitted."""

    client: str
    address: Address


class NewPrefill:
    """See the file's docstring. Call `take` for each body, `heard` for each output, `release` at a sequence's end."""

    def __init__(self) -> None:
        self._served: OrderedDict[Address, None] = OrderedDict()
        self._named: dict[str, Counter[Address]] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> NewPrefill | None:
        """Create the limit for a decode server without an allow list of prefill addresses; else return None."""
        if config.disagg.disaggregation_mode != "decode" or config.disagg.allowed_prefill is not None:
            return None
        return cls()

    def take(self, client: str, requests: Sequence[GenerateRequest]) -> list[NewAddress | None]:
        """Count the new addresses of one body; the entry of a sequence is None if its address is not new.

        Raises:
            RequestError: 503 when `client` would have more than `MAX_NEW_OF_CLIENT` new addresses; no count changes.
        """
        addresses = [self._new(request.room) for request in requests]
        new = {address for address in addresses if address is not None}
        if not new:
            return [None] * len(addresses)
        if any(request.probe for request in requests):
            client = f"probes of {client}"
        named = self._named.get(client, Counter())
        if len(new | named.keys()) > MAX_NEW_OF_CLIENT:
            raise RequestError(
                f"this client names more than {MAX_NEW_OF_CLIENT} bootstrap addresses that have never served this "
                "server; wait until requests to them have ended",
                field="bootstrap_host",
                status=503,
                code=TOO_MANY,
                retry_after_s=1,
            )
        named.update(address for address in addresses if address is not None)
        self._named[client] = named
        return [None if address is None else NewAddress(client, address) for address in addresses]

    def heard(self, new: NewAddress, output: EngineCoreOutput) -> None:
        """Record an output of the sequence: the address has served if `output` reports transferred KV pages."""
        if output.timing is None or output.timing.kv_pages is None or new.address in self._served:
            return
        self._served[new.address] = None
        if len(self._served) > MAX_SERVED:
            self._served.popitem(last=False)
        for client in list(self._named):
            self._forget(client, new.address)

    def release(self, new: NewAddress) -> None:
        """Release the address of a sequence that has ended."""
        named = self._named.get(new.client, Counter())
        if named[new.address] > 1:
            named[new.address] -= 1
        else:
            self._forget(new.client, new.address)

    def _new(self, room: RoomAddress | None) -> Address | None:
        if room is None or room.host == FAKE_BOOTSTRAP_HOST:
            return None
        address = room.host, room.port
        if address in self._served:
            self._served.move_to_end(address)
            return None
        return address

    def _forget(self, client: str, address: Address) -> None:
        named = self._named.get(client)
        if named is not None:
            named.pop(address, None)
            if not named:
                del self._named[client]
