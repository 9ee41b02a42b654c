"""What the answers of a pair mean: for the request, for another try, for their workers. Pure; `dispatch` asks."""

from __future__ import annotations

from pdserve.router.admission import Refused
from pdserve.router.upstream import ConnectionFailed, WorkerResponse, WorkerStream

RETRYABLE_STATUSES = frozenset({502, 503})


def judge(
    prefill: WorkerResponse | ConnectionFailed | None, decode: WorkerStream | WorkerResponse | ConnectionFailed | None
) -> WorkerStream | WorkerResponse | ConnectionFailed | None:
    """What a try has come to; None while it is open. `prefill` None means no answer yet, or no prefill at all.

    Once decode has its first bytes the KV cache has arrived, so that prefill does not matter any more. Of two
    failures the client's own fault (4xx) says more than a server's, and prefill's says more than decode's.
    """
    if isinstance(decode, WorkerStream):
        return decode
    failures = [half for half in (prefill, decode) if failed(half)]
    failures.sort(key=lambda half: not (isinstance(half, WorkerResponse) and half.status < 500))
    return failures[0] if failures else None


def failed(half: WorkerStream | WorkerResponse | ConnectionFailed | Refused | None) -> bool:
    """Whether one half ended without a good answer."""
    return isinstance(half, ConnectionFailed | Refused) or (isinstance(half, WorkerResponse) and half.status >= 400)


def ends_both(prefill: WorkerResponse | ConnectionFailed) -> bool:
    """Whether prefill's failure ends decode's half, too, even where decode computes prompts whose KV does not come.

    Decode does not hear of a request that prefill refused, and would wait for its KV.
    """
    return isinstance(prefill, WorkerResponse) and (prefill.status < 500 or told_to_wait(prefill))


def retryable(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether another try may help."""
    return isinstance(outcome, ConnectionFailed) or (
        isinstance(outcome, WorkerResponse) and outcome.status in RETRYABLE_STATUSES
    )


def blames(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether an outcome speaks against its worker: not where it is the client's fault, nor where it is only full."""
    if isinstance(outcome, WorkerResponse):
        return outcome.status >= 500 and not told_to_wait(outcome)
    return isinstance(outcome, ConnectionFailed) and not outcome.lost and not outcome.out_of_descriptors


def told_to_wait(outcome: WorkerStream | WorkerResponse | ConnectionFailed) -> bool:
    """Whether a worker said when to come back (`Retry-After`): it has no room, and knows it."""
    return isinstance(outcome, WorkerResponse) and "Retry-After" in outcome.headers
