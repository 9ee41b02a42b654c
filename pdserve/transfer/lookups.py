"""Look-ups of prefill servers through their bootstrap servers. Part of `HttpDirectory`, on its event loop.

A client may name any address, so look-ups run in three lanes with separate limits, which do not delay each other:

    found before                     known      a failure is reported at once, with its kind
    allowed by the operator's list   known      the same
    all others                       unknown    every failure is reported at the deadline, with the same text

One deadline covers a look-up: names, connections, all replicas, all retries. A full lane cancels its oldest look-up for
a new one, so a flood of addresses that hang cannot prevent look-ups of servers that answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pdserve.base.env import CONTROL_TOKEN
from pdserve.base.hosts import HostPatterns
from pdserve.base.log import SparingLog, escaped
from pdserve.base.proof import ControlKey
from pdserve.protocol.failure import Failure
from pdserve.transfer.bootstrap_client import TOKEN_MISMATCH, BootstrapClient, BootstrapError
from pdserve.transfer.events import Address, PrefillFound, PrefillNotFound, TransferEvent
from pdserve.transfer.name_resolver import LaneResolver

log = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""Seconds for which a server that is just starting is retried."""
UNKNOWN_S = 1.8
"""The whole deadline for an unknown address.

It may be an operator's server with another control token, and clients get that error within 2 s.
"""
MAX_ANSWER_S = 5.0
"""Seconds after `PATIENCE_S` that a known server may take to complete an answer."""
RETRY_S = (0.1, 0.25, 0.5, 1.0)
"""Pauses between tries in seconds; the last one is repeated."""
MAX_REPLICAS = 256
"""Most replicas of one server: each is a session with its own receiving engine."""
MAX_KNOWN_ADDRESSES = 1024
MAX_UNKNOWN_AT_ONCE = 64
MAX_UNKNOWN_OF_A_HOST = 8
MAX_ALLOWED_AT_ONCE = 256


class _Lane:
    """Look-ups that share limits. `per_host` is the limit of one host name as written."""

    def __init__(self, most: int, per_host: int) -> None:
        self.most = most
        self.per_host = per_host
        self.resolver = LaneResolver(max_threads=16)
        self.running: OrderedDict[asyncio.Task[None], str] = OrderedDict()

    def make_room(self, host: str) -> None:
        """Cancel the oldest look-up of `host`, or of the lane, when that limit is reached."""
        of_host = [task for task, other in self.running.items() if other == host]
        if len(of_host) >= self.per_host:
            self._give_up(of_host[0])
        elif len(self.running) >= self.most:
            self._give_up(next(iter(self.running)))

    def add(self, task: asyncio.Task[None], host: str) -> None:
        self.running[task] = host
        task.add_done_callback(lambda task: self.running.pop(task, None))

    def _give_up(self, task: asyncio.Task[None]) -> None:
        del self.running[task]
        task.cancel()


