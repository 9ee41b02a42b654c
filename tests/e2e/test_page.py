"""The router's page in a real browser, before a real pair: what it shows is what the servers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

pytest.importorskip("selenium", reason="selenium is not installed: pip install pdserve[test]")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.adapters import write_adapter
from tests.browser import open_browser
from tests.e2e.harness import Pair, Server, running, running_monolith, running_pair, start_router, until
from tests.tiny import Family

WAIT_S = 30.0
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
PAGE_STATES = ("leased", "locked", "evictable", "free")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Before `pair`, so that no server is started where there is no browser."""
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pair(browser: webdriver.Chrome, tiny_checkpoint: Callable[[Family], Path]) -> Iterator[Pair]:
    with running_pair(str(tiny_checkpoint("llama")), "--max-total-tokens", "4096") as running_one:
        yield running_one


@pytest.fixture
def page(browser: webdriver.Chrome, pair: Pair) -> Iterator[webdriver.Chrome]:
    """The page, freshly loaded; afterwards nothing has been said on the console, and nobody else has been asked."""
    browser.get_log("browser")
    browser.get(pair.url)
    until(lambda: len(cards(browser)) == 2, WAIT_S, "both servers are shown")
    yield browser
    assert browser.get_log("browser") == []
    assert_only_this_origin_was_asked(browser, pair.url)


def assert_only_this_origin_was_asked(browser: webdriver.Chrome, url: str) -> None:
    names = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(names) >= 10 and all(name.startswith(url + "/") for name in names), names


def cards(browser: webdriver.Chrome) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, "pd-worker[data-state]")


def card(browser: webdriver.Chrome, role: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, f"pd-worker[data-role={role}]")


def text(browser: webdriver.Chrome, selector: str) -> str:
    """Of all that match, one a line."""
    return "\n".join(each(browser, selector, "textContent"))


def each(browser: webdriver.Chrome, selector: str, name: str) -> list[str]:
    """A property of all that match, as they are at one moment."""
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node[arguments[1]])"
    return list(browser.execute_script(script, selector, name))


def shown_numbers(browser: webdriver.Chrome, role: str) -> dict[str, int]:
    """Queues and pages as the card of the one server of this role has them."""
    fields = "[...arguments[0].querySelectorAll('[data-field]')].map((node) => [node.dataset.field, node.textContent])"
    numbers = browser.execute_script(f"return Object.fromEntries({fields})", card(browser, role))
    return {name: int(value.replace(",", "")) for name, value in numbers.items()}


def told_numbers(server: Server) -> dict[str, int]:
    """The same from the server itself."""
    state: dict[str, Any] = requests.get(f"{server.url}/observe", timeout=10).json()["replicas"][0]["state"]
    rare = ("num_grammar_queue_reqs", "num_retracted_reqs")
    queues = {name: value for name, value in state["queues"].items() if value or name not in rare}
    return queues | {f"pages_{name}": state["pages"][name] for name in PAGE_STATES}


def say(browser: webdriver.Chrome, words: str, max_tokens: int) -> WebElement:
    """Send a message; the answer's element."""
    num_answers = len(browser.find_elements(By.CSS_SELECTOR, ".said.model"))
    for field, value in zip(browser.find_elements(By.CSS_SELECTOR, ".options input"), (max_tokens, 0), strict=True):
        field.clear()
        field.send_keys(str(value))
    browser.find_element(By.ID, "prompt").send_keys(words)
    browser.find_element(By.CSS_SELECTOR, "pd-chat button[type=submit]").click()
    found = browser.find_elements(By.CSS_SELECTOR, ".said.model")
    assert len(found) == num_answers + 1
    return found[-1]


def test_it_shows_both_servers_with_their_own_numbers(page: webdriver.Chrome, pair: Pair) -> None:
    assert {one.get_attribute("data-role"): one.get_attribute("data-state") for one in cards(page)} == {
        "prefill": "ok",
        "decode": "ok",
    }
    for server, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        assert server.url.removeprefix("http://") in card(page, role).text
        until(lambda: shown_numbers(page, role) == told_numbers(server), WAIT_S, f"the numbers of {role}")  # noqa: B023
    assert text(page, "#status") == "serving"


