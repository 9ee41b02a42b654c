"""Incremental detokenization: token ids to text, in constant time per token.

The engine client owns one `Detokenizer` per sequence. It has two stages:

    token ids ─> TextDecoder ─> text ─> StopMatcher, RegexMatcher ─> text that may be sent

`TextDecoder` emits whole characters only: bytes of an incomplete UTF-8 character wait for the rest, and are dropped if
the sequence ends first. `StopMatcher` holds back text that may be the beginning of a stop string.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.base.stream_state import RESUME_FIELD
from pdserve.errors import RequestError
from pdserve.protocol.messages import EngineCoreOutput, FinishReason
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.generation import GenerationUpdate
from pdserve.server.text.stop_regex import SLOW_LOOKS, Pattern, RegexMatcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

REPLAYED_AT_ONCE = 256
"""Tokens of a resumed stream that are detokenized before the event loop serves other tasks: a few milliseconds."""


class TextDecoder(Protocol):
    """Decodes one growing token sequence."""

    def push(self, token_id: int) -> str:
        """Return the whole characters that `token_id` completes; often one token's text, sometimes empty."""
        ...


class BytesOfToken(Protocol):
    """Returns the raw bytes of a token; empty for skipped special tokens and for ids without a token."""

    def __call__(self, token_id: int, *, skip_special: bool) -> bytes: ...


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


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet, inverted: printable character to byte.

    Printable bytes stand for themselves; the remaining bytes follow from code point 256.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


class ByteDecoder:
    """`TextDecoder` for vocabularies in which each token is a fixed string of bytes.

    Invalid bytes become U+FFFD as in `bytes.decode(errors="replace")`; unfinished ones wait.
    """

    def __init__(self, bytes_of_token: BytesOfToken, *, skip_special: bool, strip_first_space: bool = False) -> None:
        self._bytes_of_token = bytes_of_token
        self._skip_special = skip_special
        self._strip_space = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `TextDecoder.push`."""
        raw = self._bytes_of_token(token_id, skip_special=self._skip_special)
        if self._strip_space and raw:
            self._strip_space = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)


class StepDecoder(Protocol):
    """The `step` method of `tokenizers.decoders.DecodeStream`, bound to its tokenizer."""

    def __call__(self, token_id: int) -> str | None: ...


class StreamDecoder:
    """`TextDecoder` for all other vocabularies, over the tokenizer library's `DecodeStream`."""

    def __init__(self, step: StepDecoder) -> None:
        self._step = step

    def push(self, token_id: int) -> str:
        """See `TextDecoder.push`."""
        return self._step(token_id) or ""


class NoText:
    """`TextDecoder` of a server without a tokenizer: all text is empty."""

    def push(self, token_id: int) -> str:
        """See `TextDecoder.push`."""
        return ""


class StopMatcher:
    """Finds stop strings in text that arrives in pieces of any size.

    The match is the one that ends first, and the longest of those. So it does not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str], *, keep_match: bool) -> None:
        self._stops = tuple(stops)
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Append `piece`; return the text that may be sent now.

        After a match that is the text before the match (and the match itself with `keep_match`).
        """
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._keep_match else text[:start]
        hold = self._longest_beginning_at_end(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return the text that was held back; the sequence has ended, so that text is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _longest_beginning_at_end(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class Detokenizer:
    """Detokenizes one sequence. Call `push` for each token in order, then `finish` unless `stopped` is set."""

    def __init__(
        self,
        decoder: TextDecoder,
        sampling: CoreSamplingParams,
        compiled: Mapping[str, Pattern] = MappingProxyType({}),
    ) -> None:
        """`compiled`: stop patterns that are compiled already."""
        self._decoder = decoder
        self._stops = StopMatcher(sampling.stop, keep_match=sampling.no_stop_trim)
        self._patterns: RegexMatcher | None = None
        if sampling.stop_regex:
            self._patterns = RegexMatcher(sampling.stop_regex, keep_match=sampling.no_stop_trim, compiled=compiled)
        self._min_tokens = sampling.min_new_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string or pattern that ended the text; None so far."""
        return self._stops.matched or (None if self._patterns is None else self._patterns.matched)

    def push(self, token_id: int) -> str:
        """Append a token; return the new text that may be sent. Stop strings are ignored in the first `min_new_tokens`
        tokens.
        """
        self._num_tokens += 1
        piece = self._decoder.push(token_id)
        if self._num_tokens < self._min_tokens:
            return piece
        text = self._stops.push(piece)
        if self._patterns is None:
            return text
        text = self._patterns.push(text)
        return text if self._stops.matched is None else text + self._patterns.flush()

    async def replay(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that another server has already sent. The event loop serves other tasks in between.

        Raises:
            RequestError: 400, a stop string ends the text within these tokens.
        """
        pieces = []
        for number, token_id in enumerate(token_ids, start=1):
            pieces.append(self.push(token_id))
            if SLOW_LOOKS.must_yield:
                await SLOW_LOOKS.yield_to_loop()
            elif number % REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)
        text = "".join(pieces)
        if self.stopped is not None:
            raise RequestError(f"{RESUME_FIELD} has tokens after a stop string", field=RESUME_FIELD)
        return text

    def finish(self) -> str:
        """Return the text that was held back as a possible stop string. Bytes of an incomplete character are lost."""
        text = self._stops.flush()
        return text if self._patterns is None else self._patterns.push(text) + self._patterns.flush()


def detokenize_output(
    index: int, detokenizer: Detokenizer, output: EngineCoreOutput, *, keep_stop: bool
) -> GenerationUpdate:
    """Convert `output` to an update. The text is cut at a stop string, and omits a stop token unless `keep_stop`."""
    update = GenerationUpdate(index, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens)
    update.finish, update.timing, update.cached_details = output.finish, output.timing, output.cached_details
    if output.prompt_logprobs is not None:
        update.prompt_parts.append(output.prompt_logprobs)
    if output.hidden is not None:
        update.hidden_parts.append(output.hidden)
    hidden = _hidden_stop_token(output, keep=keep_stop)
    last = len(output.token_ids) - 1
    for position, token_id in enumerate(output.token_ids):
        update.token_ids.append(token_id)
        if output.logprobs is not None:
            update.logprobs.append(output.logprobs[position])
        if position == last and token_id == hidden:
            break
        update.text += detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            update.finish = FinishReason(type="stop", matched=detokenizer.stopped)
            return update
    if output.finish is not None and output.finish.type != "suspended":  # held text comes when the request goes on
        update.text += detokenizer.finish()
        if detokenizer.stopped is not None:
            update.finish = FinishReason(type="stop", matched=detokenizer.stopped)
    return update


def _hidden_stop_token(output: EngineCoreOutput, *, keep: bool) -> int | None:
    finish = output.finish
    if keep or finish is None or finish.type != "stop" or not isinstance(finish.matched, int):
        return None
    return finish.matched
