"""The completion scripts: bash's is run; of the others every command and flag must be there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pdserve.cli.completion import COMPARE, SHELLS
from pdserve.cli.help_pages import COMMANDS
from pdserve.cli.main import main, parser_of

COMPLETE = """
COMP_WORDS=({words}); COMP_CWORD={at}
_pdserve
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {}
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda text, end="\n", into=lines: into.append(text))
            assert main(["completion", shell]) == 0
        made[shell] = "".join(lines)
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pdserve", "se"], {"serve"}),
        (["pdserve", "serve", "smo"], {"smollm2"}),
        (["pdserve", "serve", "m", "--disaggregation-mode", ""], {"null", "prefill", "decode"}),
        (["pdserve", "serve", "m", "--enable-dp"], {"--enable-dp-attention"}),
        (["pdserve", "pair", "m", "--keep"], {"--keep-going"}),
        (["pdserve", "pair", "m", "--enable-dp"], {"--enable-dp-attention"}),
        (["pdserve", "local", "m", "--keep"], {"--keep-going"}),
        (["pdserve", "router", "--pd"], {"--pd-disaggregation"}),
        (["pdserve", "completion", "z"], {"zsh"}),
        (["pdserve", "bench", ""], {"compare"}),
        (["pdserve", "bench", "compare", "--output-s"], {"--output-svg"}),
        (["pdserve", "bench", "compare", "a.json", "--duration"], {""}),
        (["pdserve", "bench", "--dura"], {"--duration"}),
        (["pdserve", "bench", "--backend", "sg"], {"sglang"}),
        (["pdserve", "help", "rou"], {"router"}),
        (["pdserve", "help", "bench", ""], {"compare"}),
        (["pdserve", "vers"], {"version"}),
        (["pdserve", "serve", "m", "--disaggregation-mode", "=", "pre"], {"prefill"}),
        (["pdserve", "serve", "m", "--disaggregation-mode", "="], {"null", "prefill", "decode"}),
        (["pdserve", "serve", "m", "--no-such"], {""}),
    ],
)
def test_bash_completes_commands_flags_and_values(
    scripts: dict[str, str], words: list[str], expected: set[str]
) -> None:
    quoted = " ".join(f"'{word}'" for word in words)
    program = scripts["bash"] + COMPLETE.format(words=quoted, at=len(words) - 1)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == expected
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_the_script(scripts: dict[str, str], shell: str) -> None:
    for command in (*COMMANDS, COMPARE):
        assert command.split()[-1] in scripts[shell]
        for action in parser_of(command)._actions:
            for name in action.option_strings:
                short, long = f" -s {name[1:]} ", f" -l {name[2:]} "
                spelt = name if shell != "fish" else long if name.startswith("--") else short
                assert spelt in scripts[shell]


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_the_shell_can_read_the_script(scripts: dict[str, str], shell: str) -> None:
    done = subprocess.run([shell, "-n"], input=scripts[shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
