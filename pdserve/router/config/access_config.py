"""API keys, client limits, CORS and TLS of the router: parts of `RouterConfig`. Made by `access_flags`."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

from pdserve.base.proof import MacKey
from pdserve.errors import ConfigError
from pdserve.http.clients import Keys, Network, check_keys, parse_networks, split_keys
from pdserve.http.tls import client_context, port_context


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterAccessConfig:
    """Keys of clients and of workers, client limits, and CORS. Keys never appear in a repr."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    """Comma-separated Bearer keys of clients; None: requests need no key."""
    admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Comma-separated Bearer keys for admin paths (add and remove workers, flush, abort); None: `api_key`."""
    worker_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Key sent to workers; None: `api_key`, and without that the client's `Authorization` header."""
    worker_admin_api_key: str | None = dataclasses.field(default=None, repr=False)
    """Key sent to workers with admin requests; None: `admin_api_key`, and without that the key for workers."""
    worker_proof_key: MacKey | None = dataclasses.field(default=None, repr=False)
    """If set, workers get proofs instead of keys, and must prove the control token themselves; see `worker_proof`."""
    max_concurrent_requests_per_client: int | None = None
    """Limit of concurrent generating requests per client; None: no limit."""
    forwarded_allow_ips: str | None = None
    """Trusted proxies, whose `X-Forwarded-For` names the client; see `pdserve.http.clients`."""
    cors_allowed_origins: tuple[str, ...] = ()
    request_id_headers: tuple[str, ...] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")

    @property
    def keys(self) -> Keys:
        """The valid keys."""
        return Keys.of(self.api_key, self.admin_api_key)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """Networks of trusted proxies."""
        return parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)

    @property
    def key_for_workers(self) -> str | None:
        """The key sent to workers without a key of their own; None: none is set."""
        return self.worker_api_key or next(iter(split_keys(self.api_key)), None)

    @property
    def admin_key_for_workers(self) -> str | None:
        """The key sent with admin requests to workers without a key of their own; None: none is set."""
        own = self.worker_admin_api_key or next(iter(split_keys(self.admin_api_key)), None)
        return own or self.key_for_workers

    def __post_init__(self) -> None:
        """Check all values; `ConfigError` names the flag and contains no key."""
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
    """PEM files: the router's certificate for clients, and CA and client certificates for connections to workers."""

    cert: Path | None = None
    key: Path | None = None
    key_password: str | None = dataclasses.field(default=None, repr=False)
    worker_ca: tuple[Path, ...] = ()
    client_cert: Path | None = None
    client_key: Path | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a certificate has no key, or a key no certificate."""
        for first, second in ((self.cert, self.key), (self.client_cert, self.client_key)):
            if (first is None) != (second is None):
                raise ConfigError("a TLS certificate needs its key, and the key its certificate", field="tls")

    def port_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the router's port; None: plain HTTP. ConfigError if a file is unusable."""
        if self.cert is None:
            return None
        return port_context(self.cert, self.key, self.key_password, "--tls-cert-path, --tls-key-path")

    def worker_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for https workers; None: the system's CA certificates and no client certificate.

        Raises:
            ConfigError: a file is unusable.
        """
        flags = "--ca-cert-paths, --client-cert-path"
        return client_context(self.worker_ca, self.client_cert, self.client_key, flags)
