"""The time to the first token as a sum of named parts."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.metrics import TTFT_PARTS, ttft_parts
from pdserve.protocol.messages import RequestTiming

SECONDS = st.one_of(st.none(), st.floats(-1.0, 1e4))


@given(
    ttft_s=st.floats(0.0, 1e4),
    intake_s=st.floats(0.0, 1e4),
    timing=st.one_of(
        st.none(),
        st.builds(RequestTiming, queue_s=SECONDS, bootstrap_s=SECONDS, prefill_s=SECONDS, transfer_s=SECONDS),
    ),
)
def test_the_parts_add_up_to_the_whole_whatever_the_clocks_said(
    ttft_s: float, intake_s: float, timing: RequestTiming | None
) -> None:
    parts = ttft_parts(ttft_s, intake_s, timing)
    assert tuple(parts) == TTFT_PARTS
    assert all(seconds >= 0 for seconds in parts.values())
    assert math.isclose(sum(parts.values()), ttft_s, abs_tol=1e-9)


def test_each_part_is_what_was_measured() -> None:
    timing = RequestTiming(queue_s=0.2, bootstrap_s=0.1, prefill_s=0.4, transfer_s=0.05)
    parts = ttft_parts(1.0, 0.125, timing)
    assert [round(parts[name], 6) for name in TTFT_PARTS] == [0.125, 0.1, 0.2, 0.4, 0.05, 0.125]
