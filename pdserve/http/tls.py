"""Builds `ssl` contexts from certificate files: of a port, and of a client. Called at start-up.

`flags` names the command-line flags of the files; a ConfigError names them, and its field is the first.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdserve.errors import ConfigError


def port_context(cert: Path | str, key: Path | str | None, password: str | None, flags: str) -> ssl.SSLContext:
    """Return the context of a port.

    Raises:
        ConfigError: a file is unusable, the two do not match, or the password is wrong.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with _readable(flags):
        context.load_cert_chain(cert, key, password=lambda: password or "")  # never asks on the terminal
    return context


def verify_clients(context: ssl.SSLContext, authorities: Path | str | None, cert_reqs: int, flags: str) -> None:
    """Make a port verify client certificates with the CA certificates `authorities`; `cert_reqs`: `ssl.VerifyMode`.

    Raises:
        ConfigError: the file is unusable.
    """
    if authorities is not None:
        with _readable(flags):
            context.load_verify_locations(authorities)
    context.verify_mode = ssl.VerifyMode(cert_reqs)


def client_context(
    authorities: Sequence[Path | str], cert: Path | str | None, key: Path | str | None, flags: str
) -> ssl.SSLContext | None:
    """Return the context of a client; None without files, for the system's CA certificates and no own certificate.

    Raises:
        ConfigError: a file is unusable.
    """
    if not authorities and cert is None:
        return None
    context = ssl.create_default_context()
    with _readable(flags):
        for path in authorities:
            context.load_verify_locations(path)
        if cert is not None:
            context.load_cert_chain(cert, key)
    return context


@contextlib.contextmanager
def _readable(flags: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        field = flags.partition(",")[0].removeprefix("--").replace("-", "_")
        raise ConfigError(f"{flags}: {error}", field=field) from error