class LookUps:
    """All look-ups. `allowed` None: any address may be looked up. `patience_s` replaces `PATIENCE_S` and `UNKNOWN_S`.

    Event loop only.
    """

    def __init__(
        self,
        post: Callable[[TransferEvent], None],
        token: str,
        patience_s: float | None = None,
        allowed: HostPatterns | None = None,
    ) -> None:
        self._post = post
        self._key = ControlKey(token) if token else None
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._unknown_s = UNKNOWN_S if patience_s is None else patience_s
        self._allowed = allowed
        self._found: OrderedDict[Address, None] = OrderedDict()
        self._of_found = _Lane(MAX_KNOWN_ADDRESSES, MAX_KNOWN_ADDRESSES)
        self._of_allowed = _Lane(MAX_ALLOWED_AT_ONCE, MAX_UNKNOWN_OF_A_HOST)
        self._of_unknown = _Lane(MAX_UNKNOWN_AT_ONCE, MAX_UNKNOWN_OF_A_HOST)
        self._known_failures = SparingLog(log, burst=20)
        self._unknown_failures = SparingLog(log)
        self._closed = False

    def start(self, address: Address) -> None:
        """Look `address` up; exactly one `PrefillFound` or `PrefillNotFound` follows, until `close`."""
        host = address[0].lower()
        if self._allowed is not None and not self._allowed.allow(*address):
            self._post(PrefillNotFound(address, not_allowed(address)))
            return
        if address in self._found:
            lane = self._of_found
        else:
            lane = self._of_unknown if self._allowed is None else self._of_allowed
        lane.make_room(host)
        task = asyncio.create_task(self._find(address, lane))
        task.add_done_callback(lambda task: self._ended(task, address))
        lane.add(task, host)

    def close(self) -> None:
        """Cancel all look-ups; nothing is posted any more."""
        self._closed = True
        for lane in (self._of_found, self._of_allowed, self._of_unknown):
            for task in list(lane.running):
                task.cancel()

    def _ended(self, task: asyncio.Task[None], address: Address) -> None:
        """Post the failure of a cancelled look-up, which has posted nothing yet."""
        if task.cancelled() and not self._closed:
            self._post(PrefillNotFound(address, _BUSY))

    async def _find(self, address: Address, lane: _Lane) -> None:
        patience_s = self._unknown_s if lane is self._of_unknown else self._patience_s
        deadline_s = asyncio.get_running_loop().time() + patience_s
        event: TransferEvent
        try:
            event = PrefillFound(address, await self._seek(address, lane, deadline_s))
        except BootstrapError as error:
            event = PrefillNotFound(address, await self._explain(address, error, lane, deadline_s))
        except Exception:
            log.exception("looking for the prefill server at %s failed", escaped(str(address)))
            failure = Failure(code="lookup_failed", message="the look-up failed; see the log", status=500)
            event = PrefillNotFound(address, failure)
        if isinstance(event, PrefillFound):
            self._found[address] = None
            self._found.move_to_end(address)
            if len(self._found) > MAX_KNOWN_ADDRESSES:
                self._found.popitem(last=False)
        self._post(event)

    async def _seek(self, address: Address, lane: _Lane, deadline_s: float) -> tuple[tuple[str, str], ...]:
        """Return the instance id and control endpoint of each replica.

        Raises:
            BootstrapError: before the deadline, or at it.
        """
        loop = asyncio.get_running_loop()
        last: BootstrapError | None = None
        end_s = deadline_s if lane is self._of_unknown else deadline_s + MAX_ANSWER_S
        try:
            async with asyncio.timeout_at(end_s):
                for number in range(1 << 30):
                    try:
                        return await self._ask(address, lane)
                    except BootstrapError as error:
                        last = error
                        pause_s = RETRY_S[min(number, len(RETRY_S) - 1)]
                        if not error.retryable or loop.time() + pause_s >= deadline_s:
                            raise
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            pass
        if last is not None:
            raise last
        where = f"{address[0]}:{address[1]}"
        raise BootstrapError(f"the bootstrap server at {where} does not answer in time", code="bootstrap_unreachable")

    async def _ask(self, address: Address, lane: _Lane) -> tuple[tuple[str, str], ...]:
        async with BootstrapClient(*address, self._key, lane.resolver) as client:
            routes = [await client.replica(0)]
            if routes[0].dp_size > MAX_REPLICAS:
                message = f"the prefill server has {routes[0].dp_size} replicas; a decode server takes {MAX_REPLICAS}"
                raise BootstrapError(message, code="bootstrap_refused", retryable=False)
            routes += [await client.replica(rank) for rank in range(1, routes[0].dp_size)]
        return tuple((route.instance, f"{route.host}:{route.port}") for route in routes)

    async def _explain(self, address: Address, error: BootstrapError, lane: _Lane, deadline_s: float) -> Failure:
        """Return the failure for the client. All failures of an unknown address have the same text and arrive at the
        deadline.
        """
        known = lane is not self._of_unknown
        warnings = self._known_failures if known else self._unknown_failures
        where = escaped(f"{address[0]}:{address[1]}")
        warnings.warning(
            "no prefill server at %s: %s%s", where, escaped(str(error)), error.detail and f" ({error.detail})"
        )
        if error.code == "bad_address":
            return Failure.from_error(error)
        if known:
            failure = Failure.from_error(error, origin=f"{address[0]}:{address[1]}")
            return msgspec.structs.replace(failure, status=502) if error.code == TOKEN_MISMATCH else failure
        await asyncio.sleep(max(0.0, deadline_s - asyncio.get_running_loop().time()))
        return Failure(
            code="prefill_not_found",
            message=f"no prefill server of this deployment was found at {address[0]}:{address[1]} (bootstrap_host and "
            f"bootstrap_port): it may be down or out of reach, or its {CONTROL_TOKEN} is not the decode server's; the "
            "log of the decode server says which",
            origin=f"{address[0]}:{address[1]}",
        )


_BUSY = Failure(
    code="bootstrap_busy",
    message="too many bootstrap addresses that this server has never found are being looked up; try again",
    status=503,
)


def not_allowed(address: Address) -> Failure:
    """Return the failure for an address that `--disaggregation-allowed-prefill` does not list."""
    return Failure(
        code="prefill_not_allowed",
        message=f"bootstrap_host: {address[0][:255]}:{address[1]} is not listed by --disaggregation-allowed-prefill",
        retryable=False,
        status=400,
    )
