"""Proofs that a process knows the control token, which itself is never sent. Pure: the caller brings time and bytes.

    ControlKey        the token, stretched; MACs and secrets for one purpose each are derived from it
    Challenge         the client of an exchange in which the server proves itself first (decode, to a bootstrap server)
    ChallengeVerifier its server: answers challenges, checks what follows, signs the answers

`session_proof` has the form for many requests after one challenge. Proofs travel in the header `Pdserve-Proof`:

    exchange c1 <client's nonce> <server's nonce> <SHA-256 of the body> <MAC>
    answer   <MAC>

Every MAC is HMAC-SHA256 over a label of its own and over parts with their lengths in front, so that no MAC of one kind
passes as another's. A MAC lets an eavesdropper try guesses of the token offline: the token is stretched with scrypt,
and `is_weak` tells which tokens are too short even so.
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

_SALT = b"pdserve control token v1"
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1}
"""16 MiB and about 50 ms, once per process and token."""
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
    """A secret of 32 bytes that makes and checks MACs. Any thread; never shows the secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = secret

    def mac(self, label: str, *parts: bytes) -> bytes:
        """32 bytes over `label` and `parts`; other labels, or other boundaries between parts, give other bytes."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (label.encode(), *parts):
            digest.update(struct.pack(">Q", len(part)))
            digest.update(part)
        return digest.digest()

    def matches(self, mac: str, label: str, *parts: bytes) -> bool:
        """Whether `mac`, in hex, is that of `parts`. In constant time."""
        return hmac.compare_digest(as_bytes(mac), self.mac(label, *parts).hex().encode())


class ControlKey(MacKey):
    """What is derived from a control token, which must not be empty."""

    def __init__(self, token: str) -> None:
        assert token, "without a token there is nothing to prove"
        super().__init__(_stretched(token))

    def secret(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose: the same in all processes with this token."""
        return self.mac("secret", purpose.encode())


def as_bytes(text: str) -> bytes:
    """Whatever came in a header or in JSON, lone surrogates included."""
    return text.encode(errors="backslashreplace")


def body_digest(body: bytes) -> bytes:
    """What a proof covers of a body: its SHA-256, 32 bytes."""
    return hashlib.sha256(body).digest()


def check_body(body: bytes, digest: bytes) -> None:
    """Raise ProofError unless `body` is what a checked proof covers."""
    if not hmac.compare_digest(body_digest(body), digest):
        raise ProofError("the body is not the one that was signed")


class SpentNonces:
    """Nonces that were used, until they are too old to be taken anyway. One thread.

    Beyond `most` the oldest are forgotten; from then on nothing that is as old as they are is taken.
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
        """Take `nonce`, which was made at `made_s`, for the first and last time.

        Raises:
            ProofError: it was used before, or may have been.
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
    """The client's side of one exchange: ask for a challenge with `nonce`, `accept` the answer, then send `header`."""

    def __init__(self, key: MacKey) -> None:
        self._key = key
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self._nonces: tuple[bytes, ...] = ()

    @property
    def nonces(self) -> tuple[bytes, ...]:
        """The client's and the server's, in hex. After `accept`."""
        assert self._nonces, "the server comes first"
        return self._nonces

    def accept(self, server_nonce: str, proof: str) -> None:
        """Believe the server from here on.

        Raises:
            ProofError: it does not know the token. Nothing may be sent to it then.
        """
        nonces = (as_bytes(self.nonce), as_bytes(server_nonce))
        if not _SERVER_NONCE.fullmatch(server_nonce) or not self._key.matches(proof, "challenge", *nonces):
            raise ProofError("it has another control token")
        self._nonces = nonces

    def header(self, method: str, target: str, body: bytes) -> str:
        """Our proof for the one request that this exchange is for. After `accept`."""
        digest = body_digest(body)
        mac = self._key.mac("exchange", *self.nonces, as_bytes(method), as_bytes(target), digest)
        client, server = (nonce.decode() for nonce in self.nonces)
        return f"c1 {client} {server} {digest.hex()} {mac.hex()}"

    def check_answer(self, header: str | None, status: int, body: bytes) -> None:
        """Raise ProofError unless the server that was accepted gave this answer to this exchange."""
        if not self._key.matches(_given(header), "answer", *self._nonces, str(status).encode(), body):
            raise ProofError("the answer is not the server's")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A request whose proof was good. `digest`: of the body that is to come, see `check_body`."""

    digest: bytes
    _key: MacKey = dataclasses.field(repr=False)
    _nonces: tuple[bytes, ...] = dataclasses.field(repr=False)

    def answer(self, status: int, body: bytes) -> str:
        """The header of our answer."""
        return self._key.mac("answer", *self._nonces, str(status).encode(), body).hex()


class ServerNonces:
    """A server's own nonces. They take no memory: each encodes its creation time and the client's nonce, with a MAC.

    `now_s` is a monotonic clock's.
    """

    def __init__(self, key: MacKey, lifetime_s: float) -> None:
        self._key = key
        self._own = secrets.token_bytes(32)
        self._lifetime_s = lifetime_s

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """A new one for a client, and our proof over both. ProofError where what the client sent is no nonce."""
        if not _NONCE.fullmatch(client_nonce):
            raise ProofError("a challenge needs a nonce of 32 hex digits")
        stamp = struct.pack(">Q", int(now_s * 1e6)) + secrets.token_bytes(NONCE_BYTES)
        server_nonce = (stamp + self._mark(client_nonce, stamp)).hex()
        return server_nonce, self._key.mac("challenge", client_nonce.encode(), server_nonce.encode()).hex()

    def made_s(self, client_nonce: str, server_nonce: str, now_s: float) -> float:
        """When it was made. ProofExpiredError where it is not ours for this client, or no longer good."""
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
    """The server's side. One thread. `now_s` is a monotonic clock's."""

    def __init__(self, key: MacKey, *, lifetime_s: float = CHALLENGE_LIFETIME_S, max_nonces: int = 1 << 16) -> None:
        self._key = key
        self._nonces = ServerNonces(key, lifetime_s)
        self._spent = SpentNonces(lifetime_s, max_nonces)

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """Our nonce, and our proof over both.

        Raises:
            ProofError: what the client sent is no nonce.
        """
        return self._nonces.challenge(client_nonce, now_s)

    def check(self, header: str | None, method: str, target: str, now_s: float) -> Exchange:
        """The exchange that a request completes; its body is still to be read and compared.

        Raises:
            ProofError: the proof is missing, malformed, another token's, too old, used before, or not ours.
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
