"""pdserve: an LLM serving engine that runs prefill and decode on separate servers.

`from pdserve import LLM, SamplingParams` imports the offline Python API. It is loaded at its first use, so that
`import pdserve` alone stays cheap. `__init__.pyi` declares it for type checkers.
"""

import importlib

__version__ = "0.1.0"

OFFLINE_API = (
    "LLM", "BatchError", "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "InvalidRequestError",
    "Logprob", "PoolingParams", "RequestOutput", "SamplingParams", "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Load a name of the offline API at its first use."""
    if name in OFFLINE_API:
        # Not an import statement: every package reads `pdserve.__version__`, and lower ones must not import `llm`.
        return getattr(importlib.import_module("pdserve.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names for completion in shells."""
    return sorted([*globals(), *OFFLINE_API])
