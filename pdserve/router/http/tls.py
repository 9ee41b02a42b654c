"""Builds `ssl` contexts for the router's port and for connections to workers. Called at start-up."""

from __future__ import annotations

import ssl

from pdserve.errors import ConfigError
from pdserve.router.config.access_config import TlsConfig


def server_tls(config: TlsConfig) -> ssl.SSLContext | None:
    """Build the context of the router's port; None: plain HTTP. `ConfigError` if a file is unusable."""
    if config.cert is None or config.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.cert, config.key, password=lambda: config.key_password or "")
    except OSError as error:
        raise ConfigError(f"--tls-cert-path, --tls-key-path: {error}", field="tls_cert_path") from error
    return context


def worker_tls(config: TlsConfig) -> ssl.SSLContext | None:
    """Build the context for https workers; None: the system's CA certificates and no client certificate.

    Raises:
        ConfigError: a file is unusable.
    """
    if not config.worker_ca and config.client_cert is None:
        return None
    context = ssl.create_default_context()
    try:
        for path in config.worker_ca:
            context.load_verify_locations(path)
        if config.client_cert is not None:
            context.load_cert_chain(config.client_cert, config.client_key)
    except OSError as error:
        raise ConfigError(f"--ca-cert-paths, --client-cert-path: {error}", field="ca_cert_paths") from error
    return context
