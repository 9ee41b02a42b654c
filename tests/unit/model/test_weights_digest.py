"""The digest of all weight files: every byte counts, and it is computed once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from pdserve.errors import ModelError
from pdserve.model.weights_digest import NAME, weights_digest


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-1.safetensors").write_bytes(b"a" * 3_000_000)
    (directory / "model-2.safetensors").write_bytes(b"b" * 10)
    return directory


def test_it_is_the_digest_of_the_digests_of_all_files(model: Path) -> None:
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in sorted(model.glob("*.safetensors"))]
    assert weights_digest(model) == hashlib.sha256(b"".join(parts)).hexdigest()


def test_every_byte_counts(model: Path) -> None:
    before = weights_digest(model)
    file = model / "model-1.safetensors"
    changed = bytearray(file.read_bytes())
    changed[1_234_567] ^= 1
    file.write_bytes(changed)
    os.utime(file, ns=(1, 1))
    assert weights_digest(model) != before


def test_it_is_kept_beside_the_model_and_not_computed_again(model: Path) -> None:
    weights_digest(model)
    kept = json.loads((model / NAME).read_text())
    kept["sha256"] = "f" * 64
    (model / NAME).write_text(json.dumps(kept))
    assert weights_digest(model) == "f" * 64, "the kept one is read"
    (model / NAME).write_text("{ no JSON")
    assert weights_digest(model) != "f" * 64


def test_it_is_kept_in_the_cache_where_the_model_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (model / NAME).mkdir()  # a file of this name cannot be written
    digest = weights_digest(model)
    [place] = (tmp_path / "cache").glob("weights-*.json")
    assert json.loads(place.read_text())["sha256"] == digest == weights_digest(model)
    assert not list(model.glob(f".{NAME}.*")), "no remains"


def test_a_gguf_file_and_a_missing_one(model: Path) -> None:
    file = model / "m.gguf"
    file.write_bytes(b"xyz")
    assert weights_digest(file) == hashlib.sha256(hashlib.sha256(b"xyz").digest()).hexdigest()
    with pytest.raises(ModelError, match="cannot be read"):
        weights_digest(model / "none.gguf")
