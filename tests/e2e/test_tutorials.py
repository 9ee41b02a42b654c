"""The tutorials' commands run as they are written, in terminals as the titles of the code blocks name them.

Changed for the test: ports are free ones, hosts are loopback, the model is a tiny one with a small KV pool, and
packages are installed into a folder of the test. Blocks with the title `install` are not run: their commands are
in the README or in docs/install.md, and the wheel has tests of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli.help_pages import COMMANDS
from tests.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8000", "8998", "30000", "30001")
FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
INLINE = re.compile(r"`((?:pdserve|pip|python) [^`\n]+)`")
STARTS = re.compile(r"^\s*pdserve (?:pair|serve|router)\b")
READY = re.compile(r"^ready: |^PDSERVE_READY", re.MULTILINE)
BLOCK_S, END_S = 280.0, 60.0
PAUSE_S = 0.05


def blocks(path: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of each code block."""
    return BLOCK.findall(path.read_text())


def commands_of(text: str) -> list[str]:
    """The commands of a block without comments, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for each in lines if (line := re.sub(r"\s+#.*| +$", "", each)) and not line.startswith("#")]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_test_sees_every_command_of_a_tutorial(path: Path) -> None:
    text, found = path.read_text(), blocks(path)
    assert len(FENCE.findall(text)) == 2 * len(found), "each block is at the start of a line, with language and title"
    shown = "".join((ROOT / name).read_text() for name in ("README.md", "docs/install.md"))
    for language, title, block in found:
        commands = commands_of(block) if language == "bash" else []
        if title == "install":
            assert [one for one in commands if one not in shown] == []
        elif commands:
            assert not any(STARTS.search(one) for one in commands[:-1]), "what follows a server in its block is not run"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in INLINE.findall(BLOCK.sub("", text)):
        words = shlex.split(command)
        if words[0] == "pdserve":
            assert words[1] in COMMANDS, command
        elif wanted := re.fullmatch(r"pdserve\[(\w+)\]", words[-1]):
            assert wanted[1] in extras, command


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_code_in_tutorials_is_that_of_the_files(path: Path) -> None:
    for language, title, text in blocks(path):
        assert title, f"a block of {language} has no title: the terminal, or the file that it is from"
        assert language not in ("sh", "shell", "console", "text"), "commands are in blocks of bash, to be run"
        if language != "bash":
            assert text.rstrip("\n") in (ROOT / title).read_text(), f"{title} no longer has this code"


class Terminal:
    """A shell that takes blocks of commands. Its output goes to a file."""

    def __init__(self, name: str, folder: Path, variables: dict[str, str]) -> None:
        self.name, self._folder, self._count = name, folder, 0
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._shell = subprocess.Popen(
                ["bash", "--norc", "-e", "-o", "pipefail"],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env=os.environ | variables,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """All output so far."""
        return self._log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        """Whether no command, and no server of it, has failed."""
        return self._shell.poll() is None

    def run(self, commands: str) -> None:
        """Run commands to their end, or until a server is ready."""
        self._count += 1
        script, end = self._folder / f"{self.name}-{self._count}.sh", f"END OF BLOCK {self._count}\n"
        script.write_text(commands)
        before = len(self.output)
        assert self._shell.stdin is not None
        self._shell.stdin.write(f". {script}\necho '{end.strip()}'\n".encode())
        self._shell.stdin.flush()
        deadline = time.monotonic() + BLOCK_S
        while end not in (new := self.output[before:]) and not READY.search(new):
            assert self.is_alive, f"{self.name} failed:\n{commands}\n{new[-4000:]}"
            assert time.monotonic() < deadline, f"{self.name} did not end:\n{commands}\n{new[-4000:]}"
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Press Ctrl-C and close the terminal; a process that remains is killed."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._shell.pid, signal.SIGINT)
            self._shell.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()


def free_ports(count: int) -> list[str]:
    """Return ports that are free now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Changes:
    """What the test changes in the commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = str(make_tiny("llama", folder / "tiny"))
        self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        shutil.copytree(ROOT / "examples" / "plugins", folder / "plugins")

    def of(self, commands: str) -> str:
        """Return the commands with the changes."""
        for port, free in self._ports.items():
            commands = re.sub(rf"(?<=[: ]){port}\b", free, commands)
        commands = re.sub(r"10\.0\.0\.[45]\b", "127.0.0.1", commands)
        commands = commands.replace("smollm2", self._model).replace("build/helium", str(self._folder / "helium"))
        small = "--max-total-tokens 16384 --cpu-threads 1"
        commands = re.sub(r"^(pdserve (?:pair|serve) \S+)", rf"\1 {small}", commands, flags=re.MULTILINE)
        router = f"127.0.0.1:{self._ports['8000']}"
        commands = re.sub(
            r"^(pdserve pair \S+)", rf"\1 --router-port {self._ports['8000']}", commands, flags=re.MULTILINE
        )
        commands = re.sub(
            r"^pdserve chat (?!--url)", f"pdserve chat --url http://{router} ", commands, flags=re.MULTILINE
        )
        lookup = f"prefill --disaggregation-bootstrap-port {self._ports['8998']}"
        commands = commands.replace("--disaggregation-mode prefill", f"--disaggregation-mode {lookup}")
        install = f"pip install --quiet --no-deps --no-build-isolation --target {self._folder / 'site'}"
        return commands.replace("pip install ./examples/plugins", f"{install} {self._folder / 'plugins'}")


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[dict[str, Terminal]]:
    opened: dict[str, Terminal] = {}
    yield opened
    for terminal in reversed(opened.values()):
        terminal.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_every_command_of_a_tutorial_runs(path: Path, tmp_path: Path, terminals: dict[str, Terminal]) -> None:
    changes = Changes(tmp_path)
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for language, title, text in blocks(path):
        if language != "bash" or title == "install":
            continue
        for name in title.split():
            if name not in terminals:
                terminals[name] = Terminal(name, tmp_path, variables)
            terminals[name].run(changes.of(text))
    assert [name for name, terminal in terminals.items() if not terminal.is_alive] == []
