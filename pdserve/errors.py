"""Every exception that pdserve raises on purpose.

PdserveError
├── ConfigError            a flag or a combination of flags is wrong; the server does not start
├── ModelError             a checkpoint cannot be found, read or run
├── RequestError           one request is refused; carries an HTTP status and the field at fault
├── GrammarError           a grammar is wrong, too complex, or of no use with the model
├── TransferError          a KV transfer failed; carries a `Failure`-like code and whether a retry helps
│   └── HandshakeError     a peer differs from us; carries the name of the field
├── ProtocolError          bytes from a socket are not a message of ours
├── ProofError             a proof of the control token is missing, wrong, too old or used before
├── EngineDeadError        the scheduler process is gone
└── RankError              a rank of the replica is lost, or did not come

`assert` is for what pdserve did wrong; these are for what the world did wrong.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors of this package."""


class ConfigError(PdserveError):
    """A flag is unknown, unsupported, out of range, or contradicts another one."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(PdserveError):
    """A checkpoint is missing, damaged, or of an unsupported architecture."""


class RequestError(PdserveError):
    """One request is refused.

    `status` is the HTTP status (400 invalid, 404 unknown model, 409 live room, 503 overloaded),
    `field` the request field at fault, `code` a short machine-readable word, `retry_after_s` when to come back.
    """

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


class GrammarError(PdserveError):
    """A grammar that an output must follow is wrong, has become too complex, or is of no use with this model."""


class TransferError(PdserveError):
    """A KV transfer failed.

    `settled` tells whether the transport promises that no byte of the failed write moves any more.
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
    """The challenge that a proof answers is too old, or from before the server's start: another may help."""


class EngineDeadError(PdserveError):
    """The scheduler process has ended; nothing can be generated any more."""


class RankError(PdserveError):
    """Another rank of the replica has failed, is silent or gone, or did not come: the replica cannot go on."""
