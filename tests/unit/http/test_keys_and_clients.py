"""Keys, who a client is, how much it may ask at a time, and which addresses are reachable from outside."""

from __future__ import annotations

import logging

import pytest

from pdserve.base.hosts import reachable, url_host, warn_open, warn_unsealed, warn_weak
from pdserve.errors import ConfigError, RequestError
from pdserve.http.access import ClientLimit, client_address, parse_networks
from pdserve.http.credentials import Keys, check_keys


@pytest.mark.parametrize(
    ("api", "admin", "sent", "ask", "command"),
    [
        (None, None, None, True, True),
        ("k", None, None, False, False),
        ("k", None, "Bearer k", True, True),
        ("k", None, "bearer  k ", True, True),
        ("k", None, "Bearer kk", False, False),
        ("k", None, "Basic k", False, False),
        ("k", None, "k", False, False),
        ("k", None, "Bearer ", False, False),
        ("k", None, "Bearer k\u00e9", False, False),
        ("k1,k2", None, "Bearer k2", True, True),
        ("k1,k2", None, "Bearer k1,k2", False, False),
        (None, "root", None, True, False),
        (None, "root", "Bearer root", True, True),
        ("k", "root", "Bearer k", True, False),
        ("k", "root", "Bearer root", True, True),
        ("k", "root", None, False, False),
    ],
)
def test_who_may_ask_what(api: str | None, admin: str | None, sent: str | None, ask: bool, command: bool) -> None:
    keys = Keys.of(api, admin)
    assert (keys.may(sent, command=False), keys.may(sent, command=True)) == (ask, command)
    assert "root" not in repr(keys) and "k1" not in repr(keys)


@pytest.mark.parametrize("text", ["", "a b", "k,,l", "k\u00e9", "k\n", "secret-\x00"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="--api-key") as refused:
        check_keys("--api-key", text)
    assert refused.value.field == "api_key" and "secret" not in str(refused.value)


def test_a_client_has_so_many_places_and_no_more() -> None:
    limit = ClientLimit(2)
    with limit.take("a"), limit.take("b"):
        with limit.take("a"):
            with pytest.raises(RequestError, match="max-concurrent-requests-per-client") as refused:
                limit.take("a")
            assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
        with pytest.raises(ZeroDivisionError), limit.take("a"):
            _ = 1 / 0
        with limit.take("a"):
            pass
    without = ClientLimit(None)
    with without.take("a"), without.take("a"):
        pass


@pytest.mark.parametrize(
    ("peer", "header", "trusted", "expected"),
    [
        ("9.9.9.9", ["1.1.1.1"], None, "9.9.9.9"),
        ("9.9.9.9", ["1.1.1.1"], "10.0.0.0/8", "9.9.9.9"),
        ("10.0.0.1", ["1.1.1.1"], "10.0.0.0/8", "1.1.1.1"),
        ("10.0.0.1", ["made up, 1.1.1.1"], "10.0.0.0/8", "1.1.1.1"),
        ("10.0.0.1", ["5.5.5.5, 1.1.1.1, 10.2.2.2"], "10.0.0.0/8", "1.1.1.1"),
        ("10.0.0.1", ["5.5.5.5", "1.1.1.1"], "10.0.0.1", "1.1.1.1"),
        ("10.0.0.1", [], "10.0.0.1", "10.0.0.1"),
        ("::1", ["2001:db8::1"], "*", "2001:db8::1"),
        ("a socket", ["1.1.1.1"], "*", "a socket"),
    ],
)
def test_the_last_address_that_is_no_trusted_proxy_is_the_client(
    peer: str, header: list[str], trusted: str | None, expected: str
) -> None:
    assert client_address(peer, header, parse_networks("--forwarded-allow-ips", trusted)) == expected


def test_what_is_no_network_is_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips takes addresses"):
        parse_networks("--forwarded-allow-ips", "10.0.0.0/8,nonsense")


def test_everyone_is_warned_of_doors_that_stand_open(caplog: pytest.LogCaptureFixture) -> None:
    for inside in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"):
        assert not reachable(inside)
    for outside in ("0.0.0.0", "::", "10.0.0.1", "my-host"):
        assert reachable(outside)
    with caplog.at_level(logging.WARNING):
        warn_open("127.0.0.1", has_key=False)
        warn_open("0.0.0.0", has_key=True)
        warn_unsealed("127.0.0.1", "::1")
        warn_weak("")
        warn_weak("x" * 16)
        assert not caplog.records
        warn_open("0.0.0.0", has_key=False)
        warn_unsealed("127.0.0.1", "10.0.0.1", "10.0.0.1")
        warn_weak("hunter2")
        assert "7 characters" in (text := caplog.records.pop().message) and "hunter2" not in text
    assert ["PDSERVE_API_KEY" in one.message for one in caplog.records] == [True, False]
    assert [url_host(host) for host in ("0.0.0.0", "::", "fe80::1", "h")] == ["127.0.0.1", "[::1]", "[fe80::1]", "h"]
