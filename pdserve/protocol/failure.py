"""`Failure`: an error as a serializable value, for threads, processes and hosts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.errors import TransferError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a request or transfer failed.

    `code` is machine-readable, `message` is for people. `origin` names the process that detected the failure.
    `retryable`: a retry may succeed. `status` is the HTTP status that the client of the failed request receives.
    """

    code: str
    message: str
    origin: str = "local"
    retryable: bool = True
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 502

    @classmethod
    def from_error(cls, error: TransferError, origin: str = "local") -> Failure:
        """Convert an exception: status 502 if it is retryable, else 500."""
        status = 502 if error.retryable else 500
        return cls(code=error.code, message=str(error), origin=origin, retryable=error.retryable, status=status)
