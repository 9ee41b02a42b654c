"""The checks of `pdserve doctor`: pure functions from a `Fleet` to findings. `doctor` runs them and prints the result.

A finding says what is wrong, where, and how to correct it. An `error` stops requests or may give wrong answers; a
`warning` costs speed or safety, or will become an error; a `note` is a fact that may surprise.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import pdserve
from pdserve.base.proof import NO_TOKEN_ID
from pdserve.cli.fleet import Fleet, FleetServer
from pdserve.config.accepted_group import AcceptedConfig

Severity = Literal["error", "warning", "note"]

CLOCK_TOLERANCE_S = 2.0
LOW_MEMORY_SHARE = 0.05
LOW_SHM_BYTES = 1 << 30
FULL_POOL_SHARE = 0.02
LONG_MEMORY_WAIT_S = 1.0
OLD_QUARANTINE_S = 60.0
HANDSHAKE_FACTS = {
    "layout_fingerprint": "layout of the KV cache",
    "weights_fingerprint": "weights",
    "page_tokens": "page size in tokens",
    "kv_token_bytes": "KV bytes per token",
}
"""Facts of the engine that a prefill and a decode server must share."""
KV_CAUSES = ("page_tokens", "kv_token_bytes")
"""Facts whose difference makes the layout differ, too, which is then no finding of its own."""
PAIR_FLAGS = ("kv_cache_dtype", "page_size", "disaggregation_enable_kv_checksum", "enable_deterministic_inference")
"""Flags that a prefill and a decode server must share."""
TRANSPORT_FACTS = ("transfer_backend", "transfer_protocol")
MODEL_FIELDS = ("model_type", "architectures", "vocab_size", "weight_version")
"""Model facts that all servers must share."""
SERVICE_FIELDS = ("served_model_name", "max_context_length", "chat_template", "tool_call_parser", "reasoning_parser")
"""What a client sees: a difference makes answers depend on the server that is chosen."""
TOKEN_FIX = "set the same PDSERVE_CONTROL_TOKEN, of at least 16 characters, on all servers and the router"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. `check`: name of the check; `where`: URLs, or the router; `fix`: what to do."""

    check: str
    severity: Severity
    where: tuple[str, ...]
    what: str
    fix: str


def check_reading(fleet: Fleet) -> Iterator[Finding]:
    """Find what could not be read: servers without an answer, paths that need another key."""
    for server in fleet.servers:
        if server.error is not None and server.healthy:
            fix = "give the router the servers' key with --worker-api-key, or api_key of POST /workers"
            if not any(word in server.error for word in ("401", "403")):
                fix = "look at the server's log; its other checks were left out"
            yield _finding("unreadable", "error", server, f"/get_server_info: {server.error}", fix)
    for path, reason in fleet.unread.items():
        fix = "give --admin-api-key, so that pairs and rates are checked too"
        yield Finding(check="not_checked", severity="note", where=(fleet.url + path,), what=reason, fix=fix)


