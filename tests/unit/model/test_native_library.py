"""Where the kernels can be built and run they are there, and built from the sources that lie here.

Without this, all tests of the kernels would be skipped where the build has failed, which `setup.py` allows.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
from ctypes import c_char_p
from pathlib import Path

import pytest

from pdserve.base.native import LEVEL_VARIABLE, LEVELS, best_level, library, supports

ROOT = Path(__file__).parents[3]
CPU_INFO = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""


def can_be_built_and_run() -> bool:
    """Linux on x86-64 with AVX2, and a C++ compiler."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or shutil.which("c++") is None:
        return False
    flags = next(line for line in CPU_INFO.splitlines() if line.startswith("flags"))
    return {"avx2", "fma", "f16c"} <= set(flags.split())


pytestmark = pytest.mark.skipif(not can_be_built_and_run(), reason="the kernels cannot be built or run here")


def test_the_library_loads_and_has_a_level_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    best = best_level()
    assert best in LEVELS and supports(best)
    facts = dict(line.replace("\t", "").split(":", 1) for line in CPU_INFO.split("\n\n")[0].splitlines() if ":" in line)
    flags = set(facts["flags"].split())
    has_bf16 = {"avx512_bf16", "avx512_vnni"} <= flags
    has_amx = has_bf16 and {"amx_tile", "amx_bf16"} <= flags
    is_zen4 = has_bf16 and facts["vendor_id"].strip() == "AuthenticAMD" and int(facts["cpu family"]) == 25
    assert (best == "amx") is supports("amx") is has_amx
    assert (best == "zen4") is is_zen4
    assert supports("zen4") is supports("avx512_bf16") is has_bf16


def test_the_library_is_built_from_the_sources_that_lie_here() -> None:
    """As `digest` in setup.py has it. If not: `python setup.py build_ext --inplace`."""
    files = [ROOT / "setup.py", *sorted((ROOT / "csrc").iterdir())]
    built_from = library().pdk_sources
    built_from.restype = c_char_p
    assert built_from().decode() == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
