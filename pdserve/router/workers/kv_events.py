"""Follows the KV events of the workers of policies `kv_aware`, and keeps their `KVIndex`.

    worker is healthy ──> /get_server_info ─┬─ no events ─────────────────> chosen by load, with a warning
                                            └─ an endpoint by replica ────> a SUB socket and a task for each
    numbers have a gap ──> replay ─┬─ complete ────────────> goes on
                                   └─ else ────────────────> all subscribed again: the publisher sends what it has
    a hash differs ──> /get_server_info again: weights or adapters have changed
    worker is dead, removed, or has another role ──> its blocks are forgotten

One task a worker, and below it one a replica. A queue of a socket has at most `QUEUED` batches; others wait at the
publisher. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from pdserve.base.hosts import own_addresses, reachable, url_host
from pdserve.base.log import SparingLog, no_request
from pdserve.observe.kv_keys import KEYS_FACT, ReplicaKeys
from pdserve.observe.kv_reader import REPLAY_END, KVEventFollower, Taken
from pdserve.router.config.config import WorkerRole
from pdserve.router.policies.kv_index import CachedBlocks, KVIndex
from pdserve.router.workers.health import HealthMonitor
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import describe
from pdserve.router.workers.workers import Worker

log = logging.getLogger(__name__)

QUEUED = 256
"""Batches that wait in the queue of a socket."""
MAX_BATCH_BYTES = 64 << 20
REPLAY_TIMEOUT_S = 5.0
INFO_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
RETRY_S = 1.0
"""Seconds before a worker whose events cannot be followed is tried again, and between two reads of its keys."""
MAX_KEYS_WAIT_S = 60.0
"""Most seconds between two reads of keys that do not change, though a hash differs, as of an unloaded adapter."""
SILENT_S = 10.0
"""Seconds without a first batch after which the log says so; a publisher answers a subscription at once."""
_WILDCARDS = ("*", "0.0.0.0", "[::]")


class NoEventsError(Exception):
    """The worker has no events that can be followed, until it is restarted with other flags."""


class LostTrackError(Exception):
    """Batches are missing, so that the worker must be subscribed to again."""


@dataclasses.dataclass(frozen=True)
class ReplicaEndpoints:
    """Where a replica publishes, as the router connects. `replay` None: there are no replays."""

    events: str
    replay: str | None
    topic: str
    keys: ReplicaKeys


@dataclasses.dataclass
class FollowedReplica:
    """What the router knows of the events of one replica."""

    endpoints: ReplicaEndpoints
    blocks: CachedBlocks
    follower: KVEventFollower
    lag_s: float | None = None
    """Age of the last batch when it was applied, by the clocks of both machines; None before the first one."""


@dataclasses.dataclass
class FollowedWorker:
    """The subscription to one worker. `replicas` is empty while there is none."""

    task: asyncio.Task[None]
    replicas: dict[int, FollowedReplica] = dataclasses.field(default_factory=dict)
    num_gaps: int = 0
    """Gaps in the numbers of batches."""
    num_subscribed_again: int = 0
    error: str | None = None
    """Why the events are not followed; None: they are."""
    keys_read_at: float = 0.0
    keys_wait_s: float = dataclasses.field(default_factory=lambda: RETRY_S)
    """Seconds from one read of the keys to the next."""


class KVEventSubscriptions:
    """The subscriptions of one router. `indexes`: of the roles whose policy is `kv_aware`."""

    def __init__(self, indexes: Mapping[WorkerRole, KVIndex], health: HealthMonitor, metrics: RouterMetrics) -> None:
        self._indexes, self._health, self._metrics = indexes, health, metrics
        self._warnings = SparingLog(log)
        self._context = zmq.asyncio.Context() if indexes else None
        self.workers: dict[Worker, FollowedWorker] = {}
        if indexes:
            health.on_up.append(self.follow)
            health.on_down.append(self.forget)

    def follow(self, worker: Worker) -> None:
        """Follow the events of a worker that has become healthy."""
        if worker.spec.role in self._indexes and not worker.forgotten:
            self.forget(worker)
            self.workers[worker] = FollowedWorker(asyncio.create_task(self._run(worker), context=no_request()))

    def forget(self, worker: Worker) -> None:
        """Forget the blocks of a worker that is dead or removed."""
        followed = self.workers.pop(worker, None)
        if followed is not None:
            followed.task.cancel()
            self._index(worker).forget(worker.spec.url)

    async def close(self) -> None:
        """End all tasks and sockets."""
        tasks = [followed.task for followed in self.workers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    def describe(self, worker: Worker) -> dict[str, Any] | None:
        """Return the state of a worker's subscription for `/workers`; None if its role's policy is another one."""
        followed = self.workers.get(worker)
        if worker.spec.role not in self._indexes:
            return None
        replicas = {} if followed is None else followed.replicas
        lags = [replica.lag_s for replica in replicas.values() if replica.lag_s is not None]
        return {
            "followed": followed is not None and followed.error is None and bool(replicas),
            "num_replicas": len(replicas),
            "num_blocks": sum(len(replica.blocks) for replica in replicas.values()),
            "num_blocks_refused": sum(replica.blocks.num_refused for replica in replicas.values()),
            "num_gaps": 0 if followed is None else followed.num_gaps,
            "num_subscribed_again": 0 if followed is None else followed.num_subscribed_again,
            "lag_s": max(lags, default=None),
            "error": "the worker is not healthy" if followed is None else followed.error,
        }

    def show(self, workers: Iterable[Worker]) -> None:
        """Update the gauges of the metrics."""
        for worker in workers:
            state = self.describe(worker)
            if state is not None:
                labels = (worker.spec.role, worker.spec.url)
                self._metrics.kv_followed.labels(*labels).set(state["followed"])
                self._metrics.kv_blocks.labels(*labels).set(state["num_blocks"])
                self._metrics.kv_lag.labels(*labels).set(math.nan if state["lag_s"] is None else state["lag_s"])

    def _index(self, worker: Worker) -> KVIndex:
        return self._indexes[worker.spec.role]

    # ------------------------------------------------------------------ a worker

    async def _run(self, worker: Worker) -> None:
        """Follow a worker until the task is cancelled, or the worker turns out to publish nothing."""
        followed, ends = self.workers[worker], False
        while not ends:
            try:
                await self._subscribe(worker, followed)
            except* NoEventsError as group:
                followed.error, ends = str(group.exceptions[0]), True
                text = "%s %s is chosen by load alone: %s"
                log.warning(text, worker.spec.role, worker.spec.url, followed.error)
            except* (LostTrackError, aiohttp.ClientError, OSError, ValueError, zmq.ZMQError) as group:
                followed.error = "; ".join(describe(error) for error in group.exceptions)
                self._warnings.warning("KV events of %s are read anew: %s", worker.spec.url, followed.error)
            finally:
                if self.workers.get(worker) is followed:
                    followed.replicas.clear()
                    self._index(worker).forget(worker.spec.url)
            if not ends:
                followed.num_subscribed_again += 1
                await asyncio.sleep(RETRY_S)

    async def _subscribe(self, worker: Worker, followed: FollowedWorker) -> None:
        """Follow all replicas of a worker until one of them fails."""
        endpoints = endpoints_of(await self._health.ask_info(worker, INFO_TIMEOUT), worker.spec.host)
        for dp_rank, one in endpoints.items():
            blocks = self._index(worker).add(worker.spec.url, dp_rank, one.keys)
            followed.replicas[dp_rank] = FollowedReplica(one, blocks, KVEventFollower(blocks.apply, blocks.clear))
        followed.error, followed.keys_read_at = None, time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for replica in followed.replicas.values():
                tasks.create_task(self._follow(worker, followed, replica))

    async def _read_keys(self, worker: Worker, followed: FollowedWorker) -> None:
        """Read how hashes are made now, unless that was done less than `keys_wait_s` ago."""
        if time.monotonic() < followed.keys_read_at + followed.keys_wait_s:
            return
        followed.keys_read_at = time.monotonic()
        followed.keys_wait_s = min(2 * followed.keys_wait_s, MAX_KEYS_WAIT_S)
        endpoints = endpoints_of(await self._health.ask_info(worker, INFO_TIMEOUT), worker.spec.host)
        for dp_rank, replica in followed.replicas.items():
            if dp_rank not in endpoints or endpoints[dp_rank].keys.groups != replica.endpoints.keys.groups:
                raise LostTrackError("its replicas have changed")
            if replica.blocks.use(endpoints[dp_rank].keys):
                followed.keys_wait_s = RETRY_S

    # ------------------------------------------------------------------ a replica

    async def _follow(self, worker: Worker, followed: FollowedWorker, replica: FollowedReplica) -> None:
        """Apply the events of a replica. Raises LostTrackError when batches are missing for good."""
        endpoints, follower = replica.endpoints, replica.follower
        with self._socket(zmq.SUB, endpoints.events) as socket:
            socket.subscribe(endpoints.topic)
            while True:
                if replica.blocks.are_keys_outdated:
                    await self._read_keys(worker, followed)
                if not await socket.poll(_patience_ms(followed, replica)):
                    if follower.next_seq is None:
                        text = "no KV events from %s at %s so far: it is chosen by load"
                        self._warnings.warning(text, worker.spec.url, endpoints.events)
                    continue
                seq, payload = _numbered(await socket.recv_multipart(), signed=False)
                taken = follower.published(seq, payload)
                if taken is Taken.GAP:
                    followed.num_gaps += 1
                    self._metrics.kv_gaps.labels(worker.spec.role, worker.spec.url).inc()
                    await self._replay(replica)
                    if follower.published(seq, payload) is Taken.GAP:
                        raise LostTrackError(f"batches from {follower.next_seq} on are missing at {endpoints.events}")
                if follower.sent_at is not None:
                    replica.lag_s = time.time() - follower.sent_at
                await asyncio.sleep(0)  # a queue of batches must not keep requests waiting

    async def _replay(self, replica: FollowedReplica) -> None:
        """Apply the batches that are missing, as far as the publisher has them."""
        endpoint, start = replica.endpoints.replay, replica.follower.next_seq
        if endpoint is None or start is None:
            return
        with self._socket(zmq.DEALER, endpoint) as socket, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart((b"", start.to_bytes(8, "big")))
                while True:
                    frames = await socket.recv_multipart()
                    seq, payload = _numbered(frames[1:], signed=True)
                    if seq == REPLAY_END or replica.follower.replayed(seq, payload) is Taken.GAP:
                        return
                    await asyncio.sleep(0)

    def _socket(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.set(zmq.RCVHWM, QUEUED)
        socket.set(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
        return socket


def _patience_ms(followed: FollowedWorker, replica: FollowedReplica) -> int | None:
    """Return how long the next batch is waited for, in milliseconds; None: without end."""
    if replica.follower.next_seq is None:
        return round(SILENT_S * 1000)
    if not replica.blocks.are_keys_outdated:
        return None
    return max(1, round((followed.keys_read_at + followed.keys_wait_s - time.monotonic()) * 1000))


def _numbered(frames: list[bytes], *, signed: bool) -> tuple[int, bytes]:
    """Return number and payload of the frames topic, number, payload. Raises ValueError for others."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ValueError("a message of KV events must have a topic, a number of 8 bytes and a payload")
    return int.from_bytes(frames[1], "big", signed=signed), frames[2]


