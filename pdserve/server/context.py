"""What every endpoint of one server shares. Made once by `create_app`."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import pdserve
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import RequestError
from pdserve.observe.metrics import ServerMetrics
from pdserve.protocol.failure import Grammar
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.request.constraints import Constraint
from pdserve.server.request.grammar_check import GrammarCheck
from pdserve.server.request.intake import (
    PreparedRequests,
    PromptSpec,
    TransferAddress,
    check_size,
    check_token_ids,
    make_intake,
    prompt_field,
)
from pdserve.server.request.sampling_fields import RequestLimits, check_prompt_fits
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.tokenizer import Tokenizer

ANY_MODEL = ("", "default", "unknown")
"""Names that mean "the model you have"; sglang-router sends `unknown` for a chat without a model."""


@dataclasses.dataclass(frozen=True)
class ServerContext:
    """Configuration and owned parts, for the endpoints."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer | None
    metrics: ServerMetrics
    started_s: int
    grammars: GrammarCheck
    registered: Callable[[], bool] = lambda: True
    """See `create_app`."""
    formats: ChatFormats = ChatFormats()

    @property
    def mode(self) -> DisaggMode:
        """Which halves this server does."""
        return self.config.disagg.disaggregation_mode

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.config.model.served_model_name or self.config.model.model_path

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: equal for servers of the same version with the same model."""
        return f"fp_{zlib.crc32(f'{pdserve.__version__} {self.model_name}'.encode()):08x}"

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        return self.config.serving.max_request_bytes

    async def token_ids(self, given: Sequence[str | list[int]], field: str, *, batch: bool) -> list[list[int]]:
        """Token ids of the prompts in `field`, all texts or all ids, checked; see `as_prompts`.

        Raises:
            RequestError: 400 naming the prompt that is empty, too long, or has tokens that the model lacks.
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

    def intake(
        self, prompts: Sequence[PromptSpec], n: int, body: TransferAddress, field: str, *, stream: bool
    ) -> PreparedRequests:
        """`make_intake` on this server, of a body whose prompts came in `field`. Clients may name the fake bootstrap
        host where no KV is moved at all.

        Raises:
            RequestError: 400 naming the field.
        """
        check_size(prompts, n, self.limits().most_body_tokens, field)
        return make_intake(
            prompts,
            n,
            body,
            self.mode,
            stream=stream,
            dp_size=self.config.parallel.dp_size,
            allowed_prefill=self.config.disagg.allowed_prefill,
            fake_rooms=self.config.disagg.disaggregation_transfer_backend == "fake",
        )

    def limits(self) -> RequestLimits:
        """What bounds a request.

        Raises:
            RequestError: 503 while the engine is starting.
            EngineDeadError: the engine is gone.
        """
        return RequestLimits.of(self.client.require_ready(), self.mode)

    async def take_grammar(
        self, constraint: Constraint | None, stop_regex: str | Sequence[str] | None = None
    ) -> Grammar | None:
        """What the answers of a request must follow, checked, as are its stop patterns; see `GrammarCheck`."""
        await self.grammars.take_patterns(stop_regex, "stop_regex")
        return await self.grammars.take(constraint, self.client.require_ready())

    def check_model(self, name: str | None) -> None:
        """Accept this server's model, or no particular one.

        Raises:
            RequestError: 404 for another model.
        """
        if name is None or name in (*ANY_MODEL, self.model_name, self.config.model.model_path):
            return
        raise RequestError(
            f"model {name!r} does not exist; this server has {self.model_name!r}",
            field="model",
            status=404,
            code="model_not_found",
        )

    def require_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer, for text in `field`.

        Raises:
            RequestError: 400, when the model came without one.
        """
        if self.tokenizer is None:
            raise RequestError(f"{field}: this server has no tokenizer; send token ids", field=field)
        return self.tokenizer
