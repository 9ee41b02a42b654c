"""How ranks learn each other's addresses: through the store of the rendezvous. Called by each rank at start-up.

The leader writes its contact and draws a number for this incarnation of the replica; followers answer sealed with it.
Contacts are sealed with the token, so that hosts with different ones are told so at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ServerConfig
from pdserve.errors import ProtocolError, RankError
from pdserve.protocol.codec import Codec
from pdserve.protocol.seal import Seal
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S
from pdserve.ranks.watch import Peer

_MAX_BYTES = 4096
_LOOPBACK = "127.0.0.1"


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, and who it is. `nonce` is the leader's."""

    endpoint: str
    host: str
    pid: int
    nonce: str


_CODEC: Codec[Contact] = Codec(Contact, max_bytes=_MAX_BYTES)


def own_host(config: ServerConfig) -> str:
    """The address of this host that the other ranks of the replica reach."""
    return _LOOPBACK if config.parallel.nnodes == 1 else _outward_host(config)


def transfer_host(config: ServerConfig) -> str:
    """The address that peers' transports reach this rank at."""
    if config.disagg.disaggregation_host is not None or config.parallel.nnodes == 1:
        return config.disagg.disaggregation_host or config.serving.host
    return _outward_host(config)


def _outward_host(config: ServerConfig) -> str:
    parallel = config.parallel
    if config.disagg.disaggregation_host is not None:
        return config.disagg.disaggregation_host
    assert parallel.dist_init_addr is not None, "several hosts without an address to meet at"
    host, _, port = parallel.dist_init_addr.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def publish(store: Store, rank: int, endpoint: str, secret: str, nonce: str) -> None:
    """Write the contact of `rank`, sealed with `secret`."""
    contact = Contact(endpoint=endpoint, host=socket.gethostname(), pid=os.getpid(), nonce=nonce)
    store.set(_key(rank), Seal(secret).close(_CODEC.encode(contact)).hex())


def lookup(
    store: Store, shape: ParallelShape, rank: int, secret: str, timeout_s: float = MEET_TIMEOUT_S
) -> tuple[Peer, str]:
    """Wait for the contact of `rank`; its address, and the number it gives.

    Raises:
        RankError: it did not come in time, or has another token.
    """
    try:
        store.wait([_key(rank)], timedelta(seconds=timeout_s))
        sealed = store.get(_key(rank))
    except RuntimeError as error:
        raise RankError(f"rank {rank} did not come within {timeout_s:g} s") from error
    try:
        contact = _CODEC.decode(Seal(secret).open(bytes.fromhex(sealed.decode()), max_bytes=_MAX_BYTES))
    except (ProtocolError, ValueError) as error:
        raise RankError(
            f"rank {rank} was started with another PDSERVE_CONTROL_TOKEN, or another version of pdserve: {error}"
        ) from error
    place = shape.place(rank)
    where = f"tp {place.tp_rank}, pp {place.pp_rank}"
    return Peer(rank, f"rank {rank} ({where}) on {contact.host}, pid {contact.pid},", contact.endpoint), contact.nonce


def lookup_all(store: Store, shape: ParallelShape, secret: str, timeout_s: float = MEET_TIMEOUT_S) -> Sequence[Peer]:
    """The contacts of all followers. Raises like `lookup`."""
    return [lookup(store, shape, rank, secret, timeout_s)[0] for rank in range(1, shape.num_ranks)]


def secret_of(token: str, nonce: str) -> str:
    """What the ranks of one incarnation of a replica seal with."""
    return f"{token}\n{nonce}"


def _key(rank: int) -> str:
    return f"contact/{rank}"
