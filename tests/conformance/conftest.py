"""The transports under test, opened once for all files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Transport
from pdserve.transfer.transports import local_peers, mooncake, nixl, nixl_engine
from tests.conformance.transport_kit import REGION_BYTES, Memory, Open, PeerFactory


@pytest.fixture(scope="package")
def opened() -> Iterator[Open]:
    """Opens a transport by name, once for all tests here, as in a server; mooncake reads its timeouts all the time."""
    kept: dict[str, tuple[Transport, Memory, PeerFactory]] = {}

    def open_once(name: str) -> tuple[Transport, Memory, PeerFactory]:
        if name == "nixl" and not nixl_engine.is_installed():
            pytest.skip("nixl is not installed; scripts/setup.sh says how")
        if name not in kept:
            transport, memory = open_transport(name, "127.0.0.1", None), Memory(REGION_BYTES)
            transport.register([memory.region])
            kept[name] = transport, memory, PeerFactory(name)
        return kept[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
        patch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
        patch.setenv("UCX_TLS", "tcp,self")  # as between hosts; on one host it would write into the peer by itself
        patch.setattr(nixl, "STALL_S", 2.5)
        patch.setattr(nixl, "PROBE_TIMEOUT_S", 4.0)
        patch.setattr(local_peers, "CONNECT_TIMEOUT_S", 0.5)
        patch.setattr(mooncake, "PROBE_TIMEOUT_S", 4.0)
        yield open_once
        for transport, _, factory in kept.values():
            transport.close()
            factory.close()
