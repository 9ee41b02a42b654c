"""A small fleet under load for tests and pictures of the page, and what a browser finds wrong with it at one size.

Two prefill servers, two decode servers, a router with a key and an admin key, and `pdserve bench` beside them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from selenium import webdriver

from tests.e2e.harness import Server, running, start_router, start_server, until
from tests.tiny import VOCAB_SIZE

KEY, ADMIN_KEY = "page-user", "page-admin"
LOAD = ("--random-input-len", "60", "--random-output-len", "32", "--random-range-ratio", "0.5", "--num-prompts", "3000")
PAINT_S = 1.0
COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclasses.dataclass(frozen=True)
class ScreenSize:
    """Width and height in CSS pixels; `mobile`: a phone's browser."""

    name: str
    width: int
    height: int
    mobile: bool = False


DESKTOP, LAPTOP = ScreenSize("desktop", 1920, 1080), ScreenSize("laptop", 1366, 768)
PHONE = ScreenSize("phone", 390, 844, mobile=True)
SIZES = (DESKTOP, LAPTOP, PHONE)


class PageFleet:
    """The servers, and requests to the router with its keys."""

    def __init__(self, model: str, prefills: list[Server], decodes: list[Server], router: Server) -> None:
        self.model, self.prefills, self.decodes, self.router = model, prefills, decodes, router

    @property
    def url(self) -> str:
        """Where clients and browsers go."""
        return self.router.url

    def get(self, path: str) -> Any:
        """A JSON answer, with the admin key."""
        answer = requests.get(self.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def place_of(self, rid: str) -> str | None:
        """The URL of the decode server that runs a request; None: none does."""
        running = self.get("/observe")["router"]["running"]
        return next((one["decode"] for one in running if one["rid"] == rid), None)

    def stream(self, rid: str, num_tokens: int) -> int:
        """Read one long stream to its end, also to a broken one; the number of its output tokens."""
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        body = {"text": "a long answer", "rid": rid, "stream": True, "sampling_params": sampling}
        headers = {"Authorization": f"Bearer {KEY}"}
        with requests.post(f"{self.url}/generate", json=body, headers=headers, stream=True, timeout=300) as answer:
            assert answer.status_code == 200, answer.text
            counts = [found[1] for line in answer.iter_lines() if (found := COUNT.search(line))]
        return int(counts[-1])


@contextlib.contextmanager
def running_page_fleet(model: str, *more: str) -> Iterator[PageFleet]:
    """Start the fleet; end it at the end. `more`: further flags of the prefill servers."""
    flags = (
        *("--max-total-tokens", "8192", "--served-model-name", "tiny-llama", "--enable-hierarchical-cache"),
        *("--hicache-ratio", "2", "--speculative-algorithm", "NGRAM"),
    )
    prefills = [start_server(model, "prefill", *flags, *more, name=f"prefill-{n}") for n in (1, 2)]
    decodes = [start_server(model, "decode", *flags, name=f"decode-{n}") for n in (1, 2)]
    with running(*prefills, *decodes):
        keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
        policies = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--drain-migrate")
        router = start_router(prefills, decodes, *keys, *policies)
        router.headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with running(router):
            yield PageFleet(model, prefills, decodes, router)


def shared_load(file: Path) -> tuple[str, ...]:
    """Write prompts for `pdserve bench` that share prefixes and partly repeat, and return its flags for them.

    The caches have hits, and the answers of repeated prompts are drafted.
    """
    rng = random.Random(7)

    def some(num_tokens: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]

    prefixes, suffixes = [some(160) for _ in range(6)], [some(24) for _ in range(4)]
    prompts = [rng.choice(prefixes) + (rng.choice(suffixes) if rng.random() < 0.5 else some(24)) for _ in range(3000)]
    file.write_text("".join(json.dumps({"prompt": prompt, "output_tokens": 40}) + "\n" for prompt in prompts))
    return ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3000")


@contextlib.contextmanager
def bench_beside(fleet: PageFleet, rate: float, load: Sequence[str] = LOAD) -> Iterator[None]:
    """Run `pdserve bench` with `rate` requests per second and the flags `load`, and kill it at the end."""
    argv = [sys.executable, "-m", "pdserve", "bench", "--base-url", fleet.url, "--api-key", KEY, "--ignore-eos"]
    argv += ["--tokenizer", fleet.model, "--request-rate", str(rate), *load]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None, "the load ran all the time"
    finally:
        process.kill()
        process.wait(20)


@contextlib.contextmanager
def long_stream(fleet: PageFleet, rid: str, num_tokens: int) -> Iterator[list[int]]:
    """Read a long stream in a thread. The yielded list has the number of its tokens at the end."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(fleet.stream(rid, num_tokens)))
    thread.start()
    try:
        yield found
    finally:
        thread.join(120)
        assert not thread.is_alive(), "the stream has ended"


def set_screen(browser: webdriver.Chrome, size: ScreenSize, *, dark: bool) -> None:
    """Emulate a screen and a colour scheme; `reset_screen` ends it."""
    metrics = {"width": size.width, "height": size.height, "deviceScaleFactor": 1, "mobile": size.mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    until(lambda: browser.execute_script(CHARTS_FIT), 20.0, "the charts have the width of their cards")


def reset_screen(browser: webdriver.Chrome) -> None:
    """End `set_screen`."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def take_picture(browser: webdriver.Chrome, path: Path, size: ScreenSize, *, whole: bool = False) -> None:
    """Write a picture of the window, or of the whole page, after `set_screen`."""
    time.sleep(PAINT_S)
    options: dict[str, object] = {"format": "png"}
    if whole:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        options["captureBeyondViewport"] = True
        options["clip"] = {"x": 0, "y": 0, "width": size.width, "height": height, "scale": 1}
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    path.write_bytes(base64.b64decode(picture["data"]))


CHARTS_FIT = """
return [...document.querySelectorAll('.canvas')].filter((node) => node.clientWidth > 0)
    .every((node) => Math.abs((node.querySelector('.uplot')?.offsetWidth ?? 0) - node.clientWidth) < 2);
"""
LAYOUT_PROBLEMS = """
const problems = [];
const shown = (node) => node.checkVisibility({visibilityProperty: true, opacityProperty: true});
const root = document.documentElement;
if (root.scrollWidth > innerWidth) problems.push(`the page is ${root.scrollWidth} wide on ${innerWidth}`);
const dialog = document.querySelector('dialog[open]');
const walker = document.createTreeWalker(dialog ?? document.body, NodeFilter.SHOW_TEXT);
const texts = [];
for (let text = walker.nextNode(); text !== null; text = walker.nextNode()) {
    const owner = text.parentElement;
    if (text.data.trim() === '' || !shown(owner) || owner.closest('script, noscript, option, .skip, svg')) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const rects = [...range.getClientRects()].filter((rect) => rect.width > 1 && rect.height > 1);
    if (rects.length === 0) continue;
    const said = text.data.trim().slice(0, 60);
    const abridged = owner.closest('#model, .bar, .dense .why, .dense code, .wires .ends');
    for (let box = owner; box !== null && !abridged; box = box.parentElement) {
        const style = getComputedStyle(box);
        if (box !== root && box !== document.body && style.overflowX === 'hidden' && style.display !== 'inline') {
            const room = box.getBoundingClientRect();
            const isCut = (rect) => rect.right > room.right + 1.5 || rect.bottom > room.bottom + 3;
            if (rects.some(isCut)) problems.push(`cut off: ${said}`);
        }
        if (['auto', 'scroll'].includes(style.overflowX) || ['auto', 'scroll'].includes(style.overflowY)) break;
    }
    if (!owner.closest('.scrolls, .log, nav, .bar')) {
        if (rects.some((rect) => rect.right > innerWidth + 1 || rect.left < -1)) problems.push(`outside: ${said}`);
        texts.push([said, rects, owner]);
    }
}
const common = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
const meet = (a, b) => common(a, b, 'left', 'right') > 2 && common(a, b, 'top', 'bottom') > 4;
texts.forEach(([said, rects, owner], index) => texts.slice(index + 1).forEach(([other, others, next]) => {
    if (owner.closest('.edges, .chat') || next.closest('.edges, .chat')) return;
    if (rects.some((a) => others.some((b) => meet(a, b)))) problems.push(`over each other: ${said} | ${other}`);
}));
return [...new Set(problems)];
"""
"""Returns what is cut off, outside the window, or over another text. Some texts are abridged
on purpose: their hover titles have all of them."""
CHART_POINTS = """
const figures = [...document.querySelectorAll('pd-charts figure')].filter((node) => !node.hidden);
return Object.fromEntries(figures.map((node) => {
    const canvas = node.querySelector('canvas');
    const data = canvas?.width ? canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data : [];
    let coloured = 0;
    for (let at = 0; at < data.length; at += 4) {
        const [red, green, blue] = [data[at], data[at + 1], data[at + 2]];
        coloured += data[at + 3] > 128 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60;
    }
    return [node.querySelector('figcaption span').textContent, [coloured, node.querySelector('.legend').textContent]];
}));
"""
"""By the title of each shown chart, the number of its coloured pixels, which are those of its lines, and its legend."""
