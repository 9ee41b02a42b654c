"""Captured decode steps: which sizes, how a step is padded to one, and whole models whose replays run on the host."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor import backend_choice
from pdserve.executor.factory import LoadedEngine, build_executor, make_ready
from pdserve.executor.graphs import EagerCapture, GraphCapture, Padding, Replay, graph_sizes, is_decode, padded
from pdserve.executor.input_batch import read_plan
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.executor.local_executor import LocalExecutor
from pdserve.executor.warm_up import spans_of
from pdserve.memory.kv_memory import PageTable
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.sim.hash_lm import hash_layout
from tests.driver import Driver, build, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, WINDOW_FAMILIES, Family, make_tiny
from tests.unit.model.eagle_kit import TORCH, make_eagle3, options
from tests.unit.model.triton_kit import DEVICE


def test_sizes_are_dense_where_steps_are_small_and_end_at_the_largest() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(100)[-2:] == (96, 100)
    for most in (1, 7, 8, 255, 256, 257, 600, 4096):
        sizes = graph_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))


def test_padding_reads_the_null_page_and_writes_nowhere() -> None:
    table = PageTable(4, 5)
    rows = [table.open([3, 1]), table.open([2])]
    plan = BatchPlan(
        0, tuple(BatchRow(str(row), row, end - 1, end, True) for row, end in zip(rows, (6, 4), strict=True))
    )
    host = read_plan(plan, table, np.zeros(4, dtype=np.int64), hash_layout(4))
    assert is_decode(host)
    filled = padded(host, 4, Padding(spare_row=4, null_page=9))
    assert filled.columns.tolist() == [[*rows, 4, 4], [5, 3, 0, 0], [1, 2, -1, -1], [1, 3, 0, 0]]
    assert filled.rows.ends.tolist() == [6, 4, 1, 1] and filled.rows.starts.tolist() == [5, 3, 0, 0]
    assert filled.rows.pages[2:].tolist() == [[9, 9], [9, 9]]
    np.testing.assert_array_equal(filled.rows.pages[:2], host.rows.pages)
    assert filled.rows.offsets.tolist() == [0, 1, 2, 3]


def test_padding_has_null_window_pages_and_no_slot() -> None:
    table = PageTable(4, 5, has_window=True)
    row = table.open([3, 1])
    assert row is not None
    table.window[row, :2], table.slots[row] = [7, 5], 2
    plan = BatchPlan(0, (BatchRow("r", row, 5, 6, True),))
    host = read_plan(plan, table, np.zeros(4, dtype=np.int64), hash_layout(4, window=8))
    filled = padded(host, 3, Padding(spare_row=4, null_page=9, null_window_page=8, has_state=True))
    assert filled.rows.window is not None and filled.rows.slots is not None
    assert filled.rows.window.tolist() == [[7, 5], [8, 8], [8, 8]]
    assert filled.rows.slots.tolist() == [2, -1, -1]
    assert filled.rows.in_window().pages is filled.rows.window


@pytest.mark.parametrize("rows", [(0, 4, True), (3, 4, False)], ids=["several tokens", "nothing sampled"])
def test_other_steps_are_no_decode_steps(rows: tuple[int, int, bool]) -> None:
    table = PageTable(1, 5)
    row = table.open([0])
    assert row is not None
    assert not is_decode(read_plan(BatchPlan(0, (BatchRow("r", row, *rows),)), table, np.array([4]), hash_layout(4)))


class Starting:
    """Stands in for an executor on CUDA at start-up: remembers what is captured."""

    device = torch.device("cuda")
    can_capture = True
    captured: tuple[int, ...] | None = None
    is_warm = False

    def warm_up(self, chunk: int) -> None:
        self.is_warm = True

    def capture_decode(self, sizes: tuple[int, ...]) -> None:
        self.captured = sizes


@pytest.mark.parametrize(
    ("kernels", "max_rows", "captured"),
    [
        (KernelConfig(), 24, (1, 2, 4, 8, 16, 24)),
        (KernelConfig(cuda_graph_max_bs=10), 24, (1, 2, 4, 8, 10)),
        (KernelConfig(cuda_graph_max_bs=64), 8, (1, 2, 4, 8)),
        (KernelConfig(cuda_graph_max_bs=8, disable_cuda_graph=True), 24, None),
    ],
)
def test_flags_say_what_is_captured_at_start(
    kernels: KernelConfig, max_rows: int, captured: tuple[int, ...] | None
) -> None:
    executor = Starting()
    config = ServerConfig(model=ModelConfig(model_path="m"), kernels=kernels)
    make_ready(cast(LocalExecutor, executor), config, max_rows, 64)
    assert executor.is_warm and executor.captured == captured


class Counted:
    """A capture that counts replays by size, in order of capture."""

    def __init__(self) -> None:
        self._inner = EagerCapture() if DEVICE == "cpu" else GraphCapture()
        self.replays: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Replay:
        replay, index = self._inner(work), len(self.replays)
        self.replays.append(0)

        def counted() -> None:
            self.replays[index] += 1
            replay()

        return counted


def built(
    checkpoint: Path, *, overlap: bool = False, dtype: Literal["float32", "float16"] = "float32"
) -> LoadedEngine:  # fmt: skip
    """A small executor by Triton."""
    return build_executor(
        ServerConfig(
            model=ModelConfig(model_path=str(checkpoint), dtype=dtype, context_length=64),
            memory=MemoryConfig(page_size=8, max_total_tokens=512),
            schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
            kernels=KernelConfig(
                device="cuda" if DEVICE == "cuda" else "cpu", attention_backend="triton", cpu_threads=1,
                disable_cuda_graph=True,
            ),
        ),
        max_rows=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("llama")


def test_tokens_by_replays_are_those_of_launched_kernels(checkpoint: Path) -> None:
    """Three rows in a size of four; the step with their prompts is launched kernel by kernel."""
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (5, 3, 8)]
    expected = Driver(built(checkpoint)).generate(prompts, 3)
    counted = Counted()
    mine = built(checkpoint)
    mine.executor.capture_decode((1, 2, 4), counted)
    assert mine.executor.graphs is not None and mine.executor.graphs.sizes == (1, 2, 4)
    assert Driver(mine).generate(prompts, 3) == expected
    assert counted.replays == [2, 0, 0], "the largest is captured first"
    null_page = mine.executor.pools[0].layer(0)[-1]
    assert not null_page.any(), "padding was written to the null page"


class Replanned(TorchAttention):
    """A capturable backend on the host: each replay plans its step again."""

    def capturing(self) -> Replanned:  # type: ignore[override]
        return self

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> ReplannedStep:
        return ReplannedStep(self, write_pages, write_slots)


class ReplannedStep:
    """Attention of rows that are written; others are padding."""

    def __init__(self, backend: Replanned, write_pages: Tensor, write_slots: Tensor) -> None:
        self._backend, self._pages, self._slots = backend, write_pages, write_slots
        self.rows: HostRows | None = None

    def filling(self, rows: HostRows) -> list[Filling]:
        self.rows = rows
        return []

    def attend(self, layer: int, heads: Heads) -> Tensor:
        assert self.rows is not None
        live = (self._pages >= 0).nonzero().flatten()
        kept, host = live.numpy(), self.rows
        rows = HostRows(host.starts[kept], host.ends[kept], np.arange(len(kept)), host.prompts[kept], host.pages[kept])
        columns = torch.stack((self._pages, self._pages, self._pages, self._slots))[:, live]
        own = dataclasses.replace(heads, qkv=heads.qkv[live], cos=heads.cos[live], sin=heads.sin[live])
        out = heads.qkv.new_zeros(len(heads.qkv), heads.num_heads * heads.qkv.shape[-1])
        if len(kept):
            out[live] = self._backend.begin(ForwardBatch(columns, live, rows)).attend(layer, own)
        return out


@pytest.mark.skipif(DEVICE != "cpu", reason="the backend is for the host")
def test_replays_of_a_model_with_windows_give_the_tokens_of_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("qwen3", tmp_path, **WINDOW_FAMILIES["qwen3"])
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (5, 30, 64)]
    expected = Driver(build(path, model_impl="native", page_size=8, context_length=128)).generate(prompts, 12)
    monkeypatch.setattr(backend_choice, "TorchAttention", Replanned)
    mine, counted = build(path, model_impl="native", page_size=8, context_length=128), Counted()
    mine.executor.capture_decode((1, 2, 4), counted)
    assert Driver(mine).generate(prompts, 12) == expected
    assert counted.replays == [11, 0, 0]
    for pool in mine.executor.pools:
        assert isinstance(pool, KVPool) and not pool.layer(0)[-1].any(), "padding was written to the null page"


@pytest.mark.skipif(DEVICE != "cpu", reason="the backend is for the host")
def test_steps_beside_a_drafter_are_replayed_and_keep_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it sees later, and those that it drafts behind; only steps with drafts are not replayed."""
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=6)
    head = make_eagle3(tmp_path / "head", path)
    found = []
    for captures in (False, True):
        if captures:
            monkeypatch.setattr(backend_choice, "TorchAttention", Replanned)
        driver, counted = Driver(build(path, **options(TORCH, "EAGLE3", head))), Counted()
        executor = driver.built.executor
        if captures:
            executor.capture_decode((1, 2), counted)
        row = driver.open(random_prompt(21, VOCAB_SIZE), 40)
        start, known, drafts = 0, 21, []
        given: tuple[int, ...] = ()
        for step, num_proposals in enumerate((0, 0, 0, None, None, 0, 0, None)):
            end = known + len(given)
            result = run(
                executor, BatchPlan(step, (BatchRow("r", row, start, end, True, drafts=given),), num_proposals)
            )
            start, known = known + len(result.sampled(0)) - 1, known + len(result.sampled(0))
            drafts.append((result.sampled(0), result.drafts.get(0)))
            given = result.drafts.get(0, ()) if step == 3 else ()
        found.append(drafts)
        assert sum(counted.replays) == (6 if captures else 0), "all but the prompt, and the step with drafts"
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", rest_slow(["float32", "float16"]))
def test_what_is_sampled_from_a_replay_is_what_is_sampled_otherwise(
    checkpoint: Path, dtype: Literal["float32", "float16"]
) -> None:
    """And is what the next step goes on with: the likeliest, which a replay puts in place, is another."""
    sampling = CoreSamplingParams(temperature=1.2, seed=4, top_k=20, repetition_penalty=1.3, logit_bias={5: 2.0})
    found = []
    for captures in (False, True):
        one = built(checkpoint, dtype=dtype)
        if captures:
            one.executor.capture_decode((2,), Counted())
        driver = Driver(one)
        row = driver.open(random_prompt(7, VOCAB_SIZE), 16, sampling, top_logprobs=2)
        start, tokens = 0, []
        for end in range(7, 10):
            token = driver.step((row, start, end, True))[0]
            assert token is not None and token.logprob is not None
            tokens.append((token.token_id, round(token.logprob, 3)))
            start = end
        found.append(tokens)
    assert found[0] == found[1]


