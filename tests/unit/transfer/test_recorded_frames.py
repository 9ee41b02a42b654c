"""The control wire is what it was: packets of version 2, recorded as msgpack, decode and encode to the same bytes.

A change of these bytes is a change of the protocol: raise `CONTROL_VERSION`, and record anew with
`python -m tests.unit.transfer.test_recorded_frames > tests/unit/transfer/recorded_frames.txt`.

A new field that packets omit while it has its default changes no recorded bytes. The file then gets more packets, which
have the field: three lines have `RankMemory.host_addresses`, and the last six `RankMemory.state_regions` and
`TransferInfo.state_indices`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from pdserve.transfer.wire import CONTROL_VERSION, Body, Hello, Packet, RankMemory, StateRegion, TransferInfo
from tests.fuzz.structs import sample

RECORDED = Path(__file__).parent / "recorded_frames.txt"
OF_EACH = 3


def recorded() -> list[tuple[str, bytes]]:
    """The tag of a body, and a packet with such a body."""
    lines = RECORDED.read_text().splitlines()
    assert lines[0] == f"version {CONTROL_VERSION}"
    return [(tag, bytes.fromhex(packet)) for tag, packet in (line.split() for line in lines[1:])]


def record() -> Iterator[str]:
    """The file's lines, of packets made up by a seed."""
    yield f"version {CONTROL_VERSION}"
    rng = random.Random(1)
    for kind in sorted(get_args(Body), key=lambda kind: str(kind.__struct_config__.tag)):
        for _ in range(OF_EACH):
            packet = sample(Packet, rng, {"body": sample(kind, rng)})
            yield f"{kind.__struct_config__.tag} {msgspec.msgpack.encode(packet).hex()}"
    for _ in range(OF_EACH):
        body = sample(Hello, rng, {"host_addresses": ("10.0.0.2", "fd00::2")})
        yield f"Hello {msgspec.msgpack.encode(sample(Packet, rng, {'body': body})).hex()}"
    yield from record_state()


def record_state() -> Iterator[str]:
    """The lines with state, made up by a seed of their own."""
    rng = random.Random(2)
    for _ in range(OF_EACH):
        pins = {"state_regions": (sample(StateRegion, rng), sample(StateRegion, rng))}
        body = sample(Hello, rng, pins | {"ranks": (sample(RankMemory, rng, pins),)})
        yield f"Hello {msgspec.msgpack.encode(sample(Packet, rng, {'body': body})).hex()}"
    for _ in range(OF_EACH):
        info = sample(TransferInfo, rng, {"state_indices": ((3,), (4, 5))})
        yield f"Meta {msgspec.msgpack.encode(sample(Packet, rng, {'body': info})).hex()}"


@pytest.mark.parametrize(("tag", "packet"), recorded(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_packet_has_the_recorded_bytes(tag: str, packet: bytes) -> None:
    decoded = msgspec.msgpack.decode(packet, type=Packet)
    assert type(decoded.body).__struct_config__.tag == tag
    assert msgspec.msgpack.encode(decoded) == packet


def test_every_body_is_recorded() -> None:
    assert {tag for tag, _ in recorded()} == {kind.__struct_config__.tag for kind in get_args(Body)}


def test_packets_with_and_without_the_addresses_of_hosts_are_recorded() -> None:
    hellos = [msgspec.msgpack.decode(packet, type=Packet).body for tag, packet in recorded() if tag == "Hello"]
    addresses = {rank.host_addresses for hello in hellos if isinstance(hello, Hello) for rank in hello.ranks}
    assert addresses >= {(), ("10.0.0.2", "fd00::2")}


def test_packets_with_and_without_state_are_recorded() -> None:
    bodies = [msgspec.msgpack.decode(packet, type=Packet).body for _, packet in recorded()]
    infos = [body.state_indices for body in bodies if isinstance(body, TransferInfo)]
    counts = {len(rank.state_regions) for body in bodies if isinstance(body, Hello) for rank in body.ranks}
    assert infos == [()] * OF_EACH + [((3,), (4, 5))] * OF_EACH and counts == {0, 2}


if __name__ == "__main__":
    print("\n".join(record()))
