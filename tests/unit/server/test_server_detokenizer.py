"""Incremental text: whole characters only, stop strings wherever the cuts fall, equal to decoding all at once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.text.detokenizer import ByteDecoder, Detokenizer, StopMatcher
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import VOCAB, rust_tokenizer

TEXTS = (
    "plain words",
    "emoji 👩‍👩‍👧 and 🇫🇷 flags",
    "世界の言葉 한국어",
    "combining e\u0301 a\u0308\u0323",
    "العربية हिन्दी",
    "\x00 control \t\n",
)

Ids = Callable[[str], list[int]]


def run(tokenizer: Tokenizer, token_ids: list[int], **fields: object) -> tuple[list[str], str | None]:
    sampling = CoreSamplingParams(**fields)  # type: ignore[arg-type]
    machine = Detokenizer(tokenizer.text_decoder(skip_special=True), sampling)
    pieces = []
    for token_id in token_ids:
        pieces.append(machine.push(token_id))
        if machine.stopped is not None:
            return pieces, machine.stopped
    return [*pieces, machine.finish()], None


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, ids: Ids, text: str) -> None:
    pieces, _ = run(tokenizer, ids(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_cut_off_by_the_end_is_dropped(tokenizer: Tokenizer, ids: Ids) -> None:
    pieces, _ = run(tokenizer, ids("ok 👩")[:-1])
    assert "".join(pieces) == "ok "


def test_special_tokens_are_skipped_even_inside_a_character(tokenizer: Tokenizer, ids: Ids) -> None:
    face = ids("世")
    assert "".join(run(tokenizer, [face[0], 1, *face[1:]])[0]) == "世"
    shown = Detokenizer(tokenizer.text_decoder(skip_special=False), CoreSamplingParams())
    assert shown.push(1) == "<|user|>"


def test_any_tokens_give_the_text_of_the_library_less_an_unfinished_end(tokenizer: Tokenizer) -> None:
    library, chance = rust_tokenizer(tokenizer), random.Random(7)
    for _ in range(300):
        token_ids = [chance.randrange(VOCAB) for _ in range(24)]
        whole = library.decode(token_ids, skip_special_tokens=True)
        ours = "".join(run(tokenizer, token_ids)[0])
        assert whole.startswith(ours)
        assert set(whole[len(ours) :]) <= {"\ufffd"}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", ["STOP", "<end>", "世界!", "🛑👧"])
def test_a_stop_string_across_tokens_cuts_the_text_and_never_shows(
    tokenizer: Tokenizer, ids: Ids, text: str, stop: str
) -> None:
    pieces, matched = run(tokenizer, ids(text + stop + " tail"), stop=(stop,))
    assert matched == stop
    assert "".join(pieces) == text
    kept, _ = run(tokenizer, ids(text + stop + " tail"), stop=(stop,), no_stop_trim=True)
    assert "".join(kept) == text + stop


def test_held_text_is_shown_when_the_sequence_ends(tokenizer: Tokenizer, ids: Ids) -> None:
    pieces, matched = run(tokenizer, ids("a STO"), stop=("STOP",))
    assert matched is None
    assert "".join(pieces) == "a STO"
    assert "STO" not in "".join(pieces[:-1])


def test_text_before_min_new_tokens_is_not_searched(tokenizer: Tokenizer, ids: Ids) -> None:
    pieces, matched = run(tokenizer, ids("xx!yy!zz"), stop=("!",), min_new_tokens=5)
    assert matched == "!"
    assert "".join(pieces) == "xx!yy"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=24, max_size=24),
)
def test_where_the_text_is_cut_does_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    def shown(sizes: list[int]) -> tuple[str, str | None]:
        matcher = StopMatcher(stops, keep_match=False)
        out, position = "", 0
        for size in sizes:
            out += matcher.push(text[position : position + size])
            position += size
            if matcher.matched is not None:
                return out, matcher.matched
        return out + matcher.flush(), None

    assert shown(cuts) == shown([1] * 24)
    assert shown(cuts) == shown([24])


def test_sentencepiece_bytes_and_the_first_space() -> None:
    pieces = {1: b" Hi", 2: b"\xe4", 3: b"\xb8", 4: b"\x96", 5: b" you"}
    decoder = ByteDecoder(lambda i, *, skip_special: pieces[i], skip_special=True, strip_first_space=True)
    assert [decoder.push(i) for i in (1, 2, 3, 4, 5)] == ["Hi", "", "", "世", " you"]
