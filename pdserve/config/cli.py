"""Parses the command line into a `ServerConfig`. The parser is generated from the annotations of `groups`.

Called by `launch_server`. No flag is ignored: a flag of SGLang that pdserve does not support is refused by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn

from pdserve.config.groups import ModelConfig, ServerConfig
from pdserve.config.sglang_flags import SGLANG_FLAGS
from pdserve.config.validate import check
from pdserve.errors import ConfigError

ALIASES = {"model_path": ("--model",)}
"""Further spellings of flags in SGLang."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One field as a flag. `kind` is int, float, str or bool; `choices` is empty if all values are allowed."""

    group: str
    field: str
    names: tuple[str, ...]
    kind: type[int | float | str | bool]
    choices: tuple[str, ...]
    optional: bool
    default: Any
    help: str
    env: str | None
    """Environment variable that replaces an absent flag; an empty variable is ignored."""
    secret: bool
    refused: Mapping[str, str]
    """Advice for values of SGLang that are not supported here, by value."""
    many: bool = False
    """Whether the flag takes several words, which are joined by commas."""


@functools.cache
def flags() -> tuple[Flag, ...]:
    """Return all flags, in the order of `groups`."""
    return tuple(_flags())


def _flags() -> Iterator[Flag]:
    for group, group_class in group_classes().items():
        hints = typing.get_type_hints(group_class)
        for field in dataclasses.fields(group_class):
            kind, choices, optional = _parse_hint(hints[field.name])
            extra: tuple[str, ...] = field.metadata["names"]
            yield Flag(
                group=group,
                field=field.name,
                names=(f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, ()), *extra),
                kind=kind,
                choices=choices,
                optional=optional,
                default=field.default,
                help=field.metadata["help"],
                env=field.metadata["env"],
                secret=field.metadata["secret"],
                refused=field.metadata.get("refused", {}),
                many=field.metadata.get("many", False),
            )


def group_classes() -> dict[str, type[Any]]:
    """Return the fields of `ServerConfig` and the dataclass of each."""
    hints = typing.get_type_hints(ServerConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(ServerConfig)}


