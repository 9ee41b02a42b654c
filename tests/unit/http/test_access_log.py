"""The access log of servers and router, and the request id of log lines."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pdserve.base.log import current_request_id
from pdserve.config.access_group import AccessConfig
from pdserve.config.groups import ObserveConfig
from pdserve.observe.http_calls import log_access
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench, tiny_tokenizer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Level, request id and fields of each line."""
    return [
        {"level": record.levelname, "request_id": vars(record)["request_id"], **vars(record)["fields"]}
        for record in caplog.records
        if record.name == "pdserve.access"
    ]


def test_a_line_has_one_form_and_hostile_text_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve.access")
    log_access(client="10.0.0.1", method="POST", path="/a\nb", status=200, seconds=0.25, request_id="r", complete=False)
    log_access(client="10.0.0.1", method="GET", path="/health", status=200, seconds=0.25, request_id="r")
    log_access(client="10.0.0.1", method="GET", path="/health", status=503, seconds=0.001, request_id="r")
    assert [record.getMessage() for record in caplog.records] == [
        "10.0.0.1 POST /a\\nb 200 250.0 ms, cut off",
        "10.0.0.1 GET /health 503 1.0 ms",
    ]


async def test_a_server_logs_each_call_with_its_request_id(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pdserve.access")
    access = AccessConfig(api_key="secret-key")
    async with bench(tokenizer, observe={"access_log": True}, access=access) as b:
        body = {"prompt": "hello", "max_tokens": 2}
        key = {"Authorization": "Bearer secret-key"}
        await b.http.post("/v1/completions", json=body, headers={"X-Request-Id": "req-7", **key})
        await b.http.post("/v1/completions", json=body | {"stream": True}, headers=key)
        await b.http.post("/v1/completions", json=body)
        await b.http.get("/health")
        assert current_request_id() is None
    assert b.scheduler.requests[0].request_id == "req-7"
    first, stream, refused, health = lines_of(caplog)
    assert (first["level"], first["request_id"], first["method"], first["path"], first["status"]) == (
        *("INFO", "req-7", "POST", "/v1/completions"),
        200,
    )
    assert first["duration_ms"] > 0
    assert (stream["status"], stream["complete"]) == (200, True)
    assert stream["request_id"] == b.scheduler.requests[1].request_id
    assert stream["request_id"].startswith("req-")
    assert (refused["level"], refused["status"]) == ("INFO", 401)
    assert (health["level"], health["path"]) == ("DEBUG", "/health")
    assert "secret-key" not in caplog.text


async def test_without_the_flag_no_call_is_logged(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "pdserve.access")
    async with bench(tokenizer) as b:
        answer = await b.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
    assert lines_of(caplog) == []


@pytest.mark.parametrize(("level", "logs"), [("debug", True), ("info", True), ("warning", False), (None, False)])
def test_the_name_of_sglang_enables_it(level: Any, logs: bool) -> None:
    assert ObserveConfig(log_level_http=level).logs_access is logs
    assert ObserveConfig(access_log=True, log_level_http=level).logs_access
