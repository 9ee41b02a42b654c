"""Proofs that a process knows the control token, which is never sent itself. Pure: the caller passes time and bytes.

    ControlKey        the stretched token, from which MACs and secrets for one purpose each are derived
    Challenge         client side of an exchange in which the server proves itself first (decode to a bootstrap server)
    ChallengeVerifier server side: answers challenges, checks the requests that follow, signs the answers

`session_proof` is the variant for many requests after one challenge. Proofs travel in the header `Pdserve-Proof`:

    exchange c1 <client's nonce> <server's nonce> <SHA-256 of the body> <MAC>
    answer   <MAC>

Every MAC is HMAC-SHA256 over a label of its kind and over length-prefixed parts, so that no MAC is valid as another
kind. A MAC lets an eavesdropper test guesses of the token offline. Therefore the token is stretched with scrypt, and
`is_weak` detects tokens that are still too short.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import hmac
import re
import secrets
import struct

from pdserve.errors import ProofError, ProofExpiredError

PROOF_HEADER = "Pdserve-Proof"
MIN_TOKEN_CHARS = 16
"""Shorter tokens can be guessed offline by an eavesdropper."""
NONCE_BYTES = 16
CHALLENGE_LIFETIME_S = 10.0

NO_TOKEN_ID = "none"
"""`token_id` of a process without a control token."""
_ID_DIGITS = 8

_SALT = b"pdserve control token v1"
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}
"""Costs 16 MiB and about 50 ms, once per process and token."""
_EXCHANGE = re.compile(r"c1 ([0-9a-f]{32}) ([0-9a-f]{80}) ([0-9a-f]{64}) ([0-9a-f]{64})")
_NONCE = re.compile(r"[0-9a-f]{32}")
_SERVER_NONCE = re.compile(r"[0-9a-f]{80}")


@functools.lru_cache(maxsize=8)
def _stretched(token: str) -> bytes:
    return hashlib.scrypt(token.encode(), salt=_SALT, dklen=32, **_SCRYPT)


def is_weak(token: str) -> bool:
    """Whether `token` is set and so short that an eavesdropper can guess it."""
    return 0 < len(token) < MIN_TOKEN_CHARS


class MacKey:
    """A 32-byte secret that makes and checks MACs. Any thread; a repr does not contain the secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = secret

    def mac(self, label: str, *parts: bytes) -> bytes:
        """Return a 32-byte MAC over `label` and `parts`, including the boundaries between parts."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (label.encode(), *parts):
            digest.update(struct.pack(">Q", len(part)))
            digest.update(part)
        return digest.digest()

    def matches(self, mac: str, label: str, *parts: bytes) -> bool:
        """Whether `mac`, in hex, is the MAC of `label` and `parts`. Compares in constant time."""
        return hmac.compare_digest(as_bytes(mac), self.mac(label, *parts).hex().encode())


class ControlKey(MacKey):
    """The key derived from a control token, which must not be empty."""

    def __init__(self, token: str) -> None:
        assert token, "without a token there is nothing to prove"
        super().__init__(_stretched(token))

    def secret(self, purpose: str) -> bytes:
        """Derive a 32-byte secret for one purpose, identical in all processes with this token."""
        return self.mac("secret", purpose.encode())


def token_id(token: str) -> str:
    """Return 8 hex digits that tell tokens apart without revealing them; `NO_TOKEN_ID` for an empty token.

    Servers show it to a router, which cannot compare the tokens themselves. It is a MAC of the stretched token: like a
    challenge it lets its reader test guesses offline, and nothing else.
    """
    return ControlKey(token).mac("token id").hex()[:_ID_DIGITS] if token else NO_TOKEN_ID


def as_bytes(text: str) -> bytes:
    """Encode text from a header or from JSON, which may contain lone surrogates."""
    return text.encode(errors="backslashreplace")


def body_digest(body: bytes) -> bytes:
    """Return the 32-byte SHA-256 of a body, which a proof covers."""
    return hashlib.sha256(body).digest()


def check_body(body: bytes, digest: bytes) -> None:
    """Raise ProofError unless `body` has the `digest` of a checked proof."""
    if not hmac.compare_digest(body_digest(body), digest):
        raise ProofError("the body differs from the signed body")


class SpentNonces:
    """Used nonces, kept until their lifetime ends. One thread.

    Beyond `most` the oldest nonces are dropped; from then on all nonces of that age or older are rejected.
    """

    def __init__(self, lifetime_s: float, most: int) -> None:
        self._lifetime_s = lifetime_s
        self._most = most
        self._by_age: list[tuple[float, str]] = []
        self._spent: set[str] = set()
        self._floor_s = -float("inf")

    def __len__(self) -> int:
        return len(self._spent)

    def spend(self, nonce: str, made_s: float, now_s: float) -> None:
        """Mark `nonce`, created at `made_s`, as used.

        Raises:
            ProofError: the nonce was used before, or is too old to know.
        """
        while self._by_age and (len(self._by_age) >= self._most or self._by_age[0][0] < now_s - self._lifetime_s):
            self._floor_s, oldest = heapq.heappop(self._by_age)
            self._spent.discard(oldest)
        if nonce in self._spent:
            raise ProofError("the proof was used before")
        if made_s <= self._floor_s:
            raise ProofError("the proof is too old")
        self._spent.add(nonce)
        heapq.heappush(self._by_age, (made_s, nonce))


def _given(header: str | None) -> str:
    if not header:
        raise ProofError("a proof of the control token is missing")
    return header


# ---------------------------------------------------------------------- an exchange: the server proves itself first


class Challenge:
    """Client side of one exchange: request a challenge with `nonce`, `accept` the answer, then send `header`."""

    def __init__(self, key: MacKey) -> None:
        self._key = key
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self._nonces: tuple[bytes, ...] = ()

    @property
    def nonces(self) -> tuple[bytes, ...]:
        """The client's and the server's nonce, in hex. Valid after `accept`."""
        assert self._nonces, "the server comes first"
        return self._nonces

    def accept(self, server_nonce: str, proof: str) -> None:
        """Check the server's proof.

        Raises:
            ProofError: the server does not know the token. Send it nothing in that case.
        """
        nonces = (as_bytes(self.nonce), as_bytes(server_nonce))
        if not _SERVER_NONCE.fullmatch(server_nonce) or not self._key.matches(proof, "challenge", *nonces):
            raise ProofError("it has another control token")
        self._nonces = nonces

    def header(self, method: str, target: str, body: bytes) -> str:
        """Return the client's proof for the one request of this exchange. Call it after `accept`."""
        digest = body_digest(body)
        mac = self._key.mac("exchange", *self.nonces, as_bytes(method), as_bytes(target), digest)
        client, server = (nonce.decode() for nonce in self.nonces)
        return f"c1 {client} {server} {digest.hex()} {mac.hex()}"

    def check_answer(self, header: str | None, status: int, body: bytes) -> None:
        """Raise ProofError unless the accepted server gave this answer in this exchange."""
        if not self._key.matches(_given(header), "answer", *self._nonces, str(status).encode(), body):
            raise ProofError("the answer is not the server's")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A request with a valid proof. `digest`: SHA-256 of the body still to be read, see `check_body`."""

    digest: bytes
    _key: MacKey = dataclasses.field(repr=False)
    _nonces: tuple[bytes, ...] = dataclasses.field(repr=False)

    def answer(self, status: int, body: bytes) -> str:
        """Return the proof header of the server's answer."""
        return self._key.mac("answer", *self._nonces, str(status).encode(), body).hex()


