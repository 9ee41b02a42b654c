"""What a bootstrap server keeps and is asked: the routes of the ranks of one prefill server. Pure; see `bootstrap`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

ANY = "-1"
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


class RankRoute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefill rank: where its control socket is, its place, and what it stores."""

    instance: Name
    """Changes with every start of the server."""
    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    engine_rank: Rank = 0
    dp_rank: Rank = 0
    pp_rank: Rank = 0
    tp_size: Count = 1
    dp_size: Count = 1
    pp_size: Count = 1
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    kv_cache_dtype: Name
    model: Name
    facts: dict[str, Fact] = {}
    """What a peer must agree with, by name; see `KVLayout.fields`."""

    @property
    def place(self) -> tuple[int, int, int]:
        """(tp rank, dp rank, pp rank)."""
        return (self.engine_rank, self.dp_rank, self.pp_rank)


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a prefill server share. Unknown fields are ignored."""

    instance: str
    tp_size: int
    dp_size: int
    pp_size: int
    page_size: int
    kv_cache_dtype: str
    model: str
    facts: dict[str, Fact] = {}


def facts_of(route: RankRoute) -> ServerFacts:
    """The part of a route that all ranks share."""
    return ServerFacts(
        instance=route.instance,
        tp_size=route.tp_size,
        dp_size=route.dp_size,
        pp_size=route.pp_size,
        page_size=route.page_size,
        kv_cache_dtype=route.kv_cache_dtype,
        model=route.model,
        facts=route.facts,
    )


def check_place(route: RankRoute) -> None:
    """Raise ValueError, naming the field, when a rank lies outside its size."""
    for rank, size, name in (
        (route.engine_rank, route.tp_size, "engine_rank"),
        (route.dp_rank, route.dp_size, "dp_rank"),
        (route.pp_rank, route.pp_size, "pp_rank"),
    ):
        if rank >= size:
            raise ValueError(f"{name} is {rank}, but there are only {size} - at `$.{name}`")


class RouteTable:
    """Registered ranks of one prefill instance. Used by one event loop only."""

    def __init__(self) -> None:
        self._routes: dict[tuple[int, int, int], RankRoute] = {}
        self._facts: ServerFacts | None = None

    def put(self, route: RankRoute) -> None:
        """Register a rank. A new instance replaces the old one with all its ranks.

        Raises:
            ValueError: a rank of the same instance says something else about the server; the text names the field.
        """
        check_place(route)
        facts = facts_of(route)
        if self._facts is None or self._facts.instance != facts.instance:
            self._routes.clear()
            self._facts = facts
        for field in facts.__struct_fields__:
            ours, theirs = getattr(self._facts, field), getattr(facts, field)
            if ours != theirs:
                raise ValueError(f"{field} is {theirs!r}, but another rank said {ours!r} - at `$.{field}`")
        self._routes[route.place] = route

    @property
    def complete(self) -> bool:
        """True when all ranks are there."""
        facts = self._facts
        return facts is not None and len(self._routes) == facts.tp_size * facts.dp_size * facts.pp_size

    @property
    def facts(self) -> ServerFacts | None:
        """The shared facts, or None before the first rank."""
        return self._facts

    def find(self, tp_rank: int, dp_rank: int, pp_rank: int) -> RankRoute | None:
        """One rank's route."""
        return self._routes.get((tp_rank, dp_rank, pp_rank))


def parse_query(query: Mapping[str, str]) -> dict[str, int]:
    """The ranks asked for, by our names; -1 and absent are left out. Raises ValueError naming the parameter."""
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
