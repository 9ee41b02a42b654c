"""Seals between the ranks of a replica, with keys derived from the control token, which is stretched first.

An attacker who reads contacts at the rendezvous, or frames on the network, can test guesses of the token on them.
"""

from __future__ import annotations

from pdserve.base.proof import ControlKey
from pdserve.protocol.codec import Seal


def contact_seal(token: str, key: str) -> Seal:
    """Return the seal for an entry of the rendezvous under `key`: under another key it does not open."""
    return _seal(token, "contact", key)


def frame_seal(token: str, sender: str, receiver: str) -> Seal:
    """Return the seal for frames from one rank to another, bound to the nonces that both drew at their start.

    A frame that is sent to another rank, sent back, or kept until a later start does not open.
    """
    return _seal(token, "frame", sender, receiver)


def _seal(token: str, purpose: str, *parts: str) -> Seal:
    """Return a seal. Without a token (allowed on one host only), the key separates purposes but proves nothing."""
    if not token:
        return Seal("\n".join((purpose, *parts)))
    return Seal(ControlKey(token).mac("ranks", purpose.encode(), *(part.encode() for part in parts)).hex())
