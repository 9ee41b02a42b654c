"""What the kernels' benchmark measures: names that a stored table can tell apart, and limits of the right kind."""

from __future__ import annotations

import time

import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import embed_case, linear_case, norm_case, place_case, route_case
from benchmarks.kernels import Limits, measure
from pdserve.model.native.resources import Threads
from tests.unit.model.native_kit import needs_kernels


@needs_kernels
def test_each_case_is_measured_against_its_own_kind_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LIMIT_SIZE", 64)  # torch needs minutes for int8 where no instruction multiplies it
    threads = Threads(1)
    cases = [make(threads, rows) for make in (embed_case, norm_case, place_case, route_case) for rows in (1, 3)]
    cases += [linear_case(threads, "int8", 1, gated=gated) for gated in (True, False)]
    assert len({case.name for case in cases}) == len(cases)
    measured = measure(cases, 1, time.perf_counter)
    assert [case.products for case in cases[-3:]] == ["bf16", "int8", "int8"]
    assert measured.tera_ops_per_s.keys() == {"bf16", "int8"}
    assert all(ms.median > 0 and share.median > 0 for ms, share in measured.cases)


@needs_kernels
def test_the_limit_is_the_slower_of_bytes_and_products() -> None:
    few, many = (linear_case(Threads(1), "bf16", rows) for rows in (1, 64))
    limits = Limits(bytes_per_s=few.num_bytes, ops_per_s=many.num_ops / 3)
    assert limits.seconds(few) == 1.0
    assert limits.seconds(many) == 3.0
