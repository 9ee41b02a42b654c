"""Proofs of the control token in every request of a session: one challenge, then any number of requests. Pure.

    client (a router)                                             server
    GET /control_challenge?nonce=N   ──>
                                     <──   server's nonce, MAC over both: the server proves itself first
    request, proof with counter 0    ──>   checked, the counter is marked as used
    request, proof with counter 1    ──>   ...

    Pdserve-Proof: w1 <client's nonce> <server's nonce> <counter> <SHA-256 of the body> <MAC>

The MAC covers both nonces, the counter, the method, the target (path and query) and the digest. It does not cover other
headers, nor answers. The key is derived from the token for this purpose only (`worker_key`): its holder can send HTTP
requests to servers, but cannot act as a peer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from pdserve.base.proof import Challenge, ControlKey, MacKey, ServerNonces, as_bytes, body_digest
from pdserve.errors import ProofError, ProofExpiredError

CHALLENGE_PATH = "/control_challenge"
SESSION_LIFETIME_S = 300.0
"""Lifetime of a challenge."""
WINDOW = 4096
"""Requests may arrive out of order: the largest distance of a valid counter from the newest one."""
MAX_SESSIONS = 1024

EXPIRED = "control_proof_expired"
"""Error code and `Pdserve-Proof` of the answer: the request was not processed; retry it with a new challenge."""
REQUIRED = "control_proof_required"
"""Error code and `Pdserve-Proof` of the answer to a request without a proof; the request was not processed."""
INVALID = "invalid_control_proof"
"""Error code and `Pdserve-Proof` of the answer: the request was not processed; a new challenge does not help."""
_HEADER = re.compile(r"w1 ([0-9a-f]{32}) ([0-9a-f]{80}) (0|[1-9][0-9]{0,18}) ([0-9a-f]{64}) ([0-9a-f]{64})")
_LABEL = "request"


def worker_key(token: str) -> MacKey:
    """Derive the key of these proofs from a control token, which must not be empty."""
    return MacKey(worker_secret(token))


def worker_secret(token: str) -> bytes:
    """Return the 32 bytes of `worker_key`, for a router that does not get the token."""
    return ControlKey(token).secret("worker http")


class Session:
    """Client side: request a challenge with `nonce`, `accept` the answer, then make any number of `header`s."""

    def __init__(self, key: MacKey) -> None:
        self._key = key
        self._challenge = Challenge(key)
        self._counters = itertools.count()

    @property
    def nonce(self) -> str:
        """The client's nonce, sent in the request for a challenge."""
        return self._challenge.nonce

    def accept(self, server_nonce: str, proof: str) -> None:
        """Check the server's proof. ProofError if the server does not know the token; send it nothing in that case."""
        self._challenge.accept(server_nonce, proof)

    def header(self, method: str, target: str, body: bytes) -> str:
        """Return the client's proof for one request; send it only once. Call it after `accept`."""
        client, server = self._challenge.nonces
        counter, digest = str(next(self._counters)), body_digest(body)
        mac = self._key.mac(_LABEL, client, server, counter.encode(), as_bytes(method), as_bytes(target), digest)
        return f"w1 {client.decode()} {server.decode()} {counter} {digest.hex()} {mac.hex()}"


class CounterWindow:
    """Used counters of a session: the largest one, and a bit for each of the last `WINDOW` counters."""

    def __init__(self) -> None:
        self._largest = -1
        self._used = 0  # bit i: counter `_largest - i`

    def __len__(self) -> int:
        """Used counters that are remembered, at most `WINDOW`."""
        return self._used.bit_count()

    def take(self, counter: int) -> None:
        """Mark `counter` as used.

        Raises:
            ProofError: the counter was used before.
            ProofExpiredError: the counter is older than the window.
        """
        ahead = counter - self._largest
        if ahead > 0:
            kept = self._used << ahead if ahead < WINDOW else 0
            self._used = (kept | 1) & ((1 << WINDOW) - 1)
            self._largest = counter
            return
        if -ahead >= WINDOW:
            raise ProofExpiredError("the proof's counter is too far behind the newest one")
        if self._used >> -ahead & 1:
            raise ProofError("the proof was used before")
        self._used |= 1 << -ahead


@dataclasses.dataclass(frozen=True)
class _Known:
    """A session with at least one valid proof. `made_s`: when its challenge was answered."""

    made_s: float
    counters: CounterWindow = dataclasses.field(default_factory=CounterWindow)


class SessionVerifier:
    """Server side. One thread. Only a valid proof costs memory. `now_s` is in seconds of a monotonic clock.

    Beyond `max_sessions` the oldest session is dropped; from then on challenges of that age or older start no session.
    """

    def __init__(
        self, key: MacKey, *, lifetime_s: float = SESSION_LIFETIME_S, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._key = key
        self._nonces = ServerNonces(key, lifetime_s)
        self._lifetime_s = lifetime_s
        self._max_sessions = max_sessions
        self._sessions: dict[str, _Known] = {}
        self._floor_s = -float("inf")

    @property
    def num_sessions(self) -> int:
        """Sessions that are remembered, at most `max_sessions`."""
        return len(self._sessions)

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """Return the server's nonce, and its proof over both nonces. ProofError if `client_nonce` is malformed."""
        return self._nonces.challenge(client_nonce, now_s)

    def check(self, header: str, method: str, target: str, now_s: float) -> bytes:
        """Check a request's proof before its body is read; returns the SHA-256 that the body must have.

        Raises:
            ProofExpiredError: the challenge is too old, or from before a restart of the server. The client may retry.
            ProofError: the proof is malformed, for another token or request, or was used before.
        """
        found = _HEADER.fullmatch(header)
        if found is None:
            raise ProofError("the proof of the control token is malformed")
        client, server, counter, digest, mac = found.groups()
        made_s = self._nonces.made_s(client, server, now_s)
        named = (as_bytes(client), as_bytes(server), as_bytes(counter), as_bytes(method), as_bytes(target))
        if not self._key.matches(mac, _LABEL, *named, bytes.fromhex(digest)):
            raise ProofError("the proof was made with another control token, or for another request")
        self._session(server, made_s, now_s).counters.take(int(counter))
        return bytes.fromhex(digest)

    def _session(self, server_nonce: str, made_s: float, now_s: float) -> _Known:
        known = self._sessions.get(server_nonce)
        if known is not None:
            return known
        for old in [name for name, one in self._sessions.items() if now_s - one.made_s > self._lifetime_s]:
            del self._sessions[old]
        if made_s <= self._floor_s:
            raise ProofExpiredError("the proof is too old")
        if len(self._sessions) >= self._max_sessions:
            oldest = min(self._sessions, key=lambda name: self._sessions[name].made_s)
            self._floor_s = max(self._floor_s, self._sessions.pop(oldest).made_s)
        self._sessions[server_nonce] = known = _Known(made_s)
        return known
