"""Turns the newest `EngineState` into metric families: the scheduler's part of `/metrics`. Used by `metrics` only.

A server of several replicas has one sample per replica, labelled `dp_rank`, and no sum: Prometheus adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.base import startup_times
from pdserve.base.process_use import OWN, ProcessUse, own_processes
from pdserve.config.schedule_group import MAX_PRIORITY, MIN_PRIORITY
from pdserve.observe.speculation import (
    ACCEPTED_AT,
    ACCEPTED_TOKENS,
    DRAFT_LENGTH,
    DRAFT_TOKENS,
    IS_DRAFTING,
    VERIFY_STEPS,
    Acceptance,
    RecentAcceptance,
)
from pdserve.protocol.engine_state import EngineState, Flow, PeerLoad

Family = GaugeMetricFamily | CounterMetricFamily

SGLANG_QUEUES = (
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_retracted_reqs",
    "num_grammar_queue_reqs",
)
"""Queues with a separate gauge; 0 in roles without that queue."""
HOST_TIER = {
    "hicache_host_used_tokens": "tokens of the slots of host memory that are in use",
    "hicache_host_total_tokens": "tokens of all slots of host memory",
}
"""Counts of the host tier that have SGLang's names."""

NEW_TOKEN_RATIO = "new_token_ratio"
"""The scheduler's fact behind `sglang:new_token_ratio`, if it has that fact."""
PREFILL_INFLIGHT = "num_prefill_inflight_reqs"
"""The scheduler's fact behind the metric of that name."""

LABELLED = {
    "realtime_tokens": (
        "mode",
        ("prefill_compute", "prefill_cache", "decode"),
        "prompt tokens that were computed or found in the cache, and tokens that were decoded",
    ),
    "forward_execution_seconds": (
        "category",
        ("extend", "decode", "mixed"),
        "seconds from the launch of a step until its results, without those of an earlier step",
    ),
    "scheduler_stage_seconds": (
        "category",
        (),
        "seconds of the scheduler loop by stage; they add up to the time since its start",
    ),
    "storage_prefetch_unfulfilled_tokens": (
        "reason",
        ("below_threshold", "host_capacity", "device_covered", "storage_transfer", "deadline", "state_missing"),
        "prompt tokens that no tier had and that were not read from the store, by reason",
    ),
}
"""Counters of SGLang that the scheduler counts as `name.value`: label, values that exist at first, description."""

SGLANG_COUNTERS = {
    "bootstrap_failed_reqs": "num_bootstrap_failed_reqs",
    "transfer_failed_reqs": "num_transfer_failed_reqs",
    "requests_retracted": "num_retracted_requests",
    "scheduler_idle_seconds": "scheduler_idle_seconds",
    "scheduler_process_cpu_seconds": "scheduler_process_cpu_seconds",
    "load_back_tokens": "load_back_tokens",
    "load_back_bytes": "load_back_bytes",
    "hicache_backup_tokens": "hicache_backup_tokens",
    "hicache_backup_bytes": "hicache_backup_bytes",
    "hicache_backup_dropped_tokens": "hicache_backup_dropped_tokens",
    "prefetched_tokens": "prefetched_tokens",
    "backuped_tokens": "backuped_tokens",
    "storage_prefetch_hit_tokens": "storage_prefetch_hit_tokens",
}
"""The scheduler's counters with another name in SGLang; 0 before the first event."""

ZEROS = (
    *SGLANG_COUNTERS,
    "copies_failed",
    "dials_failed",
    "kv_transfer_bytes",
    "transfers_done",
    "transfers_unconfirmed",
    "kv_loads_recomputed",
    "optimistic_prefills",
    "optimistic_prefills_gave_way",
    "optimistic_prefills_held",
    "peers_lost",
    "requests_refused",
    "requests_preempted",
    "requests_evicted",
    "migrations_in",
    "migrations_out",
    "migrations_failed",
    "migration_pause_ms",
    "prefixes_sent",
    "health_probes",
    *(f"{name}.{value}" for name, (_, values, _) in LABELLED.items() for value in values),
)
"""Counters that exist from the start at 0, so that a rate over them exists."""

