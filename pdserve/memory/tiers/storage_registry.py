"""Stores by name. A third party's store registers as an entry point of the group `pdserve.kv_storage`.

[project.entry-points."pdserve.kv_storage"]
mystore = "my_package.store:open_store"        # open_store(options: StorageOptions) -> Storage
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pdserve.base.plugins import STORE_PLUGINS, load_plugin
from pdserve.config.storage_options import StorageOptions
from pdserve.memory.tiers.storage import Storage

FIELD = "hicache_storage_backend"

Opener = Callable[[StorageOptions], Storage]


def open_storage(name: str, options: StorageOptions) -> Storage:
    """Open the store called `name`. Its library is imported only now. Never waits for the store itself.

    Raises:
        ConfigError: no such store, its library is missing, or an option is wrong.
    """
    opener = OPENERS.get(name)
    if opener is None:
        opener = cast(Opener, load_plugin(FIELD, name, OPENERS, STORE_PLUGINS))
    return opener(options)


def _open_file(options: StorageOptions) -> Storage:
    from pdserve.memory.tiers.file_store import FileStorage

    return FileStorage.open(options)


def _open_memory(options: StorageOptions) -> Storage:
    from pdserve.memory.tiers.memory_store import MemoryStorage

    return MemoryStorage.open(options)


def _open_mooncake(options: StorageOptions) -> Storage:
    from pdserve.memory.tiers.mooncake_store import MooncakeStorage

    return MooncakeStorage.open(options)


OPENERS: dict[str, Opener] = {"file": _open_file, "memory": _open_memory, "mooncake": _open_mooncake}
