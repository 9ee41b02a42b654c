"""`pdserve doctor URL`: what is wrong with a deployment, where, and how to correct it.

Reads the deployment by `fleet.read_fleet`, tries its ports from this host, and runs the checks of `doctor_checks`.
Exit status: 0 without errors and warnings, 1 with some, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import requests

from pdserve.cli.doctor_checks import CHECKS, Finding, is_loopback
from pdserve.cli.fleet import (
    SHAPE_ERRORS,
    TLS,
    Fleet,
    FleetClient,
    FleetServer,
    add_connection_flags,
    client_of,
    other_form,
    printable,
    read_fleet,
)
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import RequestError

PORT_TIMEOUT_S = 3.0
MAX_PORT_THREADS = 16
WIDTH = 110
SEVERITIES = ("error", "warning", "note")
FAILED = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result for one deployment. `findings` are sorted by severity. `checked_at_s`: seconds since 1970."""

    url: str
    checked_at_s: float
    servers: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is neither an error nor a warning."""
        return all(one.severity == "note" for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        counts = {f"{name}s": sum(one.severity == name for one in self.findings) for name in SEVERITIES}
        return {
            "url": self.url,
            "checked_at_s": self.checked_at_s,
            "healthy": self.healthy,
            **counts,
            "servers": list(self.servers),
            "findings": [dataclasses.asdict(one) for one in self.findings],
        }

    def as_text(self) -> str:
        """Return the report for a terminal, without control characters of a server's text."""
        lines = [f"{self.url}: " + (_count_roles(self.servers) or "not read")]
        for one in self.findings:
            lines += ["", f"{one.severity}  {one.check}  {', '.join(one.where)}"]
            lines += textwrap.wrap(one.what, WIDTH, initial_indent="  ", subsequent_indent="  ")
            lines += textwrap.wrap(f"fix: {one.fix}", WIDTH, initial_indent="  ", subsequent_indent="       ")
        counts = [(sum(one.severity == name for one in self.findings), name) for name in SEVERITIES]
        told = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count)
        return printable("\n".join([*lines, "", told or f"nothing found by {len(CHECKS) + 2} groups of checks"]))


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve doctor`."""
    parser = CommandParser(
        prog="pdserve doctor",
        allow_abbrev=False,
        description="Says what is wrong with a deployment, where, and how to correct it. Exit status 1: something is.",
    )
    add_connection_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis; return the exit status."""
    args = make_parser().parse_args(argv)
    with client_of(args) as client:
        diagnosis = diagnose(client)
    if args.json:
        json.dump(diagnosis.as_json(), sys.stdout, indent=1)
        print()
    else:
        print(diagnosis.as_text())
    return 0 if diagnosis.healthy else FAILED


def diagnose(client: FleetClient) -> Diagnosis:
    """Read the deployment and run all checks. A deployment that cannot be read is a finding."""
    checked_at_s = time.time()
    try:
        fleet = read_fleet(client)
    except RequestError as error:
        return Diagnosis(url=client.url, checked_at_s=checked_at_s, servers=(), findings=(_unreachable(client, error),))
    except SHAPE_ERRORS as error:
        finding = _other_form(client.url, "the deployment was not read", error)
        return Diagnosis(url=client.url, checked_at_s=checked_at_s, servers=(), findings=(finding,))
    found = [finding for check in (*CHECKS, check_ports) for finding in _run(check, fleet)]
    found += check_access(client)
    order = {name: place for place, name in enumerate(SEVERITIES)}
    return Diagnosis(
        url=client.url,
        checked_at_s=checked_at_s,
        servers=tuple(
            {"url": one.url, "role": one.role, "healthy": one.healthy, "version": one.info.get("version")}
            for one in fleet.servers
        ),
        findings=tuple(sorted(found, key=lambda one: order[one.severity])),
    )


def _unreachable(client: FleetClient, error: RequestError) -> Finding:
    check, fix = "unreachable", "check address, port and scheme (http or https), and that the router or server runs"
    if error.code == TLS:
        fix = "give --ca-cert with the certificate of the authority that signed the service's"
    if error.status in (401, 403):
        check = "key"
        fix = "give --api-key, or set PDSERVE_API_KEY; where servers require proofs, ask the router instead"
    return Finding(check=check, severity="error", where=(client.url,), what=error.message, fix=fix)


def _run(check: Callable[[Fleet], Iterable[Finding]], fleet: Fleet) -> Iterator[Finding]:
    """Yield the findings of a check; at an answer of another form than it expects, one that says so."""
    try:
        yield from check(fleet)
    except SHAPE_ERRORS as error:
        yield _other_form(fleet.url, f"the check of {check.__name__.removeprefix('check_')} has ended early", error)


def _other_form(url: str, told: str, error: Exception) -> Finding:
    what = f"{told}: {other_form('an answer', error)}"
    fix = "use the command of the deployment's version, and check that the address is that of pdserve"
    return Finding(check="other_form", severity="error", where=(url,), what=what, fix=fix)


def check_ports(fleet: Fleet) -> Iterator[Finding]:
    """Try the HTTP, bootstrap and control ports of all servers from this host.

    Servers of another network than this host's are skipped with a note: there, only the pair probes of the router tell.
    """
    wanted = {server.url: list(_ports(server)) for server in fleet.servers if server.healthy}
    addresses = sorted({address for ports in wanted.values() for _, address in ports})
    with ThreadPoolExecutor(MAX_PORT_THREADS) as threads:
        problems = dict(zip(addresses, threads.map(_try_port, addresses), strict=True))
    outside = [url for url, ports in wanted.items() if ports and problems[ports[0][1]] is not None]
    for url, ports in wanted.items():
        for name, address in [] if url in outside else ports:
            if (problem := problems[address]) is not None:
                what = f"its {name} port {address[0]}:{address[1]} does not accept connections from here: {problem}"
                fix = "open the port between the servers: bootstrap port, control port and the engine's data ports"
                yield Finding(check="port", severity="warning", where=(url,), what=what, fix=fix)
    if outside:
        what = "these addresses do not accept connections from this host, so their ports were not checked"
        fix = "run the command on a host of the servers' network"
        yield Finding(check="port", severity="note", where=tuple(outside), what=what, fix=fix)


def _ports(server: FleetServer) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield name and address of a server's listeners, its HTTP port first."""
    address = urlsplit(server.url)
    host, mode = address.hostname or "", server.info.get("disaggregation_mode")
    with contextlib.suppress(ValueError):  # the port in the URL is no number
        yield "HTTP", (host, address.port or (443 if address.scheme == "https" else 80))
        bootstrap_port = server.info.get("disaggregation_bootstrap_port")
        if mode == "prefill" and isinstance(bootstrap_port, int):
            yield "bootstrap", (host, bootstrap_port)
        control_host, _, control_port = str(server.facts.get("control_endpoint") or "").rpartition(":")
        if control_port.isdigit() and mode in ("prefill", "decode"):
            yield "control", (control_host.strip("[]"), int(control_port))


def _try_port(address: tuple[str, int]) -> str | None:
    """Connect and disconnect; return the reason why this failed, None if it did not."""
    try:
        socket.create_connection(address, PORT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return None


def check_access(client: FleetClient) -> Iterable[Finding]:
    """Find a service on a network address that takes requests without a key."""
    if is_loopback(client.url) or client.status_without_key("/v1/models") != requests.codes.ok:
        return []
    what = "the service takes requests without a key, and its address is no loopback address"
    fix = "set --api-key, --admin-api-key; or put a proxy with authentication before it"
    return [Finding(check="no_key", severity="warning", where=(client.url,), what=what, fix=fix)]


def _count_roles(servers: Sequence[dict[str, Any]]) -> str:
    roles = [str(one["role"]) for one in servers]
    return ", ".join(f"{roles.count(role)} {role}" for role in ("prefill", "decode", "unified") if role in roles)
