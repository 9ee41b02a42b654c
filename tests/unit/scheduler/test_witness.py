"""What is sent and what arrives, hashed on both sides of a simulated pair; and a transport that damages bytes."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.observe.compare_kv import compare
from pdserve.sim.network import Faults, SimCopyEngine
from pdserve.sim.world import Prompt, RequestHalf, Shape, World, monolith_tokens
from pdserve.transfer.events import CopyJob
from pdserve.transfer.plan import PageCopy

SHAPE = Shape(page_tokens=4, num_pages=64, chunk_tokens=5)
PROMPTS = [Prompt(tuple(range(3 + i, 16 + 2 * i)), 4) for i in range(6)]


def run(
    shape: Shape, *, verify: bool, prompts: Sequence[Prompt] = PROMPTS
) -> tuple[list[RequestHalf | None], list[Any]]:
    lines: list[dict[str, Any]] = []
    world = World(5, dataclasses.replace(shape, kv_checksum=verify), Faults(), write_kv_line=lines.append)
    halves = world.run(prompts, 3)
    assert not world.prefill.leaks() and not world.decode.leaks()
    return halves, lines


@pytest.mark.parametrize("layer_groups", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_arrives_is_what_was_sent(layer_groups: int, overlap: bool) -> None:
    shape = Shape(page_tokens=4, num_pages=64, chunk_tokens=5, layer_groups=layer_groups, overlap=overlap)
    halves, lines = run(shape, verify=True)
    assert [half and half.tokens for half in halves] == monolith_tokens(shape, PROMPTS)
    report = compare(lines)
    assert (report.status, report.num_equal, report.unmatched) == (0, len(PROMPTS), ())
    line = next(line for line in lines if line["event"] == "kv.sent")
    assert line["bytes"] == len(line["pages"]) * line["page_bytes"] and line["checksum"]


def test_only_what_decode_lacks_is_looked_at() -> None:
    shape = Shape(page_tokens=4, num_pages=64, chunk_tokens=5, decode_prefix_cache=True)
    _, lines = run(shape, verify=True, prompts=[Prompt(tuple(range(5, 27)), 4)] * 12)
    report = compare(lines)
    assert report.status == 0 and report.num_equal >= 1
    assert any(line["first_page"] > 0 for line in lines)


class Damage:
    """The first copy that lands in page 1 or later of a KV pool has one bit wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = False
        land = SimCopyEngine.land

        def damaged(engine: SimCopyEngine, job: CopyJob, piece: int, copy: PageCopy) -> None:
            land(engine, job, piece, copy)
            if not self.done and copy.num_bytes > 64:
                address = job.pieces[piece][1] + copy.destination + 8
                ctypes.c_uint8.from_address(address).value ^= 1
                self.done = True

        monkeypatch.setattr(SimCopyEngine, "land", damaged)


def test_damage_on_the_way_is_refused_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    damage = Damage(monkeypatch)
    halves, lines = run(SHAPE, verify=True)
    assert damage.done
    expected = monolith_tokens(SHAPE, PROMPTS)
    failed = [half for half in halves if half is not None and half.finish is not None and half.finish.type == "abort"]
    assert [half.finish.err_type for half in failed if half.finish is not None] == ["kv_checksum_mismatch"]
    assert failed[0].tokens == [], "nothing was computed with damaged KV"
    rest = [(half.tokens, want) for half, want in zip(halves, expected, strict=True) if half and half not in failed]
    assert all(got == want for got, want in rest)
    assert compare(lines).status == 1


def test_damage_on_the_way_is_found_in_the_logs_where_it_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Damage(monkeypatch)
    halves, lines = run(SHAPE, verify=False)
    assert all(half is not None and half.finish is not None and half.finish.type == "length" for half in halves)
    report = compare(lines)
    assert report.num_equal == len(PROMPTS) - 1
    (difference,) = report.differences
    assert len(difference.cells) == 1 and len(difference.pages) == 1, difference.sentence()
