"""Orders and reports on the wire, page tables on two ranks, and gates."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError, ModelError, ProtocolError, RankError
from pdserve.executor.marks import CountedMarks
from pdserve.memory.page_table import PageTable
from pdserve.protocol.failure import Failure
from pdserve.protocol.sampling import SamplingParams
from pdserve.ranks.orders import (
    CopyReport,
    Launch,
    OpenRow,
    PlannedRow,
    RankReady,
    Rebalance,
    Stop,
    Submit,
    Trouble,
    order_codec,
    pack,
    pack_pieces,
    report_codec,
    unpack,
    unpack_pieces,
)
from pdserve.ranks.pages import PageCopybook, PageNews
from pdserve.ranks.steps import StepLog
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import Key, RankMemory, Region

PIECES = ((4096, 1 << 40, (PageCopy(0, 64, 64), PageCopy(128, 0, 1 << 33))), (1, 2, ()))


def test_orders_and_reports_come_out_as_they_went_in() -> None:
    sampling = SamplingParams(seed=(1 << 63) - 1, logit_bias={5: 0.5}, stop_token_ids=(1,))
    for order in (
        OpenRow(row=1, token_ids=pack([1, 2]), num_prompt_tokens=2, sampling=sampling, logprobs=None),
        Launch(step=9, rows=(PlannedRow(0, 3, 7, True, pack([8, 9])),), layer_marks=True),
        Submit(
            job=3, key=Key(1, 2, "o"), index=-1, peer="p", transport_address="h:1", pieces=pack_pieces(PIECES),
            num_bytes=9, after_step=None, after_layers=4,
        ),
        Rebalance("plan"),
        Stop(),
        Stop(Trouble(kind="config", message="m", field="f")),
    ):  # fmt: skip
        assert order_codec().decode(order_codec().encode(order)) == order
    memory = RankMemory("h:1", (Region(1, 2),))
    for report in (
        RankReady(num_pages=7, memory=memory, samples={"w": {0: 0.1, 1 << 40: -2.0}}, settle_s=1.5),
        CopyReport(job=1, failure=Failure(code="c", message="m"), settled=False, write_s=0.25),
    ):
        assert report_codec().decode(report_codec().encode(report)) == report


def test_an_order_is_no_report() -> None:
    with pytest.raises(ProtocolError):
        report_codec().decode(order_codec().encode(Stop()))


@given(st.lists(st.integers(0, (1 << 31) - 1)))
def test_numbers_survive_packing(numbers: list[int]) -> None:
    assert unpack(pack(numbers)) == numbers


def test_pieces_survive_packing_and_damage_is_refused() -> None:
    assert unpack_pieces(pack_pieces(PIECES)) == PIECES
    for broken in (b"123", pack(np.array([-1], dtype=np.int32))):
        with pytest.raises(ProtocolError):
            unpack(broken)


@pytest.mark.parametrize("error", [ConfigError("a", field="b"), ModelError("c"), RankError("d")])
def test_an_error_crosses_as_what_it_is(error: ConfigError | ModelError | RankError) -> None:
    again = Trouble.of(error).error()
    assert type(again) is type(error) and str(again) == str(error)
    assert Trouble.of(KeyError("x")).error().args == ("KeyError: 'x'",)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(20, 120))
def test_the_follower_s_page_table_has_what_a_step_reads(seed: int, page_tokens: int, num_ops: int) -> None:
    """Rows open, grow and close at random; at each launch every planned row agrees up to the tokens it has."""
    rng = random.Random(seed)
    table, copy = PageTable(4, 16), PageTable(4, 16)
    news, book = PageNews(table, page_tokens), PageCopybook(copy)
    live: dict[int, int] = {}
    sent = 0
    for _ in range(num_ops):
        match rng.choice(("open", "grow", "close", "launch", "launch")):
            case "open" if table.num_free:
                pages = [rng.randrange(1000) for _ in range(rng.randint(1, 8))]
                row = table.open(pages)
                assert row is not None
                live[row] = len(pages)
                news.begin(row)
                book.begin(row)
            case "grow" if live:
                row = rng.choice(list(live))
                more = [rng.randrange(1000) for _ in range(rng.randint(0, 16 - live[row]))]
                table.extend(row, live[row], more)
                live[row] += len(more)
            case "close" if live:
                row = rng.choice(list(live))
                del live[row]
                table.close(row)
            case "launch":
                for row in rng.sample(list(live), rng.randint(0, len(live))):
                    end = rng.randint(1, live[row] * page_tokens)
                    packed = news.take(row, end)
                    sent += len(packed)
                    book.write(row, packed)
                    assert news.take(row, end) == b"", "sent once"
                    num_pages = -(-end // page_tokens)
                    assert copy.pages[row, :num_pages].tolist() == table.pages[row, :num_pages].tolist()
    assert sent <= 4 * 16 * num_ops


def test_a_gate_opens_with_the_rank_s_own_layers() -> None:
    log = StepLog(range(4, 8))
    assert log.gate(None, None) is None
    gates = {n: log.gate(1, n) for n in (2, 4, 5, 6, 8, None)}
    assert gates[2] is gates[4] is gates[5], "layers of earlier stages: our first one"
    open_now = lambda: {n for n, gate in gates.items() if gate is not None and gate(0.0)}  # noqa: E731
    assert open_now() == set()
    marks = CountedMarks()
    log.begun(1, marks)
    assert open_now() == set()
    marks.on_layer(0)
    assert open_now() == {2, 4, 5}
    marks.on_layer(3)
    assert open_now() == {2, 4, 5, 6, 8}
    log.done(1)
    assert open_now() == set(gates)
    assert log.gate(1, 8) is None and log.gate(0, None) is None
    assert log.gate(2, 6) is log.gate(2, 6), "jobs of a step share its gates"


def test_a_gate_wakes_who_waits() -> None:
    log = StepLog(range(2))
    gate = log.gate(3, None)
    assert gate is not None
    opened: list[bool] = []
    thread = threading.Thread(target=lambda: opened.append(gate(10.0)))
    thread.start()
    log.begun(3, None)
    log.done(3)
    thread.join(10.0)
    assert opened == [True]
