"""Text encoding of a native engine's address: a prefix that names the transport, and a msgpack struct.

Used by the transports whose addresses are more than a host and a port.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeVar

import msgspec

from pdserve.errors import TransferError

C = TypeVar("C", bound=msgspec.Struct)


def encode_card(prefix: str, card: msgspec.Struct) -> str:
    """Encode the struct as address text."""
    return prefix + base64.urlsafe_b64encode(msgspec.msgpack.encode(card)).decode()


def decode_card(prefix: str, address: str, kind: type[C]) -> C:
    """Decode the struct in an address. Raises `not_an_address` when the address is malformed."""
    if not address.startswith(prefix):
        raise not_an_address(prefix, address)
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(address.removeprefix(prefix)), type=kind)
    except (msgspec.MsgspecError, binascii.Error, ValueError):
        raise not_an_address(prefix, address) from None


def not_an_address(prefix: str, address: str) -> TransferError:
    """Return the error for a malformed address: settled, not retryable."""
    text = f"not a {prefix.removesuffix(':')} address: {address[:100]!r}"
    return TransferError(text, code="bad_address", retryable=False)
