"""What a request is made of: the sampling fields are declared once, and a failure keeps its parts in every form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.errors import RequestError, TransferError
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason
from pdserve.protocol.sampling import BODY_DEFAULTS, BODY_FIELDS, CoreSamplingParams, validate_sampling
from pdserve.server.request.sampling_fields import declared_sampling
from pdserve.server.request.schemas import ChatBody, CompletionBody, NativeSampling


@pytest.mark.parametrize("body", [NativeSampling, CompletionBody, ChatBody])
def test_bodies_have_all_declared_sampling_fields_and_null_is_the_default(body: type[Any]) -> None:
    assert BODY_FIELDS.keys() == BODY_DEFAULTS.keys() >= {"temperature", "top_k", "ignore_eos"}
    assert declared_sampling(msgspec.convert(dict.fromkeys(BODY_FIELDS), body)) == BODY_DEFAULTS
    made = CoreSamplingParams(**declared_sampling(body()))
    assert made == CoreSamplingParams()
    for name, kind in BODY_FIELDS.items():
        assert declared_sampling(msgspec.convert({name: kind(1)}, body))[name] == 1
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({name: "one"}, body)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", (0.0, 1e6), (-0.1, 2e6, float("nan"))),
        ("top_p", (0.01, 1.0), (0.0, 1.01)),
        ("min_p", (0.0, 1.0), (-0.01, float("inf"))),
        ("repetition_penalty", (0.01, 2.0), (0.0, 2.01)),
        ("frequency_penalty", (-2.0, 2.0), (-2.01, 2.01)),
        ("presence_penalty", (-2.0, 2.0), (float("-inf"), 2.01)),
    ],
)
def test_values_outside_the_declared_range_are_refused(
    name: str, good: tuple[float, ...], bad: tuple[float, ...]
) -> None:
    for value in good:
        params = CoreSamplingParams(**{name: value})  # type: ignore[arg-type]
        assert validate_sampling(params, 10) is params
    for value in bad:
        with pytest.raises(RequestError, match=f"{name} must be in ") as refused:
            validate_sampling(CoreSamplingParams(**{name: value}), 10)  # type: ignore[arg-type]
        assert refused.value.field == name


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no pages", status=503, code="queue_full", retry_after_s=7),
        RequestError("room 7 is live", status=409, code="room_in_use", field="bootstrap_room"),
        RequestError("rid 'a' is in use", status=409, code="rid_in_use"),
        RequestError("other weights", status=409, code="lora_mismatch", field="lora_path"),
        RequestError("snapshot.kv: has 3 bytes", status=409, code="snapshot_differs", field="snapshot.kv"),
        RequestError("too complex", code="grammar_failed"),
    ],
)
def test_a_refusal_reaches_the_client_as_the_scheduler_raised_it(error: RequestError) -> None:
    finish = FinishReason.failed(Failure.from_error(error))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(finish), type=FinishReason)
    assert sent.failure is not None
    assert vars(sent.failure.error()) == vars(error)


def test_only_failures_of_requests_have_the_two_fields_that_clients_need_on_the_wire() -> None:
    lost = Failure.from_error(TransferError("gone", code="peer_gone"), "host:1")
    assert (lost.status, lost.retryable, lost.origin) == (502, True, "host:1")
    assert Failure.from_error(TransferError("never", retryable=False)).status == 500
    assert msgspec.to_builtins(lost).keys() == {"code", "message", "origin", "retryable", "status"}
    busy = Failure.from_error(RequestError("full", status=503, retry_after_s=1))
    assert msgspec.to_builtins(busy)["retry_after_s"] == 1 and busy.retryable
    assert not Failure.from_error(RequestError("bad", field="n")).retryable


def test_an_output_that_stops_has_no_failure_and_an_abort_without_status_was_requested() -> None:
    assert FinishReason(type="stop", matched=3).failure is None
    assert FinishReason(type="length", length=1).failure is None
    aborted = FinishReason(type="abort").failure
    assert aborted is not None and (aborted.status, aborted.code) == (499, "aborted")
