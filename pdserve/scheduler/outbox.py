"""What the scheduler sends to the API process about requests: the outputs of a step as one message. Logs their ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from pdserve.base.log import SparingLog, about, escaped
from pdserve.executor.interface import SampledToken
from pdserve.protocol.hidden_states import HiddenStates
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import (
    EngineCoreOutput,
    FinishReason,
    GenerateRequest,
    OutputBatch,
    RequestTiming,
    ToApi,
    TokenLogprob,
)
from pdserve.scheduler.request import Req

MAX_PART_BYTES = 4 << 20
"""Most bytes of prompt log probabilities or hidden states in one message to the API process."""
REQUEST_LOGGER = "pdserve.scheduler.requests"
"""Logger of the start and end of each request. Its lines are equal on all ranks; only rank 0 writes them."""
_requests = logging.getLogger(REQUEST_LOGGER)


def log_admitted(spec: GenerateRequest) -> None:
    """Log at level debug that a request was admitted."""
    if _requests.isEnabledFor(logging.DEBUG):
        room = "" if spec.room is None else f", room {spec.room.room}"
        text = f"{escaped(spec.rid)} is admitted: {len(spec.input_ids)} prompt tokens{room}"
        _requests.debug("%s", text, extra=about(spec.request_id))


class Outbox:
    """Collects the outputs of a step and sends them as one message. Logs the end of each request."""

    def __init__(self, send: Callable[[ToApi], None]) -> None:
        self.send = send
        self._failures = SparingLog(_requests)
        self._outputs: list[EngineCoreOutput] = []

    def emit(
        self,
        req: Req,
        tokens: tuple[SampledToken, ...],
        finish: FinishReason | None = None,
        timing: RequestTiming | None = None,
    ) -> None:
        """Add new tokens of `req`, and its finish reason if it ended. With `max_new_tokens` 0 no token is sent."""
        spec = req.spec
        if finish is not None:
            self.log_end(spec, finish, len(req.output_ids))
        if spec.sampling.max_new_tokens == 0:
            tokens = ()
        logprobs = None
        if spec.logprobs is not None and spec.logprobs.output:
            logprobs = [TokenLogprob(token.logprob or 0.0, list(token.top), list(token.picked)) for token in tokens]
        speculation = None
        if req.speculation is not None and (finish is not None or spec.sampling.has_text_stops):
            speculation = req.speculation.stats
        self._outputs.append(
            EngineCoreOutput(
                rid=spec.rid,
                token_ids=[token.token_id for token in tokens],
                logprobs=logprobs,
                finish=finish,
                prompt_tokens=len(spec.input_ids),
                cached_tokens=req.num_cached,
                cached_details=req.cached_details,
                timing=timing,
                speculation=speculation,
            )
        )

    def log_end(self, spec: GenerateRequest, finish: FinishReason, num_tokens: int) -> None:
        """Log the end of a request: a warning if the server or its peer has failed, else at level debug."""
        failure = finish.failure
        if failure is None or failure.status < 500 or failure.retry_after_s is not msgspec.UNSET or spec.probe:
            if _requests.isEnabledFor(logging.DEBUG):
                how = finish.type if failure is None else f"{failure.code}: {escaped(failure.message)}"
                text = f"{escaped(spec.rid)} has ended after {num_tokens} tokens: {how}"
                _requests.debug("%s", text, extra=about(spec.request_id))
            return
        room = "" if spec.room is None else f" (room {spec.room.room})"
        text = f"{escaped(spec.rid)}{room} has failed: {failure.code}: {escaped(failure.message)}"
        self._failures.warning("%s", text, extra=about(spec.request_id))

    def emit_prompt(self, req: Req, part: PromptLogprobs) -> None:
        """Send log probabilities of a part of the prompt at once, in messages of at most `MAX_PART_BYTES` each."""
        for piece in part.parts(MAX_PART_BYTES):
            self._send_part(req, prompt_logprobs=piece)

    def emit_hidden(self, req: Req, part: HiddenStates) -> None:
        """Send hidden states at once, in messages of at most `MAX_PART_BYTES` each."""
        req.num_hidden = part.end
        for piece in part.parts(MAX_PART_BYTES):
            self._send_part(req, hidden=piece)

    def _send_part(
        self, req: Req, *, prompt_logprobs: PromptLogprobs | None = None, hidden: HiddenStates | None = None
    ) -> None:
        output = EngineCoreOutput(
            rid=req.rid, token_ids=[], prompt_logprobs=prompt_logprobs, hidden=hidden, prompt_tokens=req.num_prompt,
            cached_tokens=req.num_cached,
        )  # fmt: skip
        self.send(OutputBatch(outputs=[output]))

    def flush(self) -> None:
        """Send the collected outputs."""
        if self._outputs:
            self.send(OutputBatch(outputs=self._outputs))
            self._outputs = []
