"""Builds the CPU kernels of `csrc` into the package; all else is in pyproject.toml.

`csrc/level.cpp` is compiled once for each instruction-set level, and the library picks one when it runs. Without a
compiler, or on another architecture, the package is installed without the library, and models are computed by torch.
`python setup.py build_ext --inplace` builds it anew where pdserve is installed as editable. The library has no Python
in it, so one wheel serves all versions of Python; its tag states the oldest glibc and libstdc++ that the library loads
with.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = "libpdserve_kernels.so"
SOURCES = [
    f"csrc/{name}.cpp"
    for name in (
        "api",
        "choose",
        "delta",
        "experts",
        "latent",
        "lora",
        "ops",
        "plan",
        "pool",
        "program",
        "selection",
        "sparse",
        "weights",
    )
]
LEVEL_SOURCE = "csrc/level.cpp"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
LEVELS = {
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DPDK_AMX"],
    "zen4": [*AVX512_BF16, "-DPDK_ZEN4"],
    "avx512_bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
FLAGS = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"]
GCC_12 = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # its own intrinsics
# What is multiplied and added in one is written so: what a compiler makes of the same lines at two places may differ.
LEVEL_FLAGS = ["-O3", "-fno-math-errno", "-ffp-contract=off", *GCC_12]


def digest() -> str:
    """Of all that the library is built from, this file among it; a test looks whether the library was built from it."""
    files = [Path("setup.py"), *sorted(Path("csrc").iterdir())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class BuildKernels(build_ext):
    """A plain shared library under a fixed name: it knows nothing of Python and is loaded by ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where it goes, below the directory of the packages."""
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Those that `pdk.h` exports; there is no module to initialise."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Each level, what is common to all, and the library of both."""
        if platform.machine() not in ("x86_64", "AMD64"):
            raise CompileError(f"the CPU kernels are for x86-64, not {platform.machine()}")
        objects = self.compiler.compile(
            SOURCES,
            self.build_temp,
            macros=[("PDK_SOURCES", f'"{digest()}"')],
            depends=ext.depends,
            extra_postargs=[*FLAGS, "-O2"],
        )
        for level, flags in LEVELS.items():
            objects += self.compiler.compile(
                [LEVEL_SOURCE],
                str(Path(self.build_temp) / level),
                macros=[("PDK_LEVEL", level)],
                depends=ext.depends,
                extra_postargs=[*FLAGS, *LEVEL_FLAGS, *flags],
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread", "-Wl,--no-undefined"], target_lang="c++"
        )


OLDEST_GLIBC = 17
"""The oldest minor version of glibc 2 that a manylinux tag of this form may name."""
GLIBC_OF_LIBSTDCXX = {19: 17, 24: 28, 28: 31, 29: 34, 30: 35, 33: 39}
"""The newest GLIBCXX_3.4.x that a manylinux tag allows, and the minor version of glibc 2 in that tag (PEP 600)."""


def platform_tag(library: bytes) -> str:
    """The tag of a wheel with this shared library: `manylinux_2_N`, or `linux` where it is newer than every policy."""
    glibc = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library)]
    libstdcxx = max((int(minor) for minor in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", library)), default=0)
    allowed = [glibc_minor for newest, glibc_minor in GLIBC_OF_LIBSTDCXX.items() if newest >= libstdcxx]
    if not glibc or not allowed:  # no glibc: musl
        return f"linux_{platform.machine()}"
    return f"manylinux_2_{max(OLDEST_GLIBC, min(allowed), *glibc)}_{platform.machine()}"


class BuildWheel(bdist_wheel):
    """One wheel for all versions of Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """`py3-none-manylinux...`, or `py3-none-any` for a package without the library."""
        libraries = list(Path(self.bdist_dir).rglob(LIBRARY))
        return "py3", "none", platform_tag(libraries[0].read_bytes()) if libraries else "any"


setup(
    ext_modules=[
        Extension(
            "pdserve.base.kernels",
            sources=[*SOURCES, LEVEL_SOURCE],
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildKernels},
)
