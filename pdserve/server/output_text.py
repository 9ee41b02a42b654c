"""A scheduler output to the update that a client sees.

Called by the engine client for every output of a live sequence.
"""

from __future__ import annotations

from pdserve.errors import RequestError
from pdserve.protocol.messages import EngineCoreOutput, FinishReason
from pdserve.server.detokenizer import Detokenizer
from pdserve.server.generation import GenerationUpdate

ABORTED_STATUS = 499
"""Status of an abort that somebody asked for."""


def refusal(finish: FinishReason | None) -> RequestError | None:
    """The error that a sequence ended with, None where it ended well or not yet.

    An abort that was asked for ends well: its client gets the text so far. As an error, routers would try it again.
    """
    if finish is None or finish.type != "abort" or finish.status_code in (None, ABORTED_STATUS):
        return None
    status = finish.status_code
    assert status is not None
    field = "bootstrap_room" if status == 409 and finish.err_type != "rid_in_use" else None
    return RequestError(
        finish.message or "aborted",
        status=status,
        code=finish.err_type or "aborted",
        field=field,
        retry_after_s=finish.retry_after_s,
    )


def detokenize_output(
    index: int, detokenizer: Detokenizer, output: EngineCoreOutput, *, keep_stop: bool
) -> GenerationUpdate:
    """The update that `output` makes; cut at a stop string, and without the text of a stop token unless it is
    wanted.
    """
    update = GenerationUpdate(index, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens)
    update.finish, update.timing = output.finish, output.timing
    if output.prompt_logprobs is not None:
        update.prompt_parts.append(output.prompt_logprobs)
    hidden = _hidden_stop_token(output, keep=keep_stop)
    last = len(output.token_ids) - 1
    for position, token_id in enumerate(output.token_ids):
        update.token_ids.append(token_id)
        if output.logprobs is not None:
            update.logprobs.append(output.logprobs[position])
        if position == last and token_id == hidden:
            break
        update.text += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            update.finish = FinishReason(type="stop", matched=detokenizer.stopped)
            return update
    if output.finish is not None:
        update.text += detokenizer.finish()
        if detokenizer.stopped is not None:
            update.finish = FinishReason(type="stop", matched=detokenizer.stopped)
    return update


def _hidden_stop_token(output: EngineCoreOutput, *, keep: bool) -> int | None:
    finish = output.finish
    if keep or finish is None or finish.type != "stop" or not isinstance(finish.matched, int):
        return None
    return finish.matched
