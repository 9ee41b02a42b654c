"""A rank of a split model reads its slices of a checkpoint, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.config.groups import ParallelConfig
from pdserve.errors import ConfigError, ModelError, RankError
from pdserve.executor.factory import LocalRanks
from pdserve.model import loader
from pdserve.model.config import ModelSpec
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_model, read_spec
from pdserve.model.parallel import SingleRank
from pdserve.model.params import fingerprint_of
from pdserve.model.placement import first_placement, slots_of
from pdserve.model.torch_parallel import open_parallel
from tests.gguf_files import write_gguf
from tests.tiny import Family, make_tiny

CPU = torch.device("cpu")
SHAPES = [ParallelShape(tp_size=tp, pp_size=pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (4, 3))]


class Standing(SingleRank):
    """A rank somewhere in a replica whose other ranks are not there: enough for loading."""

    def __init__(self, coord: RankCoord) -> None:
        self.coord = coord


@dataclasses.dataclass
class Recorder:
    """Stands for `safe_open`: notes how many elements of each tensor were given out."""

    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __call__(self, path: Path, framework: str) -> RecordedFile:
        return RecordedFile(safe_open(path, framework=framework), self.read)


class RecordedFile:
    """One open file."""

    def __init__(self, file: Any, read: collections.Counter[str]) -> None:
        self._file, self._read = file, read

    def __enter__(self) -> RecordedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._noted(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> RecordedSlice:
        return RecordedSlice(self._file.get_slice(name), lambda value: self._noted(name, value))

    def _noted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self._read[name] += value.numel()
        return value


class RecordedSlice:
    """A tensor that is read in part."""

    def __init__(self, inner: Any, noted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner, self._noted = inner, noted

    def get_shape(self) -> list[int]:
        return list(self._inner.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._noted(self._inner[index])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"tp{shape.tp_size}pp{shape.pp_size}")
def test_a_rank_reads_what_it_holds_and_all_ranks_hold_everything(
    shape: ParallelShape, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("llama", tmp_path, tie_word_embeddings=tied, attention_bias=True, vocab_size=333)
    sizes = {name: value.numel() for name, value in load_file(path / "model.safetensors").items()}
    whole = _load(path, ParallelShape().coord(0)).params.samples()
    total: collections.Counter[str] = collections.Counter()
    ranks = []
    for rank in range(shape.num_ranks):
        recorder = Recorder()
        monkeypatch.setattr(loader, "safe_open", recorder)
        model = _load(path, shape.coord(rank))
        assert recorder.read.total() * 4 == model.params.num_bytes
        total += recorder.read
        ranks.append(model.params.samples())
    for name, size in sizes.items():
        assert total[name] == size * _copies(name, shape, tied), name
    assert fingerprint_of(ranks) == fingerprint_of([whole])


def _copies(name: str, shape: ParallelShape, tied: bool) -> int:
    """How many ranks hold an element of it: one, but for norms, shared KV heads (2 in all), and a tied head."""
    if "norm" in name:
        return shape.tp_size
    if "k_proj" in name or "v_proj" in name:
        return max(1, shape.tp_size // 2)
    return 2 if tied and "embed" in name and shape.pp_size > 1 else 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"tp{shape.tp_size}pp{shape.pp_size}")
def test_tensor_ranks_read_their_columns_of_every_expert(
    shape: ParallelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny("qwen3_moe", tmp_path, mlp_only_layers=[1])
    sizes = {name: value.numel() for name, value in load_file(path / "model.safetensors").items()}
    whole = _load(path, ParallelShape().coord(0)).params.samples()
    recorder, ranks = Recorder(), []
    monkeypatch.setattr(loader, "safe_open", recorder)
    for rank in range(shape.num_ranks):
        ranks.append(_load(path, shape.coord(rank)).params.samples())
    for name in sizes:
        copies = shape.tp_size if ".mlp.gate." in name else _copies(name, shape, False)
        assert recorder.read[name] == sizes[name] * copies, name
    assert fingerprint_of(ranks) == fingerprint_of([whole])


def test_a_rank_with_whole_experts_reads_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shape = make_tiny("qwen3_moe", tmp_path), ParallelShape(tp_size=4)
    spec = read_spec(path)
    assert spec.moe is not None
    whole = _load(path, ParallelShape().coord(0)).params.samples()
    expert_map, ranks = first_placement(spec.moe, spec.moe_layers, 4, 0, "trivial"), []
    for rank in range(4):
        recorder = Recorder()
        monkeypatch.setattr(loader, "safe_open", recorder)
        standing = Standing(shape.coord(rank))
        model = load_model(
            path, spec, "float32", CPU, load_format="auto", seed=3, parallel=standing, expert_map=expert_map
        )
        assert recorder.read.total() * 4 == model.params.num_bytes
        found = {int(match[1]) for name in recorder.read if (match := re.search(r"experts\.(\d+)\.", name))}
        assert found == set(slots_of(expert_map.rows[0], 4, rank)) and len(found) == 2
        ranks.append(model.params.samples())
    assert fingerprint_of(ranks) == fingerprint_of([whole])


def test_only_its_share_of_a_mapped_file_comes_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, that is: where columns are split, a mapped page has something of every rank."""
    path = make_tiny("llama", tmp_path, vocab_size=60_000)
    size = (path / "model.safetensors").stat().st_size
    assert _most_resident(path, ParallelShape(), monkeypatch) > 0.95 * size
    assert _most_resident(path, ParallelShape(tp_size=4), monkeypatch) < 0.4 * size


