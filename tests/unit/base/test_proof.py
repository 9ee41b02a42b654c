"""Proofs of the control token: what is taken, and what a relay, an eavesdropper or a stranger can make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.base.proof import (
    Challenge,
    ChallengeVerifier,
    ControlKey,
    SpentNonces,
    check_body,
    is_weak,
)
from pdserve.errors import ProofError

TOKEN = "a-token-that-is-long-enough"


def test_what_was_forgotten_for_want_of_space_is_not_taken_again() -> None:
    spent = SpentNonces(lifetime_s=100, most=4)
    for i in range(8):
        spent.spend(str(i), made_s=i, now_s=8)
    for i in range(8):
        with pytest.raises(ProofError, match=r"used before|too old"):
            spent.spend(str(i), made_s=i, now_s=8)


def test_spent_nonces_age_out_and_stay_bounded() -> None:
    spent = SpentNonces(lifetime_s=10, most=100)
    for i in range(1000):
        spent.spend(str(i), made_s=i * 0.01, now_s=i * 0.01)
        assert len(spent) <= 100
    spent.spend("late", made_s=100, now_s=100)
    assert len(spent) == 1


# ---------------------------------------------------------------------- exchanges


class Exchanging:
    """Both ends of an exchange with a GET of `/route`, on a manual clock."""

    def __init__(self, client: str = TOKEN, server: str = TOKEN) -> None:
        self.now_s = 5.0
        self.verifier = ChallengeVerifier(ControlKey(server), lifetime_s=10)
        self.challenge = Challenge(ControlKey(client))

    def header(self) -> str:
        self.challenge.accept(*self.verifier.challenge(self.challenge.nonce, self.now_s))
        return self.challenge.header("GET", "/route", b"")

    def refused(self, header: str, method: str = "GET", target: str = "/route") -> str:
        with pytest.raises(ProofError) as caught:
            self.verifier.check(header, method, target, self.now_s)
        return str(caught.value)


def test_both_ends_prove_the_token_and_the_answer_is_proven_too() -> None:
    both = Exchanging()
    exchange = both.verifier.check(both.header(), "GET", "/route", both.now_s)
    check_body(b"", exchange.digest)
    proof = exchange.answer(200, b"routes")
    both.challenge.check_answer(proof, 200, b"routes")
    changes: list[tuple[str | None, int, bytes]] = [
        (proof, 503, b"routes"),
        (proof, 200, b"other"),
        (None, 200, b"routes"),
    ]
    for header, status, body in changes:
        with pytest.raises(ProofError):
            both.challenge.check_answer(header, status, body)


def test_a_server_without_the_token_is_sent_nothing() -> None:
    both = Exchanging(server="another-token-of-the-same-length")
    with pytest.raises(ProofError, match="another control token"):
        both.header()
    with pytest.raises(AssertionError):
        both.challenge.header("GET", "/route", b"")


def test_a_listener_cannot_reflect_the_client_s_own_challenge() -> None:
    both = Exchanging()
    server_nonce, proof = both.verifier.challenge(both.challenge.nonce, both.now_s)
    for nonce, mac in ((both.challenge.nonce, proof), (server_nonce, both.challenge.nonce), (server_nonce, "\ud800")):
        with pytest.raises(ProofError):
            both.challenge.accept(nonce, mac)


def test_a_nonce_of_the_server_is_good_once_and_for_a_short_time() -> None:
    both = Exchanging()
    header = both.header()
    both.now_s += 9
    both.verifier.check(header, "GET", "/route", both.now_s)
    assert "used before" in both.refused(header)
    header = both.header()
    both.now_s += 11
    assert "too old" in both.refused(header)


@pytest.mark.parametrize("change", [("PUT", "/route"), ("GET", "/route?engine_rank=1")])
def test_a_proof_is_for_one_method_and_one_target(change: tuple[str, str]) -> None:
    both = Exchanging()
    assert "another request" in both.refused(both.header(), *change)


def test_a_proof_for_a_challenge_of_another_server_or_of_nobody_is_refused() -> None:
    both, other = Exchanging(), Exchanging()
    assert "no challenge of ours" in both.refused(other.header())
    made_up = " ".join(["c1", "0" * 32, "0" * 80, "0" * 64, "0" * 64])
    assert "no challenge of ours" in both.refused(made_up)


def test_challenges_take_no_place_of_a_proof() -> None:
    """The server has place for one nonce, and it is free after any number of challenges."""
    both = Exchanging()
    both.verifier = ChallengeVerifier(ControlKey(TOKEN), lifetime_s=10, max_nonces=1)
    header = both.header()
    for _ in range(1000):
        both.verifier.challenge(both.challenge.nonce, both.now_s)
    assert both.verifier.check(header, "GET", "/route", both.now_s)


@pytest.mark.parametrize("nonce", ["", "0" * 31, "0" * 33, "G" * 32, "0" * 100_000])
def test_a_challenge_without_a_nonce_is_refused(nonce: str) -> None:
    with pytest.raises(ProofError, match="nonce"):
        Exchanging().verifier.challenge(nonce, 0.0)


# ---------------------------------------------------------------------- keys


def test_macs_of_other_labels_and_other_boundaries_differ() -> None:
    key = ControlKey(TOKEN)
    calls: list[Callable[[], bytes]] = [
        lambda: key.mac("a", b"b", b"c"),
        lambda: key.mac("a", b"bc"),
        lambda: key.mac("ab", b"c"),
        lambda: key.mac("a", b"b", b"c", b""),
        lambda: key.secret("a"),
        lambda: ControlKey(TOKEN + "x").mac("a", b"b", b"c"),
    ]
    assert len({call() for call in calls}) == len(calls)
    assert calls[0]() == ControlKey(TOKEN).mac("a", b"b", b"c")


@pytest.mark.parametrize(("token", "weak"), [("", False), ("x" * 15, True), ("x" * 16, False)])
def test_short_tokens_are_weak(token: str, weak: bool) -> None:
    assert is_weak(token) is weak
