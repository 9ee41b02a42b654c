"""The tokenizer of a model: text to token ids, chat messages to prompts, and decoders for token ids.

The API process owns it; it wraps the Hugging Face tokenizer of a model directory. Its `TextWorkers` tokenize texts and
render chat templates in threads, so one long prompt does not stall the streams of other requests. The Rust tokenizer
takes 50 to 160 bytes of memory per byte of text, and some microseconds. A chat template holds the GIL while it runs. So
long texts run one at a time, and short texts do not wait for them. A text that cannot fit is refused before it is
tokenized, or after a part of it was counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.base.hf_tokenizer import open_hf_tokenizer
from pdserve.base.host_memory import give_back_freed
from pdserve.errors import RequestError
from pdserve.server.text.chat_template import ChatTemplates, read_template
from pdserve.server.text.detokenizer import ByteDecoder, StreamDecoder, TextDecoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


CHARS_OF_TOKEN = 4
"""Characters per token in most texts. Decoding a token takes about as long as encoding its characters."""
MESSAGE_CHARS = 256
"""Cost of a chat message in characters: a template takes as long for it as the tokenizer for that many characters."""


def _decoder_kinds(spec: Any) -> list[str]:
    """Return the names of the decoding steps in a tokenizer.json, in order."""
    if not isinstance(spec, dict):
        return []
    if spec.get("type") == "Sequence":
        return [kind for step in spec["decoders"] for kind in _decoder_kinds(step)]
    return [str(spec.get("type"))]


class TokenBytes:
    """Maps token ids to raw bytes. `exact`: every token of the vocabulary is a fixed byte string.

    Two kinds of vocabulary are exact: byte-level BPE (GPT-2's alphabet), and SentencePiece with byte fallback (`▁` and
    `<0xNN>`).
    """

    def __init__(self, backend: RustTokenizer) -> None:
        kinds = _decoder_kinds(json.loads(backend.to_str())["decoder"])
        self._byte_level = kinds == ["ByteLevel"]
        self.strips_first_space = kinds == ["Replace", "ByteFallback", "Fuse", "Strip"]
        self.exact = self._byte_level or kinds[:2] == ["Replace", "ByteFallback"]
        self._alphabet = byte_alphabet()
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
        """`hf_tokenizer`: a fast tokenizer of transformers. `chat_template`: Jinja text that replaces the tokenizer's
        own.
        """
        self._hf = hf_tokenizer
        self._backend: RustTokenizer = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat = ChatTemplates(hf_tokenizer, chat_template)
        self._bytes = TokenBytes(self._backend)
        self._bound = TextBound(self._backend)
        self._workers = TextWorkers()

    def as_json(self) -> str:
        """Serialize the tokenizer in the form of a tokenizer.json."""
        return str(self._backend.to_str())

    async def encode(
        self, text: str, *, field: str, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[int]:
        """Tokenize `text`; see `encode_all`.

        Raises:
            RequestError: 400 naming `field`.
        """
        (ids,) = await self.encode_all(
            [text], lambda _: field, add_special_tokens=add_special_tokens, most_tokens=most_tokens
        )
        return ids

    async def encode_all(
        self,
        texts: Sequence[str],
        field: Callable[[int], str],
        *,
        add_special_tokens: bool = True,
        most_tokens: int | None = None,
        most_in_all: int | None = None,
    ) -> list[list[int]]:
        """Tokenize `texts`; errors name text i as `field(i)`.

        `most_tokens`: limit per text; a text that is known to exceed it may be refused before it is tokenized.
        `most_in_all`: limit for all texts together. None: no limit.

        Raises:
            RequestError: 400 naming the field of a text that cannot be encoded, or is too long.
        """

        def encode_in_order() -> list[list[int]]:
            ids: list[list[int]] = []
            total = 0
            for i, text in enumerate(texts):
                ids.append(self._encode(text, field(i), add_special_tokens, most_tokens))
                total += len(ids[-1])
                if most_in_all is not None and total > most_in_all:
                    raise _too_long(f"{field(i)} and the texts before it have {total} tokens", field(i), most_in_all)
            return ids

        return await self._workers.run(sum(map(len, texts)), encode_in_order)

    def _encode(self, text: str, field: str, add_special_tokens: bool, most_tokens: int | None = None) -> list[int]:
        try:
            if most_tokens is not None and self._bound.exceeds(text, most_tokens):
                raise _too_long(f"{field} is too long with {len(text)} characters", field, most_tokens)
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except UnicodeEncodeError as error:
            raise RequestError(f"{field} is not valid Unicode text: {error}", field=field) from error
        return encoding.ids

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], template: str, options: Mapping[str, Any]
    ) -> str:
        """Render a conversation to a prompt with `template`; `options` are variables for the template.

        Raises:
            RequestError: 400 naming `messages`, when the template refuses them.
        """
        size = sum(len(str(message.get("content", ""))) for message in messages) + MESSAGE_CHARS * len(messages)
        size += sum(len(str(value)) for value in options.values())
        return await self._workers.run(size, lambda: self.chat.render(template, messages, options))

    async def decode_all(self, lists: Sequence[Sequence[int]], *, skip_special: bool) -> list[str]:
        """Decode each list of token ids. Ids that are not in the vocabulary are accepted."""
        size = CHARS_OF_TOKEN * sum(map(len, lists))
        return await self._workers.run(size, lambda: [self.decode(ids, skip_special=skip_special) for ids in lists])

    async def texts_of_tokens(self, lists: Sequence[Sequence[int]]) -> list[list[str]]:
        """Return `token_text` of each token of each list."""
        size = CHARS_OF_TOKEN * sum(map(len, lists))
        return await self._workers.run(size, lambda: [[self.token_text(token) for token in ids] for ids in lists])

    def require_template(self, *, tools: bool = False) -> str:
        """Return the chat template, for a request with or without tools.

        Raises:
            RequestError: 400 naming `messages`: the model has no chat template.
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
        """Create a decoder for one new sequence."""
        if self._bytes.exact:
            return ByteDecoder(self._bytes, skip_special=skip_special, strip_first_space=self._bytes.strips_first_space)
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=skip_special)
        return StreamDecoder(lambda token_id: stream.step(self._backend, token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of one token, special tokens included; the bytes need not be whole characters."""
        return self._bytes(token_id, skip_special=False)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode a whole sequence to the same text as its stream."""
        decoder = self.text_decoder(skip_special=skip_special)
        return "".join(decoder.push(token_id) for token_id in token_ids)


def _too_long(what: str, field: str, most_tokens: int) -> RequestError:
    message = f"{what}; at most {most_tokens} tokens fit"
    return RequestError(message, field=field, code="context_length_exceeded")


def load_tokenizer(directory: str | Path, chat_template: str | None = None) -> Tokenizer | None:
    """Load the tokenizer in `directory`; None if there is none (then only `/generate` with token ids works).

    `chat_template`: the name of a built-in template, or a file.

    Raises:
        ConfigError: the tokenizer or the chat template cannot be read.
    """
    template = read_template(chat_template) if chat_template is not None else None
    loaded = open_hf_tokenizer(directory)
    return None if loaded is None else Tokenizer(loaded, template)


T = TypeVar("T")

SHORT_CHARS = 8192
"""Texts up to this length are processed on the event loop: some milliseconds."""
LONG_CHARS = 1 << 18
"""Longer texts run one at a time."""
PIECE_CHARS = 1 << 16
"""Long texts are counted in pieces of this size, each some 50 ms."""
LOST_CHARS = 4
"""At most this many characters become one: NFC composes up to four. A text that mostly consists of characters that its
tokenizer drops is refused like a text that is too long.
"""
MAX_LONG = 32
"""Maximum number of long texts that wait or run. Further long texts get a 503."""
MAX_MIDDLE_CHARS = 1 << 27
"""Maximum characters of the medium texts (between the two limits) that wait or run. Further medium texts get a 503."""
NUM_THREADS = 2
"""Threads for medium texts; long texts have one more thread."""


class TextWorkers:
    """Runs work on a text on the event loop or in a thread, by the text's length. Call it on the event loop."""

    def __init__(self) -> None:
        self._some = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._num_long = 0
        self._middle_chars = 0

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `num_chars` characters. Returns its result, or raises its exception.

        Raises:
            RequestError: 503, too many texts wait or run.
        """
        if num_chars <= SHORT_CHARS:
            return work()
        if num_chars <= LONG_CHARS:
            return await self._run_middle(num_chars, work)
        if self._num_long >= MAX_LONG:
            message = f"{MAX_LONG} texts of over {LONG_CHARS} characters wait already; try again"
            raise RequestError(message, status=503, code="text_workers_busy", retry_after_s=1)
        self._num_long += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._long, lambda: _then_trimmed(work))
        finally:
            self._num_long -= 1

    async def _run_middle(self, num_chars: int, work: Callable[[], T]) -> T:
        if self._middle_chars + num_chars > MAX_MIDDLE_CHARS:
            message = f"texts of {self._middle_chars} characters wait to be tokenized already; try again"
            raise RequestError(message, status=503, code="text_workers_busy", retry_after_s=1)
        self._middle_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._some, work)
        finally:
            self._middle_chars -= num_chars


def _then_trimmed(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        give_back_freed()


class TextBound:
    """Detects texts with too many tokens without tokenizing all of them. `backend`: a tokenizer of `tokenizers`."""

    def __init__(self, backend: RustTokenizer) -> None:
        self._backend = backend

    @cached_property
    def longest_token(self) -> int:
        """Length in characters of the longest token of the vocabulary."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @cached_property
    def chars_per_token(self) -> int:
        """Upper bound of the characters of a text per token, on average."""
        spec = json.loads(self._backend.to_str())
        return self.longest_token * (LOST_CHARS if _loses_characters(spec) else 1)

    def exceeds(self, text: str, most_tokens: int) -> bool:
        """Return True only for texts of more than `most_tokens` tokens; False does not mean that the text fits.

        Takes time in proportion to `most_tokens`, not to the text.
        """
        if len(text) <= 2 * max(most_tokens, PIECE_CHARS):
            return False
        return len(text) > most_tokens * self.chars_per_token or self._counts_more(text, most_tokens)

    def _counts_more(self, text: str, most_tokens: int) -> bool:
        """Count tokens piece by piece. A cut adds at most `longest_token` tokens."""
        counted = 0
        for first in range(0, len(text), PIECE_CHARS):
            piece = text[first : first + PIECE_CHARS]
            counted += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            counted -= self.longest_token
            if counted > most_tokens:
                return True
        return False


_STEADY = {
    "ByteLevel",
    "Digits",
    "Lowercase",
    "Metaspace",
    "NFD",
    "NFKD",
    "Prepend",
    "Punctuation",
    "Split",
    "UnicodeScripts",
}
"""Normalizers and pre-tokenizers whose output has at least as many characters as their input."""


def _loses_characters(spec: dict[str, Any]) -> bool:
    """Whether normalization or pre-tokenization can shorten a text before the vocabulary lookup.

    `spec` is a tokenizer.json. Added tokens may absorb the blanks around them. Normalizers may compose or replace
    characters. A model whose vocabulary lacks a byte drops that byte.
    """
    if any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or []):
        return True
    steps = [*_steps(spec.get("pre_tokenizer"), "pretokenizers"), *_steps(spec.get("normalizer"), "normalizers")]
    return not _has_all_bytes(spec["model"]) or not all(map(_is_steady, steps))


def _steps(spec: Any, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order."""
    if not spec:
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec[parts] for step in _steps(part, parts)]
    return [spec]


def _is_steady(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return step.get("pattern") == {"String": " "} and bool(step.get("content"))
    return step["type"] in _STEADY and step.get("behavior") != "Removed"


def _has_all_bytes(model: dict[str, Any]) -> bool:
    """Whether every byte has a token: by byte fallback, or as a byte-level vocabulary with all 256 bytes."""
    vocabulary = model.get("vocab") or {}
    if model.get("byte_fallback"):
        words = vocabulary if isinstance(vocabulary, dict) else {word for word, _ in vocabulary}
        return all(f"<0x{byte:02X}>" in words for byte in range(256))
    return model.get("type") == "BPE" and all(char in vocabulary for char in byte_alphabet())


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet, inverted: printable character to byte.

    Printable bytes stand for themselves; the remaining bytes follow from code point 256.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet
