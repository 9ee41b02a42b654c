"""Makes the pictures of the dashboard page in docs/images: a pair under load, in a headless Chromium.

    python -m tests.page_images [--seconds 90] [--out docs/images]

Needs Debian's `chromium` and `chromium-driver`. The model is a tiny random one, so its latencies mean nothing.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import requests
from selenium import webdriver

from tests.browser import open_browser
from tests.e2e.harness import Pair, running_pair
from tests.tiny import make_tiny

NUM_CLIENTS = 3
LAPTOP, PHONE = (1366, 768), (390, 844)
PAINT_S = 1.5


def ask(url: str, client: int, stop: threading.Event) -> None:
    """Send streams of changing lengths, one after the other."""
    number = 0
    while not stop.is_set():
        number += 1
        sampling = {"max_new_tokens": 8 + number * 13 % 90, "ignore_eos": True}
        body = {
            "rid": f"client-{client}-{number}",
            "text": "hello " * (5 + number % 40),
            "stream": True,
            "sampling_params": sampling,
        }
        with contextlib.suppress(requests.RequestException):
            with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as answer:
                for _ in answer.iter_lines():
                    pass


@contextlib.contextmanager
def under_load(pair: Pair) -> Iterator[None]:
    """Keep `NUM_CLIENTS` streams running."""
    stop = threading.Event()
    clients = [threading.Thread(target=ask, args=(pair.url, number, stop)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(60)


def take(
    browser: webdriver.Chrome, path: Path, size: tuple[int, int], *, dark: bool = False, whole: bool = False
) -> None:
    """Write a picture of the window, or of the whole page."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    time.sleep(PAINT_S)
    options: dict[str, object] = {"format": "png"}
    if whole:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        options["captureBeyondViewport"] = True
        options["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    path.write_bytes(base64.b64decode(picture["data"]))


def main() -> None:
    """Start the servers, load them for `--seconds`, and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds of load before the first picture")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(open_browser(folder / "profile"))
        model = make_tiny("llama", folder / "tiny")
        pair = stack.enter_context(running_pair(str(model), "--max-total-tokens", "4096"))
        stack.enter_context(under_load(pair))
        browser.get(pair.url)
        time.sleep(args.seconds)
        browser.refresh()
        time.sleep(2 * PAINT_S)
        take(browser, args.out / "page.png", LAPTOP, whole=True)
        take(browser, args.out / "page-dark.png", LAPTOP, dark=True)
        take(browser, args.out / "page-narrow.png", PHONE, dark=True)
        browser.execute_script("document.querySelectorAll('li.row')[8].click()")
        take(browser, args.out / "page-request.png", LAPTOP)


if __name__ == "__main__":
    main()
