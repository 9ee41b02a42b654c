"""How servers of end-to-end tests start, and what a failed test shows: the last lines of every running server."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _fork_server(pytestconfig: pytest.Config) -> Iterator[None]:
    """All tests of this process share one, which starts with the first server."""
    from tests.e2e import harness
    from tests.e2e.fork_server import ForkServer

    if sys.platform != "linux" or pytestconfig.getoption("--new-interpreters"):
        yield
        return
    harness.fork_server = ForkServer()
    yield
    harness.fork_server.close()
    harness.fork_server = None


@pytest.fixture(scope="module")
def forked_hosts() -> Iterator[None]:
    """Fork the hosts of each `LLM` of a module; programs that a test starts have new interpreters."""
    from tests.e2e import harness
    from tests.e2e.fork_server import ForkedChild

    with pytest.MonkeyPatch.context() as patch:
        if harness.fork_server is not None:
            patch.setattr("pdserve.llm.servers.Child", functools.partial(ForkedChild, harness.fork_server))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Also where a fixture started them for a whole module."""
    report = yield
    if report.failed:
        from tests.e2e.harness import RUNNING

        for server in sorted(RUNNING, key=lambda one: one.child.pid):
            report.sections.append((f"Last lines of {server.child.name}", "\n".join(server.lines)))
    return report