class ServerNonces:
    """A server's nonces. They need no memory: each encodes its creation time and a MAC over the client's nonce.

    `now_s` is in seconds of a monotonic clock.
    """

    def __init__(self, key: MacKey, lifetime_s: float) -> None:
        self._key = key
        self._own = secrets.token_bytes(32)
        self._lifetime_s = lifetime_s

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """Return a new nonce and the server's proof over both nonces. ProofError if `client_nonce` is malformed."""
        if not _NONCE.fullmatch(client_nonce):
            raise ProofError("a challenge needs a nonce of 32 hex digits")
        stamp = struct.pack(">Q", int(now_s * 1e6)) + secrets.token_bytes(NONCE_BYTES)
        server_nonce = (stamp + self._mark(client_nonce, stamp)).hex()
        return server_nonce, self._key.mac("challenge", client_nonce.encode(), server_nonce.encode()).hex()

    def made_s(self, client_nonce: str, server_nonce: str, now_s: float) -> float:
        """Return a nonce's creation time. ProofExpiredError if it was not made for this client, or has expired."""
        stamp, mark = bytes.fromhex(server_nonce)[:24], bytes.fromhex(server_nonce)[24:]
        if not hmac.compare_digest(mark, self._mark(client_nonce, stamp)):
            raise ProofExpiredError("the proof answers no challenge of ours")
        made_s: float = struct.unpack(">Q", stamp[:8])[0] / 1e6
        if now_s - made_s > self._lifetime_s:
            raise ProofExpiredError("the proof is too old")
        return made_s

    def _mark(self, client_nonce: str, stamp: bytes) -> bytes:
        return hmac.new(self._own, client_nonce.encode() + stamp, hashlib.sha256).digest()[:NONCE_BYTES]


class ChallengeVerifier:
    """Server side of exchanges. One thread. `now_s` is in seconds of a monotonic clock."""

    def __init__(self, key: MacKey, *, lifetime_s: float = CHALLENGE_LIFETIME_S, max_nonces: int = 1 << 16) -> None:
        self._key = key
        self._nonces = ServerNonces(key, lifetime_s)
        self._spent = SpentNonces(lifetime_s, max_nonces)

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """Return the server's nonce, and its proof over both nonces.

        Raises:
            ProofError: `client_nonce` is malformed.
        """
        return self._nonces.challenge(client_nonce, now_s)

    def check(self, header: str | None, method: str, target: str, now_s: float) -> Exchange:
        """Check a request's proof; the caller then reads the body and compares its digest.

        Raises:
            ProofError: the proof is missing, malformed, for another token or challenge, too old, or used before.
        """
        found = _EXCHANGE.fullmatch(_given(header))
        if found is None:
            raise ProofError("the proof of the control token is malformed")
        client, server, digest, mac = found.groups()
        made_s = self._nonces.made_s(client, server, now_s)
        nonces = (as_bytes(client), as_bytes(server))
        parts = (*nonces, as_bytes(method), as_bytes(target), bytes.fromhex(digest))
        if not self._key.matches(mac, "exchange", *parts):
            raise ProofError("the proof was made with another control token, or for another request")
        self._spent.spend(server, made_s, now_s)
        return Exchange(bytes.fromhex(digest), self._key, nonces)
