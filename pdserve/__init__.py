"""pdserve: an LLM serving engine that runs prefill and decode on separate servers.

The offline Python API is at the top: `from pdserve import LLM, SamplingParams`. It is loaded when it is asked for, so
that `import pdserve` alone costs nothing. `__init__.pyi` tells type checkers of it.
"""

import importlib

__version__ = "0.1.0"

OFFLINE_API = (
    "LLM", "BatchError", "CompletionOutput", "InvalidRequestError", "Logprob", "RequestOutput", "SamplingParams",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """The names of the offline API, at their first use."""
    if name in OFFLINE_API:
        # Not an import statement: every package may read `pdserve.__version__`, and none below it may need `llm`.
        return getattr(importlib.import_module("pdserve.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion in shells."""
    return sorted([*globals(), *OFFLINE_API])
