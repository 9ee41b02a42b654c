"""What a request must be before a handler sees it: types of bodies, pages of other origins, how many values."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from pdserve.errors import RequestError
from pdserve.http import access as http_access
from pdserve.http.access import BodyBudget, has_too_many_values, page_refusal

BODY = {"Content-Length": "5", "Host": "here"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, None),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, None),
        ({"Content-Type": "application/vnd.api+json"}, None),
        ({"Content-Type": "application/x-www-form-urlencoded"}, None),
        ({"Content-Type": "application/octet-stream"}, None),
        ({}, None),
        ({"Content-Type": "application/json", "Origin": "http://here"}, None),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/json"}, 415),
        ({"Content-Type": "multipart/form-data"}, 415),
        ({"Origin": "http://here"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"}, 415),
        ({"Content-Type": "application/json", "Origin": "http://there"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://here:81"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://friend", "Sec-Fetch-Site": "cross-site"}, None),
        ({"Content-Type": "text/plain", "Origin": "http://friend"}, 415),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_bodies_are_json_and_pages_are_our_own(method: str, headers: dict[str, str], status: int | None) -> None:
    given = CIMultiDict(BODY | headers)
    refusal = page_refusal(method, given, ["http://friend"], acts=False, needs_key=False)
    assert (None if refusal is None else refusal.status) == status
    with_keys = page_refusal(method, given, ["http://friend"], acts=False, needs_key=True)
    assert (None if with_keys is None else with_keys.status) == (None if status == 403 else status)


def test_reading_is_open_to_pages_but_for_commands() -> None:
    headers = CIMultiDict({"Host": "here", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"})
    assert page_refusal("GET", headers, [], acts=False, needs_key=False) is None
    refusal = page_refusal("GET", headers, [], acts=True, needs_key=False)
    assert refusal is not None and refusal.status == 403
    no_body = CIMultiDict({"Host": "here", "Content-Length": "0", "Content-Type": "text/plain"})
    assert page_refusal("POST", no_body, [], acts=True, needs_key=False) is None


def test_values_are_counted_outside_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_access, "MAX_VALUES", 10)
    monkeypatch.setattr(http_access, "MAX_CONTAINERS", 5)
    assert not has_too_many_values(b'{"prompt": "[[[[[[", "n": [1, 2, 3]}')
    assert has_too_many_values(b'{"prompt": [[], [], {}, {}]}')
    monkeypatch.setattr(http_access, "MAX_CONTAINERS", 10)
    assert not has_too_many_values(b'{"prompt": "' + b'a, [b], {c}, \\" ,' * 20 + b'"}')
    assert has_too_many_values(b'{"prompt": ["a,", "b,"' + b', "c"' * 20 + b"]}")
    assert has_too_many_values(b"[" * 20)
    assert not has_too_many_values(b'["\\\\", 1, "\\"", 2]')


def test_large_bodies_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_access, "LARGE_BODY_BYTES", 100)
    budget = BodyBudget(1000)
    small = [budget.open() for _ in range(1000)]
    for hold in small:
        hold.add(100)
    assert budget.held_bytes == 0
    large = [budget.open() for _ in range(8)]
    for hold in large:
        hold.add(600)
        hold.add(400)
    assert budget.held_bytes == 8000
    with pytest.raises(RequestError) as refused:
        small[0].add(1)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    for hold in [*large, *small]:
        hold.close()
        hold.close()
    assert budget.held_bytes == 0
