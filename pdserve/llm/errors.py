"""What `LLM.generate` and `LLM.chat` raise. Wrong arguments before anything runs; failures after all else has ended.

PdserveError
├── RequestError
│   └── InvalidRequestError   an argument is wrong; also a ValueError
└── BatchError                requests of a call failed; has the answers of the others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import PdserveError, RequestError
from pdserve.llm.outputs import RequestOutput


class InvalidRequestError(RequestError, ValueError):
    """An argument is wrong; `field` names it. Nothing was generated."""

    @classmethod
    def of(cls, error: RequestError, where: str | None = None) -> InvalidRequestError:
        """The same as `error`. `where`: which of several it is, unless the message says so."""
        message = error.message if where is None or where in error.message else f"{where}: {error.message}"
        return cls(message, field=error.field, status=error.status, code=error.code)


class BatchError(PdserveError):
    """Requests of a call failed, raised after all others had ended.

    `outputs`: one per prompt in their order, None where it failed. `errors`: why, by the number of the prompt; the
    first of them is also `__cause__`.
    """

    def __init__(self, outputs: Sequence[RequestOutput | None], errors: Mapping[int, PdserveError]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(outputs)} requests failed, first number {first}: {errors[first]} "
            "(the answers of the others are in `outputs` of this error)"
        )
        self.outputs = list(outputs)
        self.errors = dict(sorted(errors.items()))
        self.__cause__ = errors[first]
