"""`pdserve completion SHELL`: scripts that complete commands, flags and values, made from the parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping

from pdserve.cli.help_pages import CommandParser

SHELLS = ("bash", "zsh", "fish")
WITH_MODEL = ("serve", "pair")
MODEL = "smollm2"
Parsers = Mapping[str, argparse.ArgumentParser]

HEADS = {
    "bash": '# bash completion of pdserve: eval "$(pdserve completion bash)"\n',
    "zsh": "#compdef pdserve\n# zsh completion of pdserve: pdserve completion zsh > a folder of $fpath/_pdserve\n",
    "fish": "# fish completion of pdserve: pdserve completion fish > ~/.config/fish/completions/pdserve.fish\n",
}


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve completion`."""
    parser = CommandParser(
        prog="pdserve completion", allow_abbrev=False, description='Prints a script: eval "$(pdserve completion bash)"'
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    return parser


def script(shell: str, parsers: Parsers, about: Mapping[str, str]) -> str:
    """Return the script for one of `SHELLS`. `parsers` and `about` have the parser and the purpose of each command."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    # `pair` takes the flags of the servers, too.
    flags = {name: list(_actions(parser)) for name, parser in parsers.items()}
    own = {option for action in flags["pair"] for option in action.option_strings}
    flags["pair"] += [action for action in flags["serve"] if not own & set(action.option_strings)]
    return HEADS[shell] + "\n".join(write(flags, about)) + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    return (action for action in parser._actions if action.option_strings)


def _choices(action: argparse.Action) -> list[str]:
    return [] if action.choices is None else [str(choice) for choice in action.choices]


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)


def _text(action: argparse.Action) -> str:
    """Return the first clause of a flag's help, without characters that a shell gives a meaning."""
    plain = re.split(r"; |\. ", (action.help or "").replace("%%", "%"), maxsplit=1)[0]
    return re.sub(r"""[\[\]'"`:\\$]""", "", plain)[:90].strip()


def _bash(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    yield "_pdserve() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=""'
    yield '    [ "$command" = local ] && command=pair'
    yield "    COMPREPLY=()"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'        COMPREPLY=($(compgen -W "{" ".join([*about, "help", "--help", "--version"])}" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield '    case "$command $prev" in'
    yield f'        completion\\ completion) words="{" ".join(SHELLS)}" ;;'
    for command, actions in flags.items():
        for action in filter(_choices, actions):
            spelt = "|".join(f"{command}\\ {name}" for name in action.option_strings)
            yield f'        {spelt}) words="{" ".join(_choices(action))}" ;;'
    yield "    esac"
    yield '    if [ -z "$words" ] && [[ $cur == -* ]]; then'
    yield '        case "$command" in'
    for command, actions in flags.items():
        names = [name for action in actions for name in action.option_strings]
        yield f'            {command}) words="{" ".join([*names, "--help=all"])}" ;;'
    yield "        esac"
    yield '    elif [ -z "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then'
    yield f'        case "$command" in {"|".join(WITH_MODEL)}) words={MODEL} ;; esac'
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield '    [[ $cur == -* ]] || [ -n "${COMPREPLY[*]}" ] || COMPREPLY=($(compgen -f -- "$cur"))'
    yield "}"
    yield "complete -o filenames -F _pdserve pdserve"


def _zsh(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    yield "_pdserve() {"
    yield "    local -a commands"
    yield f"    commands=({' '.join(shlex.quote(f'{name}:{text}') for name, text in about.items())})"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local command=$words[2]"
    yield "    [[ $command == local ]] && command=pair"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for command, actions in flags.items():
        yield f"        {command}) _arguments \\"
        for action in actions:
            for name in action.option_strings:
                value = ""
                if _takes_value(action):
                    value = f":value:({' '.join(_choices(action))})" if action.choices else ":value:_files"
                yield f"            {shlex.quote(f'*{name}[{_text(action)}]{value}')} \\"
        last = f"1:shell:({' '.join(SHELLS)})" if command == "completion" else "*:file:_files"
        if command in WITH_MODEL:
            yield f"            '1:model:_alternative \"models:model:({MODEL})\" files:file:_files' \\"
        yield f"            {shlex.quote(last)} ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ $funcstack[1] == _pdserve ]]; then _pdserve "$@"; else compdef _pdserve pdserve; fi'


def _fish(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    for name, text in about.items():
        yield f"complete -c pdserve -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from {' '.join((*WITH_MODEL, 'local'))}' -a {MODEL}"
    for command, actions in flags.items():
        seen = "pair local" if command == "pair" else command
        for action in actions:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in action.option_strings)
            value = ""
            if _takes_value(action):
                value = f" -x -a {shlex.quote(' '.join(_choices(action)))}" if action.choices else " -r"
            text = shlex.quote(_text(action))
            yield f"complete -c pdserve -n '__fish_seen_subcommand_from {seen}' {names}{value} -d {text}"
