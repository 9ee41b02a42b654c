"""Builds the `ssl` context of a server from its certificates. Called by `launch_server` first of all, and by `run`."""

from __future__ import annotations

import ssl

from pdserve.config.access_group import AccessConfig
from pdserve.errors import ConfigError


def server_tls(config: AccessConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the HTTP port; None for plain HTTP.

    Raises:
        ConfigError: a file is not a certificate or key, the two do not match, or the password is wrong.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    password = config.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: password)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile and its password: {error}", field="ssl_certfile") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs: {error}", field="ssl_ca_certs") from error
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context
