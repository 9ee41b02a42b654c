"""How ranks learn each other's addresses: through the store of the rendezvous. Called by each rank at start-up.

Every rank writes its contact first and then reads: what differs is refused on both sides. Contacts are sealed with the
token, so that hosts with different ones are told so at once. Each rank draws a nonce at its start, and seals with the
token and the nonces of both ends from then on (`links`).
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from pdserve import __version__
from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError, ProtocolError, RankError
from pdserve.protocol.codec import Codec
from pdserve.ranks.rendezvous import MEET_TIMEOUT_S
from pdserve.ranks.seals import contact_seal
from pdserve.ranks.watch import PeerRank

_MAX_BYTES = 16384
LOOPBACK = "127.0.0.1"
_REFUSED = "refused"
_OWN = frozenset(
    {
        "model_path", "tokenizer_path", "served_model_name", "init_expert_location", "node_rank", "dist_init_addr",
        "max_total_tokens", "mem_fraction_static", "disaggregation_host", "disaggregation_ib_device",
        "disaggregation_bootstrap_port", "disaggregation_transfer_threads",
    }
)  # fmt: skip
"""Flags that each host may have its own of."""
_SLICE_S = 1.0


Facts = Mapping[str, str]
"""What must be equal on all ranks, by the name of the flag."""


class RankContact(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank listens, and who it is. `nonce` is drawn at its start."""

    endpoint: str
    host: str
    pid: int
    nonce: str
    facts: dict[str, str]


_CODEC: Codec[RankContact] = Codec(RankContact, max_bytes=_MAX_BYTES)


def facts_of(config: ServerConfig) -> Facts:
    """What hosts that share a replica must have been started alike in, for their schedulers decide by it. Paths,
    addresses, threads and how much memory there is may differ.
    """
    groups = (config.model, config.parallel, config.memory, config.schedule, config.disagg)
    facts = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
    facts = {name: value for name, value in facts.items() if name not in _OWN}
    facts |= {
        "device": config.kernels.device,
        "enable_deterministic_inference": config.kernels.enable_deterministic_inference,
        "log_kv_target": config.observe.log_kv_target is not None,
    }
    return {"pdserve_version": __version__} | {name: str(value) for name, value in facts.items()}


def own_host(config: ServerConfig) -> str:
    """The address of this host that the other ranks of the replica reach."""
    return LOOPBACK if config.parallel.nnodes == 1 else _outward_host(config)


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


@dataclasses.dataclass(frozen=True)
class Introduction:
    """One rank at the meeting, where all have numbers, and `names` for people. `facts` are its own; only those that
    both sides name are compared.
    """

    names: Sequence[str]
    rank: int
    store: Store
    token: str
    facts: Facts
    timeout_s: float = MEET_TIMEOUT_S

    def publish(self, endpoint: str, nonce: str) -> None:
        """Write our contact."""
        contact = RankContact(
            endpoint=endpoint, host=socket.gethostname(), pid=os.getpid(), nonce=nonce, facts=dict(self.facts)
        )
        self._write(_key(self.rank), _CODEC.encode(contact))

    def lookup(self, rank: int) -> PeerRank:
        """Wait for the contact of `rank`.

        Raises:
            RankError: it did not come in time, or has another token.
            ConfigError: it was started with another value of a flag.
        """
        key, whose = _key(rank), self.names[rank]
        self._await(rank)
        try:
            contact = _CODEC.decode(self._read(key))
        except ProtocolError as error:
            raise RankError(
                f"{whose} was started with another PDSERVE_CONTROL_TOKEN, or a very different pdserve: {error}"
            ) from error
        for field, ours in self.facts.items():
            theirs = contact.facts.get(field, ours)
            if ours != theirs:
                message = f"{whose} on {contact.host} has {field} {theirs}, {self.names[self.rank]} has {ours}"
                message += "; all must be started alike"
                self._write(_REFUSED, f"{field}: {message}".encode())
                raise ConfigError(message, field=field)
        return PeerRank(rank, f"{whose} on {contact.host}, pid {contact.pid},", contact.endpoint, contact.nonce)

    def _await(self, rank: int) -> None:
        """Until there is a contact. A rank that refuses to meet says so in the store, for those that still wait."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self.store.wait([_key(rank)], timedelta(seconds=min(_SLICE_S, self.timeout_s)))
                return
            except RuntimeError as error:
                if refusal := self._refusal():
                    raise ConfigError(refusal) from error
                if time.monotonic() >= deadline:
                    raise RankError(f"{self.names[rank]} did not come within {self.timeout_s:g} s") from error

    def _refusal(self) -> str:
        """Why a rank refuses to meet; empty while none does. What strangers write is none."""
        if not self.store.check([_REFUSED]):
            return ""
        try:
            return self._read(_REFUSED).decode(errors="replace")
        except ProtocolError:
            return ""

    def _write(self, key: str, said: bytes) -> None:
        self.store.set(key, contact_seal(self.token, key).close(said).hex())

    def _read(self, key: str) -> bytes:
        """What is written under `key`. Raises ProtocolError where it is not sealed with our token, or not for `key`."""
        try:
            sealed = bytes.fromhex(self.store.get(key).decode())
        except ValueError as error:
            raise ProtocolError(f"{key} is not what a rank writes") from error
        return contact_seal(self.token, key).open(sealed, max_bytes=_MAX_BYTES)

    def lookup_followers(self) -> Sequence[PeerRank]:
        """The contacts of all ranks but the first. Raises like `lookup`."""
        return [self.lookup(rank) for rank in range(1, len(self.names))]


def rank_names(shape: ParallelShape) -> list[str]:
    """What the ranks of a replica are called."""
    places = [shape.place(rank) for rank in range(shape.num_ranks)]
    return [f"rank {place.rank} (tp {place.tp_rank}, pp {place.pp_rank})" for place in places]


def _key(rank: int) -> str:
    return f"contact/{rank}"