def test_nothing_sticks_out_on_a_phone(page: webdriver.Chrome) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [400, 400]
        assert page.find_element(By.ID, "prompt").is_displayed()
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_chat_streams_and_leaves_an_edge_and_a_bar(page: webdriver.Chrome, pair: Pair) -> None:
    answer = say(page, MARKUP, 24)
    until(lambda: answer.get_attribute("data-done") is not None, WAIT_S, "the answer ends")
    assert text(page, ".said.user p") == MARKUP, "what is said is text"
    assert page.find_elements(By.CSS_SELECTOR, ".log img, .log b") == []
    assert len(str(answer.find_element(By.CSS_SELECTOR, ".answer").get_property("textContent"))) > 0
    stats = answer.find_element(By.CSS_SELECTOR, ".stats").text
    assert "TTFT" in stats and "24 tokens" in stats and "tok/s" in stats

    until(lambda: text(page, ".edges .ends") == "Prefill 1 → Decode 1", WAIT_S, "the edge")

    def edge() -> dict[str, Any]:
        seen: dict[str, Any] = requests.get(f"{pair.url}/observe", timeout=10).json()["edges"][0]
        return seen

    until(lambda: edge()["bytes"] > 0 and edge()["reports"] == 2, WAIT_S, "both servers have told of the transfer")
    until(lambda: f"{edge()['transfers']} done" in each(page, ".edges li", "title")[0], WAIT_S, "the page shows it")
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "li.row")) >= 1, WAIT_S, "the request")
    until(lambda: "→ 24" in text(page, "li.row .tokens"), WAIT_S, "both halves are one row")
    parts = page.find_elements(By.CSS_SELECTOR, "li.row .part-prefill")
    assert str(parts[0].get_attribute("title")).startswith("prefill: ")


GOES_ON = """
const send = window.fetch;
window.fetch = (url, options) => {
    if (!options || !options.body) return send(url, options);
    return send(url, {...options, body: JSON.stringify({...JSON.parse(options.body), ignore_eos: true})});
};
"""
"""A random model ends its answers at random, too."""


NOT_SERVING = """
const ask = window.fetch;
window.fetch = async (url, options) => {
    const answer = await ask(url, options);
    if (url !== "observe") return answer;
    const picture = await answer.json();
    const url_of = (role) => picture.workers.find((one) => one.worker_type === role).url;
    const pair = {prefill: url_of("prefill"), decode: url_of("decode"), serving: false, error: "no token came"};
    return Response.json({...picture, pairs: [pair]});
};
"""


def test_a_pair_that_serves_nothing_is_shown(page: webdriver.Chrome) -> None:
    page.execute_script(NOT_SERVING)
    for role, partner in (("prefill", "Decode 1"), ("decode", "Prefill 1")):
        until(lambda: card(page, role).get_attribute("data-state") == "down", WAIT_S, f"{role} is not ready")  # noqa: B023
        assert "not ready" in card(page, role).text
        assert f"No token comes through with {partner}" in card(page, role).text
    until(lambda: text(page, "#status") == "serving, degraded", WAIT_S, "the header says so")


def test_an_answer_can_be_stopped_and_the_chat_goes_on(page: webdriver.Chrome, pair: Pair) -> None:
    page.execute_script(GOES_ON)
    answer = say(page, "on and on", 3000)
    until(lambda: "tokens" in answer.text, WAIT_S, "it has begun")
    page.find_element(By.CSS_SELECTOR, "pd-chat .danger").click()
    until(lambda: answer.get_attribute("data-done") is not None, WAIT_S, "it ends")
    assert answer.find_element(By.CSS_SELECTOR, ".stats").text.endswith("stopped")
    again = say(page, "and now", 4)
    until(lambda: again.get_attribute("data-done") is not None, WAIT_S, "the next answer")
    assert "4 tokens" in again.text