def check_workers(fleet: Fleet) -> Iterator[Finding]:
    """Find roles without a server, dead and drained servers, open breakers, and what health checks report."""
    if fleet.router is not None:
        roles = ("prefill", "decode") if fleet.of("prefill") or fleet.of("decode") else ("unified",)
        for role in roles:
            healthy = [one for one in fleet.of(role) if one.healthy]
            if not healthy:
                fix = f"start a {role} server, or add it to the router: POST /workers"
                yield _of_router(fleet, "no_server", "error", f"no healthy {role} server", fix)
            elif all(one.entry.get("draining") for one in healthy):
                fix = f'start a {role} server, or take one back: PUT /workers/URL {{"draining": false}}'
                yield _of_router(fleet, "no_server", "error", f"every healthy {role} server is draining", fix)
        if fleet.router.get("serving") is False:
            fix = "correct the findings of servers and pairs; /readiness stays 503 until a token passes"
            yield _of_router(fleet, "not_serving", "error", "the router cannot serve a request now", fix)
    for server in fleet.servers:
        entry = server.entry
        if not server.healthy:
            error = str(entry.get("last_error") or server.error)
            fix = TOKEN_FIX if "control token" in error else "start it again, or remove it: DELETE /workers/URL"
            what = f"the server is dead for the router: {error}"
            yield _finding("dead", "error", server, what, fix)
        if entry.get("draining"):
            fix = 'take it back with PUT /workers/URL {"draining": false}, or remove it'
            yield _finding("draining", "note", server, "the server gets no new requests", fix)
        if entry.get("breaker") not in (None, "closed"):
            fix = "look at the errors in the server's log; a good answer closes the breaker"
            what = f"circuit breaker {entry['breaker']}: {entry.get('last_error') or 'requests failed there'}"
            yield _finding("breaker", "warning", server, what, fix)
        for rank, health in enumerate(server.info.get("replica_health") or []):
            if health.get("trouble") or health.get("alive") is False:
                what = f"replica {rank}: {health.get('trouble') or 'its scheduler has ended'}"
                yield _finding("replica", "error", server, what, "look at the server's log, and start it again")


def check_pairs(fleet: Fleet) -> Iterator[Finding]:
    """Find pairs through which no token passes, refused handshakes that no such pair tells, and silent peers."""
    told = ""
    for pair in fleet.pairs:
        if pair.get("serving") is False:
            where = (str(pair.get("prefill")), str(pair.get("decode")))
            error = str(pair.get("error") or "its probes failed")
            what = f"no token passes through this pair: {error}"
            fix = "check that both hosts reach each other's control and data ports, and the log of both servers"
            if "handshake_refused" in error:
                told += error
                fix = "make the field equal on both servers: install one version, and start them with the same flags"
            yield Finding(check="pair", severity="error", where=where, what=what, fix=fix)
    for server in fleet.servers:
        for state in server.replicas:
            refusal = (state.get("facts") or {}).get("last_handshake_refusal")
            if refusal and (str(refusal).partition(": ")[2] or refusal) not in told:
                fix = "make the named field equal on both servers; the newest refusal is shown, it may be of the past"
                yield _finding("handshake", "warning", server, f"refused a handshake: {refusal}", fix)
            for peer in state.get("peers") or []:
                if peer.get("state") in ("silent", "refused"):
                    what = f"peer {peer.get('endpoint')} is {peer['state']}"
                    fix = "check that the peer runs and that its control port is reachable from this server"
                    yield _finding("peer", "warning", server, what, fix)


def check_tokens(fleet: Fleet) -> Iterator[Finding]:
    """Find control tokens that differ or are missing."""
    known = [(one, str(one.info["control_token_id"])) for one in fleet.servers if one.info.get("control_token_id")]
    ids = {token_id for _, token_id in known}
    where = tuple(one.url for one, _ in known)
    if NO_TOKEN_ID in ids and len(ids) > 1:
        without = tuple(one.url for one, token_id in known if token_id == NO_TOKEN_ID)
        what = "these servers have no control token, the others have one"
        yield Finding(check="control_token", severity="error", where=without, what=what, fix=TOKEN_FIX)
    elif len(ids) > 1:
        what = "these servers have different control tokens"
        yield Finding(check="control_token", severity="error", where=where, what=what, fix=TOKEN_FIX)
    elif ids == {NO_TOKEN_ID} and any(not is_loopback(url) for url in where):
        what = "no control token: the control plane is neither authenticated nor encrypted"
        yield Finding(check="control_token", severity="warning", where=where, what=what, fix=TOKEN_FIX)


