"""Texts that are too long are refused without tokenizing all of them, and never a text that fits."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pdserve.errors import RequestError
from pdserve.server.text import text_bound
from pdserve.server.text import tokenizer as tokenizer_module
from pdserve.server.text.text_bound import TextBound
from pdserve.server.text.tokenizer import LONG_CHARS, SHORT_CHARS, TextWorkers, Tokenizer
from tests.unit.server.server_kit import tiny_hf_tokenizer, token_ids
from tests.waiting import until


def byte_level(*, with_all_bytes: bool = True, normalizer: normalizers.Normalizer | None = None) -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if with_all_bytes else []
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(["hello world   the quick brown fox        jumps " * 3] * 10, trainer)
    return rust


WORDS = [
    "hello",
    " world",
    "        ",
    " the",
    "quick",
    "\n",
    "é",
    "e\u0301",
    "漢",
    "🙂",
    "a",
    "b ",
    "\x04",
    "1",
    "xyzxyz",
]


@pytest.mark.parametrize("kind", ["bytes", "lossy", "composing"])
def test_no_text_that_fits_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_bound, "PIECE_CHARS", 40)
    normalizer = normalizers.NFC() if kind == "composing" else None
    backend = byte_level(with_all_bytes=kind != "lossy", normalizer=normalizer)
    bound, rng = TextBound(backend), random.Random(5)
    assert (bound.chars_per_token > bound.longest_token) == (kind != "bytes")
    refused = 0
    for _ in range(300):
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 300))) * rng.randrange(1, 4)
        num_tokens = len(backend.encode(text).ids)
        assert not bound.exceeds(text, num_tokens), text
        refused += bound.exceeds(text, num_tokens // 3)
    assert refused > 100, "texts of three times as many tokens are refused, if they are long"


def test_a_text_far_too_long_is_not_looked_at() -> None:
    bound = TextBound(byte_level())
    assert bound.exceeds("a" * (bound.chars_per_token * 1000 + 150_000), 1000)
    assert bound.exceeds("a b " * 100_000, 1000)
    assert not bound.exceeds("a b " * 500, 1000)


@pytest.mark.asyncio
async def test_long_texts_wait_for_each_other_and_short_ones_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, release = TextWorkers(), threading.Event()
    running: list[int] = []
    most = [0]

    def work(number: int) -> int:
        running.append(number)
        most[0] = max(most[0], len(running))
        release.wait(20.0)
        running.remove(number)
        return number

    long = [asyncio.create_task(workers.run(LONG_CHARS + 1, lambda i=i: work(i))) for i in range(3)]
    await until(lambda: running)
    assert await workers.run(SHORT_CHARS, lambda: "at once") == "at once"
    assert await workers.run(SHORT_CHARS + 1, lambda: "beside them") == "beside them"
    monkeypatch.setattr(tokenizer_module, "MAX_LONG", 3)
    with pytest.raises(RequestError, match="texts of over") as refused:
        await workers.run(LONG_CHARS + 1, lambda: None)
    assert (refused.value.status, refused.value.code) == (503, "text_workers_busy")
    monkeypatch.setattr(tokenizer_module, "MAX_MIDDLE_CHARS", 3 * SHORT_CHARS)
    middle = [asyncio.create_task(workers.run(SHORT_CHARS + 1, lambda: release.wait(20.0))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="wait to be tokenized already") as refused:
        await workers.run(SHORT_CHARS + 1, lambda: None)
    assert (refused.value.status, refused.value.code) == (503, "text_workers_busy")
    release.set()
    assert await asyncio.gather(*middle) == [True, True]
    assert await workers.run(SHORT_CHARS + 1, lambda: "again") == "again"
    assert await asyncio.gather(*long) == [0, 1, 2] and most[0] == 1
    assert await workers.run(LONG_CHARS + 1, lambda: "again") == "again"


@pytest.mark.asyncio
async def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_bound, "PIECE_CHARS", 50)
    text = "hello the quick brown " * 1000
    ids = await tokenizer.encode(text, field="prompt", most_tokens=len(text))
    assert ids == token_ids(tokenizer, text)


class Counting:
    """A tokenizer backend that adds up the characters it is given."""

    def __init__(self, backend: RustTokenizer) -> None:
        self._backend = backend
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.asyncio
@pytest.mark.parametrize(("most_tokens", "most_pieces"), [(100, 0), (40_000, 3)])
async def test_a_text_far_too_long_is_refused_after_a_few_pieces(
    monkeypatch: pytest.MonkeyPatch, most_tokens: int, most_pieces: int
) -> None:
    counting = Counting(tiny_hf_tokenizer().backend_tokenizer)
    tokenizer = Tokenizer(SimpleNamespace(backend_tokenizer=counting, chat_template=None))
    monkeypatch.setattr(TextBound, "chars_per_token", 128)  # as in vocabularies of real models
    with pytest.raises(RequestError, match="too long") as refused:
        await tokenizer.encode("a b " * 10**6, field="prompt", most_tokens=most_tokens)
    assert refused.value.field == "prompt" and refused.value.code == "context_length_exceeded"
    assert (counting.num_chars > 0) == (most_pieces > 0)
    assert counting.num_chars <= most_pieces * text_bound.PIECE_CHARS


@pytest.mark.asyncio
async def test_a_lone_surrogate_names_its_field() -> None:
    tokenizer = Tokenizer(tiny_hf_tokenizer())
    with pytest.raises(RequestError, match=r"prompt\[1\] is not valid Unicode text") as raised:
        await tokenizer.encode_all(["a", "b\ud800"], lambda index: f"prompt[{index}]")
    assert raised.value.field == "prompt[1]"
