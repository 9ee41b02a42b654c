"""Who may ask the router what: keys, pages of other origins, request ids, sizes, certificates."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdserve.errors import ConfigError
from pdserve.http.access import MESSAGES_PATH
from pdserve.router.app import make_app
from pdserve.router.config.config import RouterAccessConfig, RouterConfig, TlsConfig, WorkerRole, WorkerSpec
from pdserve.router.config.flags import config_from, make_parser
from pdserve.router.http import is_admin
from tests.hostile_http import POST, REFUSED, SIZED, error_of, send
from tests.unit.router.answers import begin_stream
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
GENERATE = "/generate"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(world: Any, method: str, url: str, key: str | None = None) -> int:
    async with world.session.request(method, url, json={"text": "a"}, headers=bearer(key) if key else {}) as response:
        return int(response.status)


def test_without_its_key_only_probes_are_answered(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode], wait_key="k", access=RouterAccessConfig(api_key="k")) as url:
            for path in ("/health", "/readiness", "/liveness", "/ping", "/metrics"):
                assert await ask(world, "GET", url + path) == 200
            for method, path in (("POST", GENERATE), ("GET", "/workers"), ("GET", "/v1/models"), ("GET", "/nowhere")):
                for key in (None, "wrong", ""):
                    assert await ask(world, method, url + path, key) == 401
            async with world.session.post(url + GENERATE, json={"text": "a"}, headers=bearer("x")) as response:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
            assert not decode.bodies
            assert await ask(world, "POST", url + GENERATE, "k") == 200
            assert prefill.headers[0]["Authorization"] == decode.headers[0]["Authorization"] == "Bearer k"

    run_world(scenario)


def guarded(key: str) -> Any:
    """A worker's middleware: only queries with `key` are answered."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/v1/models" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "no valid key"}}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    return check


def test_a_query_goes_on_to_a_worker_that_takes_the_routers_key(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, good = await world.worker("p", guard=guarded("old")), await world.worker("d", guard=guarded("k"))
        other = await world.worker("d2", guard=guarded("old"))
        access = RouterAccessConfig(api_key="c", worker_api_key="k")
        async with world.router([prefill], [other, good], wait_key="c", access=access) as url:
            async with world.session.get(url + "/v1/models", headers=bearer("c")) as response:
                assert (await response.json())["data"] == [{"id": "d"}]
            assert await ask(world, "GET", url + "/v1/models", "x") == 401
        async with world.router([], [other], wait_key="c", access=access) as url:
            async with world.session.get(url + "/v1/models", headers=bearer("c")) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (502, "worker_key_refused") and other.url in error["message"]
        async with world.router([], [other, good]) as url:  # a router without keys forwards the client's
            assert [await ask(world, "GET", url + "/v1/models", key) for key in ("k", "old", "x")] == [200, 200, 401]

    run_world(scenario)


def test_commands_need_the_admin_key_where_there_is_one(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        access = RouterAccessConfig(api_key="k", admin_api_key="root")
        async with world.router([], [worker], wait_key="k", access=access) as url:
            for key, status in (("k", 401), (None, 401), ("root", 200)):
                assert await ask(world, "POST", url + "/flush_cache", key) == status
            assert await ask(world, "DELETE", f"{url}/workers/{worker.url}", "k") == 401
            assert await ask(world, "POST", url + GENERATE, "root") == 200, "who may do that may ask, too"
            assert await ask(world, "DELETE", f"{url}/workers/{worker.url}", "root") == 202
        async with world.router([], [worker], access=RouterAccessConfig(admin_api_key="root")) as url:
            assert await ask(world, "POST", url + GENERATE) == 200
            assert await ask(world, "POST", url + "/flush_cache") == 401

    run_world(scenario)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/workers", False),
        ("POST", "/workers", True),
        ("PUT", "/workers/x", True),
        ("DELETE", "/workers/x", True),
        ("POST", "/add_worker", True),
        ("GET", "/flush_cache", True),
        ("POST", "/v1/completions", False),
    ],
)
def test_what_changes_things_for_others_is_a_command(method: str, path: str, expected: bool) -> None:
    assert is_admin(method, path) is expected


