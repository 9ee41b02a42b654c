"""Parses the output of a chat model: incremental text to reasoning, content and tool calls.

    text ─> ReasoningFormat ─┬─> reasoning           models with one format for all three have one reader, `Harmony`
                             └─> ToolFormat ─┬─> content
                                             └─> calls

Created by the chat endpoints, one per sequence.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

from pdserve.server.text.parsers.feed import SPACE, IncrementalParser, PiecesReader
from pdserve.server.text.parsers.harmony import Harmony
from pdserve.server.text.parsers.pieces import CallArguments, CallOpened, Content, Piece, Reasoning
from pdserve.server.text.parsers.thinking import ReasoningFormat
from pdserve.server.text.parsers.tool_format import ToolFormat, Tools
from pdserve.server.text.tokenizer import Tokenizer


class ReasoningCounter:
    """Counts the reasoning tokens of one sequence, tags included. Repeated calls read each token once."""

    def __init__(self, tokenizer: Tokenizer | None, plan: ReadPlan) -> None:
        self._thinking = plan.thinking if plan.inside is not False else None
        self._decoder = tokenizer.text_decoder(skip_special=False) if tokenizer is not None else None
        self._inside = plan.inside is True
        self._text = ""
        self._num_seen = 0
        self._num_thoughts = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Return the number of reasoning tokens. `token_ids`: the output so far, an extension of the last call's."""
        while self._thinking is not None and self._num_seen < len(token_ids):
            self._num_seen += 1
            self._step(self._thinking, token_ids[self._num_seen - 1])
        return self._num_thoughts

    def _step(self, thinking: ReasoningFormat, token_id: int) -> None:
        self._text += self._decoder.push(token_id) if self._decoder is not None else ""
        if not self._inside:
            begun = self._text.lstrip(SPACE)
            if not begun.startswith(thinking.opening):
                if not thinking.opening.startswith(begun):
                    self._thinking = None
                return
            self._inside = True
            self._text = begun.removeprefix(thinking.opening)
        self._num_thoughts = self._num_seen
        ends = (thinking.closing, *thinking.calls)
        if any(end in self._text for end in ends):
            self._thinking = None
        self._text = self._text[-max(len(end) for end in ends) :]


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """Parser settings for the outputs of one request.

    `tools`: schemas by name. `reading`: the format that tool calls are parsed in; None: no calls are parsed. `native`:
    the model's own tool format, which defines the form of call ids; None: unknown. `thinking`: the reasoning format;
    None: reasoning stays in the content. `inside`: see `ReasoningFormat.begins_inside`. `harmony`: one `Harmony` reader
    parses all. `show_reasoning` False: parsed reasoning is returned as content. `stream_reasoning` False: reasoning is
    sent in one piece, at its end. `one_call`: calls after the first are dropped.
    """

    tools: Tools = dataclasses.field(default_factory=dict)
    reading: type[ToolFormat] | None = None
    native: type[ToolFormat] | None = None
    thinking: ReasoningFormat | None = None
    inside: bool | None = None
    harmony: bool = False
    show_reasoning: bool = True
    stream_reasoning: bool = True
    one_call: bool = False

    @property
    def special_tokens(self) -> bool:
        """True when a format's markup is special tokens, which detokenization must keep."""
        formats = (self.reading is not None and self.reading.special_tokens, self.harmony)
        return any(formats) or (self.thinking is not None and self.thinking.special_tokens)


class ChatReader:
    """See the file's docstring. `called`: a tool call has begun."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self._thinking: PiecesReader | None = None
        self._calls: PiecesReader | None = None
        self._thoughts: list[str] = []
        self.called = False
        if plan.harmony:
            self._calls = _reader(Harmony(plan.tools))
        elif plan.reading is not None:
            self._calls = _reader(plan.reading(plan.tools))
        if plan.thinking is not None:
            feed = IncrementalParser()
            self._thinking = PiecesReader(feed, plan.thinking.read(feed, plan.inside))

    def push(self, text: str) -> list[Piece]:
        """Parse `text`, the continuation of all earlier text, and return the completed pieces."""
        if not text:
            return []
        return self._shown(self._behind_thoughts(self._thinking.push(text) if self._thinking else [Content(text)]))

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the text."""
        pieces = self._behind_thoughts(self._thinking.finish() if self._thinking else [])
        pieces += self._calls.finish() if self._calls else []
        shown = self._shown(pieces)
        return [*shown, *self._held_thoughts()]

    def _behind_thoughts(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Parse the tool calls in the content of `pieces`."""
        if self._calls is None:
            return list(pieces)
        read: list[Piece] = []
        for piece in pieces:
            read += self._calls.push(piece.text) if isinstance(piece, Content) else [piece]
        return read

    def _shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Filter `pieces` by the plan's options and give each call an id."""
        shown: list[Piece] = []
        for piece in pieces:
            match piece:
                case Reasoning(text) if not self._plan.show_reasoning:
                    piece = Content(text)
                case Reasoning(text) if not self._plan.stream_reasoning:
                    self._thoughts.append(text)
                    continue
                case CallOpened(index) | CallArguments(index) if index and self._plan.one_call:
                    continue
                case CallOpened(index, name, call_id):
                    self.called = True
                    piece = CallOpened(index, name, call_id or self._new_id(index, name))
            shown += [*self._held_thoughts(), piece]
        return shown

    def _held_thoughts(self) -> list[Piece]:
        held, self._thoughts = self._thoughts, []
        return [Reasoning("".join(held))] if held else []

    def _new_id(self, index: int, name: str) -> str:
        random = uuid.uuid4().hex
        return f"call_{random[:24]}" if self._plan.native is None else self._plan.native.new_id(index, name, random)


def _reader(format: ToolFormat) -> PiecesReader:
    feed = IncrementalParser()
    return PiecesReader(feed, format.read(feed))
