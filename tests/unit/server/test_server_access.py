"""Who may ask a server what: keys, limits per client, pages of other origins, and that keys never show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from pdserve.config.access_group import AccessConfig
from pdserve.config.cli import parse_server_args
from pdserve.errors import ConfigError
from pdserve.http import access as http_access
from pdserve.http.access import CLOSE_SESSION_PATH, COMMANDS, GENERATING, OPEN_SESSION_PATH
from pdserve.http.response_store import CANCEL_PATH, ITEMS_PATH, RESPONSE_PATH
from pdserve.http.session_proof import CHALLENGE_PATH
from pdserve.server.app import BODIES
from pdserve.server.http import middleware as access
from pdserve.server.http.middleware import PUBLIC
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
KEY, ROOT = "key-of-clients", "key-of-the-admin"
GENERATE = {"text": "hi"}
FACTS = {"/v1/models", "/v1/models/{name:path}", "/v1/loads", "/get_load", "/model_info", "/get_model_info",
         "/server_info", "/get_server_info", "/weight_version", "/version", "/get_weight_version",
         "/", "/api/ps", "/api/tags", "/api/version"}  # fmt: skip
CLOSED = (
    ("POST", "/generate"), ("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", "/flush_cache"),
    ("GET", "/openapi.json"), ("GET", "/get_server_info"), ("GET", "/observe"), ("OPTIONS", "/generate"),
    ("POST", "/health_pair"),
)  # fmt: skip
PROBES = {"/health_pair"}
STORED = {RESPONSE_PATH, ITEMS_PATH, CANCEL_PATH, OPEN_SESSION_PATH, CLOSE_SESSION_PATH}
PURE = {
    "/api/show",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/parse_function_call",
    "/separate_reasoning",
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_is_public_for_clients_or_a_command(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        routes = [route for route in b.app.routes if isinstance(route, APIRoute)]
    known = PUBLIC | COMMANDS | {*GENERATING} | FACTS | PURE | PROBES | {CHALLENGE_PATH} | STORED
    assert {route.path for route in routes} == known


async def test_without_a_key_only_probes_are_answered(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key=KEY)) as b:
        for path in sorted(PUBLIC):
            assert (await b.http.get(path)).status_code == 200
        for method, path in CLOSED:
            for headers in ({}, bearer("wrong"), {"Authorization": KEY}, {"X-Api-Key": "wrong"}):
                answer = await b.http.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert all(request.rid.startswith("health-") for request in b.scheduler.requests)
        assert (await b.http.post("/generate", json=GENERATE, headers=bearer(KEY))).status_code == 200
        assert (await b.http.post("/flush_cache", headers=bearer(KEY))).status_code == 200


async def test_commands_need_the_admin_key_where_there_is_one(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key=KEY, admin_api_key=ROOT)) as b:
        for path in sorted(COMMANDS):
            assert (await b.http.get(path, headers=bearer(KEY))).status_code == 401
            answer = await b.http.get(path, headers=bearer(ROOT))
            assert answer.status_code not in (401, 403, 404), "a missing field is 400, released memory 503"
        for key in (KEY, ROOT):
            assert (await b.http.post("/generate", json=GENERATE, headers=bearer(key))).status_code == 200
    async with bench(tokenizer, access=AccessConfig(admin_api_key=ROOT)) as b:
        assert (await b.http.post("/generate", json=GENERATE)).status_code == 200
        assert (await b.http.post("/abort_request", json={"abort_all": True})).status_code == 401


async def test_keys_are_shown_nowhere(
    tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    access = AccessConfig(api_key=KEY, admin_api_key=ROOT, ssl_keyfile_password="pass-of-the-file")
    async with bench(tokenizer, access=access, observe={"log_requests": True, "log_requests_level": 3}) as b:
        await b.http.post("/generate", json=GENERATE, headers=bearer(KEY))
        await b.http.post("/generate", json={"text": 7}, headers=bearer(KEY))
        shown = [repr(b.config), caplog.text]
        for path in ("/get_server_info", "/observe", "/metrics", "/openapi.json", "/v1/models"):
            shown.append((await b.http.get(path, headers=bearer(ROOT))).text)
    logged = capfd.readouterr().out  # all of it: a thread writes the lines, and has ended
    assert "hi" in logged and "max_concurrent_requests_per_client" in shown[2]
    shown.append(logged)
    for secret in (KEY, ROOT, "pass-of-the-file"):
        assert not [text for text in shown if secret in text]


async def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "from-there\n")
    monkeypatch.setenv("PDSERVE_ADMIN_API_KEY", "")
    access = parse_server_args([]).access
    assert (access.api_key, access.admin_api_key) == ("from-there", None)
    assert parse_server_args(["--api-key", "given"]).access.api_key == "given"
    monkeypatch.setenv("PDSERVE_API_KEY", "secret key")
    with pytest.raises(ConfigError, match="--api-key") as refused:
        parse_server_args([])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("access", "ours", "others"),
    [
        ({}, {}, {"X-Forwarded-For": "1.1.1.1"}),
        ({"api_key": f"{KEY},other"}, bearer(KEY), None),
        ({"forwarded_allow_ips": "127.0.0.1"}, {"X-Forwarded-For": "1.1.1.1"}, None),
    ],
)
async def test_a_client_with_all_its_places_taken_waits_and_others_do_not(
    tokenizer: Tokenizer, access: dict[str, Any], ours: dict[str, str], others: dict[str, str] | None
) -> None:
    """By address (a header that anyone can write changes nothing), by key, and by the address that a proxy names."""
    second = {"api_key": bearer("other"), "forwarded_allow_ips": {"X-Forwarded-For": "2.2.2.2"}}
    async with bench(tokenizer, access=AccessConfig(max_concurrent_requests_per_client=2, **access)) as b:
        b.scheduler.hold = True
        running = [asyncio.create_task(b.http.post("/generate", json=GENERATE, headers=ours)) for _ in range(2)]
        await until(lambda: len(b.scheduler.requests) == 2)
        refused = await b.http.post("/v1/completions", json={"prompt": "x"}, headers=ours if others is None else others)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await b.http.get("/v1/models", headers=ours)).status_code == 200, "only what generates is counted"
        for name in access:
            third = asyncio.create_task(b.http.post("/generate", json=GENERATE, headers=second[name]))
            running.append(third)
            await until(lambda: len(b.scheduler.requests) == 3)
        assert (await b.http.post("/abort_request", json={"abort_all": True}, headers=ours)).status_code == 200
        await asyncio.gather(*running)
        b.scheduler.hold = False
        assert (await b.http.post("/generate", json=GENERATE, headers=ours)).status_code == 200


async def test_pages_of_other_origins_may_ask_only_where_they_are_named(tokenizer: Tokenizer) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    here, there = {"Origin": "http://here"}, {"Origin": "http://there"}
    async with bench(tokenizer) as b:
        answer = await b.http.options("/generate", headers=here | preflight)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with bench(tokenizer, access=AccessConfig(api_key=KEY, cors_allowed_origins="http://a, http://here")) as b:
        answer = await b.http.options("/generate", headers=here | preflight)
        assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == "http://here"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        answer = await b.http.post("/generate", json=GENERATE, headers=here | bearer(KEY))
        assert answer.headers["access-control-allow-origin"] == "http://here"
        assert (await b.http.post("/generate", json=GENERATE, headers=here)).status_code == 401
        for answer in (
            await b.http.options("/generate", headers=there | preflight),
            await b.http.post("/generate", json=GENERATE, headers=there | bearer(KEY)),
        ):
            assert "access-control-allow-origin" not in answer.headers


async def test_without_a_key_no_page_of_another_origin_gives_commands(tokenizer: Tokenizer) -> None:
    """CORS would not keep a form or an image from it."""
    image, form = {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://there"}
    own: list[dict[str, str]] = [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://public"},
        {"Origin": "http://server"},
    ]
    async with bench(tokenizer, access=AccessConfig(cors_allowed_origins="http://here")) as b:
        for method, path in (("GET", "/start_profile"), ("POST", "/flush_cache"), ("GET", "/observe")):
            for headers in (image, form, {"Sec-Fetch-Site": "same-site", "Origin": "http://server:1"}):
                answer = await b.http.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
            for headers in [*own, image | {"Origin": "http://here"}]:
                assert (await b.http.request(method, path, headers=headers)).status_code == 200
        for path in ("/generate", "/v1/completions", "/tokenize", "/detokenize", "/nowhere"):
            for headers in (image, form):
                assert (await b.http.post(path, json=GENERATE, headers=headers)).status_code == 403
        for headers in [*own, image | {"Origin": "http://here"}]:
            assert (await b.http.post("/generate", json=GENERATE, headers=headers)).status_code == 200


@pytest.mark.parametrize("keys", [{}, {"admin_api_key": ROOT}, {"api_key": KEY}])
async def test_no_page_of_another_origin_computes_a_token_without_a_key(
    tokenizer: Tokenizer, keys: dict[str, str]
) -> None:
    page = {"Sec-Fetch-Site": "cross-site"}
    async with bench(tokenizer, access=AccessConfig(**keys)) as b:
        assert (await b.http.get("/health_generate", headers=page)).json()["error"]["code"] == "origin_not_allowed"
        assert (await b.http.get("/health_generate")).status_code == 200
        assert (await b.http.get("/health_generate", headers={"Sec-Fetch-Site": "same-origin"})).status_code == 200
        assert (await b.http.get("/health", headers=page)).status_code == 200
        refused = await b.http.post("/generate", json=GENERATE, headers=page)
        assert refused.status_code == (401 if "api_key" in keys else 403)
        assert (await b.http.post("/generate", json=GENERATE, headers=bearer(KEY))).status_code == 200


async def test_answers_are_neither_guessed_at_nor_kept(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for answer in (await b.http.get("/health"), await b.http.post("/generate", json={"text": 7})):
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Cache-Control"] == "no-store"


async def test_all_generating_paths_have_bodies() -> None:
    assert BODIES.keys() >= {*GENERATING}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ssl-certfile", __file__], "--ssl-certfile and --ssl-keyfile need each other"),
        (["--ssl-certfile", "/no/such", "--ssl-keyfile", __file__], "--ssl-certfile is '/no/such'"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs"),
        (["--ssl-cert-reqs", "3"], "must be 0, 1 or 2"),
        (["--max-concurrent-requests-per-client", "0"], "at least 1"),
        (["--forwarded-allow-ips", "me"], "--forwarded-allow-ips"),
        (["--admin-api-key", ""], "--admin-api-key"),
    ],
)
async def test_wrong_flags_are_refused_by_name(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_server_args(argv)


async def test_large_bodies_have_a_budget_and_a_deadline(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_access, "LARGE_BODIES", 1)
    async with bench(tokenizer, max_request_bytes=3 << 20) as b:
        b.scheduler.hold = True
        large = {"text": "hi", "ignored": "x" * (2 << 20)}
        first = asyncio.create_task(b.http.post("/generate", json=large))
        await until(lambda: b.client.num_live == 1)
        answer = await b.http.post("/generate", json=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_large_bodies")
        assert answer.headers["Retry-After"] == "1"
        b.scheduler.hold = False
        assert (await b.http.post("/generate", json=GENERATE)).status_code == 200, "small ones go on"
        await b.http.post("/abort_request", json={"abort_all": True})
        await first
        assert (await b.http.post("/generate", json=large)).status_code == 200

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(access, "BODY_TIMEOUT_S", 0.1)
    async with bench(tokenizer) as b:
        answer = await b.http.post("/generate", content=endless())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_timeout")
