"""A request as the scheduler sees it. Written by its role only."""

from __future__ import annotations

import dataclasses

from pdserve.executor.interface import SampledToken
from pdserve.memory.lease import Lease
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason, GenerateRequest
from pdserve.transfer.manager import KVReceiver, KVSender


@dataclasses.dataclass(slots=True)
class Times:
    """Moments of a request's life on this server, seconds of the scheduler's clock; None until they happen."""

    arrived: float
    peer_ready: float | None = None
    started: float | None = None
    prefilled: float | None = None
    published: float | None = None
    received: float | None = None
    second_token: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Req:
    """`computed` tokens of `prompt + output_ids` have KV in the lease's pages; `row` while the executor knows it."""

    spec: GenerateRequest
    times: Times
    output_ids: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    lease: Lease | None = None
    aux: Lease | None = None
    row: int | None = None
    sender: KVSender | None = None
    receiver: KVReceiver | None = None
    first_token: SampledToken | None = None

    @property
    def rid(self) -> str:
        """The request id."""
        return self.spec.rid

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.spec.input_ids)

    @property
    def num_worst(self) -> int:
        """Tokens the request can have at most."""
        return self.num_prompt + self.spec.sampling.max_new_tokens


def finish_for_token(req: Req, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Whether `token_id`, just appended to the request's output, ends it. Stop strings are the API process's."""
    sampling, num_out = req.spec.sampling, len(req.output_ids)
    if num_out >= sampling.min_new_tokens:
        if token_id in sampling.stop_token_ids:
            return FinishReason(type="stop", matched=token_id)
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason(type="stop", matched=token_id)
    if num_out >= sampling.max_new_tokens:
        return FinishReason(type="length", length=num_out)
    return None


def finish_for_failure(failure: Failure) -> FinishReason:
    """The end of a request that failed."""
    return FinishReason(type="abort", message=failure.message, status_code=failure.status, err_type=failure.code)


CLIENT_ABORT = Failure(code="aborted", message="the request was aborted", origin="client", status=499)