def check_versions(fleet: Fleet) -> Iterator[Finding]:
    """Find versions of pdserve that differ between servers, router and this command."""
    found: dict[str, list[str]] = {}
    for server in fleet.servers:
        if server.info.get("version"):
            found.setdefault(str(server.info["version"]), []).append(server.url)
    if fleet.router and fleet.router.get("version"):
        found.setdefault(str(fleet.router["version"]), []).append(f"router {fleet.url}")
    if len(found) > 1:
        text = "; ".join(f"{version} at {', '.join(urls)}" for version, urls in sorted(found.items()))
        where = tuple(url for urls in found.values() for url in urls)
        halves = {one.info["version"] for one in fleet.servers if one.role != "unified" and one.info.get("version")}
        severity: Severity = "warning" if len(halves) < 2 else "error"
        fix = "install one version on all hosts: prefill and decode servers of two versions refuse each other"
        yield Finding(check="versions", severity=severity, where=where, what=f"versions differ: {text}", fix=fix)
    elif found and pdserve.__version__ not in found:
        (version,) = found
        what = f"the deployment runs {version}, this command is of {pdserve.__version__}"
        yield _of_router(fleet, "versions", "note", what, "use the command of the same version; checks may be missing")


def check_clocks(fleet: Fleet) -> Iterator[Finding]:
    """Find clocks that are apart by more than 2 s and the time that the reading took.

    The median of the clocks, this host's among them, is taken as right.
    """
    middle = (fleet.asked_at + fleet.answered_at) / 2
    clocks = [
        (one.url, time_s - middle) for one in fleet.servers if (time_s := _number(one.info, "host_facts", "time_s"))
    ]
    allowed = CLOCK_TOLERANCE_S + max(0.0, fleet.answered_at - fleet.asked_at)
    offsets = [offset_s for _, offset_s in clocks]
    fix = "run a time service, such as chrony, on all hosts; logs, traces and request lists mix the clocks"
    if clocks and max(offsets) - min(offsets) > allowed:
        right = statistics.median_low([*offsets, 0.0])
        wrong = [(url, offset_s - right) for url, offset_s in clocks if abs(offset_s - right) > allowed]
        apart = [f"{url} is {abs(by_s):.1f} s {'ahead' if by_s > 0 else 'behind'}" for url, by_s in wrong]
        what = f"clocks differ from the others: {', '.join(apart)}"
        if not wrong:
            wrong, what = clocks, f"the clocks are {max(offsets) - min(offsets):.1f} s apart"
        yield Finding(check="clocks", severity="warning", where=tuple(url for url, _ in wrong), what=what, fix=fix)
    elif clocks and abs(offsets[0]) > allowed:
        what = f"the servers' clocks are {abs(offsets[0]):.1f} s apart from the clock of this host"
        where = tuple(url for url, _ in clocks)
        yield Finding(check="clocks", severity="note", where=where, what=what, fix=fix)


def check_models(fleet: Fleet) -> Iterator[Finding]:
    """Find facts and flags that differ: model, KV layout, page size, and what clients see."""
    yield from _different(fleet.servers, MODEL_FIELDS, "model", "error", lambda one: one.info)
    yield from _different(fleet.servers, SERVICE_FIELDS, "service", "warning", lambda one: one.info)
    halves = [*fleet.of("prefill"), *fleet.of("decode")]
    causes = list(_different(halves, KV_CAUSES, "kv", "error", lambda one: one.facts))
    yield from causes
    consequences = () if causes else ("layout_fingerprint",)
    yield from _different(halves, (*consequences, "weights_fingerprint"), "kv", "error", lambda one: one.facts)
    flags = [name for name in PAIR_FLAGS if name != "page_size" or not causes]
    yield from _different(halves, flags, "flags", "error", lambda one: one.info)


def _different(
    servers: Sequence[FleetServer],
    names: Sequence[str],
    check: str,
    severity: Severity,
    of: Callable[[FleetServer], Any],
) -> Iterator[Finding]:
    for name in names:
        values = {one.url: of(one)[name] for one in servers if of(one).get(name) is not None}
        if len({repr(value) for value in values.values()}) > 1:
            groups: dict[str, list[str]] = {}
            for url, value in values.items():
                groups.setdefault(repr(value), []).append(url)
            text = "; ".join(f"{value} at {', '.join(urls)}" for value, urls in groups.items())
            called = HANDSHAKE_FACTS.get(name, name)
            fix = "start all of them with the same model files and flags"
            what = f"{called} differs: {text}"
            yield Finding(check=check, severity=severity, where=tuple(values), what=what, fix=fix)


