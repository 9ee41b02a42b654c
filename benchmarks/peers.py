"""Systems to compare: our servers, and those of other projects, each started in the environment it lives in.

`compare_cpu` and `readme_charts` take those of `KINDS`.

Other projects' are used where `scripts/setup_peers.sh` has put them, below `.venv-peers`; who is not there is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks import report
from benchmarks.generate_child import GenerateChild
from benchmarks.load import Load, run
from benchmarks.servers import local_pair, monolith
from pdserve.base.process import Child, ChildError, end_all
from pdserve.bench.client import BenchRecord
from pdserve.model.paths import resolve_model_path

HOME = report.ROOT / ".venv-peers"
READY_S, GRACE_S = 400.0, 10.0
REQUESTED_NAME = "smollm2"
"""The model in requests; vLLM refuses a name that it does not serve."""
CONTEXT = 4096


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that all systems serve: its name in files and tables, and what servers take as `--model-path`."""

    name: str
    path: str

    def gguf(self, form: str) -> Path:
        """Return its file for llama.cpp and OpenVINO in a format such as `bf16`.

        `scripts/setup_peers.sh` makes those of SmolLM2, `hybrid_model.py` that of a hybrid.
        """
        return HOME / f"{self.name}-{form}.gguf"


SMOLLM2 = ServedModel("smollm2", "smollm2")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Records in the order of the prompts, the seconds they took together, and the CPU seconds of the system."""

    records: list[BenchRecord]
    duration_s: float
    cpu_s: float


class System(Protocol):
    """A started one."""

    def run(self, load: Load) -> Outcome:
        """Run all requests."""
        ...


class Served:
    """A server behind a URL; `pids` are the processes that belong to it, with all their children."""

    def __init__(self, url: str, pids: Sequence[int]) -> None:
        self.url = url
        self._pids = pids

    def run(self, load: Load) -> Outcome:
        """See `System`."""
        before = self._cpu_s()
        outcome = run(load, self.url)
        return Outcome(outcome.records, outcome.duration_s, self._cpu_s() - before)

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self._pids))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    total = 0.0
    parent = psutil.Process(pid)
    for one in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


class Generate:
    """`transformers` in a process of its own, without HTTP: padded batches of the concurrency, one after the other."""

    def __init__(self, threads: int, model: ServedModel) -> None:
        self._child = GenerateChild(model.path, "bfloat16", threads)
        self._child.facts()

    def run(self, load: Load) -> Outcome:
        """See `System`."""
        before = cpu_s(self._child.pid)
        outcome = self._child.run(load)
        return Outcome(outcome.records, outcome.duration_s, cpu_s(self._child.pid) - before)

    def close(self) -> None:
        """End it, by its pid."""
        self._child.close()


class OpenVino:
    """`openvino_child.py`, which has no HTTP around it."""

    def __init__(self, model: Path, threads: int) -> None:
        argv = [str(HOME / "openvino/bin/python"), str(report.ROOT / "benchmarks/openvino_child.py")]
        self._process = subprocess.Popen(
            [*argv, str(model), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("READY")

    def run(self, load: Load) -> Outcome:
        """See `System`."""
        prompts = load.prompts()
        job = {"prompts": prompts, "output_len": load.output_len}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "concurrency": load.concurrency}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._answer("DONE"))
        records = [
            BenchRecord(arrivals_s=arrivals, end_s=arrivals[-1], prompt_tokens=len(prompt), output_tokens=len(arrivals))
            for prompt, arrivals in zip(prompts, found["arrivals"], strict=True)
        ]
        return Outcome(records, found["duration_s"], found["cpu_s"])

    def close(self) -> None:
        """End it, by its pid."""
        self._process.kill()
        self._process.wait()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise ChildError(f"OpenVINO's process ended with {self._process.wait()}")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A system by name: of which precision, what must exist for it, and how it is started."""

    precision: str
    needs: Path | None
    start: Callable[[contextlib.ExitStack, int, ServedModel], System]
    gguf: str | None = None
    """The format of the model file that it reads, where it does not read the checkpoint."""

    def can_serve(self, model: ServedModel = SMOLLM2) -> bool:
        """Whether its program and its file of the model exist."""
        files = [self.needs, self.gguf and model.gguf(self.gguf)]
        return all(path.exists() for path in files if path)


MEMORY = ("--max-total-tokens", "32768")
"""All that the measurements need; peers get about as much, and a machine of 24 GiB holds them all."""


