"""`Failure`: an error as a serializable value, for threads, processes and hosts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.errors import RequestError, TransferError

ABORTED_STATUS = 499
"""HTTP status of a requested abort."""
RUNNING_TIMEOUT = "running_timeout"
"""Code of a request that ran for too long. Another server would compute it as long, so it is not retried."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a request or transfer failed.

    `code` is machine-readable, `message` is for people. `origin` names the process that detected the failure.
    `retryable`: a retry may succeed. `status` is the HTTP status that the client of the failed request receives,
    `field` the request field at fault, `retry_after_s` the `Retry-After` in seconds. The last two are sent only if set.
    """

    code: str
    message: str
    origin: str = "local"
    retryable: bool = True
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 502
    field: str | msgspec.UnsetType = msgspec.UNSET
    retry_after_s: int | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def from_error(cls, error: TransferError | RequestError, origin: str = "local") -> Failure:
        """Convert an exception. A `TransferError` has the status 502 if it is retryable, else 500.

        A `RequestError` is retryable if its status is 502 or 503.
        """
        if isinstance(error, TransferError):
            status = 502 if error.retryable else 500
            return cls(code=error.code, message=str(error), origin=origin, retryable=error.retryable, status=status)
        return cls(
            code=error.code,
            message=error.message,
            origin=origin,
            retryable=error.status in (502, 503),
            status=error.status,
            field=msgspec.UNSET if error.field is None else error.field,
            retry_after_s=msgspec.UNSET if error.retry_after_s is None else error.retry_after_s,
        )

    def error(self) -> RequestError:
        """Return the exception that ends the client's request with this failure."""
        return RequestError(
            self.message,
            field=None if self.field is msgspec.UNSET else self.field,
            status=self.status,
            code=self.code,
            retry_after_s=None if self.retry_after_s is msgspec.UNSET else self.retry_after_s,
        )


CLIENT_ABORT = Failure(code="aborted", message="the request was aborted", origin="client", status=ABORTED_STATUS)
MIGRATED = Failure(
    code="migrated", message="the request goes on at another server", origin="local", retryable=False, status=410
)
"""End of a request that another server has taken."""


MIXED_WEIGHTS = Failure(
    code="weights_changed",
    message="the weights changed between the sequences of this request",
    status=503,
    retry_after_s=1,
)
WEIGHTS_CHANGED = Failure(
    code="weights_changed",
    message="the request brought tokens or KV of weights that this server no longer has",
    retryable=False,
    status=409,
)


def weights_mismatch(message: str, origin: str = "local") -> Failure:
    """Return the end of a room whose sides have different weights: soon both may have the same."""
    return Failure(
        code="weights_mismatch", message=f"the weights differ: {message}", origin=origin, status=503, retry_after_s=1
    )
