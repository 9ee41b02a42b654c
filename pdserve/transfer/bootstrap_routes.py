"""Routes to the replicas of a prefill server: the bootstrap server's table and its query parameters.

Pure; used by `bootstrap` and `bootstrap_client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

ANY = "-1"
MAX_BODY_BYTES = 256 << 10
"""Most bytes of a request or answer body."""
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Fact = str | int | float | bool | None

RANK_QUERY = {
    "tp_rank": ("engine_rank", "target_tp_rank"),
    "dp_rank": ("target_dp_group", "prefill_dp_rank"),
    "pp_rank": ("target_pp_rank",),
    "cp_rank": ("prefill_cp_rank",),
}


class ChallengeAnswer(msgspec.Struct, frozen=True):
    """The bootstrap server's nonce and proof: see `base.proof.ChallengeVerifier.challenge`."""

    nonce: Annotated[str, msgspec.Meta(max_length=128)]
    proof: Annotated[str, msgspec.Meta(max_length=128)]


class ReplicaRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefill replica: the address of its rank 0's control socket, its parallel sizes, and its KV layout."""

    server: Name
    """Id of the server; each start has a new one."""
    instance: Name
    """Instance id of the replica in this start of the server."""
    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    dp_rank: Rank = 0
    tp_size: Count = 1
    dp_size: Count = 1
    pp_size: Count = 1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kv_cache_dtype: Name
    model: Name
    facts: dict[str, Fact] = {}
    """Facts that must equal a peer's, by name; see `KVLayout.fields`."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that all replicas of a prefill server share. Unknown fields are ignored."""

    server: str
    tp_size: int
    dp_size: int
    pp_size: int
    page_size: int
    kv_cache_dtype: str
    model: str
    facts: dict[str, Fact] = {}


def facts_of(route: ReplicaRoute) -> ServerFacts:
    """Return the part of a route that all replicas share."""
    return ServerFacts(
        server=route.server,
        tp_size=route.tp_size,
        dp_size=route.dp_size,
        pp_size=route.pp_size,
        page_size=route.page_size,
        kv_cache_dtype=route.kv_cache_dtype,
        model=route.model,
        facts=route.facts,
    )


class RouteTable:
    """Registered replicas of one prefill server. Used by one event loop only."""

    def __init__(self) -> None:
        self._routes: dict[int, ReplicaRoute] = {}
        self._facts: ServerFacts | None = None

    def put(self, route: ReplicaRoute) -> None:
        """Register a replica. A restarted server replaces all replicas of its former run.

        Raises:
            ValueError: its number is not below `dp_size`, or another replica of the same server registered different
                facts; the text names the field.
        """
        if route.dp_rank >= route.dp_size:
            raise ValueError(f"dp_rank is {route.dp_rank}, but there are only {route.dp_size} - at `$.dp_rank`")
        facts = facts_of(route)
        if self._facts is None or self._facts.server != facts.server:
            self._routes.clear()
            self._facts = facts
        for field in facts.__struct_fields__:
            ours, theirs = getattr(self._facts, field), getattr(facts, field)
            if ours != theirs:
                raise ValueError(f"{field} is {theirs!r}, but another replica said {ours!r} - at `$.{field}`")
        self._routes[route.dp_rank] = route

    @property
    def complete(self) -> bool:
        """True when all replicas are registered."""
        return self._facts is not None and len(self._routes) == self._facts.dp_size

    @property
    def facts(self) -> ServerFacts | None:
        """The shared facts; None before the first replica."""
        return self._facts

    def find(self, tp_rank: int, dp_rank: int, pp_rank: int) -> ReplicaRoute | None:
        """Return the route of the replica that has this rank, or None. All ranks of a replica share the route of its
        rank 0.
        """
        facts = self._facts
        if facts is None or tp_rank >= facts.tp_size or pp_rank >= facts.pp_size:
            return None
        return self._routes.get(dp_rank)


def parse_query(query: Mapping[str, str]) -> dict[str, int]:
    """Return the requested ranks, by our names, without -1 and absent ones. Raises ValueError naming the parameter."""
    ranks: dict[str, int] = {}
    for rank, parameters in RANK_QUERY.items():
        for parameter in parameters:
            text = query.get(parameter, ANY)
            if text == ANY:
                continue
            if not (text.isascii() and text.isdigit() and len(text) <= 4):
                raise ValueError(f"{parameter} must be -1 or a rank, got {text[:20]!r}")
            ranks[rank] = int(text)
    return ranks