def start_pdserve(*flags: str, gguf: str | None = None) -> Callable[..., Served]:
    """A server that runs both roles, with more flags of `launch_server`.

    It serves the checkpoint, or with `gguf` the model's file for llama.cpp in that format.
    """

    def start(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> Served:
        with _children() as pids:
            path = model.path if gguf is None else str(model.gguf(gguf))
            url = stack.enter_context(monolith(path, "bfloat16", threads=threads, flags=(*MEMORY, *flags)))
        return Served(url, pids)

    return start


def start_pair(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> Served:
    """1P1D behind a router; each server has half of the threads."""
    with _children() as pids:
        url = stack.enter_context(local_pair(model.path, "bfloat16", threads=max(1, threads // 2), flags=MEMORY))
    return Served(url, pids)


@contextlib.contextmanager
def _children() -> Iterator[list[int]]:
    """The pids of the children that this process gets meanwhile; filled at the end."""
    me = psutil.Process()
    before = {child.pid for child in me.children()}
    pids: list[int] = []
    yield pids
    pids.extend(child.pid for child in me.children() if child.pid not in before)


def start_vllm(*flags: str) -> Callable[..., Served]:
    """vLLM's CPU build with more flags, and 4 GiB of KV cache."""

    def start(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> Served:
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        }
        argv = [str(HOME / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(resolve_model_path(model.path)), "--served-model-name", REQUESTED_NAME]
        argv += ["--dtype", "bfloat16"]
        argv += ["--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--no-enable-prefix-caching", *flags]
        return _served(stack, "vllm", lambda port: [*argv, "--port", str(port)], env)

    return start


def start_llama(name: str) -> Callable[..., Served]:
    """llama.cpp's server with the model in format `name`, and 64 sequences of 2,304 tokens."""

    def start(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> Served:
        count = str(threads)
        argv = [str(LLAMA), "--model", str(model.gguf(name)), "--threads", count, "--threads-batch", count]
        argv += ["--parallel", "64", "--ctx-size", str(64 * 2304)]
        # Not `--kv-unified`: there every token is held against what other and earlier prompts have left, too.
        argv += ["--no-kv-unified", "--cache-ram", "0", "--load-mode", "none", "--no-webui"]
        return _served(stack, f"llama-{name}", lambda port: [*argv, "--port", str(port)], {})

    return start


def _openvino(name: str) -> Callable[..., System]:
    def start(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> System:
        child = OpenVino(model.gguf(name), threads)
        stack.callback(child.close)
        return child

    return start


def _transformers(stack: contextlib.ExitStack, threads: int, model: ServedModel = SMOLLM2) -> System:
    child = Generate(threads, model)
    stack.callback(child.close)
    return child


LLAMA = HOME / "llama/bin/llama-server"
VLLM, OPENVINO = HOME / "vllm/bin/python", HOME / "openvino/bin/python"
KINDS: dict[str, Kind] = {
    "pdserve": Kind("bf16", None, start_pdserve()),
    "pdserve 1P1D": Kind("bf16", None, start_pair),
    "pdserve int8": Kind("8 bit", None, start_pdserve("--quantization", "int8")),
    "pdserve 4bit": Kind("4 bit", None, start_pdserve(gguf="q4_0"), "q4_0"),
    "vllm": Kind("bf16", VLLM, start_vllm()),
    "vllm cache": Kind("bf16", VLLM, start_vllm("--enable-prefix-caching")),
    "llama bf16": Kind("bf16", LLAMA, start_llama("bf16"), "bf16"),
    "llama q8_0": Kind("8 bit", LLAMA, start_llama("q8_0"), "q8_0"),
    "llama q4_0": Kind("4 bit", LLAMA, start_llama("q4_0"), "q4_0"),
    "openvino f16": Kind("bf16", OPENVINO, _openvino("f16"), "f16"),
    "transformers": Kind("bf16", None, _transformers),
}
"""By the names that the table has. `openvino f16` is computed in bfloat16 where the CPU has it."""


def _served(
    stack: contextlib.ExitStack, name: str, argv: Callable[[int], Sequence[str]], env: dict[str, str]
) -> Served:
    """A server that is told its port, and is ready when `/health` says so.

    Raises:
        ChildError: it ended, or was not ready in time; with its last lines.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    lines: list[str] = []
    child = Child(name, argv(port), env=dict(os.environ, HF_HUB_OFFLINE="1", **env), on_line=lines.append)
    stack.callback(end_all, [child], GRACE_S)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return Served(url, [child.pid])
        if child.exited or time.monotonic() > deadline:
            raise ChildError("\n".join([f"{name} does not come up", *lines[-30:]]))
        time.sleep(0.2)
