"""What the schedulers of a simulated cluster have counted, in the words of a campaign's table."""

from __future__ import annotations

from collections import Counter

from pdserve.scheduler.speculation import ACCEPTED_AT, ACCEPTED_TOKENS, DRAFT_TOKENS, VERIFY_STEPS
from pdserve.sim.cluster import Cluster

EVENTS = {
    "requests_retracted": "requests retracted",
    "offloaded_pages": "pages offloaded",
    "restored_pages": "pages restored",
    "recomputed_tokens": "tokens computed again",
    "kv_loads_recomputed": "prompts computed on decode after a failed transfer",
    "states_copied": "requests that continued from a cached state",
    "states_kept": "states kept for the cache",
    "state_mismatches": "state mismatches",
    "metadata_mismatches": "aux records of other KV or state",
    "hicache_backup_tokens": "tokens saved to the host tier",
    "load_back_tokens": "tokens loaded from the host tier",
    "backuped_tokens": "tokens stored",
    "prefetched_tokens": "tokens read from the store",
    "storage_prefetch_hit_tokens": "tokens of prompts that came from the store",
}


DRAFT_EVENTS = {
    VERIFY_STEPS: "rows with drafts",
    DRAFT_TOKENS: "drafts",
    ACCEPTED_TOKENS: "drafts accepted",
    f"{ACCEPTED_AT}2": "second drafts accepted",
}


def events_of(cluster: Cluster) -> Counter[str]:
    """What the schedulers of all servers counted, dead ones included."""
    counts = Counter[str]()
    for node in (node for server in (*cluster.servers, *cluster.dead) for node in server.replicas):
        for name, words in EVENTS.items():
            counts[words] += node.scheduler.context.counters[name]
        states = node.memory.groups.states
        counts["cached states evicted"] += 0 if states is None else states.num_evicted
        counts["cached pages evicted"] += node.memory.pages.num_evicted
        speculation = node.scheduler.context.speculation
        if speculation is not None:
            counts += Counter({words: speculation.counters[name] for name, words in DRAFT_EVENTS.items()})
    return counts
