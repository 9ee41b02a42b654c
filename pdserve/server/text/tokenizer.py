"""The tokenizer of a model: text to token ids, chat messages to prompts, and decoders for token ids.

The API process owns it; it wraps the Hugging Face tokenizer of a model directory. Its `TextWorkers` tokenize texts and
render chat templates in threads, so one long prompt does not stall the streams of other requests. The Rust tokenizer
takes 50 to 160 bytes of memory per byte of text, and some microseconds. A chat template holds the GIL while it runs. So
long texts run one at a time, and short texts do not wait for them. A text that cannot fit is refused before it is
tokenized, or after a part of it was counted (`text_bound`).

`ChatTemplates` selects the template of a request, detects its features, and renders the prompt. Templates run in
transformers' immutable sandbox, with JSON values only. Any exception of a template counts as a refusal of the messages:
templates check roles and their order.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateSyntaxError

from pdserve.base.hf_tokenizer import open_hf_tokenizer
from pdserve.base.host_memory import give_back_freed
from pdserve.errors import ConfigError, RequestError
from pdserve.server.text.detokenizer import ByteDecoder, StreamDecoder, TextDecoder, TokenBytes
from pdserve.server.text.text_bound import TextBound

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


CHARS_OF_TOKEN = 4
"""Characters per token in most texts. Decoding a token takes about as long as encoding its characters."""
MESSAGE_CHARS = 256
"""Cost of a chat message in characters: a template takes as long for it as the tokenizer for that many characters."""


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

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins texts; None without one."""
        found: int | None = self._hf.bos_token_id
        return found

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
            if most_tokens is not None and len(text) > SHORT_CHARS and self._bound.exceeds(text, most_tokens):
                raise _too_long(f"{field} is too long with {len(text)} characters", field, most_tokens)
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as error:  # tokenizers raises a TypeError at a lone surrogate
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


BUILT_IN = Path(__file__).parent / "chat_templates"
NUM_REMEMBERED = 64
_PROBE = "pdserve-probe"


@dataclasses.dataclass(frozen=True)
class TemplateFacts:
    """Features of a template, detected by rendering test conversations.

    `parts`: message content must be a list of parts, not a string. `text_arguments`: the arguments of a past tool call
    must be JSON text, not an object. `developer`: the template handles the role `developer`.
    """

    parts: bool = False
    text_arguments: bool = False
    developer: bool = False


def built_in_names() -> list[str]:
    """Return the built-in template names that `--chat-template` accepts beside files."""
    return sorted(path.stem for path in BUILT_IN.glob("*.jinja"))


def read_template(name: str) -> str:
    """Read a built-in template or a template file.

    Raises:
        ConfigError: neither exists, or the file is not UTF-8 text.
    """
    known = BUILT_IN / f"{name}.jinja"
    path = known if name in built_in_names() else Path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(built_in_names())
        raise ConfigError(
            f"cannot read the chat template {name}: {error}; built-in templates: {names}", field="chat_template"
        ) from error


class ChatTemplates:
    """The templates of one model. Thread-safe."""

    def __init__(self, hf_tokenizer: Any, override: str | None) -> None:
        """`hf_tokenizer`: a tokenizer of transformers with its template or templates. `override`: a template that
        replaces them.

        Raises:
            ConfigError: `override` is not valid Jinja.
        """
        self._hf = hf_tokenizer
        self._override = override
        self._facts: dict[str, TemplateFacts] = {}
        if override is not None:
            self._check_syntax(override)

    def text(self, *, tools: bool = False) -> str | None:
        """Return the template for a request with or without tools; None if the model has none."""
        own = self._hf.chat_template if self._override is None else self._override
        if not isinstance(own, dict):
            return None if own is None else str(own)
        names = ("tool_use", "default") if tools else ("default",)
        found = next((own[name] for name in names if name in own), None)
        return None if found is None else str(found)

    def facts(self, template: str) -> TemplateFacts:
        """Return the features of `template`; detected once and cached."""
        facts = self._facts.get(template)
        if facts is None:
            if len(self._facts) >= NUM_REMEMBERED:
                self._facts.clear()
            facts = self._facts[template] = self._try_out(template)
        return facts

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Render a conversation to a prompt. `options`: tools, documents, and variables for the template.

        Raises:
            RequestError: 400 naming `messages`, when the template refuses them.
        """
        try:
            return self._render(template, messages, options)
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return str(self._hf.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options))

    def _check_syntax(self, template: str) -> None:
        try:
            self._render(template, [{"role": "user", "content": _PROBE}], {})
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}", field="chat_template") from error
        except Exception:
            return  # the template may refuse this conversation and accept real ones

    def _try_out(self, template: str) -> TemplateFacts:
        text = self._attempt(template, [{"role": "user", "content": _PROBE}])
        parts = _PROBE not in text and _PROBE in self._attempt(
            template, [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        )
        as_text, as_object = '{"a": "' + _PROBE + '"}', {"a": _PROBE}
        wants_text = f'"{_PROBE}"' not in self._with_call(template, as_object, parts=parts)
        text_works = f'"{_PROBE}"' in self._with_call(template, as_text, parts=parts)
        developer = "'developer'" in template or '"developer"' in template
        return TemplateFacts(parts, wants_text and text_works, developer)

    def _with_call(self, template: str, arguments: Any, *, parts: bool) -> str:
        """Render a conversation with a past tool call."""
        user: Any = [{"type": "text", "text": "u"}] if parts else "u"
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": [] if parts else "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": user},
        ]
        return self._attempt(template, messages)

    def _attempt(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._render(template, messages, {"add_generation_prompt": True})
        except Exception:
            return ""
