"""Flags that concern one role only: who starts several roles with one command line deals them out. `launch_local` does.

A server refuses such a flag in another mode, so that nobody believes it does something there. Some flags of servers
concern the router before them as well: a trace without it falls into one for each server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pdserve.config.cli import flags

Role = Literal["prefill", "decode"]

PREFILL_FIELDS = frozenset(
    {
        "disaggregation_layerwise_transfer",
        "disaggregation_layerwise_groups",
        "disaggregation_decode_tp",
        "disaggregation_decode_dp",
        "disaggregation_prefill_pp",
    }
)
DECODE_FIELDS = frozenset({"num_reserved_decode_tokens", "mixed_chunk_size"})
DECODE_PREFIX = "disaggregation_decode_"
"""Every other field that begins so is decode's."""
ROUTER_FIELDS = frozenset({"enable_trace", "otlp_traces_endpoint", "max_request_bytes", "log_level"})
"""Flags that routers have, too, under the same name and with the same meaning."""


def role_of(field: str) -> Role | None:
    """The only role that a field of the configuration concerns, or None when it is for all."""
    if field in PREFILL_FIELDS:
        return "prefill"
    return "decode" if field in DECODE_FIELDS or field.startswith(DECODE_PREFIX) else None


def flags_for(role: Role, argv: Sequence[str]) -> list[str]:
    """`argv` without the other role's flags and their values. What is no flag is kept, so that the server says so."""
    return [word for field, words in _split(argv) for word in words if field is None or role_of(field) in (None, role)]


def flags_for_router(argv: Sequence[str]) -> list[str]:
    """Those of `argv`, flags of servers, that a router in front of them takes as well."""
    found = [words for field, words in _split(argv) if field in ROUTER_FIELDS]
    return [word for words in found if not words[0].startswith("--no-") for word in words]


def _split(argv: Sequence[str]) -> Iterator[tuple[str | None, Sequence[str]]]:
    """(field, words) of each flag: `--flag`, `--no-flag`, `--flag=value` or `--flag value`; else (None, word)."""
    known = {name: flag for flag in flags() for name in flag.names}
    known |= {f"--no-{name[2:]}": flag for name, flag in known.items() if flag.kind is bool}
    at = 0
    while at < len(argv):
        name, equals, _ = argv[at].partition("=")
        flag = known.get(name)
        end = at + 1
        if flag is not None and flag.kind is not bool and not equals:
            end += sum(not word.startswith("--") for word in argv[end : end + 1])
        yield (None if flag is None else flag.field), argv[at:end]
        at = end
