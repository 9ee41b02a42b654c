"""Requests that prove the control token, as routers send them: the server's side of `base/session_proof`.

    GET /control_challenge?nonce=N    {"nonce": ours, "proof": MAC}; 409 where this server has no control token

Made by `app`, asked by `access`.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope

from pdserve.base.http_rules import HttpRefusal
from pdserve.base.proof import PROOF_HEADER
from pdserve.base.session_proof import CHALLENGE_PATH, EXPIRED, INVALID, SessionVerifier, worker_key
from pdserve.errors import ProofError, ProofExpiredError, RequestError
from pdserve.server.http.json_http import json_response

NO_TOKEN = "this server has no control token; set PDSERVE_CONTROL_TOKEN alike on router and servers"
REQUIRED = (
    "this server takes only requests that prove the control token (--require-control-proof), as a router with "
    "--worker-control-proof sends them; an API key is not enough"
)


class ControlProof:
    """The proofs of one application. `token` empty: there is none. `required`: nothing else lets a request in."""

    def __init__(self, token: str, *, required: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._verifier = SessionVerifier(worker_key(token)) if token else None
        self._now = now
        self.required = required

    def install(self, app: FastAPI) -> None:
        """Add the path of challenges."""

        @app.get(CHALLENGE_PATH, response_model=None)
        async def get_control_challenge(request: Request) -> Response:
            return self._challenge(request.query_params.get("nonce", ""))

    def check(self, scope: Scope, header: str) -> bytes:
        """Take the proof in a request's header; returns the digest that its body must have.

        Raises:
            ProofError: it is not good, or this server has no token.
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


def refusal(error: ProofError | None) -> tuple[HttpRefusal, Mapping[str, str]]:
    """The answer to a request whose proof was bad, or missing (None) where one is required, and its headers."""
    code, text = "control_proof_required", REQUIRED
    if error is not None:
        code, text = EXPIRED if isinstance(error, ProofExpiredError) else INVALID, str(error)
    return HttpRefusal(401, text, code), {"WWW-Authenticate": PROOF_HEADER, PROOF_HEADER: code}


def signed(receive: Receive, digest: bytes) -> Receive:
    """`receive` of a body that must have this digest: its last part is an error otherwise, so no handler has it whole.

    A handler that does not read the body is not told, and acts on nothing in it.
    """
    seen = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            seen.update(message.get("body", b""))
            if not message.get("more_body", False) and not hmac.compare_digest(seen.digest(), digest):
                raise RequestError("the body is not the one that was signed", status=401, code=INVALID)
        return message

    return checked
