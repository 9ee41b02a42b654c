"""How a field of a config group says that it is a command-line flag. Used by `groups` and `access_group`."""

from __future__ import annotations

import dataclasses
from typing import Any


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    names: tuple[str, ...] = (),
    env: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag; `names` are extra or replacing flag names.

    `env` is a variable that stands for the flag where it is not given. A `secret` is never shown: not in a repr, not in
    `/get_server_info`, not in a log.
    """
    metadata = {"help": help, "names": names, "env": env, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def shown(group: Any) -> dict[str, Any]:
    """The fields of a config group that may be shown, by name."""
    secret = {field.name for field in dataclasses.fields(group) if field.metadata["secret"]}
    return {name: value for name, value in dataclasses.asdict(group).items() if name not in secret}
