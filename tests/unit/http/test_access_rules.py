"""What server and router share: refusals of requests, identities of clients, parts of OpenAPI documents."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.errors import EngineDeadError, PdserveError, RequestError
from pdserve.http.access import AccessRules, Cors, framing_refusal, has_dots, parse_networks
from pdserve.http.credentials import Keys
from pdserve.http.errors import HttpRefusal
from pdserve.http.openapi import openapi_document, openapi_operation


def rules(
    api: str | None = None,
    admin: str | None = None,
    *,
    origins: Sequence[str] = (),
    proxies: str | None = None,
) -> AccessRules:
    networks = parse_networks("--forwarded-allow-ips", proxies)
    return AccessRules(Keys.of(api, admin), Cors(origins, ("GET", "POST")), networks, 1, 1 << 20)


def test_a_request_without_a_valid_key_is_told_how_to_send_it() -> None:
    refusal = rules("k").key_refusal("Bearer other", command=False)
    assert refusal is not None and (refusal.status, refusal.code) == (401, "invalid_api_key")
    assert refusal.headers == {"WWW-Authenticate": "Bearer"}
    assert rules("k").key_refusal("Bearer k", command=False) is None
    assert rules().key_refusal(None, command=True) is None


def test_pages_are_refused_where_neither_key_nor_proof_keeps_them_out() -> None:
    page = {"Origin": "http://there", "Host": "here"}

    def is_refused(access: AccessRules, method: str = "GET", path: str = "/observe", **about: bool) -> bool:
        facts = {"command": path == "/observe", "public": False} | about
        refusal = access.page_refusal(method, path, page, **facts)
        assert refusal is None or (refusal.status, refusal.code) == (403, "origin_not_allowed")
        return refusal is not None

    assert is_refused(rules())
    assert not is_refused(rules(), path="/v1/models")
    assert not is_refused(rules(), proven=True)
    assert not is_refused(rules("k"))
    assert not is_refused(rules(None, "a")), "commands need the admin key"
    assert not is_refused(rules(origins=["http://there"]))
    assert is_refused(rules(None, "a"), "POST", "/generate"), "it needs no key"
    assert not is_refused(rules("k", "a"), "POST", "/generate")
    assert is_refused(rules(), path="/health_generate"), "it computes a token"
    assert is_refused(rules("k", "a"), path="/health_generate", public=True), "no key protects a public path"
    assert not is_refused(rules("k"), path="/health_generate")


@pytest.mark.parametrize(
    ("access", "authorization", "peer", "client"),
    [
        (rules("k"), "Bearer k", "1.1.1.1", "key k"),
        (rules("k", proxies="1.1.1.1"), "Bearer k", "1.1.1.1", "2.2.2.2"),
        (rules(proxies="1.1.1.1"), None, "3.3.3.3", "3.3.3.3"),
        (rules(), None, "1.1.1.1", "1.1.1.1"),
        (rules(), None, None, "unknown"),
    ],
)
def test_a_client_is_its_key_or_its_address(
    access: AccessRules, authorization: str | None, peer: str | None, client: str
) -> None:
    assert access.client(authorization, peer, ["2.2.2.2"]) == client


def test_cors_answers_preflight_requests_of_the_named_origins() -> None:
    here, there = {"Origin": "http://here"}, {"Origin": "http://there"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    cors = Cors(["http://here"], ("GET", "POST"))
    assert cors.preflight_answer("OPTIONS", here | asked) == {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "x-a",
        "Access-Control-Max-Age": "600",
    }
    assert cors.preflight_answer("OPTIONS", there | asked) == {}
    assert cors.preflight_answer("OPTIONS", here) is None and cors.preflight_answer("POST", here | asked) is None
    assert Cors([], ("GET",)).preflight_answer("OPTIONS", here | asked) is None
    assert cors.response_headers("http://here") == {
        "Vary": "Origin",
        "Access-Control-Allow-Origin": "http://here",
        "Access-Control-Expose-Headers": "X-Request-Id, X-Weight-Version",
    }
    assert cors.response_headers("http://there") == {"Vary": "Origin"} and cors.response_headers(None) == {}
    assert Cors(["*"], ("GET",)).response_headers("http://any")["Access-Control-Allow-Origin"] == "http://any"


def test_a_client_has_one_slot_at_a_time() -> None:
    access = rules()
    with access.take_client_slot("a"), access.take_client_slot("b"), pytest.raises(RequestError) as refused:
        access.take_client_slot("a")
    assert HttpRefusal.of(refused.value).headers == {"Retry-After": "1"}
    with access.take_client_slot("a"):
        pass


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no", field="n", code="bad"), 400, "bad"),
        (EngineDeadError("gone"), 503, "engine_dead"),
        (PdserveError("?"), 500, "internal_error"),
    ],
)
def test_every_error_has_a_body_of_openais_form(error: PdserveError, status: int, code: str) -> None:
    refusal = HttpRefusal.of(error)
    assert (refusal.status, refusal.body["error"]["code"], refusal.body["code"]) == (status, code, status)
    assert refusal.body["param"] == (error.field if isinstance(error, RequestError) else None)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([(b"Content-Length", b"1"), (b"TRANSFER-ENCODING", b"chunked")], "ambiguous_length"),
        ([(b"content-encoding", b"identity"), (b"Content-Encoding", b"GZIP")], "unsupported_encoding"),
        ([(b"a", b"x" * 8192), (b"b", b"x" * 8192)], "headers_too_large"),
    ],
)
def test_framing_that_is_refused_closes_the_connection(headers: list[tuple[bytes, bytes]], code: str) -> None:
    refusal = framing_refusal(headers, 10)
    assert refusal is not None and (refusal.code, refusal.headers) == (code, {"Connection": "close"})
    assert framing_refusal([(b"Content-Length", b"1"), (b"Content-Encoding", b" Identity ")], 10) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/..", True), ("/a/%2E%2e/b", True), ("/a\\..\\b", True), ("/a.b/..c", False), ("/a?b=/../", False)],
)
def test_segments_of_dots_are_found_however_they_are_quoted(path: str, expected: bool) -> None:
    assert has_dots(path) is expected


def test_an_operation_names_its_parameters_and_a_document_its_keys() -> None:
    operation = openapi_operation(
        "/a/{name}", "A", {"200": "good"}, {"400": "bad"}, {"n": {"type": "integer"}}, "#/{name}"
    )
    assert [(one["name"], one["in"], one["required"]) for one in operation["parameters"]] == [
        ("name", "path", True),
        ("n", "query", False),
    ]
    assert operation["responses"]["400"]["content"]["application/json"]["schema"] == {"$ref": "#/ErrorAnswer"}
    document = openapi_document("T", {"/a/{name}": {"get": operation}}, {}, with_keys=True)
    assert document["security"] == [{"key": []}] and document["info"]["title"] == "T"
    assert "security" not in openapi_document("T", {}, {}, with_keys=False)
