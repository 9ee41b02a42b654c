"""Exceptions that pdserve raises.

PdserveError
├── ConfigError            a flag or a combination of flags is wrong; the server does not start
├── ModelError             a checkpoint cannot be found, read or run
│   └── UnsupportedModelError  no native code for the architecture or a feature; transformers may run it
├── RequestError           one request is refused; carries an HTTP status and the field at fault
├── GrammarError           a grammar is wrong, too complex, or unusable with the model
├── TransferError          a KV transfer failed; carries a code as in `Failure`, and whether a retry helps
│   └── HandshakeError     the peer differs in a field that must be equal; carries its name
├── ProtocolError          bytes from a socket are not a pdserve message
├── ProofError             a proof of the control token is missing, wrong, too old or used before
│   └── ProofExpiredError  the challenge is too old; a new one may succeed
├── EngineDeadError        the scheduler process has ended
└── RankError              a rank of the replica is lost, or did not join

Errors in pdserve itself are assertions, not these exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


class PdserveError(Exception):
    """Base of all errors of this package."""


class ConfigError(PdserveError):
    """A flag is unknown, unsupported, out of range, or contradicts another one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(PdserveError):
    """A checkpoint is missing, damaged, or of an unsupported architecture."""


class UnsupportedModelError(ModelError):
    """No native code runs the architecture, or a feature that the checkpoint has. Transformers may run it."""


class RequestError(PdserveError):
    """One request is refused. Subclasses may add `details` to the error object of the response.

    `status` is the HTTP status (400 invalid, 404 unknown model, 409 live room, 503 overloaded), `field` the request
    field at fault, `code` a short machine-readable word, `retry_after_s` the `Retry-After` in seconds or None.
    """

    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        status: int = 400,
        code: str = "invalid_request",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    def renamed(self, message: str, field: str | None) -> RequestError:
        """Return this error with another message and field, for a client that knows the field by another name."""
        return RequestError(message, field=field, status=self.status, code=self.code, retry_after_s=self.retry_after_s)

    def with_names(self, names: Iterable[tuple[re.Pattern[str], str]]) -> RequestError:
        """Return this error with each pattern replaced by its name, in the message and in the field."""
        message, field = self.message, self.field
        for theirs, ours in names:
            message = theirs.sub(ours, message)
            field = None if field is None else theirs.sub(ours, field)
        return self.renamed(message, field)


class GrammarError(PdserveError):
    """The grammar of a request is wrong, has become too complex, or is unusable with this model."""


class TransferError(PdserveError):
    """A KV transfer failed.

    `settled`: the transport promises that no byte of the failed write moves any more.
    """

    def __init__(
        self, message: str, *, code: str = "transfer_failed", retryable: bool = True, settled: bool = True
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.settled = settled


class HandshakeError(TransferError):
    """The two peers of a transfer differ in a field that must be equal."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(
            f"peer differs in {field}: ours is {ours!r}, theirs is {theirs!r}; both servers must be started alike",
            code="handshake_refused",
            retryable=False,
        )
        self.field = field


class ProtocolError(PdserveError):
    """Bytes from a socket do not decode to a message, are too large, or fail authentication."""


class ProofError(PdserveError):
    """A proof of the control token is missing, wrong, too old or used before."""


class ProofExpiredError(ProofError):
    """The challenge of a proof is too old, or from before the server's start; a new challenge may succeed."""


class EngineDeadError(PdserveError):
    """The scheduler process has ended; the server generates no more tokens."""


class RankError(PdserveError):
    """Another rank of the replica has failed, is silent, has ended, or did not join. The replica must end."""
