"""What the ranks of a replica seal with: keys derived from the control token, which is stretched first.

Strangers can read contacts at the rendezvous and frames on the network, and try guesses of the token by them.
"""

from __future__ import annotations

from pdserve.base.proof import ControlKey
from pdserve.protocol.codec import Seal


def contact_seal(token: str, key: str) -> Seal:
    """Of what is written to the rendezvous under `key`: moved to another key, it does not open."""
    return _seal(token, "contact", key)


def frame_seal(token: str, sender: str, receiver: str) -> Seal:
    """Of frames from one rank to another, by the nonces that both drew at their start: sent to any other rank, sent
    back, or kept until a later start, a frame does not open.
    """
    return _seal(token, "frame", sender, receiver)


def _seal(token: str, purpose: str, *parts: str) -> Seal:
    """Without a token, which only ranks on one host may lack, the seal keeps apart what does not belong together."""
    if not token:
        return Seal("\n".join((purpose, *parts)))
    return Seal(ControlKey(token).mac("ranks", purpose.encode(), *(part.encode() for part in parts)).hex())
