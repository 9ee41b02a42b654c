"""Access control of a server: the ASGI middleware around `http.access.AccessRules`, and proofs of the control token.

`app` installs the middleware. With an API key every path needs it except `PUBLIC`: as in SGLang, probes and Prometheus
send no key, and these paths reveal nothing about requests. `COMMANDS` need the admin key if one is set. A valid proof
of the control token replaces both keys. With `--require-control-proof` only the proof counts. An invalid proof is
refused on every path. `ControlProof` is the server side of `http/session_proof`; routers send the proofs.

    GET /control_challenge?nonce=N    {"nonce": server nonce, "proof": MAC}; 409 if this server has no control token
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.proof import PROOF_HEADER
from pdserve.config.access_group import AccessConfig
from pdserve.errors import ProofError, ProofExpiredError, RequestError
from pdserve.http.access import (
    COMMANDS,
    EXPOSED_HEADERS,
    GENERATING,
    NO_SNIFF,
    NO_STORE,
    PREFLIGHT_S,
    AccessRules,
    framing_refusal,
)
from pdserve.http.bodies import BODY_TIMEOUT_S, BodyHold, body_timeout
from pdserve.http.errors import HttpRefusal
from pdserve.http.session_proof import CHALLENGE_PATH, EXPIRED, INVALID, SessionVerifier, worker_key
from pdserve.server.http.calls import CLIENT_OF_SCOPE
from pdserve.server.http.json_http import BODIES, json_response, refused

NO_TOKEN = "this server has no control token; set the same PDSERVE_CONTROL_TOKEN on router and servers"
REQUIRED = (
    "this server accepts only requests that prove the control token (--require-control-proof), as a router with "
    "--worker-control-proof sends them; an API key is not enough"
)


class ControlProof:
    """Verifies the proofs of one application. `token` empty: no control token. `required`: requests without a proof
    fail.
    """

    def __init__(self, token: str, *, required: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._verifier = SessionVerifier(worker_key(token)) if token else None
        self._now = now
        self.required = required

    def install(self, app: FastAPI) -> None:
        """Add the challenge route."""

        @app.get(CHALLENGE_PATH, response_model=None)
        async def get_control_challenge(request: Request) -> Response:
            return self._challenge(request.query_params.get("nonce", ""))

    def check(self, scope: Scope, header: str) -> bytes:
        """Verify the proof in a request's header; return the digest that its body must have.

        Raises:
            ProofError: the proof is invalid, or this server has no control token.
        """
        if self._verifier is None:
            raise ProofError(NO_TOKEN)
        query: bytes = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        return self._verifier.check(header, scope["method"], target.decode(errors="backslashreplace"), self._now())

    def _challenge(self, client_nonce: str) -> Response:
        if self._verifier is None:
            raise RequestError(NO_TOKEN, status=409, code="no_control_token")
        try:
            nonce, proof = self._verifier.challenge(client_nonce, self._now())
        except ProofError as error:
            raise RequestError(f"nonce: {error}", field="nonce") from error
        return json_response({"nonce": nonce, "proof": proof})


def proof_refusal(error: ProofError | None) -> HttpRefusal:
    """Return the refusal for an invalid proof, or for a missing one where required (`error` None)."""
    code, text = "control_proof_required", REQUIRED
    if error is not None:
        code, text = EXPIRED if isinstance(error, ProofExpiredError) else INVALID, str(error)
    return HttpRefusal(401, text, code, {"WWW-Authenticate": PROOF_HEADER, PROOF_HEADER: code})


def _signed(receive: Receive, digest: bytes) -> Receive:
    """Wrap `receive`: the SHA-256 of the body must be `digest`.

    A wrong digest fails the last part, so a handler never gets a wrong body in full. A handler that does not read the
    body gets no error, and uses nothing of the body.
    """
    seen = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            seen.update(message.get("body", b""))
            if not message.get("more_body", False) and not hmac.compare_digest(seen.digest(), digest):
                raise RequestError("the body differs from the signed body", status=401, code=INVALID)
        return message

    return checked


PUBLIC = frozenset({"/health", "/health_generate", "/ready", "/readiness", "/metrics"})
OPEN = PUBLIC | {CHALLENGE_PATH}
SECURITY_HEADERS = dict((NO_SNIFF, NO_STORE))


def install(app: FastAPI, config: AccessConfig, max_body_bytes: int, proof: ControlProof) -> None:
    """Add the access middleware outside all middleware that `app` has so far."""
    most = config.max_concurrent_requests_per_client
    rules = AccessRules(config.keys, config.origins, config.proxies, most, max_body_bytes)
    app.add_middleware(AccessMiddleware, rules=rules, proof=proof)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_S,
        )


class AccessMiddleware:
    """ASGI middleware: refuses unauthorized requests, and requests beyond a client's limit."""

    def __init__(self, app: ASGIApp, rules: AccessRules, proof: ControlProof) -> None:
        self._app = app
        self._rules = rules
        self._proof = proof

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        refusal, digest = self._check(scope, headers)
        if refusal is not None:
            await refused(refusal)(scope, receive, marked)
            return
        if digest is not None:
            receive = _signed(receive, digest)
        scope[BODIES] = self._rules.bodies
        authorization, forwarded_for = headers.get("authorization"), headers.getlist("x-forwarded-for")
        peer = None if scope["client"] is None else scope["client"][0]
        scope[CLIENT_OF_SCOPE] = client = self._rules.client(authorization, peer, forwarded_for)
        hold = self._rules.bodies.open()
        try:
            if scope["path"] in GENERATING:
                await self._limited(scope, _counted(receive, hold), marked, client)
            else:
                await self._app(scope, _counted(receive, hold), marked)
        finally:
            hold.close()

    def _check(self, scope: Scope, headers: Headers) -> tuple[HttpRefusal | None, bytes | None]:
        """Return the refusal of a request, None if it is allowed, and the digest that its signed body must have."""
        framing = framing_refusal(scope["headers"], len(scope["raw_path"]) + len(scope["query_string"]))
        if framing is not None:
            return framing, None
        command = scope["path"] in COMMANDS
        stranger, digest = self._authenticate(scope, headers, command=command)
        if stranger is not None:
            return stranger, None
        proven = self._proof.required or digest is not None
        return self._rules.page_refusal(scope["method"], headers, command=command, proven=proven), digest

    def _authenticate(
        self, scope: Scope, headers: Headers, *, command: bool
    ) -> tuple[HttpRefusal | None, bytes | None]:
        """Check proof or key of a request; return values as of `_check`."""
        given = headers.get(PROOF_HEADER)
        if given is not None:
            try:
                return None, self._proof.check(scope, given)
            except ProofError as error:
                return proof_refusal(error), None
        if scope["path"] in OPEN:
            return None, None
        if self._proof.required:
            return proof_refusal(None), None
        return self._rules.key_refusal(headers.get("authorization"), command=command), None

    async def _limited(self, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        try:
            slot = self._rules.take_client_slot(client)
        except RequestError as error:
            await refused(HttpRefusal.of(error))(scope, receive, send)
            return
        with slot:
            await self._app(scope, receive, send)


def _counted(receive: Receive, hold: BodyHold) -> Receive:
    """Wrap `receive`: the body must be complete within `BODY_TIMEOUT_S` and fit into the body budget."""
    deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
    is_whole = False

    async def counted() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError as error:
            raise body_timeout() from error
        is_whole = not message.get("more_body", False)
        hold.add(len(message.get("body", b"")))
        return message

    return counted
