"""Makes the pictures of the dashboard page in docs/images: a fleet under load, in a headless Chromium.

    python -m tests.page_images [--seconds 300] [--out docs/images]

Needs Debian's `chromium` and `chromium-driver`. The model is a tiny random one, so its latencies mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser import open_browser
from tests.e2e.harness import until
from tests.e2e.page_fleet import (
    ADMIN_KEY,
    DESKTOP,
    LAPTOP,
    PHONE,
    PageFleet,
    bench_beside,
    long_stream,
    running_page_fleet,
    set_screen,
    shared_load,
    take_picture,
)
from tests.tiny import make_tiny

RATE = 3.0
WAIT_S = 30.0


def text(browser: webdriver.Chrome, selector: str) -> str:
    """Return the texts of all elements that match."""
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent).join(' ')"
    return str(browser.execute_script(script, selector))


def take_dialogs(browser: webdriver.Chrome, fleet: PageFleet, out: Path) -> None:
    """Write the pictures of a request and of the commands for a server."""
    browser.execute_script("document.querySelectorAll('li.row')[3].click()")
    take_picture(browser, out / "page-request.png", LAPTOP)
    browser.find_element(By.CSS_SELECTOR, "pd-request .close").click()
    with long_stream(fleet, "translate-book-7", 2000):
        for card in browser.find_elements(By.CSS_SELECTOR, "pd-worker[data-role=decode] .manage"):
            card.click()
            time.sleep(2)
            if "translate-book-7" in text(browser, "pd-admin .running"):
                take_picture(browser, out / "page-manage.png", LAPTOP)
                break
            browser.find_element(By.CSS_SELECTOR, "pd-admin .close").click()
    browser.execute_script("document.querySelector('pd-admin dialog').close()")


def take_failures(browser: webdriver.Chrome, fleet: PageFleet, out: Path) -> None:
    """Kill a decode server under a stream, drain another one, and write the picture of the whole page."""
    with long_stream(fleet, "summary-12", 3000):
        until(lambda: fleet.place_of("summary-12"), WAIT_S, "it runs")
        next(server for server in fleet.decodes if server.url == fleet.place_of("summary-12")).kill()
    browser.find_elements(By.CSS_SELECTOR, "pd-worker[data-role=prefill] .manage")[1].click()
    browser.find_element(By.CSS_SELECTOR, "pd-admin .actions button").click()
    until(lambda: "drains" in text(browser, "pd-admin .note"), WAIT_S, "it drains")
    browser.find_element(By.CSS_SELECTOR, "pd-admin .close").click()
    until(lambda: "down" in text(browser, "pd-worker[data-state=down] .badge"), WAIT_S, "a dead server")
    time.sleep(6)
    browser.execute_script("scrollTo(0, 0)")
    take_picture(browser, out / "page-failures.png", LAPTOP, whole=True)


def main() -> None:
    """Start the servers, load them for `--seconds`, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of load before the first picture")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(open_browser(folder / "profile"))
        store = json.dumps({"directory": str(folder / "store"), "prefetch_threshold": 16})
        flags = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", store)
        fleet = stack.enter_context(running_page_fleet(str(make_tiny("llama", folder / "tiny")), *flags))
        stack.enter_context(bench_beside(fleet, RATE, shared_load(folder / "load.jsonl")))
        browser.get(fleet.url)
        field = browser.find_element(By.ID, "key")
        until(field.is_displayed, WAIT_S, "it asks for the key")
        field.send_keys(f"{ADMIN_KEY}\n")
        time.sleep(args.seconds)
        browser.refresh()
        until(lambda: bool(browser.find_elements(By.CSS_SELECTOR, "pd-charts .uplot canvas")), WAIT_S, "the charts")
        for name, size, dark, whole in (
            ("page.png", LAPTOP, False, True),
            ("page-dark.png", DESKTOP, True, False),
            ("page-narrow.png", PHONE, True, False),
        ):
            set_screen(browser, size, dark=dark)
            browser.execute_script("scrollTo(0, 0)")
            take_picture(browser, args.out / name, size, whole=whole)
        set_screen(browser, LAPTOP, dark=False)
        take_dialogs(browser, fleet, args.out)
        take_failures(browser, fleet, args.out)


if __name__ == "__main__":
    main()