def test_a_router_with_a_key_asks_for_it(browser: webdriver.Chrome, pair: Pair) -> None:
    locked = start_router([pair.prefill], [pair.decode], "--api-key", "secret")
    with running(locked):
        browser.get(locked.url)
        field = browser.find_element(By.ID, "key")
        until(field.is_displayed, WAIT_S, "it asks")
        assert cards(browser) == []
        field.send_keys("wrong\n")
        until(lambda: "refused this key" in text(browser, "#key-note"), WAIT_S, "it says no")
        field.send_keys("secret\n")
        until(lambda: len(cards(browser)) == 2 and not field.is_displayed(), WAIT_S, "it opens")
        answer = say(browser, "hello", 4)
        until(lambda: "4 tokens" in answer.text, WAIT_S, "the chat has the key, too")
        assert_only_this_origin_was_asked(browser, locked.url)
        browser.find_element(By.ID, "lock").click()
        until(lambda: asks_and_shows_nothing(browser), WAIT_S, "it asks again, and what the key has shown is gone")


def asks_and_shows_nothing(browser: webdriver.Chrome) -> bool:
    return len(browser.find_elements(By.CSS_SELECTOR, "dialog[open]")) == 1 and not cards(browser)


def test_servers_that_do_both_are_one_pool(browser: webdriver.Chrome, pair: Pair) -> None:
    """Nothing is asked of it here, so any server will do for a router that does not ask what it is."""
    argv = ["--port", "0", "--disable-health-check", "--worker-urls", pair.decode.url]
    plain = Server("plain router", "pdserve.launch_router", argv)
    with running(plain):
        browser.get(plain.url)
        until(lambda: len(cards(browser)) == 1, WAIT_S, "the server")
        assert card(browser, "regular").is_displayed()
        assert not browser.find_element(By.CSS_SELECTOR, ".pool[data-role=prefill]").is_displayed()
        assert not browser.find_element(By.CSS_SELECTOR, ".wires").is_displayed()


SIZES = ((1366, 768, False), (1920, 1080, False), (390, 844, True))
OVERFLOWS = """
const cut = [...document.querySelectorAll('.tile strong, .tile small, .tile span, figcaption, h2, nav a')];
return cut.filter((node) => node.offsetParent && node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0)
    .map((node) => node.textContent);
"""


CHARTS_FIT = """
return [...document.querySelectorAll('.canvas')].filter((node) => node.clientWidth > 0)
    .every((node) => Math.abs(node.querySelector('.uplot').offsetWidth - node.clientWidth) < 2);
"""


