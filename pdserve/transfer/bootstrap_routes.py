"""Routes to the replicas of a prefill server: the bootstrap server's table, its query parameters and its answers.

Pure; used by `bootstrap` and `bootstrap_client`. Replicas of pdserve register a `ReplicaRoute`. Ranks that speak
SGLang's protocol register an `SGLangRank` each. Answers have SGLang's names beside ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

ANY = "-1"
FOLLOWS_ROOM = "follow_bootstrap_room"
MAX_RANKS = 1 << 16
"""Most ranks of a server that registers with SGLang's body."""
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


class FoundRoute(ReplicaRoute, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """An answer to a look-up of a replica: its route, and SGLang's names of its address."""

    rank_ip: str = ""
    rank_port: int = 0


class SGLangRank(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill rank of SGLang registers: the sizes of its server, its ranks in these, and its address.

    Its replica is `attn_dp_rank` of `attn_dp_size`, or `system_dp_rank` of `system_dp_size` if that is above 1. Fields
    that do not describe the rank's place or address are ignored.
    """

    attn_tp_size: Count
    attn_tp_rank: Rank
    attn_cp_size: Count = 1
    attn_cp_rank: Rank = 0
    attn_dp_size: Count = 1
    attn_dp_rank: Rank = 0
    pp_size: Count = 1
    pp_rank: Rank = 0
    system_dp_size: Count = 1
    system_dp_rank: Rank = 0
    rank_ip: Name
    rank_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    kv_cache_dtype: Name | None = None
    load_balance_method: Name = FOLLOWS_ROOM

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the server by kind of rank."""
        dp_size = self.attn_dp_size if self.system_dp_size == 1 else self.system_dp_size
        return {
            "tp_rank": self.attn_tp_size,
            "dp_rank": dp_size,
            "pp_rank": self.pp_size,
            "cp_rank": self.attn_cp_size,
        }

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of this process by kind of rank."""
        dp_rank = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return {"tp_rank": self.attn_tp_rank, "dp_rank": dp_rank, "pp_rank": self.pp_rank, "cp_rank": self.attn_cp_rank}

    def field_of(self, kind: str) -> str:
        """Return the field that has the rank of `kind`, for errors."""
        if kind == "dp_rank" and self.system_dp_size > 1:
            return "system_dp_rank"
        return kind if kind == "pp_rank" else f"attn_{kind}"

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that all ranks of the server share, by SGLang's names."""
        return sglang_facts(self.sizes, self.page_size, self.kv_cache_dtype, self.load_balance_method == FOLLOWS_ROOM)


def sglang_facts(
    sizes: Mapping[str, int], page_size: int | None, kv_cache_dtype: str | None, follows_room: bool
) -> dict[str, Any]:
    """Return the facts of a prefill server by the names of SGLang's newer and older versions.

    `sizes`: see `SGLangRank.sizes`. `follows_room`: a room belongs to replica `room % dp_size`.
    """
    tp_size, dp_size, pp_size = sizes["tp_rank"], sizes["dp_rank"], sizes["pp_rank"]
    return {
        "attn_tp_size": tp_size,
        "attn_cp_size": sizes["cp_rank"],
        "dp_size": dp_size,
        "pp_size": pp_size,
        "page_size": page_size,
        "kv_cache_dtype": kv_cache_dtype,
        "follow_bootstrap_room": follows_room,
        "prefill_attn_tp_size": tp_size,
        "prefill_dp_size": dp_size,
        "prefill_pp_size": pp_size,
        "prefill_page_size": page_size,
    }


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
    """Registered replicas of one prefill server. Used by one event loop only.

    It holds routes of pdserve's replicas, or ranks that registered with SGLang's body, but never both.
    """

    def __init__(self) -> None:
        self._routes: dict[int, ReplicaRoute] = {}
        self._facts: ServerFacts | None = None
        self._ranks: dict[tuple[int, ...], SGLangRank] = {}

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
            self._ranks.clear()
            self._facts = facts
        for field in facts.__struct_fields__:
            _check_same(field, getattr(self._facts, field), getattr(facts, field))
        self._routes[route.dp_rank] = route

    def put_rank(self, rank: SGLangRank) -> None:
        """Register a rank that speaks SGLang's protocol; a rank that registers again replaces its address.

        Raises:
            ValueError: a rank is not below its size, another rank registered different facts, or pdserve's replicas
                are registered; the text names the field.
        """
        if self._routes:
            raise ValueError("the replicas of this prefill server are registered - at `$.rank_ip`")
        if math.prod(rank.sizes.values()) > MAX_RANKS:
            raise ValueError(f"the sizes make more than {MAX_RANKS} ranks - at `$.attn_tp_size`")
        for kind, size in rank.sizes.items():
            if rank.ranks[kind] >= size:
                field = rank.field_of(kind)
                raise ValueError(f"{field} is {rank.ranks[kind]}, but there are only {size} - at `$.{field}`")
        for other in self._ranks.values():
            for field, value in rank.facts.items():
                _check_same(field, other.facts[field], value)
            break
        self._ranks[tuple(rank.ranks.values())] = rank

    @property
    def complete(self) -> bool:
        """True when all replicas are registered."""
        if self._facts is not None:
            return len(self._routes) == self._facts.dp_size
        first = next(iter(self._ranks.values()), None)
        return first is not None and len(self._ranks) == math.prod(first.sizes.values())

    @property
    def facts(self) -> dict[str, Any] | None:
        """The answer with the shared facts; None before the first registration."""
        facts = self._facts
        if facts is None:
            return next((rank.facts for rank in self._ranks.values()), None)
        sizes = {"tp_rank": facts.tp_size, "dp_rank": facts.dp_size, "pp_rank": facts.pp_size, "cp_rank": 1}
        return sglang_facts(sizes, facts.page_size, facts.kv_cache_dtype, True) | msgspec.structs.asdict(facts)

    def find(self, ranks: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the answer with the address of a rank, or None. `ranks`: as of `parse_query`; 0 where absent.

        All ranks of a replica of pdserve share the route of its rank 0.
        """
        at = {kind: ranks.get(kind, 0) for kind in RANK_QUERY}
        facts = self._facts
        if facts is None:
            rank = self._ranks.get(tuple(at.values()))
            return None if rank is None else {"rank_ip": rank.rank_ip, "rank_port": rank.rank_port}
        if at["tp_rank"] >= facts.tp_size or at["pp_rank"] >= facts.pp_size or at["cp_rank"]:
            return None
        route = self._routes.get(at["dp_rank"])
        if route is None:
            return None
        return msgspec.structs.asdict(route) | {"rank_ip": route.host, "rank_port": route.port}


def _check_same(field: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise ValueError(f"{field} is {theirs!r}, but another replica said {ours!r} - at `$.{field}`")


def parse_registration(body: bytes) -> ReplicaRoute | SGLangRank:
    """Parse the body of `PUT /route`: SGLang's has `rank_ip`.

    Raises:
        msgspec.MsgspecError, ValueError: it is neither; the text names the field.
    """
    fields = msgspec.json.decode(body)
    kind: type[ReplicaRoute] | type[SGLangRank] = ReplicaRoute
    if isinstance(fields, dict) and "rank_ip" in fields:
        kind = SGLangRank
    return msgspec.convert(fields, kind)


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
