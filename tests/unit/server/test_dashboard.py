"""The page of a server, and its own history."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from pdserve.base import log_ring
from pdserve.base.log_ring import LogRing
from pdserve.config.access_group import AccessConfig
from pdserve.server import dashboard
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench
from tests.waiting import seen_until

pytestmark = pytest.mark.timeout(60)


async def test_the_page_needs_no_key_and_its_data_does(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="k" * 20)) as b:
        for path, kind in (("/dashboard", "html"), ("/page/app.js", "javascript"), ("/page/style.css", "css")):
            answer = await b.http.get(path)
            assert answer.status_code == 200 and kind in answer.headers["Content-Type"]
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            again = await b.http.get(path, headers={"If-None-Match": answer.headers["ETag"]})
            assert again.status_code == 304
        assert (await b.http.get("/page/none.js")).status_code == 404
        for path in ("/observe/history", "/logs"):
            assert (await b.http.get(path)).status_code == 401


async def test_the_log_lines_need_the_admin_key_and_have_no_secrets(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_ring, "_rings", deque([ring := LogRing.create("decode scheduler")]))
    access = AccessConfig(api_key="user" * 5, admin_api_key="admin" * 4)
    async with bench(tokenizer, access=access) as b:
        for number in range(3):
            ring.write(f"line {number} of a client with {access.api_key}")
        assert (await b.http.get("/logs", headers={"Authorization": f"Bearer {access.api_key}"})).status_code == 401
        headers = {"Authorization": f"Bearer {access.admin_api_key}"}
        answer = (await b.http.get("/logs?lines=2", headers=headers)).json()
        lines = [f"line {number} of a client with [redacted]" for number in (1, 2)]
        assert answer == {"processes": [{"name": "decode scheduler", "lines": lines}]}
        refused = await b.http.get("/logs?lines=0", headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "lines"


async def test_the_history_has_requests_latencies_and_gauges(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.01)
    async with bench(tokenizer) as b:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
        assert (await b.http.post("/generate", json=body)).status_code == 200

        async def history() -> Any:
            return (await b.http.get("/observe/history")).json()

        answer = await seen_until(history, lambda seen: seen["windows"]["60"]["requests"] == 1)
        assert answer["windows"]["60"]["ttft_p50_s"] > 0 and answer["windows"]["60"]["failed"] == 0
        assert sum(answer["series"]["requests"]) == 1 and answer["workers"] == []
        refused = await b.http.get("/observe/history?seconds=x")
        assert refused.status_code == 400 and "seconds" in refused.json()["error"]["message"]
