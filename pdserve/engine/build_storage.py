"""Opens the storage tier of a replica: on each rank a client of the store, for its own part of the pages."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable

from pdserve.config import ServerConfig
from pdserve.engine.kv_events import key_namespace
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ConfigError
from pdserve.executor.factory import LoadedEngine
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_memory import SPACES
from pdserve.memory.tiers.storage import object_bytes, rank_parts
from pdserve.memory.tiers.storage_client import StorageClient
from pdserve.memory.tiers.storage_port import LocalStoragePort, StoragePort
from pdserve.memory.tiers.storage_registry import open_storage
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.messages import StorageEnded
from pdserve.ranks.rank_storage import RankStoragePort, StorageReports
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.storage_tier import StorageTier

log = logging.getLogger(__name__)

OPEN_AT_ONCE = ("file", "memory")
"""Stores that are usable once they are opened. Others have to answer a call before the first request asks them."""


def storage_namespace(config: ServerConfig, engine: ReplicaEngine) -> KeyNamespace | None:
    """Return the namespace of a replica's stored pages; None without a store, or without a host tier above it.

    Raises:
        ModelError: the weight files cannot be read.
    """
    name = config.storage.hicache_storage_backend
    if name is None or not config.wants_host_tier:
        return None
    namespace = key_namespace(config, engine)
    if namespace.weights_are_sampled:
        log.warning("stored pages are told apart by samples of the weights, because these are random")
    return namespace


def open_storage_port(
    config: ServerConfig,
    built: LoadedEngine,
    context: SchedulerContext,
    wake: Callable[[], None],
    stack: contextlib.ExitStack,
) -> StoragePort:
    """Start this rank's client of the store, which `stack` closes. Never waits for the store.

    `wake` is called on any thread when a job has ended.

    Raises:
        ConfigError: no such store, its library is missing, or an option is wrong.
    """
    name, coord, tier = config.storage.hicache_storage_backend, built.coord, context.tier
    assert name is not None, "there is a store"
    if tier is None:  # the model cannot have a prefix cache
        raise ConfigError("--hicache-storage-backend needs a prefix cache", field="hicache_storage_backend")
    own = context.memory.layout.of_rank(coord)
    largest = object_bytes(max(own.space_bytes(space) for space in SPACES))
    options = dataclasses.replace(config.storage.options, largest_object=largest)
    client = StorageClient(open_storage(name, options), wake, starts_open=name not in OPEN_AT_ONCE)
    stack.callback(client.close)
    return LocalStoragePort(client, rank_parts(coord), tier.pool.slot_bytes)


def leader_port(engine: ReplicaEngine, own: StoragePort, wake: Callable[[], None]) -> StoragePort:
    """Return rank 0's port, behind which all ranks agree; `own` where the replica is one rank."""
    group = engine.group
    if group is None:
        return own
    reports = StorageReports(group.followers.shape.num_ranks, wake)
    group.followers.on_storage_ended = reports.add
    return RankStoragePort(own, group.log, reports.add, reports)


def follower_port(own: StoragePort, log: InputLog, report: Callable[[StorageEnded], None]) -> StoragePort:
    """Return a follower's port. `report` sends to rank 0."""
    return RankStoragePort(own, log, report)


def add_storage_tier(
    config: ServerConfig, context: SchedulerContext, port: StoragePort, namespace: KeyNamespace
) -> None:
    """Put the store behind the host tier of a scheduler."""
    tier = context.tier
    assert tier is not None, "the store is below the host tier"
    tier.storage = StorageTier(
        port,
        tier.pool,
        context.memory,
        namespace,
        context.clock,
        context.counters,
        options=config.storage.options,
        policy=config.storage.hicache_storage_prefetch_policy,
        stores_decode=config.storage.disaggregation_decode_enable_offload_kvcache,
        state_grid=context.limits.state_grid,
    )
