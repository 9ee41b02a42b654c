"""The page before a fleet under load: commands with the admin key, three sizes, light and dark, failures, a reload."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: pip install pdserve[test]")

from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser import open_browser
from tests.e2e.harness import until
from tests.e2e.page_fleet import (
    ADMIN_KEY,
    CHART_POINTS,
    KEY,
    LAPTOP,
    LAYOUT_PROBLEMS,
    PHONE,
    SIZES,
    PageFleet,
    bench_beside,
    long_stream,
    reset_screen,
    running_page_fleet,
    set_screen,
)
from tests.tiny import Family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = 60.0
RATE = 2.0
ALWAYS = (
    "TTFT", "Time to second token", "ITL", "Error rate", "Requests", "Tokens per second", "KV memory", "KV transfers",
    "Prefix cache hits", "Accept length",
)  # fmt: skip
LINED = ("TTFT", "Time to second token", "ITL", "Tokens per second", "KV transfers")
"""Charts whose lines are above 0 under load."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(browser: webdriver.Chrome, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[PageFleet]:
    with running_page_fleet(str(tiny_checkpoint("llama"))) as found, bench_beside(found, RATE):
        browser.get(found.url)
        field = browser.find_element(By.ID, "key")
        until(field.is_displayed, WAIT_S, "it asks for the key")
        field.send_keys(f"{KEY}\n")
        until(lambda: "refused this key" in text(browser, "#key-note"), WAIT_S, "a client's key is no admin key")
        field.send_keys(f"{ADMIN_KEY}\n")
        until(lambda: roles(browser) == ["prefill"] * 2 + ["decode"] * 2, WAIT_S, "all servers are shown")
        yield found


@pytest.fixture
def page(browser: webdriver.Chrome, fleet: PageFleet) -> Iterator[webdriver.Chrome]:
    """The page, reloaded; the tab keeps the key."""
    browser.get_log("browser")
    browser.refresh()
    until(lambda: len(roles(browser)) == 4, WAIT_S, "all servers are shown")
    yield browser
    reset_screen(browser)
    assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []


def text(browser: webdriver.Chrome, selector: str) -> str:
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent).join('\\n')"
    return str(browser.execute_script(script, selector))


def roles(browser: webdriver.Chrome) -> list[str]:
    cards = "[...document.querySelectorAll('pd-worker[data-state]')]"
    return list(browser.execute_script(f"return {cards}.map((node) => node.dataset.role)"))


def state(browser: webdriver.Chrome, url: str) -> str:
    """The colour of a server's card, empty without one."""
    cards = "[...document.querySelectorAll('pd-worker')]"
    script = f"return {cards}.find((node) => node.worker.url === arguments[0])?.dataset.state ?? ''"
    return str(browser.execute_script(script, url))


def manage(browser: webdriver.Chrome, url: str) -> None:
    """Open the dialog of a server."""
    cards = "[...document.querySelectorAll('pd-worker')]"
    script = f"return {cards}.find((node) => node.worker.url === arguments[0]).querySelector('.manage')"
    browser.execute_script(script, url).click()
    until(lambda: url.removeprefix("http://") in text(browser, "pd-admin dialog[open] code"), WAIT_S, "its dialog")


def press(browser: webdriver.Chrome, label: str) -> None:
    """Press the button of the open dialog that has this text, as soon as it is there."""
    path = f"//pd-admin//button[normalize-space()='{label}']"
    until(lambda: bool(browser.find_elements(By.XPATH, path)), WAIT_S, label)
    browser.find_element(By.XPATH, path).click()


def note_says(browser: webdriver.Chrome, words: str) -> None:
    until(lambda: words in text(browser, "pd-admin .note"), WAIT_S, words)


def close(browser: webdriver.Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, "pd-admin .close").click()


def assert_laid_out(browser: webdriver.Chrome, what: str) -> None:
    """Nothing is cut off, outside the window, or over another text, at any size, light and dark."""
    for size in SIZES:
        for dark in (False, True):
            set_screen(browser, size, dark=dark)
            problems = browser.execute_script(LAYOUT_PROBLEMS)
            assert problems == [], (what, size.name, dark, problems)
    reset_screen(browser)


def charts(browser: webdriver.Chrome) -> dict[str, Any]:
    return dict(browser.execute_script(CHART_POINTS))


def tile(browser: webdriver.Chrome, name: str) -> str:
    return next(one for one in text(browser, ".tile").splitlines() if one.startswith(name))


def failures(browser: webdriver.Chrome) -> tuple[int, int]:
    """Failed and ended requests of the chosen time range."""
    failed, ended = re.findall(r"([\d,]+) of ([\d,]+) failed", tile(browser, "Error rate").replace("%", "% "))[0]
    return int(failed.replace(",", "")), int(ended.replace(",", ""))


def test_the_history_is_there_at_once_after_a_reload_and_fits_every_screen(
    page: webdriver.Chrome, fleet: PageFleet
) -> None:
    def recorded() -> bool:
        series = fleet.get("/observe/history")["series"]
        return sum(value is not None for value in series.get("itl_p50_s", ())) >= 4 and "accept_length" in series

    until(recorded, WAIT_S, "the router has points")
    page.refresh()
    until(lambda: len(charts(page)) == len(ALWAYS), WAIT_S, "the charts")
    until(lambda: all(charts(page)[name][0] > 40 for name in LINED), WAIT_S, "each chart has its lines")
    shown = charts(page)
    assert tuple(shown) and set(shown) == set(ALWAYS)
    assert all("–" not in legend for _, legend in shown.values()), shown
    assert "host" in shown["KV memory"][1] and "device" in shown["KV memory"][1]
    for name, window in (("TTFT, median", "5 min"), ("Error rate", "5 min"), ("KV transfer", "5 s")):
        assert window in tile(page, name)
    failed, ended = failures(page)
    assert failed == 0 < ended
    assert text(page, "#status") == "serving"
    lines = "return [...document.querySelectorAll('.tile path:not(.area)')].map((node) => node.getAttribute('d'))"
    assert all(page.execute_script(lines)), "each tile has the line of its history"
    assert_laid_out(page, "under load")
    page.find_element(By.CSS_SELECTOR, "pd-config summary").click()
    until(lambda: text(page, ".settings h3").count("\n") == 3, WAIT_S, "the settings of four servers")
    assert_laid_out(page, "settings")


def test_a_request_moves_and_a_server_drains_under_load(page: webdriver.Chrome, fleet: PageFleet) -> None:
    with long_stream(fleet, "long-answer", 3000) as tokens:
        until(lambda: fleet.place_of("long-answer"), WAIT_S, "it runs")
        source = fleet.place_of("long-answer")
        assert source is not None
        (target,) = {server.url for server in fleet.decodes} - {source}
        manage(page, source)
        until(lambda: "long-answer" in text(page, "pd-admin .running"), WAIT_S, "it is listed")
        for size in (LAPTOP, PHONE):
            set_screen(page, size, dark=size is PHONE)
            assert page.execute_script(LAYOUT_PROBLEMS) == []
        reset_screen(page)
        row = page.find_element(By.XPATH, "//pd-admin//li[code='long-answer']//button")
        name = row.text
        row.click()
        note_says(page, f"The request has moved to {name.removeprefix('Move to ')}.")
        until(lambda: fleet.place_of("long-answer") in (target, None), WAIT_S, "it runs at the other server")
        press(page, "Drain")
        until(lambda: state(page, source) == "warn", WAIT_S, "it drains")
        close(page)
        assert "It gets no new requests" in text(page, "pd-worker[data-state=warn] .why")
        assert_laid_out(page, "a drained server")
    assert tokens == [3000], "the client has the whole answer"
    manage(page, source)
    press(page, "Serve again")
    until(lambda: state(page, source) == "ok", WAIT_S, "it serves again")
    close(page)
    assert failures(page)[0] == 0, "no request of the load has failed"


def test_a_server_changes_its_role_and_back(page: webdriver.Chrome, fleet: PageFleet) -> None:
    url = fleet.prefills[1].url
    for label, role, expected in (
        ("Make it a decode server", "decode", ["prefill"] + ["decode"] * 3),
        ("Make it a prefill server", "prefill", ["prefill"] * 2 + ["decode"] * 2),
    ):
        manage(page, url)
        press(page, label)
        note_says(page, "Press the button again to go on.")
        press(page, label)
        note_says(page, f"It is a {role} server now.")
        close(page)
        until(lambda: roles(page) == expected, WAIT_S, "the map has it on its new side")  # noqa: B023
        until(lambda: state(page, url) == "ok", WAIT_S, "it is healthy")
    assert failures(page)[0] == 0, "no request of the load has failed"


def test_failed_requests_and_a_dead_server_are_shown(page: webdriver.Chrome, fleet: PageFleet) -> None:
    """Last: the server is gone afterwards."""
    dead = fleet.decodes[0].url
    with ThreadPoolExecutor(2) as pool:  # one of the two is at the server
        streams = [pool.submit(fleet.stream, rid, 3000) for rid in ("lost-1", "lost-2")]
        until(lambda: dead in map(fleet.place_of, ("lost-1", "lost-2")), WAIT_S, "a stream is there")
        fleet.decodes[0].kill()
        until(lambda: state(page, dead) == "down", WAIT_S, "its card is red")
        until(lambda: failures(page)[0] > 0, WAIT_S, "the error rate counts it")
        until(lambda: "/generate broke off" in text(page, "pd-failures"), WAIT_S, "the stream is listed")
        wait(streams, WAIT_S)
    assert dead.removeprefix("http://") in text(page, "pd-failures code")
    assert text(page, "#status") == "serving, degraded"
    assert "cannot connect" in text(page, "pd-worker[data-state=down] .why")
    assert_laid_out(page, "a dead server")
    page.refresh()
    until(lambda: "/generate broke off" in text(page, "pd-failures"), WAIT_S, "the router keeps failed requests")


def test_the_page_of_one_server_shows_its_role_alone(browser: webdriver.Chrome, fleet: PageFleet) -> None:
    browser.get(f"{fleet.prefills[0].url}/dashboard")
    until(lambda: roles(browser) == ["prefill"], WAIT_S, "the server")
    until(lambda: "TTFT" in charts(browser), WAIT_S, "its history")
    assert "ITL" not in charts(browser) and not browser.find_element(By.ID, "chat").is_displayed()
    assert not browser.find_element(By.CSS_SELECTOR, ".pool[data-role=decode]").is_displayed()
    assert_laid_out(browser, "one server")
