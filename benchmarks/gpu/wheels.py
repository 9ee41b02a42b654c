"""Packages for a GPU machine without internet: made small enough to be carried there, and installed there.

    python -m benchmarks.gpu.wheels --make      with internet: what such a machine lacks, into build/gpu-wheels
    python -m benchmarks.gpu.wheels --install   there: into build/gpu-site; prints the environment that uses it

The machine has Python 3.12 on x86-64, and torch for CUDA 13, triton, transformers, tokenizers, safetensors, aiohttp,
uvloop, numpy, psutil, regex, requests, tqdm and jinja2. Versions are those of `constraints.txt`. Both transfer engines
that are made for memory of a CUDA device come along, in their builds for CUDA 13, without what pdserve does not load: a
quarter of their size. Called by `benchmarks/gpu/next.sh`.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "gpu-wheels"
SITE = ROOT / "build" / "gpu-site"
PACKAGES = (
    "annotated-doc", "annotated-types", "anyio", "click", "fastapi", "h11", "idna", "llguidance", "msgspec",
    "nixl-cu13", "opentelemetry-api", "orjson", "prometheus_client", "pydantic", "pydantic_core", "pyzmq", "starlette",
    "typing-inspection", "typing_extensions", "uvicorn",
)  # fmt: skip
MOONCAKE, MOONCAKE_HERE = "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda"
LINUXES = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35", "2_39")
DROPPED = (
    "mooncake/libmooncake_*", "mooncake/pg_*", "mooncake/_ep*", "mooncake/store.so", "mooncake/mooncake_master",
    "mooncake/mooncake_client", "mooncake/transfer_engine_bench", "*.libs/libetcd_wrapper-*",
    "nixl_ep_*", "*/nixl_*.scripts/*", "nixl_*.scripts/*", "*libucx_perftest*", "*/libplugin_[!U]*", "*/libtelemetry_*",
    "*/libtrace_*", "*/libaws-*", "*/libazure-*", "*/libxml2-*",
)  # fmt: skip
"""Files of the engines' wheels that are left out: stores, collectives, tools, and ways to disks and clouds."""
SYSTEM_LIBRARIES = ("libibverbs.so.1", "libmlx5.so.1", "libnuma.so.1", "libcurl.so.4")
"""What mooncake's build for CUDA links to and a machine may lack; NIXL's wheel has them under names of its own."""


def constrained(constraints: str) -> dict[str, str]:
    """Versions by name."""
    pinned = (line.partition(";")[0].strip().partition("==") for line in constraints.splitlines() if "==" in line)
    return {name: version for name, _, version in pinned if not name.startswith("#")}


def requirements(constraints: str) -> list[str]:
    """What is fetched: mooncake for CUDA is of the version that the tests here run with in its build without CUDA."""
    versions = constrained(constraints)
    return [*(f"{name}=={versions[name]}" for name in PACKAGES), f"{MOONCAKE}=={versions[MOONCAKE_HERE]}"]


def is_dropped(name: str) -> bool:
    """Whether a file of a wheel is left out."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in DROPPED)


def slim(wheel: Path, directory: Path) -> Path:
    """The wheel without what is dropped; its list of files is shortened, too, so that pip takes it."""
    target = directory / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for info in source.infolist():
            if is_dropped(info.filename):
                continue
            data = source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not is_dropped(line.partition(",")[0])).encode()
            out.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
    return target


def make(directory: Path) -> int:
    """Fetch and shorten; the exit status."""
    wanted = requirements((ROOT / "constraints.txt").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    pip += [part for linux in LINUXES for part in ("--platform", f"manylinux_{linux}_x86_64")]
    pip += ["--platform", "manylinux2014_x86_64"]
    with tempfile.TemporaryDirectory() as fetched:
        code = subprocess.run([*pip, "-d", fetched, *wanted], check=False).returncode
        if code:
            return code
        for old in directory.glob("*.whl"):
            old.unlink()
        found = [slim(wheel, directory) for wheel in sorted(Path(fetched).glob("*.whl"))]
    total = sum(wheel.stat().st_size for wheel in found)
    print(f"{len(found)} wheels, {total / 2**20:.1f} MiB, in {directory}")
    return 0


def install(wheels: Path, site: Path) -> int:
    """Install into a folder of its own, and print what makes a shell's Python use it; 1 when some do not install.

    What is there of these packages already is not touched. Where all cannot be installed together, each is alone.
    """
    found = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    failed = []
    if found and not pip_install(found, site):
        failed = [wheel for wheel in found if not pip_install([wheel], site)]
        print(*(f"not installed: {Path(wheel).name}" for wheel in failed), sep="\n", file=sys.stderr)
    elif not found:
        print(f"no wheels in {wheels}: only what is installed already is used", file=sys.stderr)
    link_libraries(site)
    python_path = [str(site), str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]
    library_path = [*library_folders(site), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    print(f"export PYTHONPATH={shlex.quote(':'.join(filter(None, python_path)))}")
    print(f"export LD_LIBRARY_PATH={shlex.quote(':'.join(filter(None, library_path)))}")
    return 1 if failed else 0


def pip_install(wheels: Sequence[str], site: Path) -> bool:
    """Whether pip has put all of them into `site`."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--upgrade", "--root-user-action=ignore", "--target", str(site)]
    return subprocess.run([*pip, *wheels], check=False, stdout=sys.stderr).returncode == 0


def link_libraries(site: Path) -> None:
    """Give the system's names to NIXL's copies of libraries that this system has not, in their folder."""
    for name in SYSTEM_LIBRARIES:
        stem, _, version = name.partition(".so.")
        copies = sorted(site.glob(f"nixl_cu1*.libs/{stem}-*.so.{version}*"))
        if has_library(name):
            continue
        if not copies:
            print(f"{name} is neither on this system nor in NIXL's wheel; mooncake will not load", file=sys.stderr)
            continue
        link = copies[0].with_name(name)
        link.unlink(missing_ok=True)
        link.symlink_to(copies[0].name)
        print(f"{name}: NIXL's copy, {copies[0].name}", file=sys.stderr)


def library_folders(site: Path) -> list[str]:
    """Where NIXL's copies lie, and the CUDA runtime that torch brought."""
    folders = [str(folder) for folder in sorted(site.glob("nixl_cu1*.libs"))]
    nvidia = importlib.util.find_spec("nvidia")
    for parent in [] if nvidia is None else list(nvidia.submodule_search_locations or []):
        folders += sorted({str(path.parent) for path in Path(parent).glob("*/lib/libcudart.so.*")})
    return folders


def has_library(name: str) -> bool:
    """Whether this system can load it; asked in this process, which must not need it for anything else."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Make or install; the exit status is 0 when all packages came."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--make", action="store_true", help="fetch the wheels; needs internet")
    what.add_argument("--install", action="store_true", help="install them; prints lines for a shell's eval")
    parser.add_argument("--wheels", type=Path, default=WHEELS)
    parser.add_argument("--site", type=Path, default=SITE)
    args = parser.parse_args(argv)
    return make(args.wheels) if args.make else install(args.wheels, args.site)


if __name__ == "__main__":
    sys.exit(main())
