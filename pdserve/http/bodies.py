"""Bounds of request bodies: their memory together, their time, and the values in their JSON. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

from pdserve.errors import RequestError

MAX_VALUES = 1_500_000
"""Limit for values in a JSON body. A value takes up to 100 bytes of memory, and as few as two bytes in the body."""
MAX_CONTAINERS = 1 << 17
TOO_MANY_VALUES = f"the body has more than {MAX_VALUES} values, or {MAX_CONTAINERS} lists and objects"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

LARGE_BODY_BYTES = 1 << 20
"""Smaller bodies are not counted: the number of connections bounds them."""
LARGE_BODIES = 8
"""The budget in bodies of the maximum size."""
BREATH_S = 0.005
BODY_TIMEOUT_S = 120.0
"""Timeout from the headers of a request to the end of its body."""


def body_timeout() -> RequestError:
    """Return the error of a request whose body did not arrive in time."""
    return RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408, code="body_timeout")


def has_too_many_values(body: bytes) -> bool:
    """Whether the JSON in `body` has more than `MAX_VALUES` values, or `MAX_CONTAINERS` lists and objects.

    Commas and brackets within strings do not count.
    """
    return _has_too_many(body) and _has_too_many(_STRING.sub(b'""', body))


def _has_too_many(body: bytes) -> bool:
    if len(body) <= MAX_CONTAINERS:
        return False
    containers = body.count(b"[") + body.count(b"{")
    return containers > MAX_CONTAINERS or containers + body.count(b",") > MAX_VALUES


class BodyBudget:
    """Bounds the memory of all request bodies together; `max_bytes` is the limit of one body. Event loop only."""

    def __init__(self, max_bytes: int) -> None:
        self._most = LARGE_BODIES * max_bytes
        self._held = 0
        self._turn = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes that large bodies hold now."""
        return self._held

    def open(self) -> BodyHold:
        """Open a hold for the body of one request; close the hold after the response."""
        return BodyHold(self)

    @contextlib.asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Serialize work on large bodies that blocks the event loop, with a pause of `BREATH_S` after each."""
        if num_bytes <= LARGE_BODY_BYTES:
            yield
            return
        async with self._turn:
            yield
            await asyncio.sleep(BREATH_S)

    def take(self, num_bytes: int) -> None:
        """See `BodyHold.add`."""
        if self._held + num_bytes > self._most:
            raise RequestError(
                f"concurrent request bodies would exceed {self._most} bytes; retry later",
                status=503,
                code="too_many_large_bodies",
                retry_after_s=1,
            )
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """See `BodyHold.close`."""
        self._held -= num_bytes


class BodyHold:
    """The share of a `BodyBudget` that the body of one request holds."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = self._taken = 0

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more of the body.

        Raises:
            RequestError: 503, the budget is exhausted.
        """
        self._size += num_bytes
        if self._size > LARGE_BODY_BYTES:
            self._budget.take(self._size - self._taken)
            self._taken = self._size

    def close(self) -> None:
        """Release the bytes of the body."""
        self._budget.give_back(self._taken)
        self._taken = self._size = 0
