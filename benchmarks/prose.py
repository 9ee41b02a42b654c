"""English prose as token ids, to cut prompts from: Python's own language reference, which lies beside every Python.

Behind random ids models write fragments of characters. A server streams no event for a token that makes no text, so two
tokens come at once, and what is measured between tokens is not the server's pace.
"""

from __future__ import annotations

import functools
import pydoc_data.topics

from tokenizers import Tokenizer

from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path


@functools.cache
def prose_ids(tokenizer: str) -> tuple[int, ...]:
    """All of it, about 110,000 tokens; `tokenizer` is what servers take as `--model-path`. Raises ModelError."""
    file = resolve_tokenizer_path(resolve_model_path(tokenizer)) / "tokenizer.json"
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return tuple(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
