"""Text to token ids and chat messages to prompts; makes the decoders for the way back.

Owned by the API process; wraps the Hugging Face tokenizer of a model directory. Long texts are encoded in a worker
thread, so that one large prompt does not stop the streams of all others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.base.hf_tokenizer import open_hf_tokenizer
from pdserve.errors import RequestError
from pdserve.server.chat_template import ChatTemplates, read_template
from pdserve.server.detokenizer import ByteDecoder, StreamDecoder, TextDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

LONG_TEXT_CHARS = 8192
"""Longer texts are encoded off the event loop; this much takes a few milliseconds."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted: bytes that print stand for themselves, others follow 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


def _decoder_kinds(spec: Any) -> list[str]:
    """Names of the decoding steps in a tokenizer.json, in order."""
    if not isinstance(spec, dict):
        return []
    if spec.get("type") == "Sequence":
        return [kind for step in spec["decoders"] for kind in _decoder_kinds(step)]
    return [str(spec.get("type"))]


class TokenBytes:
    """Raw bytes of every token; `exact` says whether this vocabulary is one of fixed byte strings.

    Two kinds are: byte-level BPE (GPT-2's alphabet), and SentencePiece with byte fallback (`▁` and `<0xNN>`).
    """

    def __init__(self, backend: RustTokenizer) -> None:
        kinds = _decoder_kinds(json.loads(backend.to_str())["decoder"])
        self._byte_level = kinds == ["ByteLevel"]
        self.strips_first_space = kinds == ["Replace", "ByteFallback", "Fuse", "Strip"]
        self.exact = self._byte_level or kinds[:2] == ["Replace", "ByteFallback"]
        self._alphabet = _byte_alphabet()
        self._backend = backend
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int, *, skip_special: bool) -> bytes:
        """See `BytesOfToken`."""
        if skip_special and token_id in self._special:
            return b""
        raw = self._known.get(token_id)
        if raw is None:
            raw = self._known[token_id] = self._to_bytes(token_id)
        return raw

    def _to_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            if all(char in self._alphabet for char in piece):
                return bytes(self._alphabet[char] for char in piece)
            return piece.encode()
        if self.exact:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("▁", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class Tokenizer:
    """The tokenizer of one model. Safe to use from the event loop and from worker threads."""

    def __init__(self, hf_tokenizer: Any, chat_template: str | None = None) -> None:
        """`hf_tokenizer`: a fast tokenizer of transformers. `chat_template`: Jinja text that replaces its own."""
        self._hf = hf_tokenizer
        self._backend: RustTokenizer = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat = ChatTemplates(hf_tokenizer, chat_template)
        self._bytes = TokenBytes(self._backend)

    def as_json(self) -> str:
        """Everything about the tokens as text, in the form of a tokenizer.json."""
        return str(self._backend.to_str())

    async def encode(self, text: str, *, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
            RequestError: 400 naming `field`, when the text cannot be encoded.
        """
        if len(text) <= LONG_TEXT_CHARS:
            return self._encode(text, field, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, field, add_special_tokens)

    def _encode(self, text: str, field: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except UnicodeEncodeError as error:
            raise RequestError(f"{field} is not valid Unicode text: {error}", field=field) from error

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], template: str, options: Mapping[str, Any]
    ) -> str:
        """The prompt that `template` makes of a conversation; `options` are variables for it.

        Raises:
            RequestError: 400 naming `messages`, when the template refuses them.
        """
        size = sum(len(str(message.get("content", ""))) for message in messages)
        if size <= LONG_TEXT_CHARS:
            return self.chat.render(template, messages, options)
        return await asyncio.to_thread(self.chat.render, template, messages, options)

    def require_template(self, *, tools: bool = False) -> str:
        """The chat template, for a request with or without tools.

        Raises:
            RequestError: 400 naming `messages`: there is none.
        """
        template = self.chat.text(tools=tools)
        if template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                field="messages",
                code="no_chat_template",
            )
        return template

    def text_decoder(self, *, skip_special: bool) -> TextDecoder:
        """A decoder for one new sequence."""
        if self._bytes.exact:
            return ByteDecoder(self._bytes, skip_special=skip_special, strip_first_space=self._bytes.strips_first_space)
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=skip_special)
        return StreamDecoder(lambda token_id: stream.step(self._backend, token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token, special ones included; not always whole characters."""
        return self._bytes(token_id, skip_special=False)

    def token_text(self, token_id: int) -> str:
        """Readable text of one token; U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of a whole sequence, as a stream of it would give."""
        decoder = self.text_decoder(skip_special=skip_special)
        return "".join(decoder.push(token_id) for token_id in token_ids)


def load_tokenizer(directory: str | Path, chat_template: str | None = None) -> Tokenizer | None:
    """The tokenizer in `directory`, or None when it holds none (then only `/generate` with token ids works).

    `chat_template`: the name of a built-in one, or a file.

    Raises:
        ConfigError: the tokenizer or the chat template cannot be read.
    """
    template = read_template(chat_template) if chat_template is not None else None
    loaded = open_hf_tokenizer(directory)
    return None if loaded is None else Tokenizer(loaded, template)
