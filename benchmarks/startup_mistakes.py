"""Mistakes at start-up: how long each takes to be told, with which status, and on how many lines.

    python -m benchmarks.startup_mistakes --write

Exit status 1 when a mistake is not told once, with its cause and status 2, or when torch was imported for it. Times are
the process's whole life. The aim is a second each on an idle machine, and ten seconds for a hub that does not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Run, add_write_flags, footer, markdown_table
from pdserve.config.resolve import NVIDIA_DRIVER

LIMIT_S = 60.0
IMPORTED = "imported: "
PROGRAM = f"""
import sys
from pdserve.{{module}} import main
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
print("{IMPORTED}" + ",".join(name for name in ("torch", "transformers") if name in sys.modules))
sys.exit(status)
"""
NOTES = (
    "Times are of the whole process: interpreter, imports, checks. Other load on the machine lengthens them; it hardly "
    "changes the CPU time.",
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """A command line that must be refused. `says` is a part of the message; `env` is added to the environment."""

    name: str
    module: str = "launch_server"
    argv: tuple[str, ...]
    says: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a mistake led to. `lines` are those on stderr that are not log lines below a warning.

    `seconds` is real time, `cpu_s` CPU time of the process.
    """

    mistake: Mistake
    status: int
    lines: list[str]
    imported: str
    seconds: float
    cpu_s: float = 0.0

    @property
    def problem(self) -> str:
        """What is wrong with it; empty when it is told once, with its cause and status 2, and without torch."""
        if self.status != 2:
            return f"status {self.status}"
        if len(self.lines) != 1:
            return f"{len(self.lines)} lines"
        if self.mistake.says not in self.lines[0]:
            return f"does not say {self.mistake.says!r}"
        return f"imports {self.imported}" if self.imported else ""


@contextlib.contextmanager
def mistakes() -> Iterator[list[Mistake]]:
    """Yield the mistakes. Their files and taken ports exist during the block."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        taken, silent = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        with socket.create_server(("127.0.0.1", 0)) as once:
            closed = once.getsockname()[1]
        yield [
            *_of_flags(),
            *_of_models(folder),
            *_of_ports(str(taken.getsockname()[1])),
            *_of_the_hub(folder, closed, silent.getsockname()[1]),
            *_of_launchers(str(taken.getsockname()[1])),
        ]


def _of_flags() -> Iterator[Mistake]:
    prefill, decode = ("--disaggregation-mode", "prefill"), ("--disaggregation-mode", "decode")
    yield Mistake(name="misspelt flag", argv=("--prot", "30000"), says="did you mean --port")
    yield Mistake(name="port out of range", argv=("--port", "70000"), says="must be 0 to 65535")
    yield Mistake(name="word for a number", argv=("--tp", "two"), says="invalid int value: 'two'")
    yield Mistake(name="unknown choice", argv=("--dtype", "fp8"), says="invalid choice: 'fp8'")
    yield Mistake(name="value without a flag", argv=("smollm2",), says="unexpected argument 'smollm2'")
    yield Mistake(name="unsupported flag of SGLang", argv=("--enable-hierarchical-cache",), says="SGLang has this flag")
    yield Mistake(
        name="flags that contradict each other",
        argv=(*decode, "--disaggregation-layerwise-transfer", "--port", "0"),
        says="is for --disaggregation-mode prefill, not decode",
    )
    if not os.path.exists(NVIDIA_DRIVER):
        yield Mistake(name="GPU that is not there", argv=("--device", "cuda", "--port", "0"), says="torch finds no GPU")
    yield Mistake(
        name="transfer engine not installed",
        argv=(*prefill, "--disaggregation-transfer-backend", "mori", "--disaggregation-bootstrap-port", "0"),
        says="pip install amd-mori",
    )
    yield Mistake(name="no such chat template", argv=("--chat-template", "/absent.jinja"), says="/absent.jinja")
    yield Mistake(
        name="no such certificate",
        argv=("--ssl-certfile", "/absent.pem", "--ssl-keyfile", "/absent.pem"),
        says="this file does not exist",
    )
    yield Mistake(
        name="proof without a token",
        argv=("--require-control-proof", "--port", "0"),
        says="needs PDSERVE_CONTROL_TOKEN",
        env={"PDSERVE_CONTROL_TOKEN": ""},
    )


def _of_models(folder: Path) -> Iterator[Mistake]:
    def model(name: str, changes: Mapping[str, object] | None = None, weights: bytes | None = None) -> str:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**CONFIG, **(changes or {})}))
        if weights is not None:
            (folder / name / "model.safetensors").write_bytes(weights)
        return str(folder / name)

    def refused(name: str, path: str, says: str, *flags: str) -> Mistake:
        return Mistake(name=name, argv=("--model-path", path, "--port", "0", *flags), says=says)

    (folder / "empty").mkdir()
    (folder / "zip.gguf").write_bytes(b"PK\x03\x04")
    (folder / "lfs.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    foreign: dict[str, object] = {"architectures": ["FooForCausalLM"]}
    own = foreign | {"auto_map": {"AutoModel": "foo.Foo"}}
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    yield refused("no such path", "/no/such/model", "looked for /no/such/model")
    yield refused("directory without a model", str(folder / "empty"), "has no config.json")
    yield refused("file of another kind", str(folder / "zip.gguf"), "is not a gguf file")
    yield refused("pointer of Git LFS", str(folder / "lfs.gguf"), "run `git lfs pull`")
    yield refused("unsupported architecture", model("foreign", foreign), "'FooForCausalLM' is not supported")
    yield refused("code of the checkpoint", model("own", own), "pdserve never runs", "--trust-remote-code")
    yield refused("no weights", model("bare"), "has no .safetensors file")
    weights = len(header).to_bytes(8, "little") + header + b"\0"
    yield refused("weights cut short", model("short", weights=weights), "is cut short")
    yield refused(
        "context above the model's", model("context"), "context_length must be in", "--context-length", "9999"
    )
    yield refused("heads that cannot be split", model("split"), "does not divide", "--tp-size", "3")


def _of_ports(taken: str) -> Iterator[Mistake]:
    yield Mistake(name="port taken", argv=("--port", taken), says="give --port another port")
    yield Mistake(
        name="bootstrap port taken",
        argv=("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", taken, "--port", "0"),
        says="give --disaggregation-bootstrap-port another port",
    )


def _of_the_hub(folder: Path, closed: int, silent: int) -> Iterator[Mistake]:
    def refused(name: str, says: str, **env: str) -> Mistake:
        argv = ("--model-path", "org/name", "--port", "0", "--download-dir", str(folder / "cache"))
        return Mistake(name=name, argv=argv, says=says, env={"HF_HUB_OFFLINE": "", "NO_PROXY": "127.0.0.1"} | env)

    yield refused("model not cached, offline", "HF_HUB_OFFLINE forbids", HF_HUB_OFFLINE="1")
    yield refused("hub refuses connections", "cannot be reached", HF_ENDPOINT=f"http://127.0.0.1:{closed}")
    yield refused("hub does not answer", "cannot be reached", HF_ENDPOINT=f"http://127.0.0.1:{silent}")


def _of_launchers(taken: str) -> Iterator[Mistake]:
    yield Mistake(
        name="local: misspelt flag", module="launch_local", argv=("--prefil", "2"), says="did you mean --prefill"
    )
    yield Mistake(
        name="local: no such path",
        module="launch_local",
        argv=("--model-path", "/no/such/model", "--router-port", "0"),
        says="looked for /no/such/model",
    )
    yield Mistake(
        name="local: port taken", module="launch_local", argv=("--router-port", taken), says="cannot listen on"
    )
    yield Mistake(name="router: misspelt flag", module="launch_router", argv=("--polcy", "x"), says="mean --policy")
    yield Mistake(name="router: no servers", module="launch_router", argv=(), says="name servers with --worker-urls")
    yield Mistake(
        name="router: port taken",
        module="launch_router",
        argv=("--worker-urls", "http://a:1", "--port", taken),
        says="cannot listen on",
    )


def run(mistake: Mistake) -> Told:
    """Make a mistake: run its command line until it ends."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=mistake.module), *mistake.argv],
        env={**os.environ, **mistake.env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line for line in ended.stderr.splitlines() if " I " not in line and " INFO " not in line]
    imported = [line.removeprefix(IMPORTED) for line in ended.stdout.splitlines() if line.startswith(IMPORTED)]
    return Told(mistake, ended.returncode, lines, imported[0] if imported else "unknown", seconds, cpu_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write_flags(parser, "startup-mistakes")
    args = parser.parse_args(argv)
    report = Run("startup-mistakes", argv, module="startup_mistakes")
    with mistakes() as all_of_them:
        told = [run(each) for each in all_of_them]
    rows = [
        [each.mistake.name, " / ".join(each.lines), each.problem or "-", f"{each.seconds:.2f}", f"{each.cpu_s:.2f}"]
        for each in told
    ]
    table = markdown_table(["mistake", "what is told", "problem", "s", "CPU s"], rows, num_text=3)
    facts = report.facts(
        seconds={each.mistake.name: each.seconds for each in told},
        cpu_s={each.mistake.name: each.cpu_s for each in told},
    )
    text = f"# Mistakes at start-up\n\n{table}\n\n{footer(facts, NOTES)}\n"
    report.publish(args, text, facts)
    return int(any(each.problem for each in told))


if __name__ == "__main__":
    sys.exit(main())