def test_steps_launched_ahead_use_the_tokens_of_replays(checkpoint: Path) -> None:
    prompt = random_prompt(6, VOCAB_SIZE)
    (expected,) = Driver(built(checkpoint)).generate([prompt], 4)
    one = built(checkpoint, overlap=True)
    try:
        one.executor.capture_decode((1, 2), Counted())
        row = Driver(one).open(prompt, 12)
        spans = [(0, 6), *((end - 1, end) for end in range(7, 10))]
        flying = [
            one.executor.launch(BatchPlan(step, (BatchRow("r", row, start, end, True),)))
            for step, (start, end) in enumerate(spans)
        ]
        tokens = [one.executor.resolve(handle).tokens[0] for handle in flying]
    finally:
        one.executor.close()
    assert [None if token is None else token.token_id for token in tokens] == expected
    assert torch.equal(one.executor.pools[0].layer(0)[-1], torch.zeros_like(one.executor.pools[0].layer(0)[-1]))


@pytest.mark.slow
def test_warming_up_has_every_form_of_step_and_leaves_no_trace(checkpoint: Path) -> None:
    forms = spans_of(2000, 4, 512)
    short, long = (0, 1), (1999, 2000)
    assert forms[:2] == [[*[short] * 3, (0, 512)], [(0, 64)]], "the fullest, and a short chunk"
    for first, some in ((short, forms[2:8]), (long, forms[8:])):
        assert some[::2] == [[first], [first, short], [first, *[short] * 3]]
        assert some[1::2] == [[(0, 2)], [first, (0, 2)], [first, *[short] * 2, (0, 2)]]
    one = built(checkpoint)
    pool = one.executor.pools[0]
    pool.pages.fill_(float("nan"))
    one.executor.warm_up(8)
    assert pool.pages.isnan().all(), "a page was written"
    assert not pool.layer(0)[-1].any(), "the null page was written"


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows addresses; what lies there belongs to the work that was captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    for name in ("CUDAGraph", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)

    def work(tensor: torch.Tensor = tensor) -> None:
        tensor.add_(1)

    replay = GraphCapture()(work)
    del tensor, work
    gc.collect()
    assert alive() is not None
    replay()
    cast(mock.MagicMock, torch.cuda.CUDAGraph).return_value.replay.assert_called_once_with()
