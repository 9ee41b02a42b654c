"""What every endpoint of one server shares. Made once by `create_app`."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import pdserve
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import RequestError
from pdserve.observe.metrics import ServerMetrics
from pdserve.protocol.grammar import Grammar
from pdserve.server.chat_formats import ChatFormats
from pdserve.server.constraints import Constraint, GrammarCheck
from pdserve.server.engine_client import EngineClient
from pdserve.server.sampling_fields import Limits
from pdserve.server.tokenizer import Tokenizer

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

    def limits(self) -> Limits:
        """What bounds a request.

        Raises:
            RequestError: 503 while the engine is starting.
            EngineDeadError: the engine is gone.
        """
        return Limits.of(self.client.require_ready(), self.mode)

    async def take_grammar(self, constraint: Constraint | None) -> Grammar | None:
        """What the answers of a request must follow, checked; see `GrammarCheck.take`."""
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
