"""Workers prove the control token before the router sends them anything, and get a proof with every request."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import pdserve.router
from pdserve.base.env import worker_proof_secret
from pdserve.base.proof import PROOF_HEADER, MacKey, body_digest
from pdserve.errors import ConfigError, ProofError, ProofExpiredError
from pdserve.http import worker_proof
from pdserve.http.session_proof import (
    CHALLENGE_PATH,
    EXPIRED,
    INVALID,
    REQUIRED,
    SessionVerifier,
    worker_key,
    worker_secret,
)
from pdserve.router.config.config import HealthConfig, RouterAccessConfig
from pdserve.router.config.flags import config_from, make_parser
from tests.unit.router.answers import begin_stream
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
TOKEN, OTHER = "a-token-that-is-long-enough", "another-token-of-the-same-length"
KEYS: dict[str, Any] = {"worker_api_key": "inner", "worker_admin_api_key": "inner-root"}
ACCESS = RouterAccessConfig(worker_proof_key=worker_key(TOKEN), **KEYS)
SECRETS = ("inner", "client's", "a prompt")


class Guard:
    """What a server with `--require-control-proof` does before each handler. `now_s` is its clock."""

    def __init__(self, token: str = TOKEN) -> None:
        self._token = token
        self.now_s = 5.0
        self.num_challenges = 0
        self.refused: list[str] = []
        self.taken: list[str] = []
        self.start_anew()

    def start_anew(self) -> None:
        self.verifier = SessionVerifier(worker_key(self._token))

    @property
    def middleware(self) -> Any:
        @web.middleware
        async def guarded(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == CHALLENGE_PATH:
                self.num_challenges += 1
                nonce, proof = self.verifier.challenge(request.query["nonce"], self.now_s)
                return web.json_response({"nonce": nonce, "proof": proof})
            try:
                header = request.headers.get(PROOF_HEADER, "")
                digest = self.verifier.check(header, request.method, request.raw_path, self.now_s)
                assert body_digest(await request.read()) == digest and "Authorization" not in request.headers
            except ProofError as error:
                self.refused.append(f"{request.method} {request.raw_path}")
                code = EXPIRED if isinstance(error, ProofExpiredError) else INVALID
                return web.Response(status=401, headers={PROOF_HEADER: code})
            self.taken.append(f"{request.method} {request.path}")
            return await handler(request)

        return guarded


async def ask(world: Any, url: str, path: str = "/generate", method: str = "POST") -> tuple[int, str]:
    headers = {"Authorization": "Bearer client's", PROOF_HEADER: "a client's own"}
    body = {"text": "a prompt"} if method == "POST" else None
    async with world.session.request(method, url + path, json=body, headers=headers) as response:
        return response.status, await response.text()


async def error_at(world: Any, url: str, worker_url: str) -> str:
    """Add a worker, and wait for what a check says of it."""
    async with world.session.post(f"{url}/workers", json={"url": worker_url, "worker_type": "regular"}) as response:
        assert response.status == 202

    async def seen() -> dict[str, Any]:
        async with world.session.get(f"{url}/workers") as response:
            return next(one for one in (await response.json())["workers"] if one["url"] == worker_url)

    found = await world.until(seen, lambda one: one["is_healthy"] or one["last_error"] != "not checked yet")
    assert not found["is_healthy"]
    return str(found["last_error"])


def test_every_request_to_every_worker_carries_a_proof_and_no_key(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        guards = Guard(), Guard()
        prefill, decode = [await world.worker(n, guard=g.middleware) for n, g in zip("pd", guards, strict=True)]
        prefill.pair = decode.pair = {"status": "ok"}
        prefill.reported = decode.reported = 3
        async with world.router([prefill], [decode], policy="least_loaded", access=ACCESS) as url:
            for path in ("/generate", "/v1/chat/completions", "/tokenize", "/flush_cache", "/abort_request"):
                assert (await ask(world, url, path))[0] == 200, path
            paths = ("/get_server_info", "/v1/models", "/get_load", "/observe", "/engine_metrics", "/health_generate")
            for path in (*paths, "/flush_cache?timeout=0.5", "/openapi.json"):
                assert (await ask(world, url, path, "GET"))[0] in (200, 404, 405), path
            body = {"worker_url": decode.url, "new_role": "decode"}
            async with world.session.post(f"{url}/pd_role_switch", json=body) as response:
                assert response.status == 200
            expected = {"POST /health_pair", "GET /get_load", "GET /observe", "GET /metrics", "POST /pd_role_switch"}
            await until(lambda: expected <= set(guards[1].taken))
        for guard in guards:  # a request that the router gives up, as under load, needs a challenge of its own
            assert guard.refused == [] and 1 <= guard.num_challenges <= len(guard.taken) // 4
        assert decode.headers[0]["X-Forwarded-For"] == "127.0.0.1"

    run_world(scenario)


def test_a_stream_passes_piece_by_piece(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        let_go = asyncio.Event()

        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            await response.write(b"data: 1\n\n")
            await let_go.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        worker = await world.worker("w", stream, guard=Guard().middleware)
        async with (
            world.router([], [worker], access=ACCESS) as url,
            world.session.post(f"{url}/generate", json={"text": "a", "stream": True}) as response,
        ):
            assert await response.content.readany() == b"data: 1\n\n"
            let_go.set()
            assert await response.content.readany() == b"data: [DONE]\n\n"

    run_world(scenario)


async def answers_ok(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def has_no_such_path(request: web.Request) -> web.Response:
    return web.json_response({}, status=404 if request.path == CHALLENGE_PATH else 200)


async def has_no_token(request: web.Request) -> web.Response:
    return web.json_response({}, status=409)


async def has_another_token(request: web.Request) -> web.Response:
    if request.path != CHALLENGE_PATH:
        return web.json_response({})
    nonce, proof = SessionVerifier(worker_key(OTHER)).challenge(request.query["nonce"], 5.0)
    return web.json_response({"nonce": nonce, "proof": proof})


async def reflects(request: web.Request) -> web.Response:
    return web.json_response({"nonce": request.query.get("nonce"), "proof": request.query.get("nonce")})


async def redirects(request: web.Request) -> web.Response:
    raise web.HTTPTemporaryRedirect(f"/elsewhere?{request.query_string}")


async def is_endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"x" * 10_000)
    return response


IMPOSTORS: dict[Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]], str] = {
    answers_ok: "no challenge",
    has_no_such_path: "404, it has no such path",
    has_no_token: "409, it has no control token",
    has_another_token: "another control token",
    reflects: "another control token",
    redirects: "answered 307",
    is_endless: "no challenge",
}


@pytest.mark.parametrize("impostor", IMPOSTORS, ids=lambda one: one.__name__)
def test_a_worker_that_does_not_prove_the_token_sees_nothing(run_world: RunWorld, impostor: Any) -> None:
    async def scenario(world: Any) -> None:
        seen: list[str] = []

        @web.middleware
        async def listen(request: web.Request, handler: Any) -> web.StreamResponse:
            seen.append(f"{request.method} {request.raw_path} {dict(request.headers)} {await request.text()}")
            return await impostor(request)

        stranger = await world.worker("s", guard=listen)
        async with world.router([], [], access=ACCESS) as url:
            error = await error_at(world, url, stranger.url)
            assert "does not prove the control token" in error and IMPOSTORS[impostor] in error
            assert (await ask(world, url))[0] == 503
            assert (await ask(world, url, "/flush_cache"))[0] == 503
        assert seen and all(line.startswith(f"GET {CHALLENGE_PATH}?nonce=") for line in seen)
        assert not [line for line in seen for secret in (*SECRETS, PROOF_HEADER) if secret in line]

    run_world(scenario)


def test_an_impostor_is_sent_no_prompt_without_health_checks_either(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        guard = Guard()
        worker = await world.worker("w", guard=guard.middleware)
        port = int(worker.url.rpartition(":")[2])
        async with world.router([], [worker], access=ACCESS, health=HealthConfig(enabled=False)) as url:
            assert (await ask(world, url))[0] == 200
            await worker.stop()
            worker.guard = None
            worker.bodies.clear()
            assert (await ask(world, url))[0] in (502, 503)
            await worker.start(port)
            for _ in range(3):
                status, text = await ask(world, url)
                assert status in (502, 503), text
            assert worker.bodies == []

    run_world(scenario)


def test_a_worker_that_was_started_anew_is_asked_once_more(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        guard = Guard()
        worker = await world.worker("w", guard=guard.middleware)
        async with world.router([], [worker], check_interval_s=60.0, access=ACCESS) as url:
            assert (await ask(world, url))[0] == 200
            guard.start_anew()
            answers = await asyncio.gather(*(ask(world, url) for _ in range(8)))
            assert [status for status, _ in answers] == [200] * 8
            assert 1 <= guard.refused.count("POST /generate") <= 8 and guard.num_challenges == 2
            assert len(worker.bodies) == 9, "what was refused was not processed"

    run_world(scenario)


def test_a_session_is_renewed_before_it_ends_and_without_delay(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_proof, "RENEW_AFTER_S", 0.0)

    async def scenario(world: Any) -> None:
        guard = Guard()
        worker = await world.worker("w", guard=guard.middleware)
        async with world.router([], [worker], access=ACCESS) as url:
            begun = guard.num_challenges
            assert (await ask(world, url))[0] == 200
            await until(lambda: guard.num_challenges > begun)
            guard.now_s += 1e6
            await until(lambda: bool(guard.refused))
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


def test_a_worker_that_refuses_good_proofs_is_left_out_and_not_asked_again_and_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        @web.middleware
        async def refuse(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == CHALLENGE_PATH:
                return await guard.middleware(request, handler)
            return web.Response(status=401, headers={PROOF_HEADER: EXPIRED})

        guard = Guard()
        worker = await world.worker("w", guard=refuse)
        async with world.router([], [], check_interval_s=60.0, access=ACCESS) as url:
            error = await error_at(world, url, worker.url)
            assert "refuses the router's own proof" in error and EXPIRED in error

    run_world(scenario)


def test_without_the_flag_workers_get_keys_and_no_header_of_clients(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker], access=RouterAccessConfig(**KEYS)) as url:
            assert (await ask(world, url))[0] == 200
            assert worker.headers[-1]["Authorization"] == "Bearer inner"
            assert PROOF_HEADER not in worker.headers[-1]

    run_world(scenario)


def test_a_worker_that_requires_proofs_is_not_used_by_a_router_that_sends_none(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        @web.middleware
        async def closed(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == "/health":
                return await handler(request)
            return web.Response(status=401, headers={PROOF_HEADER: REQUIRED})

        worker = await world.worker("w", guard=closed)
        async with world.router([], [], check_interval_s=60.0, access=RouterAccessConfig(**KEYS)) as url:
            error = await error_at(world, url, worker.url)
            assert "set PDSERVE_CONTROL_TOKEN or PDSERVE_WORKER_PROOF_KEY at the router" in error
            assert (await ask(world, url))[0] == 503 and worker.bodies == []

    run_world(scenario)


def test_all_requests_to_workers_are_made_through_one_session() -> None:
    made = [
        (path.name, found)
        for path in sorted(Path(pdserve.router.__file__).parent.rglob("*.py"))
        for found in re.findall(
            r"ClientSession\(|make_session\(|aiohttp\.request\(|import (?:httpx|requests)\b", path.read_text()
        )
    ]
    kubernetes = ("kube_api.py", "ClientSession(")  # it calls the API server, and no worker
    assert made == [
        *(("app.py", "make_session("), kubernetes, ("outcome.py", "make_session("), ("outcome.py", "ClientSession(")),
    ]


WORKER = ["--worker-urls", "http://a:1"]
FLAGS = [*WORKER, "--worker-control-proof"]


def test_a_router_proves_the_token_where_it_has_it_or_the_key_made_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*flags: str) -> MacKey | None:
        return config_from(make_parser().parse_args([*WORKER, *flags])).access.worker_proof_key

    for name in ("PDSERVE_CONTROL_TOKEN", "PDSERVE_WORKER_PROOF_KEY"):
        monkeypatch.setenv(name, "")
    assert key() is None and key("--no-worker-control-proof") is None
    with pytest.raises(ConfigError, match="--worker-control-proof needs PDSERVE_CONTROL_TOKEN or PDSERVE_WORKER_PROOF"):
        config_from(make_parser().parse_args(FLAGS))
    made = []
    for name, value in (("CONTROL_TOKEN", TOKEN), ("WORKER_PROOF_KEY", worker_secret(TOKEN).hex())):
        with monkeypatch.context() as patch:
            patch.setenv(f"PDSERVE_{name}", value)
            config = config_from(make_parser().parse_args(WORKER))
            assert key("--worker-control-proof") is not None and key("--no-worker-control-proof") is None
        assert config.access.worker_proof_key is not None and value not in repr(config)
        made.append(config.access.worker_proof_key.mac("a", b"b"))
    assert made[0] == made[1] == worker_key(TOKEN).mac("a", b"b")


def test_the_printed_key_is_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CONTROL_TOKEN", TOKEN)
    command = [sys.executable, "-m", "pdserve.router.worker_proof"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    monkeypatch.setenv("PDSERVE_WORKER_PROOF_KEY", printed)
    assert worker_proof_secret() == worker_secret(TOKEN)
    monkeypatch.delenv("PDSERVE_CONTROL_TOKEN")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "PDSERVE_CONTROL_TOKEN" in done.stderr and not done.stdout


@pytest.mark.parametrize("text", ["x", "0" * 63, "g" * 64, TOKEN])
def test_a_key_that_is_none_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PDSERVE_WORKER_PROOF_KEY", text)
    with pytest.raises(ConfigError, match="PDSERVE_WORKER_PROOF_KEY") as caught:
        worker_proof_secret()
    assert len(text) < 2 or text not in str(caught.value)
