"""The offline Python API: `pdserve.LLM` generates for batches of prompts, without HTTP, on one server or on pairs."""

from __future__ import annotations

from pdserve.llm.api import LLM
from pdserve.llm.outputs import BatchError, CompletionOutput, InvalidRequestError, Logprob, RequestOutput
from pdserve.llm.sampling import SamplingParams
from pdserve.protocol.messages import SpeculationStats

__all__ = [
    "LLM",
    "BatchError",
    "CompletionOutput",
    "InvalidRequestError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
]
