"""pdserve: an LLM serving engine that runs prefill and decode on separate servers."""

__version__ = "0.1.0"
