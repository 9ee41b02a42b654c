"""The server's side of proofs of the control token (`http/session_proof`), which routers send instead of keys.

    GET /control_challenge?nonce=N    {"nonce": server nonce, "proof": MAC}; 409 if this server has no control token

A valid proof replaces both API keys; an invalid one is refused on every path. A server with a token and no `--api-key`
requires a proof (`ProofRule.UNLESS_KEY`), one with `--require-control-proof` accepts nothing else. `AccessMiddleware`
asks `ControlProof`. Event loop only.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope

from pdserve.base.proof import PROOF_HEADER
from pdserve.config.access_group import ProofRule
from pdserve.errors import ProofError, ProofExpiredError, RequestError
from pdserve.http.errors import HttpRefusal
from pdserve.http.session_proof import CHALLENGE_PATH, EXPIRED, INVALID, REQUIRED, SessionVerifier, worker_key
from pdserve.server.http.json_http import json_response

NO_TOKEN = "this server has no control token; set the same PDSERVE_CONTROL_TOKEN on router and servers"
ONLY_PROOFS = (
    "this server accepts only requests that prove the control token (--require-control-proof), as pdserve's router "
    "sends them; an API key is not enough"
)
NO_KEY_IS_SET = (
    "this server has PDSERVE_CONTROL_TOKEN and no --api-key, so it accepts only requests that prove the token: send "
    "them through a pdserve router that has PDSERVE_CONTROL_TOKEN or PDSERVE_WORKER_PROOF_KEY, or start this server "
    "with --api-key, or with --no-require-control-proof"
)


class ControlProof:
    """Verifies the proofs of one application. `token` empty: no control token. `rule`: which requests need a proof."""

    def __init__(self, token: str, rule: ProofRule, now: Callable[[], float] = time.monotonic) -> None:
        self._verifier = SessionVerifier(worker_key(token)) if token else None
        self._now = now
        self.rule = rule

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

    def missing(self) -> HttpRefusal:
        """Return the refusal of a request without a proof."""
        return _refusal(REQUIRED, NO_KEY_IS_SET if self.rule is ProofRule.UNLESS_KEY else ONLY_PROOFS)

    def _challenge(self, client_nonce: str) -> Response:
        if self._verifier is None:
            raise RequestError(NO_TOKEN, status=409, code="no_control_token")
        try:
            nonce, proof = self._verifier.challenge(client_nonce, self._now())
        except ProofError as error:
            raise RequestError(f"nonce: {error}", field="nonce") from error
        return json_response({"nonce": nonce, "proof": proof})


def proof_refusal(error: ProofError) -> HttpRefusal:
    """Return the refusal of a request with an invalid proof."""
    return _refusal(EXPIRED if isinstance(error, ProofExpiredError) else INVALID, str(error))


def _refusal(code: str, text: str) -> HttpRefusal:
    return HttpRefusal(401, text, code, {"WWW-Authenticate": PROOF_HEADER, PROOF_HEADER: code})


def signed(receive: Receive, digest: bytes) -> Receive:
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
