"""Proofs of the control token in every request of a session: one challenge, then any number of requests. Pure.

    client (a router)                                             server
    GET /control_challenge?nonce=N   ──>
                                     <──   server's nonce, MAC over both: the server proves itself first
    request, proof with counter 0    ──>   checked, the counter is marked as used
    request, proof with counter 1    ──>   ...

    Pdserve-Proof: w1 <client's nonce> <server's nonce> <counter> <SHA-256 of the body> <MAC>

The MAC covers both nonces, the counter, the method, the target (path and query) and the digest; other headers, and
answers, are not covered. The key is derived from the token for this purpose alone (`worker_key`): who has it can ask
servers over HTTP, but cannot be a peer.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

from pdserve.base.proof import Challenge, ControlKey, MacKey, ServerNonces, as_bytes, body_digest
from pdserve.errors import ProofError, ProofExpiredError

CHALLENGE_PATH = "/control_challenge"
SESSION_LIFETIME_S = 300.0
"""How long a challenge is good for."""
WINDOW = 4096
"""Requests overtake each other: so far behind the newest counter one may be."""
MAX_SESSIONS = 1024

EXPIRED = "control_proof_expired"
"""Code, and value of the answer's `Pdserve-Proof`: the request was not processed, and a new challenge may help."""
INVALID = "invalid_control_proof"
"""The same where a new challenge would not help."""
_HEADER = re.compile(r"w1 ([0-9a-f]{32}) ([0-9a-f]{80}) (0|[1-9][0-9]{0,18}) ([0-9a-f]{64}) ([0-9a-f]{64})")
_LABEL = "request"


def worker_key(token: str) -> MacKey:
    """The key of these proofs, from a control token, which must not be empty."""
    return MacKey(worker_secret(token))


def worker_secret(token: str) -> bytes:
    """The 32 bytes of `worker_key`, for a router that shall not have the token."""
    return ControlKey(token).secret("worker http")


class Session:
    """The client's side: ask for a challenge with `nonce`, `accept` the answer, then any number of `header`s."""

    def __init__(self, key: MacKey) -> None:
        self._key = key
        self._challenge = Challenge(key)
        self._counters = itertools.count()

    @property
    def nonce(self) -> str:
        """What to ask for a challenge with."""
        return self._challenge.nonce

    def accept(self, server_nonce: str, proof: str) -> None:
        """Believe the server from here on. ProofError where it does not know the token: it may be sent nothing then."""
        self._challenge.accept(server_nonce, proof)

    def header(self, method: str, target: str, body: bytes) -> str:
        """Our proof for one request, to be sent once. After `accept`."""
        client, server = self._challenge.nonces
        counter, digest = str(next(self._counters)), body_digest(body)
        mac = self._key.mac(_LABEL, client, server, counter.encode(), as_bytes(method), as_bytes(target), digest)
        return f"w1 {client.decode()} {server.decode()} {counter} {digest.hex()} {mac.hex()}"


class CounterWindow:
    """Which counters of a session were used: the largest, and of the `WINDOW` up to it each."""

    def __init__(self) -> None:
        self._largest = -1
        self._used = 0  # bit i: counter `_largest - i`

    def take(self, counter: int) -> None:
        """Use `counter` for the first and last time.

        Raises:
            ProofError: it was used before.
            ProofExpiredError: it is so far behind that nothing is known of it.
        """
        ahead = counter - self._largest
        if ahead > 0:
            kept = self._used << ahead if ahead < WINDOW else 0
            self._used = (kept | 1) & ((1 << WINDOW) - 1)
            self._largest = counter
            return
        if -ahead >= WINDOW:
            raise ProofExpiredError("the proof was overtaken by too many others")
        if self._used >> -ahead & 1:
            raise ProofError("the proof was used before")
        self._used |= 1 << -ahead


@dataclasses.dataclass(frozen=True)
class _Known:
    """A session in which a request with a good proof has come. `made_s`: when its challenge was answered."""

    made_s: float
    counters: CounterWindow = dataclasses.field(default_factory=CounterWindow)


class SessionVerifier:
    """The server's side. One thread. Only a request with a good proof costs memory. `now_s` is a monotonic clock's.

    Beyond `max_sessions` the oldest session is forgotten; no challenge that is as old as it begins one from then on.
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

    def challenge(self, client_nonce: str, now_s: float) -> tuple[str, str]:
        """Our nonce, and our proof over both. ProofError where what the client sent is no nonce."""
        return self._nonces.challenge(client_nonce, now_s)

    def check(self, header: str, method: str, target: str, now_s: float) -> bytes:
        """Take the proof of a request, whose body is still to be read; returns the digest that the body must have.

        Raises:
            ProofExpiredError: its challenge is too old or of another start of this server. The client may try again.
            ProofError: it is malformed, another token's, for another request, or was used before.
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
