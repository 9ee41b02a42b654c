"""Rendezvous of ranks: a torch store, in a file on one host, over TCP on several.

With DP attention the ranks of all replicas share it. Each rank's process opens it at start-up; rank 0 of the first
replica serves the TCP store.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pdserve import __version__
from pdserve.base.listeners import close_port
from pdserve.base.parallel import DpRankCoord, ParallelShape, RankCoord
from pdserve.config.groups import ParallelConfig, ServerConfig
from pdserve.errors import ConfigError, ProtocolError, RankError
from pdserve.protocol.codec import Codec
from pdserve.ranks.failure_detector import PeerRank
from pdserve.ranks.links import contact_seal

MEET_TIMEOUT_S = 600.0
"""Seconds that ranks wait for each other: a rank may still be loading its program from a slow disk."""
FILE, TCP = "file://", "tcp://"


def open_stores(rendezvous: str, parallel: ParallelConfig, coord: RankCoord, dp_rank: int) -> tuple[Store, Store]:
    """Open the store of all ranks that compute together, and that of the rank's own replica, which may be the same.

    Raises like `open_store`.
    """
    dp_coord = DpRankCoord(coord, parallel.num_sharing, dp_rank if parallel.num_sharing > 1 else 0)
    store = open_store(rendezvous, dp_coord.rank, dp_coord.num_ranks)
    return store, store if dp_coord.dp_size == 1 else PrefixStore(f"replica/{dp_rank}", store)


def open_store(rendezvous: str, rank: int, num_ranks: int, timeout_s: float = MEET_TIMEOUT_S) -> Store:
    """Open the store at `file://PATH` or `tcp://HOST:PORT`; rank 0 creates it.

    Raises:
        ConfigError: the address of the TCP store cannot be listened on, or does not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if rendezvous.startswith(FILE):
        store = FileStore(rendezvous.removeprefix(FILE), num_ranks)
        store.set_timeout(timeout)
        return store
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    try:
        return TCPStore(
            host.strip("[]"), int(port), num_ranks, is_master=rank == 0, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        message = f"rank {rank} cannot join the rendezvous at {host}:{port}: {reason}"
        raise ConfigError(message, field="dist_init_addr") from error


def close_rendezvous(store: Store) -> None:
    """Accept no more connections; those of ranks stay open. Call it when all ranks have joined.

    Does nothing in a process that does not serve the TCP store.
    """
    if isinstance(store, TCPStore):
        close_port(store.port)


_MAX_BYTES = 16384
LOOPBACK = "127.0.0.1"
_REFUSED = "refused"
_OWN = frozenset(
    {
        "model_path", "tokenizer_path", "download_dir", "served_model_name", "weight_version", "init_expert_location",
        "node_rank",
        "dist_init_addr", "max_total_tokens", "mem_fraction_static", "disaggregation_host", "disaggregation_ib_device",
        "disaggregation_bootstrap_port", "disaggregation_transfer_threads",
    }
)  # fmt: skip
"""Flags that may differ between hosts."""
_SLICE_S = 1.0


Facts = Mapping[str, str]
"""Flags and properties that must be equal on all ranks, by name."""


class RankContact(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of a rank. `nonce` is drawn at its start."""

    endpoint: str
    host: str
    pid: int
    nonce: str
    facts: dict[str, str]


_CODEC: Codec[RankContact] = Codec(RankContact, max_bytes=_MAX_BYTES)


def facts_of(config: ServerConfig) -> Facts:
    """Return the flags that must be equal on all hosts of a replica, since their schedulers depend on them.

    Paths, addresses, threads and memory sizes may differ.
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
    """Return the address of this host at which the other ranks of the replica reach it."""
    return LOOPBACK if config.parallel.nnodes == 1 else _outward_host(config)


def transfer_host(config: ServerConfig) -> str:
    """Return the address at which peers' transports reach this rank."""
    if config.disagg.disaggregation_host is not None or config.parallel.nnodes == 1:
        return config.disagg.disaggregation_host or config.serving.host
    return _outward_host(config)


def _outward_host(config: ServerConfig) -> str:
    parallel = config.parallel
    if config.disagg.disaggregation_host is not None:
        return config.disagg.disaggregation_host
    assert parallel.dist_init_addr is not None, "several hosts need dist_init_addr"
    host, _, port = parallel.dist_init_addr.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


@dataclasses.dataclass(frozen=True)
class Introduction:
    """One rank at the rendezvous, where ranks have numbers and display names. `facts` are its own.

    Only facts that both sides name are compared.
    """

    names: Sequence[str]
    rank: int
    store: Store
    token: str
    facts: Facts
    timeout_s: float = MEET_TIMEOUT_S

    def publish(self, endpoint: str, nonce: str) -> None:
        """Write our contact to the store."""
        contact = RankContact(
            endpoint=endpoint, host=socket.gethostname(), pid=os.getpid(), nonce=nonce, facts=dict(self.facts)
        )
        self._write(_key(self.rank), _CODEC.encode(contact))

    def lookup(self, rank: int) -> PeerRank:
        """Wait for the contact of `rank`, and check its facts.

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
        """Wait for the contact of `rank`. A rank with other flags writes its refusal to the store, for the ranks that
        wait.
        """
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
        """Return the refusal of a rank; empty while there is none. An entry that is not sealed with our token does not
        count.
        """
        if not self.store.check([_REFUSED]):
            return ""
        try:
            return self._read(_REFUSED).decode(errors="replace")
        except ProtocolError:
            return ""

    def _write(self, key: str, body: bytes) -> None:
        self.store.set(key, contact_seal(self.token, key).close(body).hex())

    def _read(self, key: str) -> bytes:
        """Return the entry under `key`. Raises ProtocolError unless it is sealed with our token for `key`."""
        try:
            sealed = bytes.fromhex(self.store.get(key).decode())
        except ValueError as error:
            raise ProtocolError(f"{key} is not an entry of a rank") from error
        return contact_seal(self.token, key).open(sealed, max_bytes=_MAX_BYTES)

    def lookup_followers(self) -> Sequence[PeerRank]:
        """Return the contacts of all ranks but rank 0. Raises like `lookup`."""
        return [self.lookup(rank) for rank in range(1, len(self.names))]


def rank_names(shape: ParallelShape) -> list[str]:
    """Return the display names of the ranks of a replica."""
    coords = [shape.coord(rank) for rank in range(shape.num_ranks)]
    return [f"rank {coord.rank} (tp {coord.tp_rank}, pp {coord.pp_rank})" for coord in coords]


def _key(rank: int) -> str:
    return f"contact/{rank}"
