"""Log lines of the scheduler about one request have its request id."""

from __future__ import annotations

import logging

import msgspec
import pytest

from pdserve.protocol.messages import AbortRequest, FinishReason, GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.outbox import REQUEST_LOGGER, Outbox
from tests.unit.scheduler.kit import Mono

REQUEST = GenerateRequest(
    rid="a.1", input_ids=[5, 6, 7], sampling=CoreSamplingParams(max_new_tokens=2), request_id="req-9"
)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None, str]]:
    """Level, request id and message of each line."""
    return [
        (record.levelname, vars(record).get("request_id"), record.getMessage())
        for record in caplog.records
        if record.name == REQUEST_LOGGER
    ]


def test_start_and_end_of_a_request_are_told_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, REQUEST_LOGGER)
    mono = Mono()
    mono.mailbox.post(REQUEST)
    mono.run()
    mono.mailbox.post(msgspec.structs.replace(REQUEST, rid="a.2"))
    mono.mailbox.post(AbortRequest(rid="a.2"))
    mono.run()
    assert lines_of(caplog) == [
        ("DEBUG", "req-9", "a.1 is admitted: 3 prompt tokens"),
        ("DEBUG", "req-9", "a.1 has ended after 2 tokens: length"),
        ("DEBUG", "req-9", "a.2 is admitted: 3 prompt tokens"),
        ("DEBUG", "req-9", "a.2 has ended after 0 tokens: aborted: the request was aborted"),
    ]


def test_a_failure_of_server_or_peer_is_a_warning_and_many_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    outbox = Outbox(lambda message: None)
    gone = FinishReason(type="abort", message="the peer\nis gone", status_code=502, err_type="peer_gone")
    for _ in range(50):
        outbox.log_end(REQUEST, gone, 0)
    full = FinishReason(type="abort", message="full", status_code=503, err_type="queue_full", retry_after_s=1)
    outbox.log_end(REQUEST, full, 0)
    lines = lines_of(caplog)
    assert lines[0] == ("WARNING", "req-9", "a.1 has failed: peer_gone: the peer\\nis gone")
    assert len(lines) < 10
    assert all("peer_gone" in text for _, _, text in lines)