def test_workers_get_their_own_key_whatever_the_client_sent(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode, special = [await world.worker(name) for name in ("p", "d", "s")]
        access = RouterAccessConfig(worker_api_key="inner")
        async with world.router([prefill], [decode], access=access) as url:
            assert await ask(world, "POST", url + GENERATE, "client's") == 200
            assert prefill.headers[-1]["Authorization"] == decode.headers[-1]["Authorization"] == "Bearer inner"
            assert await ask(world, "POST", url + "/tokenize", "client's") == 200
            assert decode.headers[-1]["Authorization"] == "Bearer inner"
            body = {"url": special.url, "worker_type": "decode", "api_key": "its own"}
            async with world.session.post(url + "/workers", json=body) as response:
                assert response.status == 202
                assert "its own" not in await response.text()
            await world.until(lambda: world.healthy_urls(url), lambda urls: special.url in urls)
            assert await ask(world, "DELETE", f"{url}/workers/{decode.url}") == 202
            assert await ask(world, "POST", url + GENERATE) == 200
            assert special.headers[-1]["Authorization"] == "Bearer its own"

    run_world(scenario)


def test_workers_get_their_admin_key_with_commands_only(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        access = RouterAccessConfig(worker_api_key="inner", worker_admin_api_key="inner-root")
        async with world.router([], [worker], access=access) as url:
            for method, path, key in (("POST", GENERATE, "inner"), ("POST", "/flush_cache", "inner-root")):
                assert await ask(world, method, url + path) == 200
                assert worker.headers[-1]["Authorization"] == f"Bearer {key}"

    run_world(scenario)
    assert RouterAccessConfig(api_key="k1,k2", admin_api_key="root").key_for_workers == "k1"
    assert RouterAccessConfig(api_key="k1,k2", admin_api_key="root").admin_key_for_workers == "root"
    assert RouterAccessConfig(api_key="k1,k2").admin_key_for_workers == "k1"


def test_a_client_with_all_its_places_taken_waits_and_others_do_not(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        let_go = asyncio.Event()

        async def slow(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await let_go.wait()
            return web.json_response({"text": ""})

        worker = await world.worker("w", slow)
        access = RouterAccessConfig(api_key="a,b", max_concurrent_requests_per_client=1)
        async with world.router([], [worker], wait_key="a", access=access) as url:
            first = asyncio.create_task(ask(world, "POST", url + GENERATE, "a"))
            await until(lambda: len(worker.bodies) == 1)
            async with world.session.post(url + GENERATE, json={}, headers=bearer("a")) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert (await response.json())["error"]["code"] == "too_many_requests"
            turn = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
            async with world.session.post(url + MESSAGES_PATH, json=turn, headers={"x-api-key": "a"}) as response:
                told = await response.json()
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert (told["type"], told["error"]["type"]) == ("error", "rate_limit_error")
            second = asyncio.create_task(ask(world, "POST", url + GENERATE, "b"))
            await until(lambda: len(worker.bodies) == 2)
            let_go.set()
            assert [await first, await second] == [200, 200]
            assert await ask(world, "POST", url + GENERATE, "a") == 200

    run_world(scenario)


def test_without_a_key_no_page_of_another_origin_gives_commands(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker]) as url:
            for headers, status in (
                ({"Origin": "http://there"}, 403),
                ({"Sec-Fetch-Site": "cross-site"}, 403),
                ({"Origin": url}, 200),
                ({"Sec-Fetch-Site": "same-origin", "Origin": "https://public"}, 200),
            ):
                async with world.session.post(url + "/flush_cache", headers=headers) as response:
                    assert response.status == status
            assert not {"Origin", "Sec-Fetch-Site"} & set(worker.headers[-1])
            async with world.session.delete(f"{url}/workers/{worker.url}", headers={"Origin": "null"}) as response:
                assert response.status == 403

    run_world(scenario)


@pytest.mark.parametrize("keys", [{}, {"admin_api_key": "a"}])
def test_no_page_of_another_origin_computes_a_token_without_a_key(run_world: RunWorld, keys: dict[str, str]) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        page = {"Sec-Fetch-Site": "cross-site"}
        async with world.router([], [worker], access=RouterAccessConfig(**keys)) as url:
            for headers, status in ((page, 403), ({}, 200), ({"Sec-Fetch-Site": "none"}, 200)):
                async with world.session.get(url + "/health_generate", headers=headers) as response:
                    assert response.status == status
                async with world.session.post(url + GENERATE, json={"text": "a"}, headers=headers) as response:
                    assert response.status == status
            async with world.session.get(url + "/health", headers=page) as response:
                assert response.status == 200

    run_world(scenario)


def test_workers_hear_whom_the_router_asks_for(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker]) as url:
            for given, seen in (({}, "127.0.0.1"), ({"X-Forwarded-For": "1.1.1.1"}, "1.1.1.1, 127.0.0.1")):
                async with world.session.post(url + GENERATE, json={"text": "a"}, headers=given) as response:
                    assert response.status == 200
                assert worker.headers[-1]["X-Forwarded-For"] == seen

    run_world(scenario)


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "ADMIN_API_KEY", "WORKER_API_KEY", "WORKER_ADMIN_API_KEY"):
        monkeypatch.setenv(f"PDSERVE_{name}", name)
    args = make_parser().parse_args(["--pd-disaggregation", "--worker-api-key", "given"])
    config = config_from(args)
    access = config.access
    assert (access.api_key, access.admin_api_key) == ("API_KEY", "ADMIN_API_KEY")
    assert (access.worker_api_key, access.worker_admin_api_key) == ("given", "WORKER_ADMIN_API_KEY")
    assert "API_KEY" not in repr(config)


@pytest.mark.parametrize(
    "flags", [["--api-key", ""], ["--admin-api-key", "a b"], ["--max-concurrent-requests-per-client", "0"],
              ["--forwarded-allow-ips", "x"]]
)  # fmt: skip
def test_wrong_values_are_refused_by_flag(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        config_from(make_parser().parse_args(["--pd-disaggregation", *flags]))


def test_pages_of_other_origins_may_ask_only_where_they_are_named(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        here, there = {"Origin": "http://here"}, {"Origin": "http://there"}
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
        async with world.router([], [worker]) as url:
            async with world.session.options(url + GENERATE, headers=here | preflight) as response:
                assert not [name for name in response.headers if name.startswith("Access-Control")]
        access = RouterAccessConfig(api_key="k", cors_allowed_origins=("http://here",))
        async with world.router([], [worker], wait_key="k", access=access) as url:
            async with world.session.options(url + GENERATE, headers=here | preflight) as response:
                assert response.status == 204, "the browser asks without the key"
                assert response.headers["Access-Control-Allow-Origin"] == "http://here"
                assert response.headers["Access-Control-Allow-Headers"] == "x-a"
            async with world.session.post(url + GENERATE, json={}, headers=here | bearer("k")) as response:
                assert response.headers["Access-Control-Allow-Origin"] == "http://here"
            for method, headers in (("OPTIONS", there | preflight), ("POST", there | bearer("k"))):
                async with world.session.request(method, url + GENERATE, json={}, headers=headers) as response:
                    assert "Access-Control-Allow-Origin" not in response.headers

    run_world(scenario)


def test_a_request_keeps_its_id_from_the_client_to_the_workers_and_back(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            await response.write(b"data: one\n\n")
            return response

        prefill, decode = await world.worker("p"), await world.worker("d", stream)
        access = RouterAccessConfig(request_id_headers=("x-mine", "x-trace-id"))
        async with world.router([prefill], [decode], access=access) as url:
            for given, expected in (
                ({"X-Trace-Id": "t7", "X-Request-Id": "no"}, "t7"),
                ({"X-Mine": "m"}, "m"),
                ({}, ""),
            ):
                async with world.session.post(url + GENERATE, json={"text": "a"}, headers=given) as response:
                    found = response.headers["X-Request-Id"]
                assert found == expected or (not expected and found.startswith("req-"))
                await until(lambda: len(prefill.headers) == len(decode.headers))
                for seen in (prefill.headers[-1], decode.headers[-1]):
                    assert CIMultiDict(seen).getall("X-Request-Id") == [found]
            async with world.session.get(url + "/nowhere") as response:
                assert response.headers["X-Request-Id"].startswith("req-")

    run_world(scenario)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    where = tmp_path_factory.mktemp("tls")
    cert, key = where / "cert.pem", where / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=30)
    return cert, key


def test_https_to_clients_and_to_workers(run_world: RunWorld, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate

    async def scenario(world: Any) -> None:
        inner_config = RouterConfig(pd=False, tls=TlsConfig(cert=cert, key=key))
        inner = web.AppRunner(make_app(inner_config), handler_cancellation=True)
        await inner.setup()
        await web.TCPSite(inner, "127.0.0.1", 0, ssl_context=inner_config.tls.port_context()).start()
        url = f"https://127.0.0.1:{inner.addresses[0][1]}"
        try:
            trusted = ssl.create_default_context(cafile=cert)
            async with world.session.get(url + "/liveness", ssl=trusted) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await world.session.get(url + "/liveness")
            spec = WorkerSpec(role=WorkerRole.REGULAR, url=url)
            for tls, said in ((TlsConfig(worker_ca=(cert,)), "answered 503"), (TlsConfig(), "certificate")):
                async with world.router([], [], workers=(spec,), tls=tls) as outer:
                    async with world.session.get(outer + "/workers") as response:
                        state = (await response.json())["workers"][0]
                assert said in state["last_error"].lower(), "the inner router is reached, and has no workers"
        finally:
            await inner.cleanup()

    run_world(scenario)


def test_certificates_that_cannot_be_read_are_refused_by_flag(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    missing = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match="--tls-cert-path"):
        TlsConfig(cert=missing, key=certificate[1]).port_context()
    with pytest.raises(ConfigError, match="--ca-cert-paths"):
        TlsConfig(worker_ca=(missing,)).worker_context()
    assert TlsConfig().port_context() is None
    assert TlsConfig().worker_context() is None


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../flush_cache",
        "/v1/models/%2e%2e/%2E%2E/observe",
        "/v1/models/x/..%2f..%2f../start_profile",
        "/v1/models/%252e%252e/%252e%252e/flush_cache",
        "/v1/models/..\\..\\flush_cache",
        "/./flush_cache",
    ],
)
def test_a_path_that_means_another_one_reaches_no_worker(run_world: RunWorld, path: str) -> None:
    """Sent as it is, which most clients would not do: the rules of a path would hold for another than is asked for."""

    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        access = RouterAccessConfig(api_key="k", admin_api_key="root")
        async with world.router([], [worker], wait_key="k", access=access) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer k\r\n\r\n".encode())
            status = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            assert status.startswith(b"HTTP/1.1 404"), status

    run_world(scenario)


def test_what_is_not_allowed_is_named_so(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with (
            world.router([prefill], [decode]) as url,
            world.session.put(url + "/v1/completions", json={}) as response,
        ):
            assert response.status == 405
            assert (await response.json())["error"]["code"] == "method_not_allowed"

    run_world(scenario)


def test_each_hostile_request_gets_its_status(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            port = int(url.rpartition(":")[2])
            for name, (data, status, code) in REFUSED.items():
                found, answer = await send(port, data)
                assert found == status, (name, answer[:500])
                assert code is None or error_of(answer)["code"] == code, name
                assert answer.count(b"HTTP/1.") == 1, (name, "one request has one answer")
            assert not prefill.bodies and not decode.bodies
            assert (await send(port, POST + SIZED))[0] == 200, "curl sends a form's type, and programs none"

    run_world(scenario)


def test_the_router_logs_each_call_and_sends_its_request_id(
    run_world: RunWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.access")

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode], access_log=True) as url:
            headers = {"X-Request-Id": "req-8"}
            async with world.session.post(f"{url}/generate", json={"text": "a"}, headers=headers) as answer:
                assert answer.status == 200
            async with world.session.get(f"{url}/nowhere") as answer:
                assert answer.status == 404

    run_world(scenario)
    lines = [vars(record) for record in caplog.records if record.name == "pdserve.access"]
    generated, missing = [line for line in lines if line["fields"]["path"] in (GENERATE, "/nowhere")]
    assert (generated["request_id"], generated["fields"]["path"], generated["fields"]["status"]) == (
        *("req-8", GENERATE),
        200,
    )
    assert (missing["fields"]["path"], missing["fields"]["status"]) == ("/nowhere", 404)
    assert missing["fields"]["client"] == "127.0.0.1"
