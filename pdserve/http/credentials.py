"""API keys, and `ssl` contexts from certificate files: of a port, and of a client. Made at start-up.

`flags` names the command-line flags of the files; a ConfigError names them, and its field is the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.errors import ConfigError

API_KEY = "PDSERVE_API_KEY"
ADMIN_API_KEY = "PDSERVE_ADMIN_API_KEY"
WORKER_API_KEY = "PDSERVE_WORKER_API_KEY"
WORKER_ADMIN_API_KEY = "PDSERVE_WORKER_ADMIN_API_KEY"
"""Environment variables that replace the flags: every user of the machine can read a command line."""


def split_keys(text: str | None) -> tuple[str, ...]:
    """Split a flag's value at commas into keys.

    Several keys identify several clients, and allow a key rotation in which old and new key are both valid.
    """
    return () if text is None else tuple(text.split(","))


def check_keys(flag: str, text: str | None) -> None:
    """Raise ConfigError if a key is empty or not valid in a header. The message does not contain the key."""
    for key in split_keys(text):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            field = flag.removeprefix("--").replace("-", "_")
            raise ConfigError(f"{flag}: a key must be printable ASCII without spaces, and not empty", field=field)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The valid keys of a server; a repr does not contain them."""

    api: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, api: str | None, admin: str | None) -> Keys:
        """Parse the values of `--api-key` and `--admin-api-key`."""
        return cls(split_keys(api), split_keys(admin))

    @property
    def some(self) -> bool:
        """Whether any key is set."""
        return bool(self.api or self.admin)

    def required(self, *, command: bool) -> bool:
        """Whether a request needs a key; `command`: on a path of `COMMANDS`. Public paths are not considered."""
        return bool(self.api or (command and self.admin))

    def may(self, authorization: str | None, *, command: bool) -> bool:
        """Whether a request with this `Authorization` header is allowed; `command`: on a path of `COMMANDS`."""
        if command and self.admin:
            return _find(authorization, self.admin) is not None
        return not self.api or self.find(authorization) is not None

    def find(self, authorization: str | None) -> str | None:
        """Return the valid key in the `Authorization` header; None without one."""
        if not self.some:
            return None
        return _find(authorization, (*self.api, *self.admin))


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """Return the `Authorization` header of a request; without one the key in `x-api-key`, as that header's value.

    Clients of Anthropic's API send `x-api-key`.
    """
    given = headers.get("Authorization")
    key = headers.get("x-api-key") if given is None else None
    return given if key is None else f"Bearer {key}"


def _find(authorization: str | None, keys: tuple[str, ...]) -> str | None:
    """Compare all keys, each in constant time, so that timing reveals nothing about a key."""
    kind, _, given = (authorization or "").partition(" ")
    sent = given.strip().encode()
    found = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    return found[0] if found and kind.lower() == "bearer" else None


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
