"""Third parties' transports, KV stores, routing policies and more, which installed packages register.

[project.entry-points."pdserve.transports"]        # or "pdserve.kv_storage", ...
mine = "my_package.transport:open_transport"
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from pdserve.errors import ConfigError

TRANSPORT_PLUGINS = "pdserve.transports"
"""Group of `open_transport(host: str, options: TransportOptions) -> Transport`."""
STORE_PLUGINS = "pdserve.kv_storage"
"""Group of `open_store(options: StorageOptions) -> Storage`."""
POLICY_PLUGINS = "pdserve.router_policies"
"""Group of `make_policy(config: PolicyConfig) -> Policy`."""
FAMILY_PLUGINS = "pdserve.model_families"
"""Group of `FAMILIES`, each a tuple of `Family`."""

PROCESSOR_PLUGINS = "pdserve.logit_processors"
"""Group of classes of `LogitProcessor` (`executor/logit_processors.py`), made without arguments."""


def plugin_names(group: str) -> list[str]:
    """Return the names of the entry points of `group`, sorted. Imports nothing."""
    return sorted({one.name for one in entry_points(group=group)})


def check_name(field: str, name: str, built_in: Iterable[str], group: str) -> None:
    """Check that `name` is in `built_in`, or an entry point of `group`. Imports nothing.

    Raises:
        ConfigError: it is neither; names the flag of `field`, and the names that there are.
    """
    names = {*built_in, *plugin_names(group)}
    if name not in names:
        flag = field.replace("_", "-")
        raise ConfigError(f"--{flag} is {name!r}; there is {', '.join(sorted(names))}", field=field)


def load_plugin(field: str, name: str, built_in: Iterable[str], group: str) -> Any:
    """Return what the entry point `name` of `group` names. Its package is imported only now.

    Raises:
        ConfigError: there is no such entry point (then as `check_name`), or its package cannot be imported.
    """
    found = next(iter(entry_points(group=group, name=name)), None)
    if found is None:
        check_name(field, name, built_in, group)
        raise ConfigError(f"{name!r} is no entry point of {group}", field=field)
    try:
        return found.load()
    except Exception as error:
        flag = field.replace("_", "-")
        raise ConfigError(f"--{flag} {name} ({found.value}) cannot be loaded: {error}", field=field) from error
