"""Dispatches `pdserve COMMAND [arguments]`. Called by the entry point `pdserve`, and by `python -m pdserve`.

    serve MODEL [flags]     launch_server --model-path MODEL [flags]
    pair MODEL [flags]      launch_local --model-path MODEL [flags]
    router [flags]          launch_router [flags]
    chat, bench, top, doctor, support-bundle, env, completion      modules of this package

`--help` of a command prints its help page; `--help=all` prints every flag.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

from pdserve import __version__
from pdserve.cli.help_pages import COMMANDS, overview, page
from pdserve.errors import ConfigError, PdserveError

ALIASES = {"local": "pair"}
WRONG_USAGE = 2
SHORT_HELP, ALL_HELP = ("-h", "--help"), "--help=all"
MODEL_FLAGS = ("--model-path", "--model")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status, 2 for a wrong command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except PdserveError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return WRONG_USAGE
    except BrokenPipeError:  # `pdserve --help=all | head`
        sys.stderr.close()
        return 1


def _run(words: list[str]) -> int:
    if not words:
        print(overview(), file=sys.stderr)
        return WRONG_USAGE
    first, rest = words[0], words[1:]
    if first in ("--version", "-V", "version"):
        print(f"pdserve {__version__}")
        return 0
    if first in (*SHORT_HELP, "help") and not rest:
        print(overview())
        return 0
    if first == ALL_HELP:
        print("\n\n".join([overview(), *(_all_flags(name) for name in COMMANDS)]))
        return 0
    if first == "help":
        return _run([*rest, "--help"])
    if first.startswith("-"):
        if not any(word.partition("=")[0] in MODEL_FLAGS for word in words):
            raise ConfigError(f"{first}: a command comes first, such as `pdserve pair smollm2`; see `pdserve --help`")
        print(f"pdserve: {first} without a command is taken as `pdserve pair {first} ...`", file=sys.stderr)
        return _pair(words)
    return _command(ALIASES.get(first, first), rest)


def _command(name: str, rest: list[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES, "help", "version"], n=1)
        hint = f"did you mean `pdserve {close[0]}`?" if close else f"there is {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    if (name, rest[:1]) == ("bench", ["compare"]):
        return _bench_compare(rest[1:])
    if ALL_HELP in rest or rest == ["--help", "all"]:
        print(_all_flags(name))
        return 0
    if any(word in SHORT_HELP for word in rest):
        known = page(name)
        parsers = [parser_of(one) for one in ((name, "serve") if name == "pair" else (name,))]
        print(known.render(*parsers) if known is not None else parsers[0].format_help().rstrip())
        return 0
    return RUN[name](rest)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's flags, with the command's name and usage."""
    module, maker = PARSERS[command]
    parser: argparse.ArgumentParser = getattr(importlib.import_module(module), maker)()
    parser.prog = f"pdserve {command}"
    known = page(command)
    if known is not None:
        parser.usage, parser.description = known.usage, known.about
    return parser


def _all_flags(command: str) -> str:
    text = parser_of(command).format_help()
    more = "\nAll flags of `pdserve serve` are taken, too, and go to the servers.\n" if command == "pair" else ""
    return f"{text}{more}".rstrip()


def with_model(command: str, words: Sequence[str]) -> list[str]:
    """Return `words` with the model, their first word, behind its flag.

    Raises:
        ConfigError: no model is given, or two.
    """
    flags = [word.partition("=")[0] for word in words]
    named = next((flag for flag in flags if flag in MODEL_FLAGS), None)
    first = bool(words) and not words[0].startswith("-")
    if first and named is not None:
        raise ConfigError(f"the model is given twice, as {words[0]!r} and by {named}")
    if not first and named is None:
        raise ConfigError(f"give the model first, such as `pdserve {command} smollm2`")
    return ["--model-path", *words] if first else list(words)


def _serve(words: list[str]) -> int:
    from pdserve.launch_server import main as launch_server

    return launch_server(with_model("serve", words))


def _pair(words: list[str]) -> int:
    from pdserve.launch_local import main as launch_local

    return launch_local(with_model("pair", words))


def _router(words: list[str]) -> int:
    from pdserve.launch_router import main as launch_router

    return launch_router(words)


def _chat(words: list[str]) -> int:
    from pdserve.cli.chat import main as chat

    return chat(words)


def _bench_compare(words: list[str]) -> int:
    from pdserve.cli.bench_compare import main as compare

    if any(word in (*SHORT_HELP, ALL_HELP) for word in words):
        print(parser_of("bench compare").format_help().rstrip())
        return 0
    return compare(words)


def _bench(words: list[str]) -> int:
    from pdserve.cli.bench import main as bench

    return bench(words)


def _env(words: list[str]) -> int:
    from pdserve.cli.environment import main as environment

    return environment(words)


def _top(words: list[str]) -> int:
    from pdserve.cli.top import main as top

    return top(words)


def _doctor(words: list[str]) -> int:
    from pdserve.cli.doctor import main as doctor

    return doctor(words)


def _support_bundle(words: list[str]) -> int:
    from pdserve.cli.support_bundle import main as support_bundle

    return support_bundle(words)


def _completion(words: list[str]) -> int:
    from pdserve.cli.completion import COMPARE, SHELLS, script

    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"give one of {', '.join(SHELLS)}, not {' '.join(words) or 'nothing'}")
    parsers = {name: parser_of(name) for name in (*COMMANDS, COMPARE)}
    print(script(words[0], parsers, {name: about for name, (_, about) in COMMANDS.items()}), end="")
    return 0


RUN: dict[str, Callable[[list[str]], int]] = {
    "pair": _pair,
    "serve": _serve,
    "router": _router,
    "chat": _chat,
    "bench": _bench,
    "top": _top,
    "doctor": _doctor,
    "support-bundle": _support_bundle,
    "env": _env,
    "completion": _completion,
}
PARSERS = {
    "pair": ("pdserve.launch_local", "make_parser"),
    "serve": ("pdserve.config.cli", "build_parser"),
    "router": ("pdserve.router.config.flags", "make_parser"),
    "chat": ("pdserve.cli.chat", "make_parser"),
    "bench": ("pdserve.cli.bench", "make_parser"),
    "bench compare": ("pdserve.cli.bench_compare", "make_parser"),
    "top": ("pdserve.cli.top", "make_parser"),
    "doctor": ("pdserve.cli.doctor", "make_parser"),
    "support-bundle": ("pdserve.cli.support_bundle", "make_parser"),
    "env": ("pdserve.cli.environment", "make_parser"),
    "completion": ("pdserve.cli.completion", "make_parser"),
}
