"""Why something failed, as a value: it crosses threads, processes and hosts where an exception cannot."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pdserve.errors import TransferError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """`code` for machines, `message` for people, `origin` says who saw it first, `retryable` whether a new try may
    help.

    `status` is the HTTP status a client gets when its request ends with this.
    """

    code: str
    message: str
    origin: str = "local"
    retryable: bool = True
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 502

    @classmethod
    def from_error(cls, error: TransferError, origin: str = "local") -> Failure:
        """The value of an exception."""
        status = 502 if error.retryable else 500
        return cls(code=error.code, message=str(error), origin=origin, retryable=error.retryable, status=status)


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is a JSON schema or structural tag as JSON, a regular expression, or a grammar (GBNF or Lark).

    Its state is never sent: it is a function of the grammar and the output ids, and each side that samples works it out
    from the ids that it knows.
    """

    kind: GrammarKind
    text: str
