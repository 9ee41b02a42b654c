"""Requests that prove the control token: as good as keys, the only way in where that is required, never ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from pdserve.base.proof import PROOF_HEADER
from pdserve.config.access_group import AccessConfig, ProofRule
from pdserve.config.cli import parse_server_args
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import ConfigError
from pdserve.http.access import COMMANDS, GENERATING
from pdserve.http.error_forms import inner_error
from pdserve.http.session_proof import CHALLENGE_PATH, EXPIRED, INVALID, Session, worker_key
from pdserve.launch_checks import check_proof
from pdserve.server.http.middleware import OPEN
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
TOKEN = "a-token-that-is-long-enough"
KEY, ROOT = "key-of-clients", "key-of-the-admin"
KEYS: dict[str, Any] = {"api_key": KEY, "admin_api_key": ROOT}
GENERATE = b'{"text": "hi"}'
JSON = {"Content-Type": "application/json"}


async def begin(http: httpx.AsyncClient) -> Session:
    """A session with a server that has proven the token."""
    session = Session(worker_key(TOKEN))
    answer = await http.get(CHALLENGE_PATH, params={"nonce": session.nonce})
    assert answer.status_code == 200, answer.text
    session.accept(server_nonce=answer.json()["nonce"], proof=answer.json()["proof"])
    return session


async def ask(
    http: httpx.AsyncClient, session: Session, method: str, target: str, body: bytes = b"", **headers: str
) -> httpx.Response:
    sent = {PROOF_HEADER: session.header(method, target, body), **(JSON if body else {}), **headers}
    return await http.request(method, target, content=body or None, headers=sent)


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    return answer.status_code, inner_error(answer.json())["code"], answer.headers.get(PROOF_HEADER)


@pytest.mark.parametrize(
    ("access", "says"),
    [
        (AccessConfig(require_control_proof=True, **KEYS), "--require-control-proof"),
        (AccessConfig(), "or start this server with --api-key, or with --no-require-control-proof"),
    ],
    ids=["by the flag", "by default, without a key"],
)
async def test_where_it_is_required_every_route_but_the_open_ones_wants_it(
    tokenizer: Tokenizer, access: AccessConfig, says: str
) -> None:
    async with bench(tokenizer, access=access, control_token=TOKEN) as b:
        asked = [
            (method, route.path.replace("{name:path}", "tiny"))
            for route in b.app.routes
            if isinstance(route, APIRoute) and route.path not in OPEN
            for method in sorted(route.methods or ())
        ]
        assert len(asked) > 30
        for method, path in [*asked, ("GET", "/nowhere"), ("GET", "/openapi.json"), ("OPTIONS", "/generate")]:
            for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {ROOT}"}):
                answer = await b.http.request(method, path, headers=headers)
                if method == "HEAD":
                    assert (answer.status_code, answer.headers[PROOF_HEADER]) == (401, "control_proof_required"), path
                    continue
                assert code(answer) == (401, "control_proof_required", "control_proof_required"), (method, path)
                assert says in answer.text
        for path in sorted(OPEN - {CHALLENGE_PATH}):
            assert (await b.http.get(path)).status_code == 200
        session = await begin(b.http)
        assert all(request.rid.startswith("health-") for request in b.scheduler.requests)
        assert (await ask(b.http, session, "POST", "/generate", GENERATE)).status_code == 200
        for target in ("/health", "/v1/models/tiny", "/get_load", "/v1/loads?dp_rank=0", "/flush_cache", "/observe"):
            assert (await ask(b.http, session, "GET", target)).status_code == 200, target
        assert (await ask(b.http, session, "GET", "/nowhere")).status_code == 404


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_stranger_at_a_server_of_a_pair_with_a_token_and_no_key(tokenizer: Tokenizer, mode: DisaggMode) -> None:
    async with bench(tokenizer, mode=mode, control_token=TOKEN) as b:
        for path in sorted({*GENERATING, *COMMANDS, "/health_pair", "/tokenize", "/get_server_info"}):
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, {"Origin": "http://there"}):
                answer = await b.http.post(path, content=GENERATE, headers=JSON | headers)
                assert code(answer) == (401, "control_proof_required", "control_proof_required"), path
        assert not b.scheduler.requests
        session = await begin(b.http)
        assert (await ask(b.http, session, "GET", "/get_server_info")).status_code == 200


async def test_the_admin_key_alone_admits_its_holder_and_nobody_else(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(admin_api_key=ROOT), control_token=TOKEN) as b:
        for path in ("/generate", "/flush_cache"):
            for key, status in ((ROOT, 200), (KEY, 401)):
                headers = JSON | {"Authorization": f"Bearer {key}"}
                assert (await b.http.post(path, content=GENERATE, headers=headers)).status_code == status, path


async def test_the_negated_flag_opens_a_server_with_a_token(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(require_control_proof=False), control_token=TOKEN) as b:
        assert (await b.http.post("/generate", content=GENERATE, headers=JSON)).status_code == 200
        assert (await b.http.get("/get_load", headers={PROOF_HEADER: "w1"})).status_code == 401


@pytest.mark.parametrize(
    ("flags", "with_token", "without"),
    [
        ([], ProofRule.UNLESS_KEY, ProofRule.OPTIONAL),
        (["--admin-api-key", ROOT], ProofRule.UNLESS_KEY, ProofRule.OPTIONAL),
        (["--api-key", KEY], ProofRule.OPTIONAL, ProofRule.OPTIONAL),
        (["--no-require-control-proof"], ProofRule.OPTIONAL, ProofRule.OPTIONAL),
        (["--api-key", KEY, "--require-control-proof"], ProofRule.ALWAYS, ProofRule.ALWAYS),
    ],
)
async def test_what_needs_a_proof_by_flags_and_token(
    flags: list[str], with_token: ProofRule, without: ProofRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PDSERVE_API_KEY", "PDSERVE_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    access = parse_server_args(["--model-path", "m", *flags]).access
    assert (access.proof_rule(has_token=True), access.proof_rule(has_token=False)) == (with_token, without)


async def test_without_the_flag_a_good_proof_is_as_good_as_both_keys(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(**KEYS), control_token=TOKEN) as b:
        session = await begin(b.http)
        for method, target, body in (("POST", "/generate", GENERATE), ("POST", "/flush_cache", b"")):
            assert (await ask(b.http, session, method, target, body)).status_code == 200
            assert (await b.http.request(method, target, content=body, headers=JSON)).status_code == 401
        headers = JSON | {"Authorization": f"Bearer {KEY}"}
        assert (await b.http.post("/generate", content=GENERATE, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/health", "/metrics", CHALLENGE_PATH])
async def test_a_bad_proof_is_refused_everywhere_whatever_key_comes_with_it(tokenizer: Tokenizer, path: str) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key=KEY), control_token=TOKEN) as b:
        session = await begin(b.http)
        key = {"Authorization": f"Bearer {KEY}"}
        used = session.header("GET", "/get_load", b"")
        assert (await b.http.get("/get_load", headers={PROOF_HEADER: used})).status_code == 200
        for header in ("", "x", used, session.header("GET", "/other", b"")):
            answer = await b.http.get(path, headers=key | {PROOF_HEADER: header})
            assert code(answer) == (401, INVALID, INVALID)
    async with bench(tokenizer, access=AccessConfig(api_key=KEY), control_token=TOKEN) as b:
        answer = await b.http.get(path, headers=key | {PROOF_HEADER: session.header("GET", path, b"")})
        assert code(answer) == (401, EXPIRED, EXPIRED), "another start of the server"


@pytest.mark.parametrize("body", [b"", b'{"text": "ho"}', GENERATE + b" "])
async def test_another_body_than_the_signed_one_reaches_no_handler(tokenizer: Tokenizer, body: bytes) -> None:
    async with bench(tokenizer, control_token=TOKEN) as b:
        session = await begin(b.http)
        headers = {PROOF_HEADER: session.header("POST", "/generate", GENERATE), **JSON}
        answer = await b.http.post("/generate", content=body, headers=headers)
        assert code(answer)[:2] == (401, INVALID) and "body" in answer.text
        assert not b.scheduler.requests


async def test_a_body_in_parts_is_checked_as_a_whole(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, control_token=TOKEN) as b:
        session = await begin(b.http)
        for last, status in ((b'"hi"}', 200), (b'"ho"}', 401)):

            async def parts(last: bytes = last) -> Any:
                yield b'{"text": '
                yield last

            headers = {PROOF_HEADER: session.header("POST", "/generate", GENERATE), **JSON}
            assert (await b.http.post("/generate", content=parts(), headers=headers)).status_code == status
        assert len(b.scheduler.requests) == 1


async def test_the_servers_information_tells_tokens_apart_without_the_token(tokenizer: Tokenizer) -> None:
    found = []
    for token in (TOKEN, TOKEN, TOKEN + "x", ""):
        async with bench(tokenizer, access=AccessConfig(require_control_proof=False), control_token=token) as b:
            answer = await b.http.get("/get_server_info")
            assert answer.status_code == 200 and TOKEN not in answer.text
            found.append(answer.json()["control_token_id"])
    assert found[0] == found[1] and len(set(found)) == 3
    assert len(found[0]) == 8 and found[3] == "none"


async def test_a_server_without_a_token_says_so(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.get(CHALLENGE_PATH, params={"nonce": "0" * 32})
        assert code(answer)[:2] == (409, "no_control_token")
        answer = await b.http.post("/generate", content=GENERATE, headers=JSON | {PROOF_HEADER: "w1"})
        assert code(answer) == (401, INVALID, INVALID) and "has no control token" in answer.text
        assert (await b.http.post("/generate", content=GENERATE, headers=JSON)).status_code == 200


@pytest.mark.parametrize("nonce", ["", "0" * 31, "G" * 32, "0" * 4000])
async def test_a_challenge_needs_a_nonce(tokenizer: Tokenizer, nonce: str) -> None:
    async with bench(tokenizer, control_token=TOKEN) as b:
        answer = await b.http.get(CHALLENGE_PATH, params={"nonce": nonce})
        assert (answer.status_code, answer.json()["param"]) == (400, "nonce")


async def test_pages_of_other_origins_need_not_be_refused_where_they_cannot_prove_anything(
    tokenizer: Tokenizer,
) -> None:
    """They get the same answer as any stranger, and a router that passes a browser's header on is heard."""
    async with bench(tokenizer, access=AccessConfig(require_control_proof=True), control_token=TOKEN) as b:
        answer = await b.http.post("/generate", content=GENERATE, headers=JSON | {"Origin": "http://there"})
        assert code(answer)[:2] == (401, "control_proof_required")
        session = await begin(b.http)
        assert (await ask(b.http, session, "POST", "/generate", GENERATE, Origin="http://there")).status_code == 200


async def test_the_flag_needs_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(access=AccessConfig(require_control_proof=True))
    monkeypatch.delenv("PDSERVE_CONTROL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"--require-control-proof needs PDSERVE_CONTROL_TOKEN") as caught:
        check_proof(config)
    assert caught.value.field == "require_control_proof"
    monkeypatch.setenv("PDSERVE_CONTROL_TOKEN", TOKEN)
    check_proof(config)