def test_a_mapped_file_comes_into_memory_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path, vocab_size=60_000)
    size = (path / "model.safetensors").stat().st_size
    monkeypatch.setattr(loader, "WINDOW_BYTES", size // 8)
    assert 0 < _most_resident(path, ParallelShape(), monkeypatch) < 0.6 * size  # one of two tensors that are half of it


def test_a_gguf_file_comes_into_memory_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf", vocab_size=60_000), tmp_path / "tiny.gguf", "llama")
    size, most = path.stat().st_size, []
    for window in (2 * size, size // 8):
        monkeypatch.setattr(loader, "WINDOW_BYTES", window)
        resident: list[int] = []
        model = loader.empty_model(read_spec(path), "float32", CPU)
        loader.fill_model(
            model, path, load_format="auto", seed=0,
            on_progress=lambda *_, found=resident: found.append(_resident_bytes(path)),
        )  # fmt: skip
        most.append(max(resident))
    assert most[0] > 0.95 * size and most[1] < 0.2 * size


def _most_resident(path: Path, shape: ParallelShape, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most of the mapped file that is in memory while the last rank loads."""
    resident = []

    class Watched(RecordedFile):
        def __exit__(self, *error: object) -> None:
            resident.append(_resident_bytes(path / "model.safetensors"))
            super().__exit__(*error)

    def open_watched(file: Path, framework: str) -> Watched:
        return Watched(safe_open(file, framework=framework), collections.Counter())

    monkeypatch.setattr(loader, "safe_open", open_watched)
    _load(path, shape.coord(shape.num_ranks - 1))
    return max(resident)


def _resident_bytes(path: Path) -> int:
    """What of the mapped file is in this process's memory."""
    sections = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mapped = [section for section in sections if str(path) in section.partition("\n")[0]]
    if not mapped:
        pytest.skip("this safetensors does not map files")
    return sum(int(match[1]) << 10 for section in mapped if (match := re.search(r"Rss:\s+(\d+) kB", section)))


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_wrong_tensor_is_found_by_some_rank(name: str, change: str, tmp_path: Path) -> None:
    path, shape = make_tiny("llama", tmp_path), ParallelShape(tp_size=2, pp_size=3)
    tensors = load_file(path / "model.safetensors")
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        name = name.replace("weight", "scale")
        tensors[name] = torch.ones(3)
    else:
        tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, path / "model.safetensors")
    refusals = []
    for rank in range(shape.num_ranks):
        try:
            _load(path, shape.coord(rank))
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) >= 2
    assert all(name in refusal for refusal in refusals)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_is_cut_like_its_checkpoint(family: Family, tmp_path: Path) -> None:
    checkpoint = make_tiny(family, tmp_path / "hf", vocab_size=321)
    path = write_gguf(checkpoint, tmp_path / "tiny.gguf", family)
    whole = _load(checkpoint, ParallelShape().coord(0)).params.samples()
    for shape in SHAPES:
        ranks = [_load(path, shape.coord(r)).params.samples() for r in range(shape.num_ranks)]
        assert fingerprint_of(ranks) == fingerprint_of([whole])


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_slices_of_dummies_are_slices_of_the_whole(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, vocab_size=321)
    whole = _load(path, ParallelShape().coord(0), load_format="dummy").params.samples()
    for shape in SHAPES:
        ranks = [_load(path, shape.coord(r), load_format="dummy").params.samples() for r in range(shape.num_ranks)]
        assert fingerprint_of(ranks) == fingerprint_of([whole])


def _load(path: Path, coord: RankCoord, load_format: Any = "auto") -> Decoder:
    spec: ModelSpec = read_spec(path)
    return load_model(path, spec, "float32", CPU, load_format=load_format, seed=3, parallel=Standing(coord))


def test_ranks_of_a_host_are_numbered_on_it() -> None:
    shape = ParallelShape(tp_size=2, pp_size=2)
    ranks = [LocalRanks.of(ParallelConfig(tp_size=2, pp_size=2, nnodes=2), shape.coord(r)) for r in range(4)]
    assert [(rank.index, rank.count) for rank in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize("host", ["192.0.2.1", "no such name"])
def test_an_address_that_is_not_of_this_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=host) as error:
        open_parallel(ParallelShape(tp_size=2).coord(0), HashStore(), CPU, host=host)
    assert error.value.field == "disaggregation_host"


def test_a_rank_that_never_comes_is_an_error_in_time() -> None:
    with pytest.raises(RankError, match="rendezvous"):
        open_parallel(ParallelShape(tp_size=2).coord(0), HashStore(), CPU, timeout_s=1.0)
