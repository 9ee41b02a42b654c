"""State shared by all endpoints of one server. `create_app` creates it once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

import pdserve
from pdserve.base.proof import NO_TOKEN_ID
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.config.lora_group import ANY_MODEL
from pdserve.errors import RequestError
from pdserve.http.background_responses import BackgroundResponses
from pdserve.http.response_store import ResponseStore
from pdserve.http.session_store import OpenSessions
from pdserve.observe.metrics import ServerMetrics
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import Grammar
from pdserve.protocol.weights import weights_name
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.http.json_http import scalar_or_list
from pdserve.server.request.constraints import Constraint, GrammarCheck
from pdserve.server.request.custom_params import (
    ANY_TEXT,
    BUDGET,
    NOTHING_CUSTOM,
    TAIL_TOKENS,
    CustomSampling,
    budget_tokens,
    processor_params,
    thinking_limit,
)
from pdserve.server.request.intake import (
    TransferAddress,
    attaches,
    check_size,
    check_token_ids,
    make_requests,
    prompt_field,
    with_salts,
)
from pdserve.server.request.restored import RestoredRequest
from pdserve.server.request.sampling_fields import RequestLimits, check_prompt_fits
from pdserve.server.snapshot_store import SnapshotStore
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.tokenizer import Tokenizer

MAX_MODEL_CHARS = 1024

PRIORITY_RETRY_S = 60
"""`Retry-After` of a refused priority. Routers count a 503 without one as a failure of the server."""

Endpoint = Callable[["ServerContext", Request], Awaitable[Response]]
"""Answers a request to the server with this context."""


@dataclasses.dataclass
class WeightsChange:
    """State of updates of the weights, on all replicas; see `sglang_api/weights.py`."""

    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while an update runs."""
    prepared: object = None
    """What `prepare_only` has prepared; None: nothing."""
    expiry: asyncio.TimerHandle | None = None
    """Drops what is prepared, if no update uses it."""
    tasks: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)
    """Updates that run: the event loop keeps no reference to a task."""


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """Configuration and components of one server, for its endpoints. `started_s` is Unix time in seconds."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer | None
    metrics: ServerMetrics
    started_s: int
    grammars: GrammarCheck
    registered: Callable[[], bool] = lambda: True
    """Whether decode servers can find this server; see `create_app`."""
    formats: ChatFormats = ChatFormats()
    control_token_id: str = NO_TOKEN_ID
    """`base.proof.token_id` of this server's control token."""
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)
    """Directories of the loaded LoRA adapters, by name. `/load_lora_adapter` and `/unload_lora_adapter` change it."""
    responses: ResponseStore | None = None
    """The stored responses of `/v1/responses`; None: there is no such path, as in an `LLM`."""
    background: BackgroundResponses | None = None
    """The responses that run in the background; None with `responses`."""
    sessions: OpenSessions | None = None
    """The open sessions of SGLang's API; None: there are none, as in an `LLM`."""
    suspended: SnapshotStore | None = None
    """The suspended requests; None: they are kept elsewhere, as those of an `LLM`."""
    restored: RestoredRequest | None = None
    """The snapshot that the next request goes on from, in the context of one call; None: requests begin anew."""
    changing_adapters: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while an adapter is loaded or unloaded, on all replicas."""

    changing_weights: WeightsChange = dataclasses.field(default_factory=WeightsChange)
    """The update of the weights that runs, or that is prepared."""

    prefill_servers: Callable[[], list[dict[str, Any]]] | None = None
    """Facts about the servers of `--disaggregation-prefill`; None without the flag, or in another role."""

    def bind(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return `endpoint` as a handler of this server's requests."""

        async def handle(request: Request) -> Response:
            return await endpoint(self, request)

        return handle

    @property
    def mode(self) -> DisaggMode:
        """Role of this server: `null` (unified), `prefill` or `decode`."""
        return self.config.disagg.disaggregation_mode

    @property
    def model_name(self) -> str:
        """Model name shown to clients."""
        return self.config.model.served_model_name or self.config.model.model_path

    @property
    def weight_version(self) -> str:
        """Name of the version of the weights in use."""
        return self.client.weight_version or self.config.model.weight_version

    @property
    def weights_in_use(self) -> str:
        """Version and fingerprint of the weights in use, see `weights_name`; empty while the engine starts."""
        return "" if self.client.weights is None else weights_name(*self.client.weights)

    @property
    def weights_path(self) -> str:
        """Where the weights in use come from: the path of the last update, or of the flags."""
        ready = self.client.ready
        return str((ready.facts.get("weights_path") if ready else None) or self.config.model.model_path)

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: equal for servers of the same version with the same model."""
        return f"fp_{zlib.crc32(f'{pdserve.__version__} {self.model_name}'.encode()):08x}"

    @functools.cached_property
    def takes_adapters(self) -> bool:
        """Whether requests may have a LoRA adapter (`--enable-lora`)."""
        return self.config.lora.is_on

    @property
    def max_body_bytes(self) -> int:
        """Largest request body in bytes."""
        return self.config.serving.max_request_bytes

    async def token_ids(self, given: Sequence[str | list[int]], field: str, *, batch: bool) -> list[list[int]]:
        """Tokenize and check the prompts in `field`, all texts or all token id lists; see `as_prompts`.

        Raises:
            RequestError: 400 naming the prompt that is empty, too long, or has token ids outside the vocabulary.
        """
        limits = self.limits()

        def name(index: int) -> str:
            return prompt_field(field, index, batch=batch)

        texts = [prompt for prompt in given if isinstance(prompt, str)]
        lists = [prompt for prompt in given if isinstance(prompt, list)]
        if texts:
            most, in_all = limits.most_prompt_tokens, limits.most_body_tokens
            lists = await self.require_tokenizer(field).encode_all(texts, name, most_tokens=most, most_in_all=in_all)
        for i, ids in enumerate(lists):
            if not ids:
                raise RequestError(f"{name(i)} must not be empty", field=name(i))
            check_prompt_fits(len(ids), limits, name(i))
            check_token_ids(ids, limits.vocab_size, name(i))
        return lists

    def make_requests(
        self,
        prompts: Sequence[GenerateRequest],
        n: int,
        body: TransferAddress,
        field: str,
        *,
        stream: bool,
        pools: bool = False,
    ) -> list[RequestState]:
        """Call `intake.make_requests` with this server's configuration. The prompts of `body` came in `field`.

        `pools`: no token is generated, so that a server with `--is-embedding` takes the requests, too.

        Clients may name the fake bootstrap host only with `--disaggregation-transfer-backend fake`, which moves no KV
        cache.

        Raises:
            RequestError: 400 naming the field; 503 for a priority with `--abort-on-priority-when-disabled`.
        """
        if self.config.embedding.is_embedding and not pools:
            message = "this server has an embedding model (--is-embedding) and generates no text"
            raise RequestError(message, field=field, code="unsupported")
        schedule = self.config.schedule
        if body.priority is not None and schedule.abort_on_priority_when_disabled and not schedule.uses_priority:
            message = "Using priority is disabled for this server. Please send a new request without a priority."
            raise RequestError(
                message, field="priority", status=503, code="priority_disabled", retry_after_s=PRIORITY_RETRY_S
            )
        if self.takes_adapters:
            prompts = self._with_adapters(prompts, body)
        prompts = with_salts(prompts, body)
        limits, restored = self.limits(), self.restored
        check_size(prompts, n, limits.most_body_tokens, field)
        states = make_requests(
            prompts,
            n,
            body,
            "null" if restored is not None or attaches(body) else self.mode,
            stream=stream,
            dp_size=self.config.parallel.dp_size,
            allowed_prefill=self.config.disagg.allowed_prefill,
            default_port=self.config.disagg.disaggregation_bootstrap_port,
            fake_rooms=self.config.disagg.disaggregation_transfer_backend == "fake",
            default_priority=schedule.default_priority,
        )
        if restored is not None:
            restored.apply(states, limits)
        return states

    def _with_adapters(self, prompts: Sequence[GenerateRequest], body: TransferAddress) -> list[GenerateRequest]:
        """Give each prompt the adapter that `lora_path` of the body names, or else `model`.

        Raises:
            RequestError: 404 for an adapter that is not loaded.
        """
        named = getattr(body, "lora_path", None)
        if named is None:
            model = getattr(body, "model", None)
            named = model if model in self.adapters else None
        names = scalar_or_list(named, len(prompts), "lora_path", str)
        for name in names:
            if name is not None and name not in self.adapters:
                raise self.no_such_model(name, field="lora_path")
        return [msgspec.structs.replace(prompt, lora=name) for prompt, name in zip(prompts, names, strict=True)]

    def limits(self) -> RequestLimits:
        """Return the limits of a request.

        Raises:
            RequestError: 503 while the engine is starting.
            EngineDeadError: the engine has exited.
        """
        return RequestLimits.of(self.client.require_ready(), self.mode)

    async def take_grammar(
        self, constraint: Constraint | None, stop_regex: str | Sequence[str] | None = None
    ) -> Grammar | None:
        """Check the grammar and the stop patterns of a request and return the grammar; see `GrammarCheck`."""
        if stop_regex is not None:
            await self.grammars.take_patterns(stop_regex, "stop_regex")
        return None if constraint is None else await self.grammars.take(constraint, self.client.require_ready())

    async def take_custom(
        self, custom_params: Mapping[str, Any] | None, field: str, processor: str | None = None
    ) -> CustomSampling:
        """Return what the body's `field` and its `custom_logit_processor` ask for.

        Raises:
            RequestError: 400 naming the field: see `processor_params`, `budget_tokens` and `thinking_limit`; or this
                server has no grammars, which both need.
        """
        if not custom_params and not processor:
            return NOTHING_CUSTOM
        given = custom_params or {}
        call = processor_params(processor, given, field, self.config.grammar.processor_names)
        num_tokens, thinking = budget_tokens(given, field), None
        if num_tokens is not None:
            where = f"{field}.{BUDGET}"
            thinking = await thinking_limit(num_tokens, where, self.formats, self.tokenizer)
            await self.grammars.take(Constraint(ANY_TEXT, where), self.client.require_ready())
        elif call is not None:
            await self.grammars.take(Constraint(ANY_TEXT, "custom_logit_processor"), self.client.require_ready())
        return CustomSampling(thinking, call)

    def begins_inside(self, custom: CustomSampling, input_ids: Sequence[int]) -> bool | None:
        """Whether the output for the prompt `input_ids` begins inside the reasoning; None: unknown, or not limited."""
        if custom.thinking is None or self.tokenizer is None:
            return None
        return custom.thinking.begins_inside(self.tokenizer.decode(input_ids[-TAIL_TOKENS:], skip_special=False))

    def check_model(self, name: str | None) -> None:
        """Check the model name of a request. Without `--strict-model-name` and LoRA adapters every name is accepted.

        With them None, the names in `ANY_MODEL`, this server's model and its adapters are accepted.

        Raises:
            RequestError: 404 for another model; 400 for a name that is too long, because every event repeats it.
        """
        if name is not None and len(name) > MAX_MODEL_CHARS:
            message = f"model has {len(name)} characters; the maximum is {MAX_MODEL_CHARS}"
            raise RequestError(message, field="model")
        is_strict = self.config.serving.strict_model_name or self.takes_adapters
        if name is None or not is_strict or name in ANY_MODEL or self.is_model(name) or name in self.adapters:
            return
        raise self.no_such_model(name)

    def is_model(self, name: str) -> bool:
        """Whether `name` is a name of this server's model."""
        return name in (self.model_name, self.config.model.model_path)

    def no_such_model(self, name: str, field: str = "model") -> RequestError:
        """Return the 404 for a model or adapter, named in `field`, that this server does not have."""
        known = ", ".join(map(repr, (self.model_name, *self.adapters)))
        return RequestError(
            f"{'model' if field == 'model' else 'LoRA adapter'} {name!r} does not exist; this server has {known}",
            field=field,
            status=404,
            code="model_not_found",
        )

    def require_tokenizer(self, field: str) -> Tokenizer:
        """Return the tokenizer, for text in `field`.

        Raises:
            RequestError: 400, the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError(f"{field}: this server has no tokenizer; send token ids", field=field)
        return self.tokenizer
