"""A reader of KV events: the package's, over a copy of the cache's content and over sockets that block."""

from __future__ import annotations

import time

import zmq

from pdserve.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pdserve.observe.kv_reader import REPLAY_END, KVEventFollower, Taken, decode_batch


def events_of(payload: bytes) -> list[Event]:
    """The events of a batch in either form."""
    return list(decode_batch(payload)[1])


class CacheCopy:
    """Blocks by group and hash, of the device and of the host tier. Applying an event twice changes nothing."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, tuple[int | None, tuple[int, ...], str | None]]] = {}
        self.host: dict[int, dict[int, tuple[int | None, tuple[int, ...], str | None]]] = {}

    def apply(self, event: Event) -> None:
        match event:
            case BlockStored():
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                tier = self.host if event.medium == "CPU" else self.blocks
                group = tier.setdefault(event.group_idx or 0, {})
                parent = event.parent_block_hash
                for i, block in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
                    group[block] = (parent, tokens, event.lora_name)
                    parent = block
            case BlockRemoved():
                tier = self.host if event.medium == "CPU" else self.blocks
                for block in event.block_hashes:
                    tier.get(event.group_idx or 0, {}).pop(block, None)
            case AllBlocksCleared():
                self.clear()

    def clear(self) -> None:
        self.blocks.clear()
        self.host.clear()

    def prompts(self, group: int = 0) -> set[tuple[int, ...]]:
        """The tokens of each cached prefix, from the first token on; without blocks whose parents are not known yet."""
        known, paths = self.blocks.get(0, {}), set[tuple[int, ...]]()
        for block in self.blocks.get(group, {}):
            path: tuple[int, ...] = ()
            at: int | None = block
            while at is not None and at in known:
                parent, tokens, _ = known[at]
                path, at = tokens + path, parent
            if at is None:
                paths.add(path)
        return paths


class Follower(KVEventFollower):
    """Follows with a copy."""

    def __init__(self) -> None:
        self.copy = CacheCopy()
        super().__init__(self.copy.apply, self.copy.clear)

    def take(self, seq: int, payload: bytes) -> bool:
        """Apply a batch, new or replayed; False, without any change, where batches are missing before it."""
        return self.replayed(seq, payload) is not Taken.GAP


class Subscriber:
    """A `Follower` over sockets, which replays what it lacks."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", *, small_queue: bool = False
    ) -> None:
        """`small_queue`: few batches wait to be read, in this process and in the kernel."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        if small_queue:
            self._sub.set(zmq.RCVHWM, 1)
            self._sub.set(zmq.RCVBUF, 4096)
        self.num_gaps = 0
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self.follower = Follower()
        self.topics: set[bytes] = set()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def poll(self, timeout_s: float) -> bool:
        """Take one batch, if one comes in time."""
        if not self._sub.poll(round(timeout_s * 1000)):
            return False
        topic, number, payload = self._sub.recv_multipart()
        self.topics.add(topic)
        seq = int.from_bytes(number, "big")
        if self.follower.published(seq, payload) is Taken.GAP:
            assert self.follower.next_seq is not None
            self.num_gaps += 1
            for one, batch in self.replay(self.follower.next_seq):
                self.follower.replayed(one, batch)
            self.follower.published(seq, payload)
        return True

    def until(self, prompts: set[tuple[int, ...]], deadline_s: float = 20.0) -> None:
        """Follow until the copy has exactly these prompts."""
        end = time.monotonic() + deadline_s
        while self.follower.copy.prompts() != prompts:
            left = end - time.monotonic()
            assert left > 0, f"{len(self.follower.copy.prompts())} prefixes, expected {len(prompts)}"
            self.poll(min(left, 0.5))

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Ask for all batches from a number on, with a DEALER, as readers of vLLM do."""
        assert self._replay_endpoint is not None
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            found: list[tuple[int, bytes]] = []
            while True:
                assert dealer.poll(20_000), "no answer to the replay"
                empty, _topic, number, payload = dealer.recv_multipart()
                seq = int.from_bytes(number, "big", signed=True)
                assert empty == b""
                if seq == REPLAY_END:
                    return found
                found.append((seq, payload))
