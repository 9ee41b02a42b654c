"""Converts the arguments of a call to jobs, all validated before the first is sent. Loop thread only.

Prompts and conversations are processed by the code of the HTTP endpoints.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

from pdserve.errors import RequestError
from pdserve.llm.outputs import InvalidRequestError
from pdserve.llm.runner import Job
from pdserve.llm.sampling import SamplingParams
from pdserve.llm.servers import RunningServer
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import Grammar
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import convert
from pdserve.server.openai.chat import chat_prompt, final_text
from pdserve.server.openai.chat_tools import plan_tools
from pdserve.server.request.constraints import Constraint, reasoning_grammar
from pdserve.server.request.intake import check_salt, check_token_ids, make_requests, prompt_request
from pdserve.server.request.sampling_fields import check_prompt_fits
from pdserve.server.request.schemas import ChatBody


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt`: it shares cached KV with prompts of the same salt only."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `cache_salt`: as in `TextPrompt`."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
Conversation = Sequence[Message]
Adapter = str | None
"""Name of a LoRA adapter; None: the model itself."""


@dataclasses.dataclass(frozen=True)
class GivenPrompt:
    """Text or token ids of a prompt, and its name `where` in error messages."""

    where: str
    content: str | list[int]
    salt: str = ""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[GivenPrompt]:
    """Split `prompts`, which is one prompt or a sequence of prompts.

    Raises:
        InvalidRequestError: naming `prompts`, for another shape or an empty prompt.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_prompt(prompts, "prompts")]
    if not isinstance(prompts, Sequence):
        raise _wrong("prompts", prompts)
    return [_prompt(entry, f"prompts[{i}]") for i, entry in enumerate(prompts)]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[list[dict[str, Any]]]:
    """Split `messages`, which is one conversation or a sequence of conversations.

    Raises:
        InvalidRequestError: naming `messages`, for another shape.
    """
    wrong = InvalidRequestError("messages must be a list of messages, or a list of such lists", field="messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise wrong
    several: list[Any] = [*messages] if all(isinstance(entry, list | tuple) for entry in messages) else [messages]
    for conversation in several:
        if not conversation or not all(isinstance(message, Mapping) for message in conversation):
            raise wrong
    return [[dict(message) for message in conversation] for conversation in several]


def adapters_of(given: Adapter | Sequence[Adapter], count: int) -> list[Adapter]:
    """Return the adapter of each of `count` prompts. Raises InvalidRequestError naming `lora_path`."""
    if given is None or isinstance(given, str):
        return [given] * count
    if not isinstance(given, Sequence) or not all(name is None or isinstance(name, str) for name in given):
        raise InvalidRequestError("lora_path must be a name or a list of names and None", field="lora_path")
    if len(given) != count:
        raise InvalidRequestError(f"lora_path has {len(given)} entries for {count} prompts", field="lora_path")
    return list(given)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(type(entry) is int for entry in value)


def _prompt(value: Any, where: str) -> GivenPrompt:
    if isinstance(value, Mapping):
        names = value.keys() & {"prompt", "prompt_token_ids"}
        if len(value.keys() - {"cache_salt"}) != 1 or len(names) != 1:
            message = (
                f"{where} must have either prompt or prompt_token_ids, and nothing else but cache_salt, "
                f"got {sorted(value)}"
            )
            raise InvalidRequestError(message, field="prompts")
        name = names.pop()
        content = value[name]
        if isinstance(content, str) != (name == "prompt"):
            raise _wrong(where, content)
        return dataclasses.replace(_prompt(content, where), salt=_salt(value.get("cache_salt"), f"{where}.cache_salt"))
    if isinstance(value, str) and value:
        return GivenPrompt(where, value)
    if _is_ids(value):
        return GivenPrompt(where, list(value))
    raise _wrong(where, value)


def _salt(value: Any, where: str) -> str:
    """Return the salt of a prompt, empty without one."""
    try:
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{where} must be text, got {type(value).__name__}", field=where)
        return check_salt(value, where) or ""
    except RequestError as error:
        raise InvalidRequestError(error.message, field="prompts") from None


def _wrong(where: str, value: Any) -> InvalidRequestError:
    kind = "an empty one" if isinstance(value, Sequence) and not value else type(value).__name__
    return InvalidRequestError(f"{where} must be text or a list of token ids, got {kind}", field="prompts")


BREATH = 64
"""Number of prompts to prepare before yielding to the event loop."""


@dataclasses.dataclass(frozen=True)
class ReadyPrompt:
    """A tokenized prompt. `text` None: the prompt was given as token ids.

    `begins_inside`: see `ReasoningFormat.begins_inside`; for chats only.
    """

    where: str
    text: str | None
    input_ids: list[int]
    begins_inside: bool | None = None
    is_chat: bool = False
    salt: str = ""


@dataclasses.dataclass(frozen=True)
class ReadyJob:
    """A job, with the prompt and parameters that its output needs."""

    job: Job
    prompt: ReadyPrompt
    params: SamplingParams

    def named(self, name: str) -> ReadyJob:
        """Return the same with the request id `name`."""
        return dataclasses.replace(self, job=dataclasses.replace(self.job, request_id=name))


@dataclasses.dataclass(kw_only=True)
class _Nowhere:
    """`intake.TransferAddress` of a request without a bootstrap room."""

    rid: Any
    priority: int | None
    data_parallel_rank: int | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


class Preparer:
    """Prepares and numbers all requests of one LLM. `seed` None: requests without a seed differ from run to run."""

    def __init__(self, servers: Sequence[RunningServer], seed: int | None) -> None:
        self._servers = servers
        self._seed = seed
        self._numbers = itertools.count()

    @property
    def context(self) -> ServerContext:
        """The context of a server whose output is returned: the first one that is not a prefill server."""
        return next(running.context for running in self._servers if running.server.mode != "prefill")

    async def prompts(self, given: Sequence[GivenPrompt]) -> list[ReadyPrompt]:
        """Tokenize and validate prompts.

        Raises:
            InvalidRequestError: naming the argument, which is the beginning of the prompt's `where`.
        """
        ready = []
        for position, prompt in enumerate(given):
            try:
                ready.append(await self._prompt(prompt))
            except RequestError as error:
                raise InvalidRequestError.of(error, prompt.where) from None
            if position % BREATH == 0:
                await asyncio.sleep(0)
        return ready

    async def _prompt(self, given: GivenPrompt) -> ReadyPrompt:
        context, field = self.context, given.where.partition("[")[0]
        if isinstance(given.content, str):
            tokenizer = context.require_tokenizer(field)
            text, input_ids = given.content, await tokenizer.encode(given.content, field=field)
        else:
            text, input_ids = None, given.content
        if not input_ids:
            raise RequestError(f"{field} must not be empty", field=field)
        check_token_ids(input_ids, context.limits().vocab_size, field)
        return ReadyPrompt(given.where, text, input_ids, salt=given.salt)

    async def conversations(
        self, given: Sequence[Sequence[Mapping[str, Any]]], fields: Mapping[str, Any]
    ) -> list[ReadyPrompt]:
        """Render and tokenize conversations. `fields`: the fields of a chat body other than its messages.

        Raises:
            InvalidRequestError: naming `messages` or one of `fields`.
        """
        ready = []
        for position, messages in enumerate(given):
            where = "messages" if len(given) == 1 else f"messages[{position}]"
            try:
                ready.append(await self._conversation(messages, fields, where))
            except RequestError as error:
                raise InvalidRequestError.of(error, where if len(given) > 1 else None) from None
            if position % BREATH == 0:
                await asyncio.sleep(0)
        return ready

    async def _conversation(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], where: str
    ) -> ReadyPrompt:
        context = self.context
        body = convert({"messages": list(messages), **fields}, ChatBody)
        text = await chat_prompt(context, body, plan_tools(body, context.formats.tools), "messages")
        tokenizer = context.require_tokenizer("messages")
        input_ids = await tokenizer.encode(text, field="messages", add_special_tokens=False)
        if not input_ids:
            raise RequestError("messages render to an empty prompt", field="messages")
        inside: bool | None = False
        if context.formats.thinking is not None:
            continued = final_text(body.messages[-1]) if body.continue_final_message else None
            inside = context.formats.thinking.begins_inside(text, continued)
        return ReadyPrompt(where, text, input_ids, inside, is_chat=True)

    async def jobs(
        self,
        prompts: Sequence[ReadyPrompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[str | None],
    ) -> list[ReadyJob]:
        """Create a job for each prompt. `adapters`: the LoRA adapter of each, None for the model itself.

        Raises:
            InvalidRequestError: parameters do not fit the model or a prompt, or an adapter is not loaded.
        """
        if self.context.config.embedding.is_embedding:
            raise InvalidRequestError("this LLM has an embedding model (is_embedding) and generates no text; use embed")
        ready = []
        self._check_adapters(adapters)
        for number, (prompt, wanted, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
            try:
                job = await self._job(number, prompt, wanted, priority, adapters[number])
                ready.append(ReadyJob(job, prompt, wanted))
            except RequestError as error:
                raise InvalidRequestError.of(error, prompt.where if len(prompts) > 1 else None) from None
            if number % BREATH == 0:
                await asyncio.sleep(0)
        return ready

    async def prompt_jobs(
        self, prompts: Sequence[ReadyPrompt], requests: Sequence[GenerateRequest], adapters: Sequence[Adapter]
    ) -> list[Job]:
        """Create a job for each prompt from its request, without sampling parameters.

        Raises:
            InvalidRequestError: a prompt is too long, or an adapter is not loaded.
        """
        self._check_adapters(adapters)
        jobs = []
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            try:
                for running in self._servers:
                    check_prompt_fits(len(prompt.input_ids), running.context.limits(), prompt.where)
            except RequestError as error:
                raise InvalidRequestError.of(error, prompt.where) from None
            whole = msgspec.structs.replace(request, cache_salt=prompt.salt, lora=adapters[number])
            own = str(next(self._numbers))
            states = make_requests([whole], 1, _Nowhere(rid=own, priority=0), "null", stream=False)
            jobs.append(Job(number, own, [state.request for state in states]))
            if number % BREATH == 0:
                await asyncio.sleep(0)
        return jobs

    def _check_adapters(self, names: Sequence[Adapter]) -> None:
        context = self.context
        for name in set(names) - {None}:
            if not context.config.lora.is_on:
                text = "lora_path: this LLM has no LoRA adapters; make it with enable_lora=True or lora_paths"
                raise InvalidRequestError(text, field="lora_path")
            if name not in context.adapters:
                raise InvalidRequestError.of(context.no_such_model(str(name), field="lora_path"))

    async def _job(
        self, number: int, prompt: ReadyPrompt, params: SamplingParams, priority: int, adapter: str | None
    ) -> Job:
        grammar = await self._grammar(prompt, params)
        context, count = self.context, len(prompt.input_ids)
        custom = await context.take_custom(params.custom_params, "custom_params", params.custom_logit_processor)
        inside = prompt.begins_inside if prompt.is_chat else context.begins_inside(custom, prompt.input_ids)
        sampling = params.for_engine(count, context.limits(), prompt.where, grammar)
        sampling = custom.apply(sampling, inside)
        for running in self._servers:  # a prefill server may have a smaller KV pool for the prompt
            check_prompt_fits(count, running.context.limits(), prompt.where)
        own = next(self._numbers)
        if sampling.seed is None and self._seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=_derived(self._seed, own))
        request = prompt_request(prompt.input_ids, sampling, params.logprob_params())
        if prompt.salt:
            request = msgspec.structs.replace(request, cache_salt=prompt.salt)
        prompt_requests = [request if adapter is None else msgspec.structs.replace(request, lora=adapter)]
        body = _Nowhere(rid=str(own), priority=priority)
        states = make_requests(prompt_requests, params.n, body, "null", stream=False)
        return Job(number, str(own), [state.request for state in states])

    async def _grammar(self, prompt: ReadyPrompt, params: SamplingParams) -> Grammar | None:
        """The grammar of the output. In chats with a reasoning model it applies after the reasoning."""
        constraint: Constraint | None = params.constraint()
        thinking = self.context.formats.thinking
        if constraint is not None and thinking is not None and prompt.is_chat:
            constraint = reasoning_grammar(constraint, thinking, prompt.begins_inside)
        return await self.context.take_grammar(constraint, params.stop_regex)


def _derived(seed: int, number: int) -> int:
    """Derive the seed of request `number`, the same in every run and for every deployment."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
