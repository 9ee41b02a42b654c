"""Counts the package's files that one streamed chat request through a pair enters.

The program starts a prefill server, a decode server and a router, sends requests until they are warm, and then records
which functions run in any process while one more streamed chat is answered. It also records some seconds without a
request: heartbeats, health checks, and turns of idle loops. A file counts when one of its functions ran with the
request and not without one. Files whose functions all run without a request too are counted apart. The launcher of the
service is not counted, because no request passes it.

    python scripts/entered_files.py [--list] [--model-path smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "pdserve"
READY = "ready: OPENAI_BASE_URL="
LAUNCHER = "pdserve.launch_local"
START_S, WARM_UP, WRITE_S = 300.0, 4, 20.0
IDLE_WINDOWS, MOST_WINDOWS, IDLE_S = 6, 24, 1.5
OF_REQUESTS = frozenset(
    {
        "scheduler/scheduler.py:Scheduler._admit",
        "executor/local_executor.py:LocalExecutor.launch",
        "transfer/copy_workers.py:CopyWorkers._run",
    }
)
"""They run for each request, also for the probes of the router's watchdog. An idle window with one is left out."""
HOOK = """
import mmap, os, sys, threading, time

folder = os.environ.get("PDSERVE_ENTERED_FILES")
if folder:
    with open(os.path.join(folder, "switch"), "r+b") as file:
        switch = mmap.mmap(file.fileno(), 8)  # [0]: the window that is open; [1]: the one to write down
    windows = {}

    def note(frame, event, arg):
        if switch[0] and event == "call":
            code = frame.f_code
            windows.setdefault(switch[0], set()).add(code.co_filename + ":" + code.co_qualname)

    def write():
        written = 0
        while True:
            time.sleep(0.05)
            if switch[1] != written:
                written = switch[1]
                path = os.path.join(folder, f"{written}.{os.getpid()}")
                with open(path + ".part", "w") as out:
                    out.write("\\n".join([" ".join(sys.orig_argv), *windows.get(written, ())]))
                os.rename(path + ".part", path)

    threading.Thread(target=write, daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)
"""


class Windows:
    """The shared switch of all processes: `record` opens a window, `entered` reads what they wrote of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "switch").write_bytes(bytes(8))
        (folder / "sitecustomize.py").write_text(HOOK)
        with open(folder / "switch", "r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 8)
        self._number = 0

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Functions that run within the block are recorded."""
        self._number += 1
        self._switch[0] = self._number
        yield
        self._switch[0] = 0

    def entered(self) -> dict[str, set[str]]:
        """Functions of the package, as `file:name`, that ran in the last window, by the command of the process."""
        self._switch[1] = self._number
        deadline, seen = time.monotonic() + WRITE_S, -1
        while True:  # until no further process writes
            time.sleep(1.0)
            paths = [path for path in self._folder.glob(f"{self._number}.*") if path.suffix != ".part"]
            if len(paths) == seen or time.monotonic() > deadline:
                break
            seen = len(paths)
        found: dict[str, set[str]] = {}
        for path in paths:
            command, *functions = path.read_text().split("\n")
            inside = {str(Path(name).relative_to(PACKAGE)) for name in functions if Path(name).is_relative_to(PACKAGE)}
            found.setdefault(command, set()).update(inside)
        return found


def ask(base_url: str, model: str) -> None:
    """One streamed chat, read to its end."""
    body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    body |= {"max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    assert text.rstrip().endswith("[DONE]"), text[-500:]


@contextlib.contextmanager
def service(folder: Path, model: str) -> Iterator[str]:
    """A pair behind a router; its base URL."""
    env = os.environ | {"PDSERVE_ENTERED_FILES": str(folder), "PYTHONPATH": f"{folder}:{PACKAGE.parent}"}
    flags = ["--model-path", model, "--max-total-tokens", "4096", "--router-port", "0"]
    command = [sys.executable, "-m", LAUNCHER, *flags]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next((line for line in process.stdout if line.startswith(READY)), None)
            if url is None:
                raise SystemExit("the service did not start; its output says why")
            yield url.removeprefix(READY).split()[0]
        finally:
            process.terminate()


def files_of(functions: set[str]) -> set[str]:
    """The files of `file:name` entries."""
    return {function.partition(":")[0] for function in functions}


def main() -> None:
    """Print the count, and the files by process with `--list`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--list", action="store_true", help="print the files of each process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        windows = Windows(Path(name))
        with service(Path(name), args.model_path) as url:
            with urllib.request.urlopen(f"{url}/models", timeout=30) as answer:
                model = json.load(answer)["data"][0]["id"]
            for _ in range(WARM_UP):
                ask(url, model)
            with windows.record():
                ask(url, model)
            by_process = windows.entered()
            idle: set[str] = set()
            num_clean = 0
            for _ in range(MOST_WINDOWS):
                with windows.record():
                    time.sleep(IDLE_S)
                functions = set[str]().union(*windows.entered().values())
                if functions.isdisjoint(OF_REQUESTS):
                    idle |= functions
                    num_clean += 1
                if num_clean == IDLE_WINDOWS:
                    break
    by_process = {command: functions for command, functions in by_process.items() if LAUNCHER not in command}
    ran = set[str]().union(*by_process.values())
    entered = files_of(ran - idle)
    if args.list:
        for command, functions in sorted(by_process.items()):
            files = files_of(functions)
            print(f"{len(files):4d}  {command}")
            for file in sorted(files):
                print(f"        {file}{'' if file in entered else '  (idle)'}")
    print(
        f"{len(entered)} files entered by a streamed chat request "
        f"({len(files_of(ran) - entered)} more ran functions that also run without a request)"
    )


if __name__ == "__main__":
    main()
