"""What is carried to a GPU machine, and what the pair's report says: without servers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.answers import Answer
from benchmarks.gpu import fence_check, pair_on_one_gpu, verify_timings, wheels
from benchmarks.gpu.fence_check import Round
from benchmarks.gpu.pair_on_one_gpu import FAKE, IN_FP32, MORE, TINY, TINY_HYBRID, Outcome, Pair
from benchmarks.gpu.timings import Timing
from benchmarks.gpu.verify_timings import Measured

SCRIPT = wheels.ROOT / "benchmarks" / "gpu" / "next.sh"


def answer_of(tokens: list[int], ttft_s: float, **timing: float) -> Answer:
    return Answer(sent_s=0.0, came_s=[ttft_s], output_ids=tokens, timing=timing)


def test_every_package_has_a_version() -> None:
    found = wheels.requirements((wheels.ROOT / "constraints.txt").read_text())
    assert len(found) == len(wheels.PACKAGES) + 1
    assert found[-1].startswith("mooncake-transfer-engine-cuda13==0.")
    assert wheels.constrained("# no==t\na==1\nb==2; python_version < '4'\n") == {"a": "1", "b": "2"}


def test_a_wheel_loses_files_and_their_lines_in_its_list(tmp_path: Path) -> None:
    (tmp_path / "slim").mkdir()
    names = ["mooncake/engine.so", "mooncake/pg_2_11_0.so", "m.libs/libplugin_UCX.so", "m.libs/libplugin_GDS.so"]
    with zipfile.ZipFile(tmp_path / "m.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
        wheel.writestr("m.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    with zipfile.ZipFile(wheels.slim(tmp_path / "m.whl", tmp_path / "slim")) as slim:
        kept = ["mooncake/engine.so", "m.libs/libplugin_UCX.so"]
        assert slim.namelist() == [*kept, "m.dist-info/RECORD"]
        assert slim.read("m.dist-info/RECORD").decode() == "".join(f"{name},,\n" for name in kept)


def test_libraries_that_are_missing_are_nixl_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "has_library", lambda name: name == "libnuma.so.1")
    folder = tmp_path / "nixl_cu13.libs"
    folder.mkdir()
    for name in ("libibverbs-1de1.so.1.14.48.0", "libnuma-3387.so.1.0.0"):
        (folder / name).touch()
    wheels.link_libraries(tmp_path)
    assert (folder / "libibverbs.so.1").readlink() == Path("libibverbs-1de1.so.1.14.48.0")
    assert not (folder / "libnuma.so.1").exists(), "the system has it"
    assert wheels.library_folders(tmp_path)[0] == str(folder)


def test_a_pair_passes_with_equal_tokens_only() -> None:
    alone = [answer_of([1, 2, 3], 0.5), answer_of([4, 5, 6], 0.5)]
    moved = {"kv_bytes": 2_000_000, "kv_transfer_s": 0.001}
    answers = [answer_of([1, 2, 3], 0.6, **moved), answer_of([4, 9, 6], 0.8, **moved)]
    outcome = Outcome("m", Pair("nixl"), None, (17, 17), 1.0, alone, answers, [True, False])
    assert not outcome.passed and outcome.verdict == "1 of 2 answers equal; differing: 1 at token 1"
    assert pair_on_one_gpu.by_length(outcome) == [["17", "500.0", "700.0", "2.0", "2.00"]]
    assert "| 1P1D nixl - monolith |" in pair_on_one_gpu.section(outcome)
    outcome.equal = [True, True]
    assert outcome.passed and outcome.verdict == "2 of 2 answers equal"
    outcome.at_once = [True, False]
    assert outcome.passed and outcome.verdict == "2 of 2 answers equal, 1 of 2 sent at once"
    outcome.model = TINY
    assert not outcome.passed, "float32 has no excuse"
    outcome.at_once = [True, True]
    assert outcome.passed
    outcome.equal = None
    assert not outcome.passed and "no KV was moved" in outcome.verdict


def test_which_pairs_there_are() -> None:
    assert pair_on_one_gpu.pairs_of("Qwen3-8B", ["mooncake", "nixl"]) == [Pair("mooncake"), Pair("nixl")]
    assert pair_on_one_gpu.pairs_of(TINY, ["nixl"]) == [Pair("nixl"), Pair("nixl", MORE)]
    assert pair_on_one_gpu.pairs_of(TINY, [FAKE]) == [Pair(FAKE)]


def test_an_engine_that_does_not_load_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_on_one_gpu, "LOADERS", {"mooncake": "raise OSError('no libcuda')", "nixl": "pass"})
    found, notes = pair_on_one_gpu.engines_there(["mooncake", "nixl"])
    assert found == ["nixl"] and notes == ["mooncake is not tried, for it does not load: OSError: no libcuda"]


@pytest.mark.parametrize("model", [TINY, TINY_HYBRID, "Qwen3-0.6B", "tiny"])
def test_what_a_server_needs_is_written(model: str, tmp_path: Path) -> None:
    args: argparse.Namespace = pair_on_one_gpu.parse_flags(["--device", "cpu"])
    assert pair_on_one_gpu.prepare(model, tmp_path) == (151936 if model == "Qwen3-0.6B" else 320)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in tmp_path.iterdir()}
    flags = pair_on_one_gpu.server_flags(model, args)
    assert ("dummy" in flags) is (model not in IN_FP32) and ("float32" in flags) is (model in IN_FP32)


def test_the_script_goes_on_behind_a_step_that_fails(tmp_path: Path) -> None:
    copy = tmp_path / "benchmarks" / "gpu" / SCRIPT.name
    copy.parent.mkdir(parents=True)
    copy.write_text(SCRIPT.read_text())
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >"$OUT/report.md"\ncase "$*" in *pair*) exit 1 ;; esac\n')
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "out"), "PYTHON": str(python)}
    done = subprocess.run(["bash", copy, "pair", "checks"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = [line.split() for line in (tmp_path / "out" / "summary.txt").read_text().splitlines()[-2:]]
    assert [(name, status) for name, status, *_ in rows] == [("pair", "1"), ("checks", "0")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checks.md", "gpu-next.tar.gz", "pair.md", "summary.txt"
    ]  # fmt: skip
    assert "--skip-timings" in (tmp_path / "out" / "checks.md").read_text()


@pytest.mark.slow
def test_verify_steps_are_timed_beside_decode_steps(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.gpu.verify_timings", "--tiny"]
    done = subprocess.run(command, env=env, cwd=wheels.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("*.json")
    measured = json.loads(written.read_text())["measured"]
    steps = ["decode", "verify, 4 tokens", "decode, graph", "decode, graph, overlap"]
    assert sorted((one["batch"], one["how"]) for one in measured) == sorted((b, s) for b in (1, 2) for s in steps)


def test_a_verify_step_is_compared_with_the_fastest_decode_step() -> None:
    def measured(batch: int, how: str, seconds: float) -> Measured:
        return Measured(batch, how, Timing(how, seconds, seconds, seconds, 0.5e-3, batch))

    rows = [measured(1, "decode", 2e-3), measured(1, "verify, 4 tokens", 3e-3), measured(1, "decode, graph", 1e-3)]
    lines = verify_timings.table(rows).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["2.00", "3.00", "1.00"]


def test_fences_are_counted_by_what_the_sender_did() -> None:
    rounds = [
        Round("runs", True, 0.02, True, 0),
        Round("runs", False, 0.03, False, 5),
        Round("is dead", True, 0.01, True, 0),
    ]
    facts = dict.fromkeys(("device", "date", "torch", "revision", "command"), "x")
    lines = fence_check.document(facts, {"nixl": rounds, "mooncake": "TransferError: no"}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert cells[-3:] == [
        ["nixl", "runs", "2", "1", "30", "1", "5"],
        ["nixl", "is dead", "1", "1", "10", "1", "0"],
        ["mooncake", "TransferError: no", "-", "-", "-", "-", "-"],
    ]


def test_help_needs_no_wheels() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.wheels"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--make" in done.stderr