BY_PRIORITY = frozenset(
    {
        *("num_running_reqs", "num_queue_reqs"),
        *("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
        *("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
    }
)
"""Gauges that also have a sample for each priority, in SGLang and here."""
MAX_PRIORITIES = 64
"""Priorities with a separate label; clients choose them. Requests of further ones are summed as `other`."""
MAX_PEERS = 64
"""Peers with a separate label; the traffic of further peers is summed as `other`."""


class PriorityLabels:
    """Values of the label `priority`: the first `MAX_PRIORITIES` priorities that were seen, and `other`.

    Requests without a priority, which are the least urgent of all, have `none_label`.
    """

    def __init__(self, none_label: str) -> None:
        self._known: dict[int, str] = {}
        self._none_label = none_label

    def label(self, priority: int) -> str:
        """Return the label of a priority."""
        if priority in (MIN_PRIORITY, MAX_PRIORITY):
            return self._none_label
        if priority not in self._known and len(self._known) < MAX_PRIORITIES:
            self._known[priority] = str(priority)
        return self._known.get(priority, "other")

    def count(self, requests: Mapping[int, int]) -> dict[str, int]:
        """Sum numbers of requests by label; 0 for a label that was seen before."""
        counted = dict.fromkeys(self._known.values(), 0)
        for priority, number in sorted(requests.items()):
            label = self.label(priority)
            counted[label] = counted.get(label, 0) + number
        return counted


class EngineCollector(Collector):
    """Collects the scheduler's metrics. Owned by `ServerMetrics`, which sets `state` before each scrape."""

    def __init__(
        self,
        labels: Mapping[str, str],
        own_counters: Callable[[], Mapping[str, float]],
        speculation: RecentAcceptance,
        *,
        by_priority: bool = False,
    ) -> None:
        """With `by_priority` the gauges of `BY_PRIORITY` have a label `priority`, which is empty for the total.

        `speculation` is read at each scrape; its owner feeds it.
        """
        self._labels = dict(labels)
        self._priorities = {name: PriorityLabels("None") for name in BY_PRIORITY} if by_priority else {}
        self._speculation = speculation
        self.own_counters = [own_counters]
        """Functions that return totals of the API process."""
        self.state: EngineState | None = None
        self.alive: Mapping[int, bool] = {}
        """By replica, whether its scheduler runs."""
        self.api_startup_s: float | None = None
        """Seconds of the API process's start; None: unknown."""

    def collect(self) -> Iterator[Family]:
        """Yield all families; called by the registry."""
        families = _Families(self._labels)
        for name, total in sorted(total for ask in self.own_counters for total in ask().items()):
            _count(families, {}, name, total)
        for rank, is_alive in sorted(self.alive.items()):
            text = "1 while the scheduler of this replica runs and is not stuck in a step"
            families.gauge("pdserve:scheduler_alive", text, {"dp_rank": str(rank)}, float(is_alive))
        for name, use in own_processes().items():
            _process(families, {"process": name}, use)
            if name == OWN:
                text = "CPU time of the process that tokenizes, detokenizes and serves HTTP"
                families.counter("sglang:process_cpu_seconds", text, {"component": "tokenizer"}, use.cpu_s)
        if self.state is not None:
            replicas = self.state.replicas
            for rank, state in enumerate(replicas or [self.state]):
                where = {"dp_rank": str(rank)} if replicas else {}
                self._load(families, where, state)
                self._queues(families, where, state)
                _preallocated(families, where, state)
                _pages(families, where, state)
                _totals(families, where, state)
                _speculation(families, where, state, self._speculation.of(rank))
                _peers(families, where, state.peers)
                _ages(families, where, state)
                _startup(families, where, state, self.api_startup_s)
        yield from families

    def _load(self, families: _Families, where: Mapping[str, str], state: EngineState) -> None:
        usage = state.num_used_tokens / state.max_total_tokens if state.max_total_tokens else 0.0
        self._requests(
            families, where, state, "num_running_reqs", "requests in the running batch", state.num_running_reqs
        )
        self._requests(families, where, state, "num_queue_reqs", "queued requests", state.num_queue_reqs)
        for name, text, value in (
            ("num_used_tokens", "token slots in use", state.num_used_tokens),
            ("max_total_num_tokens", "all token slots", state.max_total_tokens),
            ("token_usage", "share of token slots in use", usage),
        ):
            families.gauge(f"sglang:{name}", text, where, value)
        ratio = state.facts.get(NEW_TOKEN_RATIO)
        if isinstance(ratio, float | int):
            text = "share of a running request's remaining tokens that memory is kept free for"
            families.gauge("sglang:new_token_ratio", text, where, ratio)

    def _queues(self, families: _Families, where: Mapping[str, str], state: EngineState) -> None:
        for queue in SGLANG_QUEUES:
            self._requests(families, where, state, queue, "requests in this queue", state.queues.get(queue, 0))
        for name, text, depth in _queue_depths(state):
            families.gauge(f"sglang:{name}", text, where, depth)
        for queue, length in sorted(state.queues.items()):
            families.gauge("pdserve:queue_reqs", "length of a queue", {**where, "queue": queue}, length)

    def _requests(
        self, families: _Families, where: Mapping[str, str], state: EngineState, name: str, text: str, total: int
    ) -> None:
        """Add the gauge of a number of requests, with a sample for each priority where `BY_PRIORITY` names it."""
        labels = self._priorities.get(name)
        if labels is None:
            families.gauge(f"sglang:{name}", text, where, total)
            return
        families.gauge(f"sglang:{name}", text, {**where, "priority": ""}, total)
        for priority, number in labels.count(state.by_priority.get(name, {})).items():
            families.gauge(f"sglang:{name}", text, {**where, "priority": priority}, number)


class _Families:
    """Metric families by name, in the order of their first sample."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._found: dict[str, Family] = {}

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of a gauge."""
        self._add(GaugeMetricFamily, name, text, labels, value)

    def counter(self, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of a counter; `name` without `_total`."""
        self._add(CounterMetricFamily, name, text, labels, value)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._found.values())

    def _add(self, kind: type[Family], name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        family = self._found.get(name)
        if family is None:
            family = self._found[name] = kind(name, text, labels=[*self._labels, *labels])
        family.add_metric([*self._labels.values(), *labels.values()], value)


def _preallocated(families: _Families, where: Mapping[str, str], state: EngineState) -> None:
    """Add decode's tokens in prealloc and transfer; a role without these queues has no samples."""
    reserved, pending = state.facts.get("preallocated_tokens"), state.facts.get("pending_prealloc_tokens")
    if isinstance(reserved, float | int):
        text = "prompt tokens whose KV pages are reserved and whose KV has not arrived"
        families.gauge("pdserve:preallocated_tokens", text, where, reserved)
    if isinstance(pending, float | int):
        usage = pending / state.max_total_tokens if state.max_total_tokens else 0.0
        text = "prompt tokens that wait for KV pages, as a share of all token slots"
        families.gauge("sglang:pending_prealloc_token_usage", text, where, usage)


def _queue_depths(state: EngineState) -> Iterator[tuple[str, str, float]]:
    """Yield SGLang's queue depths: requests that wait for prefill, and retracted ones. Decode prefills no new request.

    On a monolith retracted requests are in the waiting queue.
    """
    queues, retracted = state.queues, state.queues.get("num_retracted_reqs", 0)
    prefill = 0
    if "num_decode_prealloc_queue_reqs" not in queues:
        prefill = queues.get("num_queue_reqs", 0) + queues.get("num_prefill_bootstrap_queue_reqs", 0) - retracted
    yield "prefill_queue_depth", "new requests whose prompt waits to be computed here", prefill
    yield "decode_queue_depth", "retracted requests that wait to continue", retracted
    inflight = state.facts.get(PREFILL_INFLIGHT)
    if isinstance(inflight, int | float):
        yield PREFILL_INFLIGHT, "prompts that have started and are not complete", inflight


def _pages(families: _Families, where: Mapping[str, str], state: EngineState) -> None:
    for name, count in sorted(state.memory.items()):
        if name in HOST_TIER:
            families.gauge(f"sglang:{name}", HOST_TIER[name], where, count)
        else:
            families.gauge(f"pdserve:{name}", f"KV memory: {name}", where, count)
    states = pages_by_state(state)
    total = sum(states.values())
    page_tokens = state.max_total_tokens // total if total else 0
    if total:
        text = "1; tokens of a KV page and number of pages, as labels"
        sizes = {"page_size": str(page_tokens), "num_pages": str(total)}
        families.gauge("sglang:cache_config_info", text, {**where, **sizes}, 1)
        families.gauge("sglang:page_size", "tokens of a KV page", where, page_tokens)
        families.gauge("sglang:num_pages", "KV pages", where, total)
    for name, page_state in (("kv_available_tokens", "free"), ("kv_evictable_tokens", "evictable")):
        text = f"token slots in pages that are {page_state}"
        families.gauge(f"sglang:{name}", text, where, page_tokens * states.get(page_state, 0))
    for name, count in states.items():
        text = "KV pages by state; they add up to pdserve:pages_total"
        families.gauge("pdserve:kv_pages", text, {**where, "state": name}, count)
    text = "differences of the self-audit: pages, rows, slots and rooms without an owner, or with two"
    families.gauge("pdserve:audit_differences", text, where, len(state.audit))


def _totals(families: _Families, where: Mapping[str, str], state: EngineState) -> None:
    zeros = ZEROS if IS_DRAFTING not in state.facts else (*ZEROS, VERIFY_STEPS, DRAFT_TOKENS, ACCEPTED_TOKENS)
    for name, total in sorted({**dict.fromkeys(zeros, 0.0), **state.counters}.items()):
        _count(families, where, name, total)
    text = "requests that failed here, by cause"
    for cause, number in sorted({"transfer_failed": 0, **state.failures}.items()):
        families.counter("pdserve:request_failures", text, {**where, "cause": cause}, number)


def _count(families: _Families, where: Mapping[str, str], name: str, total: float) -> None:
    family, _, value = name.partition(".")
    if family in LABELLED:
        label, _, text = LABELLED[family]
        families.counter(f"sglang:{family}", text, {**where, label: value}, total)
        return
    if family == ACCEPTED_AT:
        text = "verify steps whose draft at this position, from 1 on, was accepted"
        families.counter(f"pdserve:{family}", text, {**where, "position": value}, total)
        return
    known = SGLANG_COUNTERS.get(name, name if name.startswith("kv_transfer_") else None)
    full = f"pdserve:{name}" if known is None else f"sglang:{known}"
    families.counter(full, name.replace("_", " "), where, total)


def _speculation(families: _Families, where: Mapping[str, str], state: EngineState, recent: Acceptance | None) -> None:
    """Add the acceptance of draft tokens of the last seconds, 0 while no drafts were verified, and the draft length.

    A server without speculation has no samples.
    """
    drafting, length = state.facts.get(IS_DRAFTING), state.facts.get(DRAFT_LENGTH)
    if recent is None or not isinstance(drafting, float | int):
        return
    text = "1 while decode steps may have drafts; 0 while adaptive drafting is off, because drafts do not pay"
    families.gauge("pdserve:spec_is_drafting", text, where, drafting)
    if isinstance(length, float | int):
        families.gauge("pdserve:spec_draft_length", "drafts per row of the last decode step", where, length)
    text = "tokens per verify step, recently: accepted drafts and one more; 0 while no drafts were verified"
    families.gauge("sglang:spec_accept_length", text, where, recent.accept_length or 0.0)
    text = "share of draft tokens that were accepted, recently"
    families.gauge("sglang:spec_accept_rate", text, where, recent.accept_rate or 0.0)


def _peers(families: _Families, where: Mapping[str, str], peers: Iterable[PeerLoad]) -> None:
    """Add the peers' metrics: `MAX_PEERS` with most bytes have labels, the rest is summed."""
    ordered = sorted(peers, key=lambda peer: -(peer.sent.bytes + peer.received.bytes))
    for peer in ordered[:MAX_PEERS]:
        labels = {**where, "peer": peer.endpoint}
        text = "seconds since the last packet of the peer"
        families.gauge("pdserve:peer_heartbeat_age_seconds", text, labels, peer.heartbeat_age_s)
        families.gauge("pdserve:peer_up", "1 while the session with the peer is good", labels, peer.state == "ready")
        _flows(families, labels, peer.sent, peer.received)
    rest = ordered[MAX_PEERS:]
    if rest:
        labels = {**where, "peer": "other"}
        _flows(families, labels, _sum(peer.sent for peer in rest), _sum(peer.received for peer in rest))


def _ages(families: _Families, where: Mapping[str, str], state: EngineState) -> None:
    """Add the ages of conditions that should be short."""
    text = "age of the oldest KV pages that no request holds and that a peer may still write into, in seconds"
    families.gauge("pdserve:quarantined_pages_age_seconds", text, where, state.oldest_orphan_s)
    text = "seconds since the longest silent peer became silent; 0 without a silent peer"
    silent_s = max((peer.silent_s for peer in state.peers if peer.silent_s is not None), default=0.0)
    families.gauge("pdserve:silent_peer_age_seconds", text, where, silent_s)


def _flows(families: _Families, labels: Mapping[str, str], sent: Flow, received: Flow) -> None:
    for direction, flow in (("sent", sent), ("received", received)):
        where = {**labels, "direction": direction}
        families.counter("pdserve:peer_bytes", "KV bytes to or from the peer", where, flow.bytes)
        families.counter("pdserve:peer_transfers", "successful transfers", where, flow.transfers)
        families.counter("pdserve:peer_transfer_failures", "failed transfers", where, flow.failures)
        families.counter("pdserve:peer_write_seconds", "time the sender's transport wrote", where, flow.write_s)
        families.gauge("pdserve:peer_transfers_in_flight", "transfers under way", where, flow.in_flight)
        speed = flow.recent_bytes_s / 1e9
        families.gauge("pdserve:peer_gb_per_second", "KV gigabytes a second, recently", where, speed)


def _sum(flows: Iterable[Flow]) -> Flow:
    kept = list(flows)
    return Flow(
        bytes=sum(flow.bytes for flow in kept),
        transfers=sum(flow.transfers for flow in kept),
        failures=sum(flow.failures for flow in kept),
        write_s=sum(flow.write_s for flow in kept),
        in_flight=sum(flow.in_flight for flow in kept),
        recent_bytes_s=sum(flow.recent_bytes_s for flow in kept),
    )


def _process(families: _Families, where: Mapping[str, str], use: ProcessUse) -> None:
    """Add one process's metrics, under the names of Prometheus's clients where they exist."""
    for name, text, value in (
        ("process_resident_memory_bytes", "resident memory of the process", use.rss_bytes),
        ("process_start_time_seconds", "creation time of the process, in seconds since 1970", use.start_s),
        ("pdserve:process_anonymous_memory_bytes", "resident memory without files behind it", use.anonymous_bytes),
        ("pdserve:process_peak_memory_bytes", "most resident memory that the process had", use.peak_bytes),
    ):
        families.gauge(name, text, where, value)
    families.counter("process_cpu_seconds", "CPU time of all threads of the process", where, use.cpu_s)


def _startup(families: _Families, where: Mapping[str, str], state: EngineState, api_s: float | None) -> None:
    """Add the start-up times, and the memory that was allocated then. `api_s`: see `EngineCollector`."""
    seconds = startup_times.read_facts(state.facts)
    if seconds and api_s is not None:
        seconds[startup_times.API] = api_s
    for phase, value in seconds.items():
        text = "seconds of the engine's start by phase; scheduler_e2e is all of it"
        families.gauge("sglang:startup_time_seconds", text, {**where, "phase": phase}, value)
    if startup_times.SCHEDULER in seconds:
        text = "seconds from the creation of the engine's process until it took requests"
        families.gauge("sglang:engine_startup_time", text, where, seconds[startup_times.SCHEDULER])
        loading = sum(seconds.get(phase, 0.0) for phase in (startup_times.WEIGHTS, startup_times.PACK))
        families.gauge("sglang:engine_load_weights_time", "seconds to load and pack weights", where, loading)
    for fact, name, text in (
        ("weight_bytes", "sglang:weight_memory_usage_gb", "GiB of weights that a rank holds"),
        (
            "kv_pool_bytes",
            "sglang:kv_cache_memory_usage_gb",
            "GiB of a rank's KV pool; on CPU, committed as it is used",
        ),
        (
            "startup_available_bytes",
            "sglang:startup_available_gpu_memory_gb",
            "GiB free on the device, on CPU in the host, once all was allocated",
        ),
    ):
        size = state.facts.get(fact)
        if isinstance(size, int | float):
            families.gauge(name, text, where, size / (1 << 30))
    graph_bytes, graph_s = state.facts.get("graph_bytes"), state.facts.get("graph_s")
    if isinstance(graph_bytes, int | float) and isinstance(graph_s, int | float):
        decode = {**where, "phase": "decode"}
        families.gauge("sglang:graph_memory_usage_gb", "GiB of captured CUDA graphs", decode, graph_bytes / (1 << 30))
        families.gauge("sglang:startup_cuda_graph_time_seconds", "seconds to capture CUDA graphs", decode, graph_s)


def pages_by_state(state: EngineState) -> dict[str, int]:
    """Count all KV pages by state: free, evictable (cached), locked (cached, in use), leased (by requests or peers)."""
    total, free = state.memory.get("pages_total", 0), state.memory.get("pages_free", 0)
    cached, evictable = state.memory.get("pages_cached", 0), state.memory.get("pages_evictable", 0)
    return {
        "free": free,
        "evictable": evictable,
        "locked": cached - evictable,
        "leased": total - free - cached,
    }
