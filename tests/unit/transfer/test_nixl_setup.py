"""What the nixl transport decides without an engine: addresses, environment, and what it says when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pdserve.config.transfer_engines import NIXL_MODULES
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports import nixl
from pdserve.transfer.transports.nixl import (
    PREFIX,
    SYN_RETRIES,
    NixlEndpointInfo,
    NixlRegion,
    decode_address,
    encode_address,
    set_environment,
)
from pdserve.transfer.transports.nixl_engine import IDLE_SLEEP_US, is_installed, let_idle_threads_sleep


def test_an_address_carries_metadata_and_regions() -> None:
    card = NixlEndpointInfo(
        bytes(range(256)), (NixlRegion(1 << 46, 64, "DRAM", 0), NixlRegion(1 << 47, 1 << 40, "VRAM", 7))
    )
    address = encode_address(card)
    assert decode_address(address) == card
    assert address.isascii() and address.isprintable() and " " not in address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "fake",
        PREFIX,
        PREFIX + "%%%",
        PREFIX + "gA==",
        encode_address(NixlEndpointInfo(b"", ())),
        encode_address(NixlEndpointInfo(b"x", ())),
    ],
)
def test_a_malformed_address_is_refused_for_good(address: str) -> None:
    with pytest.raises(TransferError, match="not a nixl address") as caught:
        decode_address(address)
    assert caught.value.settled
    assert not caught.value.retryable


def test_named_nics_reach_the_engine_and_the_user_s_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    set_environment("mlx5_0")
    assert os.environ["UCX_NET_DEVICES"] == "eth7"
    monkeypatch.delenv("UCX_NET_DEVICES")
    set_environment(None)
    assert "UCX_NET_DEVICES" not in os.environ
    set_environment("mlx5_0, mlx5_1")
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    monkeypatch.setenv("UCX_IB_TRAFFIC_CLASS", "1")
    set_environment(None)
    assert os.environ["UCX_IB_TRAFFIC_CLASS"] == "1"
    set_environment(None, 106)
    assert os.environ["UCX_IB_TRAFFIC_CLASS"] == "106"


def test_a_host_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_SYN_CNT", "5")
    set_environment(None)
    assert os.environ["UCX_TCP_SYN_CNT"] == "5"
    monkeypatch.delenv("UCX_TCP_SYN_CNT")
    set_environment(None)
    assert os.environ["UCX_TCP_SYN_CNT"] == str(SYN_RETRIES)


def test_a_missing_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NIXL_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[nixl\]'") as caught:
        open_transport("nixl", "127.0.0.1")
    assert caught.value.field == "disaggregation_transfer_backend"


def test_a_thread_of_the_engine_that_has_nothing_to_do_sleeps() -> None:
    class Config:
        """What the engine's Python layer fills in, field by field."""

        pthrDelay = lthrDelay = 7

    class Bindings(SimpleNamespace):
        __hash__ = object.__hash__

    bindings = Bindings(nixlAgentConfig=Config)
    let_idle_threads_sleep(bindings)
    let_idle_threads_sleep(bindings)
    config = bindings.nixlAgentConfig()
    config.pthrDelay, config.lthrDelay = 0, 5
    assert (config.pthrDelay, config.lthrDelay) == (IDLE_SLEEP_US, 5)
    assert IDLE_SLEEP_US > 0 and isinstance(config, Config)


@pytest.mark.skipif(not is_installed(), reason="nixl is not installed")
def test_a_process_with_an_agent_ends_with_its_own_status() -> None:
    """One of the wheel's libraries crashes when a process unloads it at its end."""
    program = (
        "import sys\n"
        "from pdserve.transfer.transports.nixl_engine import Agent, load_native\n"
        "agent = Agent(load_native(), answers=True)\n"
        "print('printed', flush=False)\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "printed\n")


@pytest.mark.skipif(not is_installed(), reason="nixl is not installed")
def test_senders_to_a_peer_that_does_not_answer_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both: the one that connected, and the one that did not."""

    class Sender:
        peer = "peer"

        def __init__(self, native: object, regions: object) -> None:
            self.is_destroyed = False
            made.append(self)

        def connect(self, metadata: bytes, there: object) -> None:
            if len(made) == 2:
                raise TransferError("no peer answers", code="peer_unreachable")

        def destroy(self) -> None:
            self.is_destroyed = True

    made: list[Sender] = []
    memory = np.zeros(4096, np.uint8)
    transport = open_transport("nixl", "127.0.0.1")
    try:
        transport.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
        monkeypatch.setattr(nixl, "Sender", Sender)
        with pytest.raises(TransferError, match="no peer answers"):
            transport.connect(transport.address())
        assert [sender.is_destroyed for sender in made] == [True, True]
    finally:
        transport.close()
