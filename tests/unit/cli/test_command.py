"""The `pdserve` command: which launcher gets which arguments, help pages, and what a typing mistake gets."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import pdserve
from pdserve.cli.help_pages import COMMANDS, PAGES
from pdserve.cli.main import main, parser_of
from pdserve.config.cli import flags

LAUNCHERS = {"serve": "launch_server", "pair": "launch_local", "router": "launch_router"}
MAX_HELP_LINES = 60


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The arguments that each launcher got; every launcher returns 7."""
    given: dict[str, list[str]] = {}
    for module in LAUNCHERS.values():

        def run(argv: Sequence[str], module: str = module) -> int:
            given[module] = list(argv)
            return 7

        monkeypatch.setattr(f"pdserve.{module}.main", run)
    return given


@pytest.mark.parametrize(
    ("words", "module", "argv"),
    [
        ("serve m --port 0", "launch_server", "--model-path m --port 0"),
        ("serve --port 0 --model-path m", "launch_server", "--port 0 --model-path m"),
        ("serve --model=m", "launch_server", "--model=m"),
        ("pair m --prefill 2", "launch_local", "--model-path m --prefill 2"),
        ("local m", "launch_local", "--model-path m"),
        ("router --worker-urls http://a:1", "launch_router", "--worker-urls http://a:1"),
        ("--model-path m --prefill 2", "launch_local", "--model-path m --prefill 2"),
    ],
)
def test_a_command_starts_its_launcher(launched: dict[str, list[str]], words: str, module: str, argv: str) -> None:
    assert main(words.split()) == 7
    assert launched == {module: argv.split()}


def test_flags_without_a_command_are_those_of_pair(
    launched: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--model-path", "m"])
    assert "taken as `pdserve pair --model-path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("serv m", "there is no command 'serv'; did you mean `pdserve serve`?"),
        ("xyzzy", "there is no command 'xyzzy'; there is " + ", ".join(COMMANDS)),
        ("--verison", "--verison: a command comes first, such as `pdserve pair smollm2`; see `pdserve --help`"),
        ("serve", "give the model first, such as `pdserve serve smollm2`"),
        ("pair --prefill 2", "give the model first, such as `pdserve pair smollm2`"),
        ("serve m --model-path n", "the model is given twice, as 'm' and by --model-path"),
        ("serve m --tp-sise 2", "--tp-sise: there is no such flag; did you mean --tp-size"),
        ("chat --modle m", "--modle: there is no such flag; did you mean --model?"),
        ("env --jason", "--jason: there is no such flag; did you mean --json?"),
        ("completion tcsh", "give one of bash, zsh, fish, not tcsh"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pdserve: {told}")
    assert err.count("\n") == 1


def test_a_misspelt_flag_of_the_router_names_its_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["router", "--decoed", "http://a:1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --decoed: there is no such flag; did you mean --decode")


def test_help_fits_a_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= MAX_HELP_LINES
    for name in COMMANDS:
        assert f"  {name} " in text
    assert main(["help"]) == 0
    assert capsys.readouterr().out == text
    assert main([]) == 2
    assert capsys.readouterr().err == text, "without a command the help is an error's"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= MAX_HELP_LINES
    assert max(map(len, text.splitlines())) <= 120
    known = PAGES.get(command)
    for name in [] if known is None else [name for _, names in known.tasks for name in names]:
        assert f"  {name}" in text
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("words", [["serve", "--help=all"], ["serve", "m", "--help=all"], ["serve", "--help", "all"]])
def test_help_all_lists_every_flag_of_a_server(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pdserve serve MODEL [flags]")
    assert all(name in text for flag in flags() for name in flag.names)


def test_help_all_of_the_program_lists_every_flag_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help=all"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert all(name in text for action in parser_of(command)._actions for name in action.option_strings)


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "version"):
        assert main([word]) == 0
        assert capsys.readouterr().out == f"pdserve {pdserve.__version__}\n"


def test_help_and_version_do_not_load_torch() -> None:
    code = (
        "import sys; from pdserve.cli.main import main\n"
        "for words in (['--version'], ['--help'], ['serve', '--help'], ['pair', '--help'], ['router', '--help']):\n"
        "    main(words)\n"
        "sys.exit(len({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "pdserve", "version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pdserve {pdserve.__version__}\n"


def test_the_installed_command_is_the_module_s_function() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    entry = EntryPoint("pdserve", project["scripts"]["pdserve"], "console_scripts")
    assert entry.load() is main
