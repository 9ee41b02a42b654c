"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.server.context import ServerContext
from pdserve.server.generation import Update
from pdserve.server.intake import Intake, PromptSpec, as_prompts, check_token_ids, check_top_logprobs, make_intake
from pdserve.server.json_http import convert, read_json_object, refuse_unsupported
from pdserve.server.logprob_format import completion_logprobs, tokens_length
from pdserve.server.openai_common import OpenAICall
from pdserve.server.sampling_fields import COMPLETION_TOKENS, Ask, count_n, openai_sampling
from pdserve.server.schemas import UNSUPPORTED_COMPLETION, CompletionBody


class CompletionCall(OpenAICall):
    """A text completion."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, context: ServerContext, body: CompletionBody, intake: Intake) -> None:
        super().__init__(context, body, intake)
        self._offsets: dict[int, int] = {}

    def choice(self, update: Update) -> dict[str, Any]:
        """See `OpenAICall`."""
        return self.delta(update)

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `OpenAICall`: completions have none."""
        return None

    def delta(self, update: Update) -> dict[str, Any]:
        """See `OpenAICall`."""
        if not update.logprobs:
            return {"text": update.text, "logprobs": None}
        tokenizer = self.context.tokenizer
        offset = self._offsets.get(update.index, 0)
        self._offsets[update.index] = offset + tokens_length(tokenizer, update.token_ids)
        return {"text": update.text, "logprobs": completion_logprobs(tokenizer, update, offset)}


async def _prompt_ids(context: ServerContext, prompt: str | list[int], vocab_size: int) -> list[int]:
    if isinstance(prompt, str):
        prompt = await context.require_tokenizer("prompt").encode(prompt, field="prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", field="prompt")
    check_token_ids(prompt, vocab_size, "prompt")
    return prompt


async def completions(context: ServerContext, request: Request) -> Response:
    """Check everything, then submit; nothing is allocated for a bad request.

    Raises:
        RequestError: what was wrong with the body.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    limits = context.limits()
    if raw.get("best_of") in (1, raw.get("n")):
        raw.pop("best_of", None)
    if raw.get("response_format") == {"type": "text"}:
        raw.pop("response_format")
    body = convert(refuse_unsupported(raw, UNSUPPORTED_COMPLETION), CompletionBody)
    context.check_model(body.model)
    prompts, _ = as_prompts(body.prompt, "prompt", allow_text=True, allow_ids=True)
    n = count_n(body.n)
    top_logprobs = check_top_logprobs(body.logprobs, "logprobs")
    ask = Ask(body.max_tokens, COMPLETION_TOKENS, "max_tokens")
    specs = []
    for prompt in prompts:
        input_ids = await _prompt_ids(context, prompt, limits.vocab_size)
        specs.append(PromptSpec(input_ids, openai_sampling(body, ask, len(input_ids), limits, "prompt"), top_logprobs))
    intake = make_intake(specs, n, body, context.mode, stream=bool(body.stream))
    return await CompletionCall(context, body, intake).answer(request)
