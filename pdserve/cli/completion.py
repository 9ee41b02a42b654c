"""`pdserve completion SHELL`: scripts that complete commands, flags and values, made from the parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping

from pdserve.cli.help_pages import CommandParser

SHELLS = ("bash", "zsh", "fish")
WITH_MODEL = ("serve", "pair")
COMPARE = "bench compare"
"""The command of two words."""
OTHER_WORDS = ("help", "version", "--help", "--help=all", "--version")
"""First words that are no command."""
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
    """Return the script for one of `SHELLS`.

    `parsers` has the parser of each command and of `COMPARE`, `about` the purpose of each command.
    """
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


def _one_word(command: str) -> str:
    return command.replace(" ", "-")


def _bash(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    yield "_pdserve() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=""'
    yield '    [ "$command" = local ] && command=pair'
    yield '    [ "$COMP_CWORD" -gt 2 ] && [ "$command ${COMP_WORDS[2]}" = "bench compare" ] && command=bench-compare'
    yield "    # --flag=value is three words"
    yield '    if [ "$cur" = "=" ]; then cur=""; elif [ "$prev" = "=" ]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi'
    yield "    COMPREPLY=()"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'        COMPREPLY=($(compgen -W "{" ".join([*about, *OTHER_WORDS])}" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield '    case "$command $prev" in'
    yield f'        completion\\ completion) words="{" ".join(SHELLS)}" ;;'
    yield f'        help\\ help) words="{" ".join(about)}" ;;'
    yield "        help\\ bench) words=compare ;;"
    for command, actions in flags.items():
        for action in filter(_choices, actions):
            spelt = "|".join(f"{_one_word(command)}\\ {name}" for name in action.option_strings)
            yield f'        {spelt}) words="{" ".join(_choices(action))}" ;;'
    yield "    esac"
    yield '    if [ -z "$words" ] && [[ $cur == -* ]]; then'
    yield '        case "$command" in'
    for command, actions in flags.items():
        names = [name for action in actions for name in action.option_strings]
        yield f'            {_one_word(command)}) words="{" ".join([*names, "--help=all"])}" ;;'
    yield "        esac"
    yield '    elif [ -z "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then'
    yield f'        case "$command" in {"|".join(WITH_MODEL)}) words={MODEL} ;; bench) words=compare ;; esac'
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield '    [[ $cur == -* ]] || [ -n "${COMPREPLY[*]}" ] || COMPREPLY=($(compgen -f -- "$cur"))'
    yield "}"
    yield "complete -o filenames -F _pdserve pdserve"


def _zsh(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    yield "_pdserve() {"
    yield "    local -a commands"
    told = {**about, "help": "the same as COMMAND --help", "version": "print the version"}
    yield f"    commands=({' '.join(shlex.quote(f'{name}:{text}') for name, text in told.items())})"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local command=$words[2]"
    yield "    [[ $command == local ]] && command=pair"
    yield "    shift words; (( CURRENT-- ))"
    yield "    if [[ $command == bench && $words[2] == compare ]] && (( CURRENT > 2 )); then"
    yield "        command=bench-compare"
    yield "        shift words; (( CURRENT-- ))"
    yield "    fi"
    yield "    case $command in"
    yield f"        help) _arguments '1:command:({' '.join(about)})' '2:command:(compare)' ;;"
    for command, actions in flags.items():
        yield f"        {_one_word(command)}) _arguments \\"
        for action in actions:
            for name in action.option_strings:
                value = ""
                if _takes_value(action):
                    value = f":value:({' '.join(_choices(action))})" if action.choices else ":value:_files"
                yield f"            {shlex.quote(f'*{name}[{_text(action)}]{value}')} \\"
        last = f"1:shell:({' '.join(SHELLS)})" if command == "completion" else "*:file:_files"
        if command in WITH_MODEL:
            yield f"            '1:model:_alternative \"models:model:({MODEL})\" files:file:_files' \\"
        if command == "bench":
            yield "            '1:command:(compare)' \\"
        yield f"            {shlex.quote(last)} ;;"
    yield "    esac"
    yield "}"
    yield 'if [[ $funcstack[1] == _pdserve ]]; then _pdserve "$@"; else compdef _pdserve pdserve; fi'


def _fish(flags: Mapping[str, list[argparse.Action]], about: Mapping[str, str]) -> Iterator[str]:
    for name, text in about.items():
        yield f"complete -c pdserve -n __fish_use_subcommand -f -a {name} -d {shlex.quote(text)}"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from {' '.join((*WITH_MODEL, 'local'))}' -a {MODEL}"
    yield "complete -c pdserve -n __fish_use_subcommand -f -a help -d 'the same as COMMAND --help'"
    yield "complete -c pdserve -n __fish_use_subcommand -f -a version -d 'print the version'"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from help' -f -a '{' '.join(about)}'"
    without_compare = "bench; and not __fish_seen_subcommand_from compare"
    yield f"complete -c pdserve -n '__fish_seen_subcommand_from {without_compare}' -f -a compare"
    seen_from = {
        "pair": "pair local",
        "bench": without_compare,
        COMPARE: "bench; and __fish_seen_subcommand_from compare",
    }
    for command, actions in flags.items():
        seen = seen_from.get(command, command)
        for action in actions:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in action.option_strings)
            value = ""
            if _takes_value(action):
                value = f" -x -a {shlex.quote(' '.join(_choices(action)))}" if action.choices else " -r"
            text = shlex.quote(_text(action))
            yield f"complete -c pdserve -n '__fish_seen_subcommand_from {seen}' {names}{value} -d {text}"
