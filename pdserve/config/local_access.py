"""Access and TLS flags of `launch_local`, and the split of server flags between the router and the servers by role.

Clients connect to the router only, so client limits, CORS and the certificate are flags of the router. Router and
servers all get the API keys, through the environment. The servers listen on loopback, with HTTPS only if
`--ssl-ca-certs` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Literal

from pdserve.base.log import LogFormat
from pdserve.config.access_group import KEYFILE_PASSWORD
from pdserve.config.cli import flags
from pdserve.errors import ConfigError
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY, check_keys

Role = Literal["prefill", "decode"]

PREFILL_FIELDS = frozenset(
    {
        "disaggregation_layerwise_transfer",
        "disaggregation_layerwise_groups",
        "disaggregation_decode_tp",
        "disaggregation_decode_dp",
    }
)
DECODE_FIELDS = frozenset({"num_reserved_decode_tokens", "mixed_chunk_size"})
DECODE_PREFIX = "disaggregation_decode_"
"""Further decode-only fields start with this prefix."""
ROUTER_FIELDS = frozenset(
    {"enable_trace", "otlp_traces_endpoint", "max_request_bytes", "log_level", "log_format", "log_stats_interval"}
    | {"access_log"}
)
"""Server flags that the router also has, with the same name and meaning."""


def role_of(field: str) -> Role | None:
    """Return the only role that uses a configuration field; None: all roles."""
    if field in PREFILL_FIELDS:
        return "prefill"
    return "decode" if field in DECODE_FIELDS or field.startswith(DECODE_PREFIX) else None


def flags_for(role: Role, argv: Sequence[str]) -> list[str]:
    """Return `argv` without the other role's flags and values. Unknown words are kept; the server reports them."""
    return [word for field, words in _split(argv) for word in words if field is None or role_of(field) in (None, role)]


def flags_for_router(argv: Sequence[str]) -> list[str]:
    """Return the server flags in `argv` that the router also has."""
    found = [words for field, words in _split(argv) if field in ROUTER_FIELDS]
    return [word for words in found if not words[0].startswith("--no-") for word in words]


def log_format_of(argv: Sequence[str]) -> LogFormat:
    """Return the last `--log-format` in `argv`; the servers report a wrong value."""
    given = [words[-1].partition("=")[2] or words[-1] for field, words in _split(argv) if field == "log_format"]
    return "json" if given and given[-1] == "json" else "text"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalAccess:
    """Access and TLS settings. None: not given. Secrets never appear in a repr."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    require_control_proof: bool | None = None
    max_concurrent_requests_per_client: int | None = None
    forwarded_allow_ips: str | None = None
    cors_allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = dataclasses.field(default=None, repr=False)
    ssl_ca_certs: str | None = None

    def __post_init__(self) -> None:
        """Check keys and certificates; raises `ConfigError`. Router and servers check the remaining values."""
        check_keys("--api-key", self.api_key)
        check_keys("--admin-api-key", self.admin_api_key)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile need each other", field="ssl_certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile", field="ssl_ca_certs")

    @property
    def client_key(self) -> str:
        """Placeholder for the key in printed examples; never the key itself."""
        return "none" if self.api_key is None else "YOUR_KEY"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for router and servers."""
        given = {
            API_KEY: self.api_key,
            ADMIN_API_KEY: self.admin_api_key,
            KEYFILE_PASSWORD: self.ssl_keyfile_password,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def server_flags(self) -> list[str]:
        """Flags for every server."""
        if self.require_control_proof is None:
            return self._tls_flags
        return [f"--{'' if self.require_control_proof else 'no-'}require-control-proof", *self._tls_flags]

    @property
    def _tls_flags(self) -> list[str]:
        if self.ssl_ca_certs is None or self.ssl_certfile is None or self.ssl_keyfile is None:
            return []
        return ["--ssl-certfile", self.ssl_certfile, "--ssl-keyfile", self.ssl_keyfile]

    @property
    def router_flags(self) -> list[str]:
        """Flags for the router."""
        values = {
            "--max-concurrent-requests-per-client": self.max_concurrent_requests_per_client,
            "--forwarded-allow-ips": self.forwarded_allow_ips,
            "--tls-cert-path": self.ssl_certfile,
            "--tls-key-path": self.ssl_keyfile,
            "--ca-cert-paths": self.ssl_ca_certs,
        }
        flags = [word for name, value in values.items() if value is not None for word in (name, str(value))]
        return flags + (["--cors-allowed-origins", *self.cors_allowed_origins] if self.cors_allowed_origins else [])


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    add = parser.add_argument_group("access", "API keys, client limits, CORS and TLS").add_argument
    add("--api-key", metavar="KEY", help=f"key that clients must send as Authorization: Bearer KEY (or in {API_KEY})")
    add("--admin-api-key", metavar="KEY", help=f"key that replaces --api-key for admin paths (or in {ADMIN_API_KEY})")
    text = (
        "servers accept only requests of the router, which proves the control token with each request; the default "
        "without --api-key"
    )
    add("--require-control-proof", action=argparse.BooleanOptionalAction, help=text)
    text = "concurrent generating requests per client; no limit when absent"
    add("--max-concurrent-requests-per-client", type=int, metavar="N", help=text)
    text = "trusted proxies, comma-separated; their X-Forwarded-For names the client"
    add("--forwarded-allow-ips", metavar="ADDRESSES", help=text)
    text = "origins of web pages that may send requests; * for all"
    add("--cors-allowed-origins", nargs="*", default=[], metavar="ORIGIN", help=text)
    add("--ssl-certfile", metavar="PEM", help="the router serves HTTPS with this certificate")
    add("--ssl-keyfile", metavar="PEM", help="private key of --ssl-certfile")
    add("--ssl-keyfile-password", metavar="PASSWORD", help=f"password of the key file (or in {KEYFILE_PASSWORD})")
    text = "the servers also serve HTTPS, and the router verifies them with these CA certificates; the certificate must"
    add("--ssl-ca-certs", metavar="PEM", help=f"{text} be valid for 127.0.0.1")


def access_of(args: argparse.Namespace) -> LocalAccess:
    """Return the given values; absent keys are read from the environment."""
    given = {field.name: vars(args)[field.name] for field in dataclasses.fields(LocalAccess)}
    for field, variable in (("api_key", API_KEY), ("admin_api_key", ADMIN_API_KEY)):
        if given[field] is None:
            given[field] = os.environ.get(variable, "").strip() or None
    return LocalAccess(**given | {"cors_allowed_origins": tuple(args.cors_allowed_origins)})
