"""API keys: which are known, and whether a request has brought one. Used by the HTTP sides of servers and router.

Keys travel as `Authorization: Bearer KEY`. SGLang's rules, for paths that everyone may ask and for commands:

    api key   admin key   other paths   commands
    -         -           open          open
    set       -           api key       api key
    -         set         open          admin key
    set       set         either key    admin key
"""

from __future__ import annotations

import dataclasses
import hmac

from pdserve.errors import ConfigError

API_KEY = "PDSERVE_API_KEY"
ADMIN_API_KEY = "PDSERVE_ADMIN_API_KEY"
WORKER_API_KEY = "PDSERVE_WORKER_API_KEY"
WORKER_ADMIN_API_KEY = "PDSERVE_WORKER_ADMIN_API_KEY"
"""Environment variables that stand for the flags: a command line can be read by every user of the machine."""

COMMANDS = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/declare_peer_dead",
        "/start_profile",
        "/stop_profile",
        "/pd_role_switch",
        "/observe",
    }
)
"""Paths of servers, and of the router, that change what others see, or show what others ask."""


def split_keys(text: str | None) -> tuple[str, ...]:
    """The keys in a flag's value: one, or several with commas between them, so that clients can be told apart and a
    key can be changed while its predecessor is still taken.
    """
    return () if text is None else tuple(text.split(","))


def check_keys(flag: str, text: str | None) -> None:
    """Raise ConfigError, without showing the key, where one is empty or cannot travel in a header."""
    for key in split_keys(text):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            field = flag.removeprefix("--").replace("-", "_")
            raise ConfigError(f"{flag}: a key must be printable ASCII without spaces, and not empty", field=field)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that a server knows; never in a repr."""

    api: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    admin: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, api: str | None, admin: str | None) -> Keys:
        """From the values of `--api-key` and `--admin-api-key`."""
        return cls(split_keys(api), split_keys(admin))

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return bool(self.api or self.admin)

    def may(self, authorization: str | None, *, command: bool) -> bool:
        """Whether a request with this header may ask; `command`: on a path that changes what others see."""
        if command and self.admin:
            return _find(authorization, self.admin) is not None
        return not self.api or self.find(authorization) is not None

    def find(self, authorization: str | None) -> str | None:
        """The known key that the header brings."""
        return _find(authorization, (*self.api, *self.admin))


def _find(authorization: str | None, keys: tuple[str, ...]) -> str | None:
    """Takes as long for a key that is nearly right as for any other: all are compared, each in constant time."""
    kind, _, given = (authorization or "").partition(" ")
    sent = given.strip().encode()
    found = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    return found[0] if found and kind.lower() == "bearer" else None