def check_network(fleet: Fleet) -> Iterator[Finding]:
    """Find transports that differ, NICs that are absent or down, TCP beside RDMA devices, and endpoints that peers on
    other hosts cannot reach.
    """
    halves = [*fleet.of("prefill"), *fleet.of("decode")]
    for name in TRANSPORT_FACTS:  # the second one follows from the first
        if found := list(_different(halves, (name,), "transport", "error", lambda one: one.facts)):
            yield from found
            break
    for server in halves:
        nics = _devices(server)
        yield from _check_nics(server, nics)
        if nics and server.facts.get("transfer_protocol") == "tcp":
            what = f"KV moves over TCP, and the host has RDMA devices: {', '.join(nics)}"
            fix = "give --disaggregation-ib-device, and --mooncake-protocol rdma"
            yield _finding("nic", "warning", server, what, fix)
        endpoint = str(server.facts.get("control_endpoint") or "")
        if endpoint and is_loopback(f"tcp://{endpoint}") and not is_loopback(server.url):
            what = f"its control endpoint is {endpoint}, which other hosts cannot reach"
            yield _finding("endpoint", "error", server, what, "give --disaggregation-host the address of the host")


def _devices(server: FleetServer) -> list[str]:
    """Return the names of the RDMA devices of a server's host; empty where the server does not tell them."""
    named = (server.info.get("host_facts") or {}).get("rdma_devices")
    return [str(name) for name in named] if isinstance(named, list) else []


def _check_nics(server: FleetServer, nics: Sequence[str]) -> Iterator[Finding]:
    """Find NICs of `--disaggregation-ib-device` that the host lacks, and NICs in use without an active port."""
    facts = server.info.get("host_facts") or {}
    if not isinstance(facts.get("rdma_devices"), list):
        return
    named = [name.strip() for name in str(server.info.get("disaggregation_ib_device") or "").split(",") if name.strip()]
    absent = [name for name in named if name not in nics]
    if absent:
        has = f"has {', '.join(nics)}" if nics else "has no RDMA device"
        what = f"--disaggregation-ib-device names {', '.join(absent)}, and the host {has}"
        yield _finding("nic", "error", server, what, "name devices of /sys/class/infiniband on that host")
    states = facts.get("rdma_ports")
    ports = states if isinstance(states, dict) else {}
    in_use = named or (list(nics) if server.facts.get("transfer_protocol") == "rdma" else [])
    for name in in_use:
        own = {port: state for port, state in ports.items() if port.partition(":")[0] == name}
        if own and "ACTIVE" not in own.values():
            listed = ", ".join(f"port {port.partition(':')[2]} is {state}" for port, state in own.items())
            fix = "check cable, switch and subnet manager (ibstat), or name another NIC"
            yield _finding("nic", "error", server, f"no port of {name} is ACTIVE: {listed}", fix)


def check_memory(fleet: Fleet) -> Iterator[Finding]:
    """Find hosts and KV pools that are nearly full, quarantined pages, and errors of the self-audit."""
    for server in fleet.servers:
        available = _number(server.info, "host_facts", "memory_available_bytes")
        total = _number(server.info, "host_facts", "memory_total_bytes")
        if available is not None and total and available < LOW_MEMORY_SHARE * total:
            what = (
                f"{available / 2**30:.2f} of {total / 2**30:.1f} GiB of memory are left on its host or in its container"
            )
            fix = "give the server less: --max-total-tokens, --hicache-size, --disaggregation-decode-offload-gb"
            yield _finding("host_memory", "warning", server, what, fix)
        shm_free = _number(server.info, "host_facts", "shm_free_bytes")
        if (
            server.facts.get("transfer_backend") in ("shm", "auto")
            and shm_free is not None
            and shm_free < LOW_SHM_BYTES
        ):
            what = f"/dev/shm has {shm_free / 2**30:.2f} GiB left, and KV is in shared memory"
            yield _finding("shared_memory", "warning", server, what, "give the container more: --shm-size")
        for state in server.replicas:
            yield from _check_pool(server, state)


