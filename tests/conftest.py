"""Fixtures that many tests share: checkpoints made once per run. Order of a run, and the share of slow tests in it.

Imports nothing heavy: with several workers the process that deals out the tests reads this, too.
"""

from __future__ import annotations

import faulthandler
import fcntl
import importlib.util
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

if TYPE_CHECKING:
    from tests.mooncake_master import Master
    from tests.mtp import MTPReference
    from tests.tiny import Family

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers does

LONGEST_FIRST = ("e2e", "world", "conformance")
"""Directories whose files take long. Dealt out last, one of them would keep one worker busy and the others idle."""


SHARE_OPTIONS = ("--slow-share", "--slow-seed")
_ran: list[str] = []
"""Slow tests of this run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """A run takes all tests, or with `-m "not slow"` none of the slow ones, or a share of these."""
    parser.addoption("--slow-share", type=float, help="fraction of the slow tests to run, 0 to 1")
    parser.addoption("--slow-seed", default="", help="which ones: a text, in CI the commit")
    parser.addoption("--new-interpreters", action="store_true", help="no fork server: e2e servers start as users' do")


def is_in_share(item: pytest.Item, share: float, seed: str) -> bool:
    """Whether a slow test is among those that are run; every seed selects another share.

    Tests with a time limit above ten minutes are not: they take that long, or need the internet.
    """
    chosen = zlib.crc32(f"{seed} {item.nodeid}".encode()) < share * 2**32
    limit = item.get_closest_marker("timeout")
    return chosen and (limit is None or limit.args[0] <= 600)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files of `LONGEST_FIRST` first, leave out slow tests that are not in the share, and give slow ones more time.

    A slow test without a limit of its own has twice the usual one: beside other work it may take several times as long.
    """

    def rank(item: pytest.Item) -> int:
        directory = item.path.parent.name
        return LONGEST_FIRST.index(directory) if directory in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=rank)
    limit_s = 2 * float(config.getini("timeout"))
    for item in items:
        if item.get_closest_marker("slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
    share, seed = (config.getoption(name) for name in SHARE_OPTIONS)
    if share is not None:
        left_out = [item for item in items if item.get_closest_marker("slow") and not is_in_share(item, share, seed)]
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where a test has a longer time limit, pytest's `faulthandler_timeout` ends the process that much later."""
    limit = item.get_closest_marker("timeout")
    usual, hung = float(item.config.getini("timeout")), float(item.config.getini("faulthandler_timeout"))
    if limit is not None and limit.args[0] > usual:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(hung + limit.args[0] - usual, file=stderr, exit=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note slow tests."""
    if report.when == "call" and "slow" in report.keywords:
        _ran.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print which slow tests were in the share."""
    share, seed = (config.getoption(name) for name in SHARE_OPTIONS)
    if share is not None:
        terminalreporter.section(f"{len(_ran)} slow tests, a share of {share:g} chosen by {seed or 'no seed'}")
        for nodeid in sorted(_ran):
            terminalreporter.write_line(nodeid)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """`tiny_checkpoint(family)`: a random HF checkpoint of that family with a tokenizer; do not change its files."""
    from tests.tiny import make_tiny

    made: dict[Family, Path] = {}

    def checkpoint(family: Family) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return checkpoint


@pytest.fixture(scope="session")
def family_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family_checkpoint(name)`: the checkpoint of a `TinyFamily`; do not change its files."""
    from tests.model_families import FAMILIES

    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("families") / name
            FAMILIES[name].write(made[name])
        return made[name]

    return checkpoint


@pytest.fixture(scope="session")
def hybrid_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`hybrid_checkpoint(name)`: the checkpoint of a `deep_hybrid`; do not change its files."""
    from tests.model_families import deep_hybrid

    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hybrids") / name
            deep_hybrid(name).write(made[name])
        return made[name]

    return checkpoint


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, MTPReference]]:
    """`mtp_model(name)`: the checkpoint of a hybrid family with an MTP module, and its reference."""
    from tests.mtp import MTPReference, write_with_mtp

    made: dict[str, tuple[Path, MTPReference]] = {}

    def model(name: str) -> tuple[Path, MTPReference]:
        if name not in made:
            path = write_with_mtp(name, tmp_path_factory.mktemp("mtp") / name)
            made[name] = path, MTPReference.load(path, path.parent / "reference")
        return made[name]

    return model


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as an HF directory, converted from the wheel once per run, for all workers."""
    from pdserve.model.paths import resolve_model_path

    mine = tmp_path_factory.getbasetemp()
    of_all = mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine
    with open(of_all / "smollm2.lock", "w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("PDSERVE_CACHE", str(of_all / "cache"))
        first = resolve_model_path("smollm2")
        assert resolve_model_path("smollm2") == first
    return first


@pytest.fixture
def master(request: pytest.FixtureRequest) -> Iterator[Master]:
    """A master of Mooncake Store, killed at the end. The parameter is the lease of objects in milliseconds."""
    from tests.mooncake_master import Master

    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    made = Master(getattr(request, "param", 100))
    yield made
    made.kill()
