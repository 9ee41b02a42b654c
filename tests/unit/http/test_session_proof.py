"""Proofs of the control token in every request: what is taken, and what strangers, eavesdroppers and relays can do."""

from __future__ import annotations

import pytest

from pdserve.base.proof import ControlKey, MacKey
from pdserve.errors import ProofError, ProofExpiredError
from pdserve.http.session_proof import (
    MAX_SESSIONS,
    SESSION_LIFETIME_S,
    WINDOW,
    CounterWindow,
    Session,
    SessionVerifier,
    worker_key,
    worker_secret,
)

TOKEN = "a-token-that-is-long-enough"
OTHER = "another-token-of-the-same-length"
ASKED = ("POST", "/generate?a=1", b"a prompt")


class Both:
    """A session and a server, on a manual clock."""

    def __init__(self, client: str = TOKEN, server: str = TOKEN, *, max_sessions: int = MAX_SESSIONS) -> None:
        self.now_s = 5.0
        self.verifier = SessionVerifier(worker_key(server), max_sessions=max_sessions)
        self._key = worker_key(client)
        self.session = Session(self._key)

    def begin(self) -> Session:
        """A new session, which the server's proof has opened."""
        self.session = Session(self._key)
        self.session.accept(*self.verifier.challenge(self.session.nonce, self.now_s))
        return self.session

    def take(self, header: str, method: str = "POST", target: str = "/generate?a=1") -> bytes:
        return self.verifier.check(header, method, target, self.now_s)

    def refused(self, header: str, *request: str) -> ProofError:
        with pytest.raises(ProofError) as caught:
            self.take(header, *request)
        return caught.value


def test_one_challenge_is_enough_for_many_requests() -> None:
    both = Both()
    session = both.begin()
    digests = [both.take(session.header(*ASKED)) for _ in range(3)]
    assert len(set(digests)) == 1 and len(digests[0]) == 32
    assert both.take(session.header("POST", "/generate?a=1", b"another")) != digests[0]


def test_a_server_with_another_token_or_without_one_is_sent_nothing() -> None:
    both = Both(server=OTHER)
    with pytest.raises(ProofError, match="another control token"):
        both.begin()
    with pytest.raises(AssertionError):
        both.session.header(*ASKED)


def test_a_client_with_another_token_is_refused() -> None:
    both = Both()
    forger = Session(worker_key(OTHER))
    nonce, _ = both.verifier.challenge(forger.nonce, both.now_s)
    forger.accept(nonce, worker_key(OTHER).mac("challenge", forger.nonce.encode(), nonce.encode()).hex())
    error = both.refused(forger.header(*ASKED))
    assert "another control token" in str(error) and not isinstance(error, ProofExpiredError)


@pytest.mark.parametrize("request_", [("GET", "/generate?a=1"), ("POST", "/generate"), ("POST", "/flush_cache?a=1")])
def test_a_proof_is_for_one_method_path_and_query(request_: tuple[str, str]) -> None:
    both = Both()
    assert "another request" in str(both.refused(both.begin().header(*ASKED), *request_))


@pytest.mark.parametrize("part", range(6))
def test_no_part_of_a_header_can_be_changed(part: int) -> None:
    both = Both()
    parts = both.begin().header(*ASKED).split(" ")
    parts[part] = parts[part][:-1] + ("2" if parts[part][-1] != "2" else "3")
    both.refused(" ".join(parts))
    both.take(both.session.header(*ASKED))


@pytest.mark.parametrize("header", ["", "w1", "c1 " + "0" * 32, "w1 \ud800", "x" * 100_000])
def test_what_is_no_proof_is_refused(header: str) -> None:
    assert "malformed" in str(Both().refused(header))


def test_a_proof_is_good_once() -> None:
    both = Both()
    header = both.begin().header(*ASKED)
    both.take(header)
    assert "used before" in str(both.refused(header))


def test_requests_may_overtake_each_other() -> None:
    both = Both()
    session = both.begin()
    headers = [session.header(*ASKED) for _ in range(WINDOW)]
    for header in headers[::-1]:
        both.take(header)
    for header in headers:
        assert "used before" in str(both.refused(header))


def test_a_request_that_was_overtaken_by_too_many_may_be_sent_again() -> None:
    both = Both()
    session = both.begin()
    first = session.header(*ASKED)
    for _ in range(WINDOW):
        last = session.header(*ASKED)
    both.take(last)
    assert isinstance(both.refused(first), ProofExpiredError)
    both.take(session.header(*ASKED))


@pytest.mark.parametrize("step", [1, WINDOW - 1, WINDOW, WINDOW + 1, 10**18])
def test_the_window_moves_with_the_largest_counter(step: int) -> None:
    window = CounterWindow()
    window.take(7)
    window.take(7 + step)
    for counter in (7, 7 + step):
        with pytest.raises(ProofError):
            window.take(counter)
    if step > 1:
        window.take(7 + step - 1)


@pytest.mark.parametrize("step", [1, 2, WINDOW - 1, WINDOW])
def test_no_more_counters_are_remembered_than_the_window_has(step: int) -> None:
    window = CounterWindow()
    for counter in range(0, 3 * WINDOW, step):
        window.take(counter)
        assert len(window) <= WINDOW
    assert len(window) == -(-WINDOW // step)


def test_a_session_ends_with_its_challenge() -> None:
    both = Both()
    session = both.begin()
    both.take(session.header(*ASKED))
    both.now_s += SESSION_LIFETIME_S - 1
    both.take(session.header(*ASKED))
    both.now_s += 2
    assert isinstance(both.refused(session.header(*ASKED)), ProofExpiredError)
    both.take(both.begin().header(*ASKED))
    assert both.verifier.num_sessions == 1, "old ones are forgotten"


def test_a_server_that_was_started_anew_takes_nothing_recorded() -> None:
    both = Both()
    headers = [both.begin().header(*ASKED), both.session.header(*ASKED)]
    both.take(headers[0])
    both.verifier = SessionVerifier(worker_key(TOKEN))
    for header in headers:
        assert isinstance(both.refused(header), ProofExpiredError)


def test_a_recorded_challenge_convinces_no_other_session() -> None:
    both = Both()
    recorded = both.verifier.challenge(both.session.nonce, both.now_s)
    with pytest.raises(ProofError):
        Session(worker_key(TOKEN)).accept(*recorded)


def test_challenges_cost_no_memory_and_sessions_are_bounded() -> None:
    both = Both(max_sessions=3)
    for _ in range(1000):
        both.verifier.challenge(both.session.nonce, both.now_s)
    assert both.verifier.num_sessions == 0
    headers = []
    for _ in range(6):
        both.now_s += 1
        headers.append(both.begin().header(*ASKED))
        both.take(headers[-1])
    assert both.verifier.num_sessions == 3
    for header in headers:
        both.refused(header)


def test_the_key_is_for_this_purpose_only() -> None:
    both = Both()
    router = Session(MacKey(worker_secret(TOKEN)))
    router.accept(*both.verifier.challenge(router.nonce, both.now_s))
    both.take(router.header(*ASKED))
    label, part = "challenge", b"x"
    assert worker_key(TOKEN).mac(label, part) != ControlKey(TOKEN).mac(label, part)
    assert worker_secret(TOKEN) not in (ControlKey(TOKEN).secret("curve"), worker_secret(OTHER))