def test_the_history_stays_after_a_reload_and_nothing_is_cut_off_at_three_sizes(
    page: webdriver.Chrome, pair: Pair
) -> None:
    body = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    assert requests.post(f"{pair.url}/generate", json=body, timeout=30).status_code == 200

    def kept() -> Any:
        return requests.get(f"{pair.url}/observe/history", timeout=10).json()["windows"]["300"].get("itl_p50_s")

    until(kept, WAIT_S, "the router has a point")
    for _ in range(2):
        until(lambda: page.find_elements(By.CSS_SELECTOR, "pd-charts .uplot canvas"), WAIT_S, "the charts")
        until(lambda: "ms" in text(page, ".plots figure:nth-child(3) .legend"), WAIT_S, "ITL has values")
        page.refresh()
    until(lambda: len(cards(page)) == 2, WAIT_S, "both servers are shown")
    assert "5 min" in text(page, ".tile em")
    page.find_element(By.CSS_SELECTOR, "[data-range='60']").click()
    until(lambda: "1 min" in text(page, ".tile em"), WAIT_S, "the tiles name the new time range")
    try:
        for width, height, mobile in SIZES:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
            page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            assert page.execute_script(OVERFLOWS) == []
            until(lambda: page.execute_script(CHARTS_FIT), WAIT_S, "the charts have the width of their cards")
            bottom = page.execute_script("return document.querySelector('#prompt').getBoundingClientRect().bottom")
            assert mobile or bottom <= height, "the chat needs no scrolling on a laptop"
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_request_opens_its_waterfall(page: webdriver.Chrome, pair: Pair) -> None:
    body = {"text": "hello", "rid": "shown-here", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    assert requests.post(f"{pair.url}/generate", json=body, timeout=30).status_code == 200
    until(lambda: "shown-here" in "".join(each(page, "li.row", "title")), WAIT_S, "the request")
    page.find_element(By.CSS_SELECTOR, "li.row[title*='shown-here'] .when").click()
    until(lambda: "decode · generation" in text(page, "pd-request .waterfall"), WAIT_S, "its parts on both servers")
    shown = text(page, "pd-request dd")
    for part in ("shown-here", *(server.url.removeprefix("http://") for server in (pair.prefill, pair.decode))):
        assert part in shown
    page.find_element(By.CSS_SELECTOR, "pd-request .close").click()


def test_a_server_is_drained_and_serves_again_from_the_page(page: webdriver.Chrome) -> None:
    card(page, "decode").find_element(By.CSS_SELECTOR, ".manage").click()
    button = page.find_element(By.CSS_SELECTOR, "pd-admin .actions button")
    for state, label in (("warn", "Serve again"), ("ok", "Drain")):
        button.click()
        until(lambda: card(page, "decode").get_attribute("data-state") == state, WAIT_S, state)  # noqa: B023
        until(lambda: button.text == label, WAIT_S, label)  # noqa: B023
    page.find_element(By.CSS_SELECTOR, "pd-admin .close").click()


def test_the_settings_of_both_servers_can_be_read(page: webdriver.Chrome) -> None:
    page.find_element(By.CSS_SELECTOR, "pd-config summary").click()
    until(lambda: "disaggregation_mode" in text(page, ".settings th"), WAIT_S, "the settings")
    assert [one.split(" ")[0] for one in each(page, ".settings h3", "textContent")] == ["prefill", "decode"]
    until(lambda: "context 4,096" in text(page, ".models") or "model" in text(page, ".models"), WAIT_S, "the model")


def test_a_server_without_a_router_has_the_page(browser: webdriver.Chrome, pair: Pair) -> None:
    browser.get(f"{pair.decode.url}/dashboard")
    until(lambda: len(cards(browser)) == 1, WAIT_S, "the server")
    until(lambda: browser.find_elements(By.CSS_SELECTOR, "pd-charts .uplot canvas"), WAIT_S, "its history")
    assert text(browser, "#status") == "serving"
    assert_only_this_origin_was_asked(browser, pair.decode.url)


def monolith_flags(directory: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--served-model-name", "tiny", "--max-total-tokens", "2048", "--dtype", "float32", "--page-size", "16"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file"),
        *("--hicache-storage-backend-extra-config", json.dumps({"directory": str(directory)}), *more),
    )


