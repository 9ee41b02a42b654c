"""Opens the publishers of KV events and of load of a replica.

Only rank 0 publishes: the caches and the queues of all ranks are equal. The publishers belong to the process, not to
its role.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from pdserve.config import ServerConfig
from pdserve.engine.replica import ReplicaEngine
from pdserve.memory.cache_recorder import AdapterKeys, CacheRecorder
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.model.paths import resolve_model_path
from pdserve.model.weights_digest import weights_digest
from pdserve.observe.kv_events import KVEventStream, groups_of
from pdserve.observe.kv_keys import KEYS_FACT, Group, ReplicaKeys
from pdserve.observe.kv_publisher import KVEventPublisher
from pdserve.observe.load_events import LoadPublisher

log = logging.getLogger(__name__)


@dataclasses.dataclass
class KVEvents:
    """The recorders of a replica's prefix cache and of its host tier, and the publisher that they feed.

    `namespace`, `groups`, `adapters`: see `ReplicaKeys`; `adapters` returns those that are loaded now.
    """

    recorder: CacheRecorder
    host_recorder: CacheRecorder
    publisher: KVEventPublisher
    namespace: KeyNamespace
    groups: Sequence[Group]
    adapters: Callable[[], Mapping[str, str]]

    def endpoints(self) -> dict[str, str | None]:
        """Return the addresses of the sockets, as facts of the engine."""
        return {
            "kv_events_endpoint": self.publisher.endpoint,
            "kv_events_replay_endpoint": self.publisher.replay_endpoint,
        }

    def change_weights(self, namespace: KeyNamespace) -> None:
        """Make the keys of later pages with other weights. The caches are empty."""
        self.recorder.weights_changed(namespace)
        self.namespace = namespace

    def facts(self) -> dict[str, str | float]:
        """Return counts for `/get_server_info`, and how block hashes are made."""
        return {
            **self.publisher.facts(),
            "kv_events_lost": float(self.recorder.num_lost + self.host_recorder.num_lost),
            KEYS_FACT: ReplicaKeys(self.namespace, self.groups, self.adapters()).to_json(),
        }


def open_kv_events(
    config: ServerConfig, engine: ReplicaEngine, dp_rank: int, stack: contextlib.ExitStack
) -> KVEvents | None:
    """Start the publisher that `--kv-events-config` asks for; None where events or the prefix cache are off.

    `stack` ends it.

    Raises:
        ConfigError: an endpoint cannot be used.
    """
    events, built = config.kv_events, engine.built
    if events is None or not config.wants_prefix_cache:
        return None
    namespace, groups = key_namespace(config, engine), groups_of(built.layout)
    stream = KVEventStream(
        namespace,
        groups,
        dp_rank=dp_rank,
        wire_form=events.wire_form,
        buffer_steps=events.buffer_steps,
    )
    publisher = KVEventPublisher(events, stream, dp_rank)
    stack.callback(publisher.close)
    log.info("KV events of replica %d are published at %s", dp_rank, publisher.endpoint)
    if any(endpoint.is_reachable for endpoint in events.bound):
        log.warning(
            "KV events can be read from other machines, and hold the token ids of prompts: use a firewall, or bind "
            "a loopback address"
        )
    loras = built.loras
    adapters = None if loras is None else AdapterKeys(loras.key_shift, loras.adapter_of_key)
    return KVEvents(
        CacheRecorder(publisher, adapters),
        CacheRecorder(publisher, adapters, of_host=True),
        publisher,
        namespace,
        sorted(groups.values(), key=lambda group: (group is not groups[PageSpace.TOKENS], group.index)),
        lambda: {} if loras is None else loras.digests,
    )


def open_load_events(config: ServerConfig, dp_rank: int, stack: contextlib.ExitStack) -> LoadPublisher | None:
    """Start the publisher that `--load-publish-endpoint` asks for; None without it. `stack` ends it.

    Raises:
        ConfigError: the endpoint cannot be used.
    """
    if config.load_endpoint is None:
        return None
    publisher = LoadPublisher(config.load_endpoint, dp_rank)
    stack.callback(publisher.close)
    log.info("the load of replica %d is published at %s", dp_rank, publisher.endpoint)
    return publisher


def key_namespace(config: ServerConfig, engine: ReplicaEngine) -> KeyNamespace:
    """Return the namespace of the page keys of a replica, for KV events and for the store.

    `weights` has the fingerprint of the loaded weights, which tells of quantization too, and the digest of all weight
    files. Random weights have no files. Pages of a server with a draft model have the drafter's KV too, so a digest of
    `draft_facts` comes behind these.

    Raises:
        ModelError: the weight files cannot be read.
    """
    built, weights = engine.built, [engine.weights_fingerprint]
    digest = engine.digest
    if digest is None and config.model.load_format != "dummy":
        digest = weights_digest(resolve_model_path(config.model.model_path))
    if digest:
        weights.append(digest)
    facts = engine.draft_facts()
    if facts:
        weights.append(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())
    return KeyNamespace(
        weights=":".join(weights),
        weights_are_sampled=not digest,
        layout=built.layout.fingerprint(),
        dtype=str(built.dtype),
        page_tokens=built.layout.page_tokens,
        model=built.spec.digest(),
    )
