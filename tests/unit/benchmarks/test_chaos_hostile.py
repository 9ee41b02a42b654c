"""The trap of the chaos run: which visits count as having told a secret."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.chaos_hostile import Trap

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("second_part", "num_secrets"),
    [(b"X: y", 0), (b"Authorization: Bearer The-Token", 1), (b"pdserve-PROOF: 1", 1), (b"A: The-Token, The-Token", 1)],
)
async def test_a_secret_is_seen_in_all_that_a_visitor_sends(second_part: bytes, num_secrets: int) -> None:
    trap = Trap("The-Token")
    await trap.open(HOST)
    reader, writer = await asyncio.open_connection(HOST, trap.port)
    writer.write(b"GET /challenge HTTP/1.1\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (trap.num_visits, trap.num_secrets) == (1, 0)
    half = len(second_part) // 2
    writer.write(second_part[:half])
    await writer.drain()
    writer.write(second_part[half:] + b"\r\n\r\n")
    writer.write_eof()
    await reader.read()  # the trap has ended the visit
    assert trap.num_secrets == num_secrets
    writer.close()
    await trap.close()