def _check_pool(server: FleetServer, state: dict[str, Any]) -> Iterator[Finding]:
    memory = state.get("memory") or {}
    total = memory.get("pages_total", 0)
    usable, waiting = memory.get("pages_free", 0) + memory.get("pages_evictable", 0), state.get("num_queue_reqs")
    waited_s = (state.get("facts") or {}).get("memory_wait_s") or 0.0
    if waiting and (waited_s > LONG_MEMORY_WAIT_S or (total and usable < FULL_POOL_SHARE * total)):
        since = f", the first one {waited_s:.0f} s for KV memory" if waited_s > LONG_MEMORY_WAIT_S else ""
        what = f"{usable} of {total} KV pages are usable, and {waiting} requests wait{since}"
        fix = "add servers of this role, give more memory, or bound the load: --max-inflight of the router"
        yield _finding("kv_full", "warning", server, what, fix)
    orphan_s = state.get("oldest_orphan_s") or 0.0
    if orphan_s > OLD_QUARANTINE_S:
        what = f"KV pages are in quarantine since {orphan_s:.0f} s: a lost peer might still write there"
        fix = "if that peer's process has ended, say so: POST /declare_peer_dead"
        yield _finding("quarantine", "warning", server, what, fix)
    if state.get("audit"):
        what = f"the self-audit of the KV memory found: {'; '.join(map(str, state['audit'][:3]))}"
        yield _finding("audit", "error", server, what, "report it with `pdserve support-bundle`, and start it again")


def check_flags(fleet: Fleet) -> Iterator[Finding]:
    """Find flags that are accepted and have no effect."""
    known = {field.name: field.metadata["why"] for field in dataclasses.fields(AcceptedConfig)}
    given: dict[str, list[str]] = {}
    for server in fleet.servers:
        for name in known:
            if server.info.get(name) is not None:
                given.setdefault(name, []).append(server.url)
    for name, urls in given.items():
        what = f"--{name.replace('_', '-')} has no effect: {known[name]}"
        yield Finding(check="no_effect", severity="note", where=tuple(urls), what=what, fix="leave the flag out")


def check_failures(fleet: Fleet) -> Iterator[Finding]:
    """Report failures of requests by cause, as far as schedulers have counted any."""
    for server in fleet.servers:
        counts: dict[str, int] = {}
        for state in server.replicas:
            for cause, count in (state.get("failures") or {}).items():
                counts[cause] = counts.get(cause, 0) + int(count)
        if counts:
            what = "requests failed since the start: " + ", ".join(
                f"{n} {cause}" for cause, n in sorted(counts.items())
            )
            yield _finding("failures", "note", server, what, "look for the causes in the server's log")


CHECKS: tuple[Callable[[Fleet], Iterator[Finding]], ...] = (
    check_reading, check_workers, check_pairs, check_tokens, check_versions, check_clocks, check_models, check_network,
    check_memory, check_flags, check_failures,
)  # fmt: skip


def _finding(check: str, severity: Severity, server: FleetServer, what: str, fix: str) -> Finding:
    return Finding(check=check, severity=severity, where=(server.url,), what=what, fix=fix)


def _of_router(fleet: Fleet, check: str, severity: Severity, what: str, fix: str) -> Finding:
    return Finding(check=check, severity=severity, where=(fleet.url,), what=what, fix=fix)


def _number(info: dict[str, Any], group: str, name: str) -> float | None:
    value = (info.get(group) or {}).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is this host's loopback, as an address or by the name `localhost`."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
