"""The offline Python API: `pdserve.LLM` generates for batches of prompts, without HTTP, on one server or on pairs."""

from __future__ import annotations

from pdserve.llm.api import LLM
from pdserve.llm.embedding import PoolingParams
from pdserve.llm.outputs import (
    BatchError,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    InvalidRequestError,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pdserve.llm.sampling import SamplingParams
from pdserve.protocol.messages import SpeculationStats

__all__ = [
    "LLM",
    "BatchError",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "InvalidRequestError",
    "Logprob",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpeculationStats",
]
