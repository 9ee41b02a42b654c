"""Embeddings and hidden states of a server: a group of `ServerConfig`. Flag names of SGLang."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pdserve.config.access_group import flag
from pdserve.errors import ConfigError

PoolingMode = Literal["auto", "last", "mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """What a server returns of hidden states."""

    is_embedding: bool = flag(
        False,
        help="serve embeddings of a causal language model (/v1/embeddings, /v1/score, /v1/rerank) instead of "
        "generation; only without prefill and decode servers",
    )
    embedding_pooling: PoolingMode = flag(
        "auto",
        help="how --is-embedding makes one vector of a text: the hidden state of its last token, or the mean of all. "
        "auto: as modules.json of the checkpoint says, else last",
    )
    enable_return_hidden_states: bool = flag(
        False, help="serve return_hidden_states of /generate: the last layer's hidden states of all tokens"
    )

    def check(self, mode: str, *, drafts: bool) -> None:
        """Check the values. `mode`: the role. `drafts`: speculative decoding is on. Raises ConfigError."""
        if not self.is_embedding:
            if self.embedding_pooling != "auto":
                raise ConfigError("--embedding-pooling needs --is-embedding", field="embedding_pooling")
            return
        reason = None
        if mode != "null":
            reason = f"has no {mode} role: an embedding needs no decode. Leave --disaggregation-mode out"
        elif drafts:
            reason = "generates no tokens: leave --speculative-algorithm out"
        elif self.enable_return_hidden_states:
            reason = "serves no /generate: leave --enable-return-hidden-states out"
        if reason is not None:
            raise ConfigError(f"a server with --is-embedding {reason}", field="is_embedding")