def _parse_hint(hint: Any) -> tuple[type[Any], tuple[str, ...], bool]:
    """Return (kind, choices, may be None) of an annotation."""
    optional = False
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not NoneType]
        assert len(members) == 1, f"a flag has one type or None, not {hint}"
        hint, optional = members[0], True
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), optional
    assert hint in (int, float, str, bool), f"no flag type for {hint}"
    return hint, (), optional


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting; `--help` still prints and exits."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Joined(argparse.Action):
    """Joins the words of a flag, and those of earlier ones of its name, by commas."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """See `argparse.Action`."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, ",".join([*([] if before is None else [before]), *values]))


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with one argument group per config group. Absent flags are absent from the result."""
    parser = _Parser(
        prog="python -m pdserve.launch_server",
        description="One pdserve server: monolith, prefill or decode.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    sections = {
        group: parser.add_argument_group(group, (group_class.__doc__ or "").split("\n")[0])
        for group, group_class in group_classes().items()
    }
    for flag in flags():
        text = flag.help if flag.default is None else f"{flag.help} (default: {flag.default})"
        text += "" if flag.env is None else f" (or in {flag.env})"
        common: dict[str, Any] = {"dest": flag.field, "help": text.replace("%", "%%")}
        if flag.kind is bool:
            sections[flag.group].add_argument(*flag.names, action=argparse.BooleanOptionalAction, **common)
        elif flag.many:
            sections[flag.group].add_argument(*flag.names, nargs="+", action=_Joined, metavar=_metavar(flag), **common)
        else:
            choices = flag.choices or None
            sections[flag.group].add_argument(
                *flag.names, type=_converter(flag), choices=choices, metavar=_metavar(flag), **common
            )
    return parser


def _converter(flag: Flag) -> Callable[[str], Any]:
    """Return the function that turns the text of a value into the value."""
    if not flag.refused:
        return flag.kind

    def convert(text: str) -> str:
        if text in flag.refused:
            raise argparse.ArgumentTypeError(f"{text} is not supported; {flag.refused[text]}")
        return text

    return convert


def _metavar(flag: Flag) -> str:
    return "{" + ",".join(flag.choices) + "}" if flag.choices else flag.kind.__name__.upper()


def parse_server_args(argv: Sequence[str]) -> ServerConfig:
    """Parse and check a command line. `--help` prints and raises SystemExit.

    Raises:
        ConfigError: a flag is unknown or not supported, or its value is malformed or out of range.
    """
    refuse_unknown_flags(argv)
    given = _parse(argv)
    variables = {flag.field: flag for flag in _flags_in_environment() if flag.field not in given}
    values = {field: _value_of_variable(flag) for field, flag in variables.items()} | given
    groups = {
        group: group_class(**{f.name: values[f.name] for f in dataclasses.fields(group_class) if f.name in values})
        for group, group_class in group_classes().items()
    }
    assert isinstance(groups["model"], ModelConfig)
    config = ServerConfig(**groups)
    try:
        check(config)
    except ConfigError as error:
        if error.field not in variables:
            raise
        raise ConfigError(f"{variables[error.field].env}: {error}", field=error.field) from error
    return config


def _flags_in_environment() -> Iterator[Flag]:
    """Yield the flags whose environment variable is set."""
    return (flag for flag in flags() if flag.env is not None and os.environ.get(flag.env, "").strip())


def _value_of_variable(flag: Flag) -> int | float | str:
    """Return the value of a flag from its environment variable, which is set. ConfigError names the variable.

    The case of a value with choices does not matter.
    """
    assert flag.env is not None and flag.kind is not bool
    text = os.environ[flag.env].strip()
    if flag.choices:
        if text.lower() not in flag.choices:
            raise ConfigError(f"{flag.env} is {text!r}, but must be one of {', '.join(flag.choices)}", field=flag.field)
        return text.lower()
    try:
        return flag.kind(text)
    except ValueError as error:
        kind = "a whole number" if flag.kind is int else "a number"
        raise ConfigError(f"{flag.env} is {text!r}, but must be {kind}", field=flag.field) from error


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of the given flags by field. ConfigError names the invalid flag."""
    try:
        given, extra = build_parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").partition("/")[0]
        raise ConfigError(f"{name}: {error.message}", field=name.lstrip("-").replace("-", "_") or None) from error
    if extra:
        raise ConfigError(f"unexpected argument {extra[0]!r}; every value follows its flag", field=extra[0])
    return vars(given)


def refuse_unknown_flags(
    argv: Sequence[str], more_names: Iterable[str] = (), instead: Mapping[str, str | None] | None = None
) -> None:
    """Raise ConfigError for the first unknown flag; the message says if SGLang has it, else names similar flags.

    `more_names`: flags of the program beside those of a server, which may be meant. `instead`: see `no_such_flag`.
    """
    known: dict[str, Flag] = {name: flag for flag in flags() for name in flag.names}
    negated = {f"--no-{name[2:]}": flag for name, flag in known.items() if flag.kind is bool}
    names = known.keys() | negated.keys() | {"--help", "-h"}
    for word in argv:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in names:
            continue
        if name in SGLANG_FLAGS:
            raise ConfigError(f"{name}: SGLang has this flag, pdserve does not honour it yet; leave it out", field=name)
        raise ConfigError(no_such_flag(name, {*names, *more_names}, instead), field=name)


def no_such_flag(name: str, names: Iterable[str], instead: Mapping[str, str | None] | None = None) -> str:
    """Return the error for an unknown flag `name`, with the nearest of the known `names`.

    `instead`: names to be shown in place of others; None: such a name is not shown.
    """
    replaced = instead or {}
    found = (replaced.get(one, one) for one in difflib.get_close_matches(name, sorted(names), n=3))
    close = list(dict.fromkeys(one for one in found if one is not None))
    return f"{name}: there is no such flag" + (f"; did you mean {' or '.join(close)}?" if close else "")
