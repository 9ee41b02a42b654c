"""Lists of hosts, networks and ports: what each pattern means, and what it does not."""

from __future__ import annotations

import pytest

from pdserve.base.hosts import canonical_host, is_host, parse_host_patterns
from pdserve.errors import ConfigError

FLAG = "--disaggregation-allowed-prefill"


@pytest.mark.parametrize(
    ("text", "host", "port", "allowed"),
    [
        ("10.0.0.2", "10.0.0.2", 8998, True),
        ("10.0.0.2", "10.0.0.3", 8998, False),
        ("10.0.0.2:8998", "10.0.0.2", 8998, True),
        ("10.0.0.2:8998", "10.0.0.2", 22, False),
        ("10.0.0.0/24", "10.0.0.77", 1, True),
        ("10.0.0.0/24:8998", "10.0.0.77", 1, False),
        ("10.0.0.0/24", "10.0.1.77", 1, False),
        ("10.0.0.0/24", "::ffff:10.0.0.77", 1, True),
        ("0.0.0.0/0", "10.1.2.3", 1, True),
        ("0.0.0.0/0", "fd00::1", 1, False),
        ("0.0.0.0/0", "a.name", 1, False),
        ("127.0.0.0/8", "127.1", 1, False),  # a name, for all we know
        ("127.0.0.0/8", "2130706433", 1, False),
        ("fd00::/8", "fd00::1", 1, True),
        ("[fd00::1]:8998", "fd00:0:0::1", 8998, True),
        ("[fd00::1]:8998", "fd00::1", 8999, False),
        ("[fd00::/8]", "fd12::1", 1, True),
        ("prefill-0.svc", "PREFILL-0.svc.", 1, True),
        ("prefill-0.svc", "prefill-0.svc.evil.example", 1, False),
        ("*.prefill.svc:8998", "pod-3.prefill.svc", 8998, True),
        ("*.prefill.svc", "prefill.svc", 8998, False),
        ("*.prefill.svc", "xprefill.svc", 8998, False),
        (" a , 10.0.0.1:5 ,,", "10.0.0.1", 5, True),
    ],
)
def test_what_a_pattern_means(text: str, host: str, port: int, allowed: bool) -> None:
    assert parse_host_patterns(FLAG, text).allow(host, port) is allowed


@pytest.mark.parametrize(
    "text", ["", " , ", "a b", "10.0.0.0/33", "a:0", "a:65536", "a:x", "[fd00::1", "[fd00::1]x", "*", "*a", "http://a"]
)
def test_what_is_no_pattern_is_refused_by_the_name_of_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=FLAG) as caught:
        parse_host_patterns(FLAG, text)
    assert caught.value.field == "disaggregation_allowed_prefill"


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("Prefill-0.SVC.", "prefill-0.svc"),
        ("2.2.2.2.", "2.2.2.2"),
        ("0x2.2.514", "2.2.2.2"),
        ("33686018", "2.2.2.2"),
        ("::FFFF:2.2.2.2", "2.2.2.2"),
        ("FD00:0:0::1", "fd00::1"),
        ("1a.b", "1a.b"),
        ("2.2.2.2 x", "2.2.2.2 x"),  # no host
    ],
)
def test_all_spellings_of_a_host_are_one(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical_host(canonical) == canonical


@pytest.mark.parametrize("host", ["a", "a_b-c.d", "10.0.0.1", "::1", "fe80::1%eth0", "a" * 253])
def test_hosts(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize(
    "host", ["", "a b", "[::1]", "a:1", "user@a", "a/b", "a#b", "a?b", "-a", "a\n", "é", "a" * 254]
)
def test_what_cannot_be_a_host(host: str) -> None:
    assert not is_host(host)