def test_a_monolith_shows_its_adapter_its_store_and_a_request(
    browser: webdriver.Chrome, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint("llama")
    lora = ("--enable-lora", "--lora-paths", f"poet={write_adapter(tmp_path / 'adapter', model)}")
    with running_monolith(str(model), *monolith_flags(tmp_path / "store", *lora)) as server:
        browser.get_log("browser")
        browser.get(f"{server.url}/dashboard")
        until(lambda: [one.get_attribute("data-role") for one in cards(browser)] == ["regular"], WAIT_S, "the server")
        until(lambda: "store file" in card(browser, "regular").text, WAIT_S, "its store")
        assert text(browser, "#status") == "serving"
        assert not browser.find_element(By.CSS_SELECTOR, ".pool[data-role=prefill]").is_displayed()
        until(lambda: "poet" in text(browser, ".models"), WAIT_S, "the models")
        listed = each(browser, ".models li", "textContent")
        assert len(listed) == 2 and listed[0].startswith("tiny") and "model, context" in listed[0], listed
        assert listed[1].startswith("poet") and "adapter of tiny" in listed[1], listed
        browser.find_element(By.CSS_SELECTOR, "pd-config summary").click()
        until(lambda: "hicache_storage_backend" in text(browser, ".settings th"), WAIT_S, "the settings")

        sampling = {"max_new_tokens": 8, "ignore_eos": True}
        body = {"text": "hello", "rid": "by-poet", "lora_path": "poet", "sampling_params": sampling}
        assert requests.post(f"{server.url}/generate", json=body, timeout=30).status_code == 200
        until(lambda: "by-poet" in "".join(each(browser, "li.row", "title")), WAIT_S, "the request")
        browser.find_element(By.CSS_SELECTOR, "li.row[title*='by-poet'] .when").click()
        until(lambda: "generation" in text(browser, "pd-request .waterfall"), WAIT_S, "its parts")
        browser.find_element(By.CSS_SELECTOR, "pd-request .close").click()
        assert browser.get_log("browser") == []
        assert_only_this_origin_was_asked(browser, server.url)


@pytest.mark.slow
def test_a_monolith_has_a_chart_of_its_store(
    browser: webdriver.Chrome, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    with running_monolith(str(tiny_checkpoint("llama")), *monolith_flags(tmp_path / "store")) as server:

        def written() -> list[float | None]:
            series = requests.get(f"{server.url}/observe/history", timeout=10).json()["series"]
            return list(series.get("kv_store_written", []))

        browser.get(f"{server.url}/dashboard")
        until(lambda: 0.0 in written(), WAIT_S, "nothing is written")
        body = {"input_ids": list(range(3, 203)), "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        for _ in range(3):  # pages are written when they have been used again
            assert requests.post(f"{server.url}/generate", json=body, timeout=30).status_code == 200
        until(lambda: any(written()), WAIT_S, "the history has what was written")
        until(lambda: shows_lines(browser, "KV store"), WAIT_S, "and the chart shows it")


def shows_lines(browser: webdriver.Chrome, name: str) -> bool:
    """Whether the chart `name` is shown, with a canvas."""
    figures = browser.find_elements(By.CSS_SELECTOR, "pd-charts figure")
    found = next((one for one in figures if one.text.startswith(name)), None)
    return found is not None and bool(found.find_elements(By.CSS_SELECTOR, ".uplot canvas"))


def test_the_pages_of_the_api_show_and_send_requests(browser: webdriver.Chrome, pair: Pair) -> None:
    browser.get_log("browser")
    browser.get(f"{pair.url}/docs")
    select = "details.operation[data-path='/v1/messages']"
    until(lambda: bool(browser.find_elements(By.CSS_SELECTOR, select)), WAIT_S, "the operations are shown")
    paths = each(browser, "details.operation code.path", "textContent")
    assert {"/v1/chat/completions", "/generate", "/workers"} <= set(paths)
    browser.find_element(By.ID, "search").send_keys("/v1/messages")
    assert browser.execute_script("return document.querySelectorAll('details.operation:not([hidden])').length") == 2
    operation = browser.find_element(By.CSS_SELECTOR, select)
    operation.find_element(By.TAG_NAME, "summary").click()
    until(lambda: bool(operation.find_elements(By.TAG_NAME, "textarea")), WAIT_S, "the form is shown")
    assert "max_tokens" in operation.text and "budget_tokens" not in operation.text
    operation.find_element(By.CSS_SELECTOR, "form button").click()
    until(lambda: '"type":"message"' in operation.find_element(By.TAG_NAME, "pre").text, WAIT_S, "an answer")
    assert operation.find_element(By.TAG_NAME, "pre").text.startswith("200")
    assert browser.get_log("browser") == []


def test_a_killed_server_turns_red(page: webdriver.Chrome, pair: Pair) -> None:
    """Last: it is gone afterwards."""
    pair.decode.kill()
    until(lambda: card(page, "decode").get_attribute("data-state") == "down", WAIT_S, "it is seen")
    assert "down" in card(page, "decode").text
    assert card(page, "prefill").get_attribute("data-state") == "ok"
    assert shown_numbers(page, "decode") == {}, "nobody knows its numbers"
    until(lambda: text(page, "#status") == "not serving", WAIT_S, "the header says so")
    states = "return [...document.querySelectorAll('.edges li')].map((node) => node.dataset.state)"
    assert set(page.execute_script(states)) <= {"down"}, "the line to it is red, until prefill forgets it"
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
    assert requests.post(f"{pair.url}/generate", json=body, timeout=30).status_code == 503
    until(lambda: "1 of" in error_tile(page), WAIT_S, "the error rate counts the failed request")


def error_tile(browser: webdriver.Chrome) -> str:
    return next(one for one in each(browser, ".tile", "textContent") if one.startswith("Error rate"))