def endpoints_of(info: Mapping[str, Any], worker_host: str) -> dict[int, ReplicaEndpoints]:
    """Return the endpoints of a worker's replicas from its `/get_server_info`.

    Raises:
        NoEventsError: it publishes no events that this router can read.
        ValueError: a replica has not told of its endpoint or of its keys yet.
    """
    events, states = info.get("kv_events"), info.get("internal_states")
    if not isinstance(events, dict):
        raise NoEventsError("it publishes no KV events (--kv-events-config, and a prefix cache)")
    if events.get("bind") is False:
        raise NoEventsError("its KV events need bind: true in --kv-events-config, since the router connects to them")
    found: dict[int, ReplicaEndpoints] = {}
    for dp_rank, state in enumerate(states if isinstance(states, list) else []):
        facts = state.get("facts") if isinstance(state, dict) else None
        endpoint, keys = (facts or {}).get("kv_events_endpoint"), (facts or {}).get(KEYS_FACT)
        if not isinstance(endpoint, str) or not isinstance(keys, str):
            raise ValueError(f"replica {dp_rank} has no {KEYS_FACT} in /get_server_info")
        try:
            parsed = ReplicaKeys.from_json(keys)
        except (msgspec.DecodeError, ValueError) as error:
            raise NoEventsError(f"{KEYS_FACT} of its /get_server_info: {error}") from error
        replay, topic = (facts or {}).get("kv_events_replay_endpoint"), events.get("topic")
        found[dp_rank] = ReplicaEndpoints(
            events=_connectable(endpoint, worker_host),
            replay=_connectable(replay, worker_host) if isinstance(replay, str) else None,
            topic=topic if isinstance(topic, str) else "",
            keys=parsed,
        )
    if not found:
        raise ValueError("its /get_server_info has no state of a replica")
    return found


def _connectable(endpoint: str, worker_host: str) -> str:
    """Return an endpoint as another process connects to it. Raises NoEventsError for loopback of another machine."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    parts = urlsplit(endpoint)
    if endpoint.removeprefix("tcp://").rpartition(":")[0] in _WILDCARDS:
        return f"tcp://{url_host(worker_host)}:{parts.port}"
    if not reachable(parts.hostname or "") and reachable(worker_host) and worker_host not in own_addresses():
        raise NoEventsError(f"its KV events are at {endpoint}, which only its own machine reaches; give --kv-events-"
                            f"config an endpoint such as tcp://*:{parts.port}")  # fmt: skip
    return endpoint
