"""What a failed end-to-end test shows: the last lines of every server that was running."""

from __future__ import annotations

from collections.abc import Generator

import pytest


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
