"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.access import COMPLETIONS_PATH
from pdserve.protocol.logprobs import Logprobs
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import convert, read_json_object, refuse_unsupported
from pdserve.server.openai.common import OpenAICall, check_prompt_logprobs, check_prompt_token_ids
from pdserve.server.openai.logprob_format import (
    completion_logprobs,
    completion_prompt_logprobs,
    prompt_tokens,
    tokens_length,
)
from pdserve.server.request.constraints import openai_constraint
from pdserve.server.request.intake import (
    as_prompts,
    check_top_logprobs,
    openai_logprobs,
    prompt_field,
    prompt_request,
)
from pdserve.server.request.sampling_fields import (
    COMPLETION_TOKENS,
    MAX_N,
    check_listed,
    count_n,
    is_constrained,
    openai_sampling,
)
from pdserve.server.request.schemas import UNSUPPORTED_COMPLETION, CompletionBody


class CompletionCall(OpenAICall):
    """A text completion. The choices of each prompt are its `num_choices` best sequences."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"
    prompt_logprobs_of_body = False
    finish_with_tokens = True

    def __init__(
        self,
        context: ServerContext,
        body: CompletionBody,
        states: list[RequestState],
        n: int,
        texts: list[str],
        num_choices: int,
    ) -> None:
        """`texts`: those of the prompts; not read unless the body has `echo`."""
        super().__init__(context, body, states, n)
        self._texts = texts
        self._num_choices = num_choices
        self._echo = bool(body.echo)
        self._num_top = body.logprobs
        self._offsets: dict[int, int] = {}

    def chosen(self, updates: list[GenerationUpdate]) -> list[GenerationUpdate]:
        """See `OpenAICall`: for each prompt, those with the highest log probability per token, best first."""
        made, wanted = self.n, self._num_choices
        if made == wanted:
            return updates
        groups = [updates[first : first + made] for first in range(0, len(updates), made)]
        return [one for group in groups for one in sorted(group, key=mean_logprob, reverse=True)[:wanted]]

    def choice(self, update: GenerationUpdate) -> dict[str, Any]:
        """See `OpenAICall`."""
        echoed = self.opening(update.index)
        fields = self.delta(update)
        if echoed is not None:
            fields["text"] = echoed["text"] + fields["text"]
            if echoed["logprobs"] is not None:
                own = fields["logprobs"] or {name: [] for name in echoed["logprobs"]}
                fields["logprobs"] = {name: values + own[name] for name, values in echoed["logprobs"].items()}
        return {**fields, **self.prompt_logprobs(update.index)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `OpenAICall`: the prompt, if `echo` is set."""
        if not self._echo:
            return None
        text = self._texts[index // self.n]
        if self._num_top is None:
            return {"text": text, "logprobs": None}
        tokenizer, request = self.context.tokenizer, self.states[index].request
        self._offsets[index] = tokens_length(tokenizer, request.input_ids)
        tokens = prompt_tokens(request, self.prompt_parts.get(index, []))
        return {"text": text, "logprobs": completion_prompt_logprobs(tokenizer, tokens, self._num_top)}

    def replay(self, update: GenerationUpdate) -> None:
        """See `OpenAICall`."""
        self.opening(update.index)
        if self._num_top is not None:
            num_chars = tokens_length(self.context.tokenizer, update.token_ids)
            self._offsets[update.index] = self._offsets.get(update.index, 0) + num_chars

    def delta(self, update: GenerationUpdate) -> dict[str, Any]:
        """See `OpenAICall`."""
        if not update.logprobs or self._num_top is None:
            return {"text": update.text, "logprobs": None}
        tokenizer = self.context.tokenizer
        offset = self._offsets.get(update.index, 0)
        self._offsets[update.index] = offset + tokens_length(tokenizer, update.token_ids)
        return {"text": update.text, "logprobs": completion_logprobs(tokenizer, update, offset, self._num_top)}


def mean_logprob(update: GenerationUpdate) -> float:
    """Return the log probability per token, by which `best_of` ranks answers; 0 without log probabilities."""
    return sum(line.logprob for line in update.logprobs) / max(1, len(update.logprobs))


def _text(context: ServerContext, prompt: str | list[int]) -> str:
    """The text of `prompt` for `echo`; empty for token ids on a server without tokenizer."""
    if isinstance(prompt, str):
        return prompt
    return "" if context.tokenizer is None else context.tokenizer.decode(prompt, skip_special=False)


def _count_made(body: CompletionBody, num_choices: int) -> int:
    """Number of sequences to generate per prompt: `best_of`, or else `num_choices`."""
    if body.best_of is None or body.best_of == num_choices:
        return num_choices
    if not num_choices <= body.best_of <= MAX_N:
        message = f"best_of must be in [n={num_choices}, {MAX_N}], got {body.best_of}"
        raise RequestError(message, field="best_of")
    if body.stream:
        raise RequestError("best_of cannot be streamed: the best output is known only at the end", field="best_of")
    return body.best_of


def _logprob_params(body: CompletionBody, *, ranked: bool) -> Logprobs | None:
    top = check_top_logprobs(body.logprobs, "logprobs")
    prompt_top = check_prompt_logprobs(body)
    if body.echo and top is not None:
        prompt_top = max(top, prompt_top or 0)
    return openai_logprobs(0 if ranked and top is None else top, prompt_top)


async def completions(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/completions`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    return await (await prepare_completion(context, raw)).answer(request)


async def prepare_completion(context: ServerContext, raw: dict[str, Any]) -> CompletionCall:
    """Validate the body `raw` and prepare the call.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    limits = context.limits()
    body = convert(refuse_unsupported(raw, UNSUPPORTED_COMPLETION), CompletionBody)
    context.check_model(body.model)
    check_prompt_token_ids(body)
    given, batch = as_prompts(body.prompt, "prompt", allow_text=True, allow_ids=True)
    num_choices = count_n(body.n)
    made = _count_made(body, num_choices)
    check_listed([body], len(given) * made)
    logprob_params = _logprob_params(body, ranked=made > num_choices)
    constraint = openai_constraint(body) if is_constrained(body) else None
    grammar = await context.take_grammar(constraint, body.stop_regex)
    custom = await context.take_custom(body.custom_params, "custom_params", body.custom_logit_processor)
    lists = await context.token_ids(given, "prompt", batch=batch)
    prompt_requests = []
    for i, ids in enumerate(lists):
        field = prompt_field("prompt", i, batch=batch)
        sampling = openai_sampling(body, COMPLETION_TOKENS, len(ids), limits, field, grammar)
        sampling = custom.apply(sampling, context.begins_inside(custom, ids))
        prompt_requests.append(prompt_request(ids, sampling, logprob_params))
    states = context.make_requests(prompt_requests, made, body, "prompt", stream=bool(body.stream))
    texts = [_text(context, prompt) for prompt in given] if body.echo else []
    return CompletionCall(context, body, states, made, texts, num_choices).keep_origin(COMPLETIONS_PATH, raw)
