"""Transports by name. A transfer engine is imported only when its transport is chosen.

A third party's transport registers as an entry point of the group `pdserve.transports`, see `base/plugins.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import cast

from pdserve.base.env import TRANSFER_FAILURES, transfer_failures
from pdserve.base.plugins import TRANSPORT_PLUGINS, load_plugin
from pdserve.transfer.transport import Transport, TransportOptions

log = logging.getLogger(__name__)

FIELD = "disaggregation_transfer_backend"
Opener = Callable[[str, TransportOptions], Transport]


def open_transport(name: str, host: str, options: TransportOptions | None = None) -> Transport:
    """Open the transport called `name`; its engine is imported only now.

    `host` is the address that peers reach this process at; `options` None: the defaults.

    Raises:
        ConfigError: no such transport, its library is missing, it cannot start here, or the configured share of failing
            writes is not a number.
    """
    opener = OPENERS.get(name)
    if opener is None:
        opener = cast(Opener, load_plugin(FIELD, name, OPENERS, TRANSPORT_PLUGINS))
    share = transfer_failures()
    transport = opener(host, options or TransportOptions())
    if not share:
        return transport
    from pdserve.transfer.transports.failing import FailingTransport

    names = " or ".join(TRANSFER_FAILURES)
    log.warning("%g%% of the writes to peers and of the polls of transfers fail on purpose (%s)", 100 * share, names)
    return FailingTransport(transport, share)


def _open_mooncake(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.mooncake import MooncakeTransport

    return MooncakeTransport.open(host, options)


def _open_nixl(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.nixl import NixlTransport

    return NixlTransport.open(host, options)


def _open_mori(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.mori import MoriTransport

    return MoriTransport.open(host, options.ib_device)


def _open_ascend(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.ascend import AscendTransport

    return AscendTransport.open(host, options.ib_device)


def _open_fake(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.fake import FakeTransport

    return FakeTransport()


def _open_shm(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.shm import ShmTransport

    return ShmTransport()


def _open_auto(host: str, options: TransportOptions) -> Transport:
    from pdserve.transfer.transports.auto import open_each

    best_first = {name: functools.partial(OPENERS[name], host, options) for name in ("shm", "mooncake")}
    return open_each(best_first)


OPENERS: dict[str, Opener] = {
    "mooncake": _open_mooncake,
    "shm": _open_shm,
    "auto": _open_auto,
    "nixl": _open_nixl,
    "mori": _open_mori,
    "ascend": _open_ascend,
    "fake": _open_fake,
}
