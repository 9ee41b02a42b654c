"""Who may ask the router, and over what: parts of `RouterConfig`. Made by `access_flags`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pdserve.base.clients import Keys, Network, check_keys, parse_networks, split_keys
from pdserve.base.proof import MacKey
from pdserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterAccessConfig:
    """Who may ask what, and what workers are told of it. Keys never appear in a repr."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    """What clients must send as Bearer, several with commas between them; None: everyone may ask."""
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """What those must send who add and remove workers, flush and abort; None: `api_key`."""
    worker_api_key: str | None = dataclasses.field(default=None, repr=False)
    """What workers are sent; None: `api_key`, and where there is none either, what the client sent."""
    worker_admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """What workers are sent with commands; None: `admin_api_key`, and without that what they are sent otherwise."""
    worker_proof_key: MacKey | None = dataclasses.field(default=None, repr=False)
    """With this workers are sent proofs instead of keys, and have to prove the control token; see `worker_proof`."""
    max_concurrent_requests_per_client: int | None = None
    """Generating requests that a client may have at a time; None: no limit."""
    forwarded_allow_ips: str | None = None
    """Proxies whose `X-Forwarded-For` says who the client is; see `pdserve.base.clients`."""
    cors_allowed_origins: tuple[str, ...] = ()
    request_id_headers: tuple[str, ...] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")

    @property
    def keys(self) -> Keys:
        """The keys that are known."""
        return Keys.of(self.api_key, self.admin_api_key)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """Who is believed about whom it asks for."""
        return parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)

    @property
    def key_for_workers(self) -> str | None:
        """The key that workers are sent unless they have one of their own."""
        return self.worker_api_key or next(iter(split_keys(self.api_key)), None)

    @property
    def admin_key_for_workers(self) -> str | None:
        """The same with commands."""
        own = self.worker_admin_api_key or next(iter(split_keys(self.admin_api_key)), None)
        return own or self.key_for_workers

    def __post_init__(self) -> None:
        """Raises `ConfigError`, naming the flag and never showing a key."""
        check_keys("--api-key", self.api_key)
        check_keys("--admin-api-key", self.admin_api_key)
        for name, key in (
            ("--worker-api-key", self.worker_api_key),
            ("--worker-admin-api-key", self.worker_admin_api_key),
        ):
            check_keys(name, key)
        most = self.max_concurrent_requests_per_client
        if most is not None and most < 1:
            raise ConfigError(
                f"--max-concurrent-requests-per-client must be at least 1, got {most}",
                field="max_concurrent_requests_per_client",
            )
        parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Certificates as PEM files: the router's own for its clients, and what it trusts and shows towards workers."""

    cert: Path | None = None
    key: Path | None = None
    key_password: str | None = dataclasses.field(default=None, repr=False)
    worker_ca: tuple[Path, ...] = ()
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` where half of a pair is missing."""
        for first, second in ((self.cert, self.key), (self.client_cert, self.client_key)):
            if (first is None) != (second is None):
                raise ConfigError("a TLS certificate needs its key, and the key its certificate", field="tls")
