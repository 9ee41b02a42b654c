"""Flags of the router that say who may ask it, and over what. Part of `flags`.

Keys and passwords may stand in the environment instead: a command line can be read by every user of the machine.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdserve.base.clients import ADMIN_API_KEY, API_KEY, WORKER_ADMIN_API_KEY, WORKER_API_KEY
from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY, control_token, worker_proof_secret
from pdserve.base.proof import MacKey
from pdserve.base.session_proof import worker_key
from pdserve.errors import ConfigError
from pdserve.router.config.access_config import RouterAccessConfig, TlsConfig

KEYFILE_PASSWORD = "PDSERVE_SSL_KEYFILE_PASSWORD"
DEFAULTS = RouterAccessConfig()


def add_access(group: argparse._ArgumentGroup) -> None:
    """Add them to a parser."""
    add = group.add_argument
    text = "what clients must send as Authorization: Bearer KEY, several with commas; without it everyone may ask"
    add("--api-key", metavar="KEY", help=f"{text} (or in {API_KEY})")
    text = "instead of --api-key for those who add and remove servers, flush caches and abort requests of others"
    add("--admin-api-key", metavar="KEY", help=f"{text} (or in {ADMIN_API_KEY})")
    text = "what servers are sent; without it --api-key, and without that what the client sent"
    add("--worker-api-key", metavar="KEY", help=f"{text} (or in {WORKER_API_KEY})")
    text = (
        "what servers are sent with commands; without it --admin-api-key, and without that what they are sent otherwise"
    )
    add("--worker-admin-api-key", metavar="KEY", help=f"{text} (or in {WORKER_ADMIN_API_KEY})")
    text = (
        f"prove {CONTROL_TOKEN} to servers with every request instead of sending keys, and ask only servers that prove "
        f"it first; needs the variable, or {WORKER_PROOF_KEY}, which is derived from it"
    )
    add("--worker-control-proof", action="store_true", help=text)
    text = "generating requests that a client may have at a time; one more is a 429. No limit without it"
    add("--max-concurrent-requests-per-client", type=int, metavar="N", help=text)
    text = "proxies, as addresses and networks with commas, whose X-Forwarded-For names the client"
    add("--forwarded-allow-ips", metavar="ADDRESSES", help=text)
    text = "origins of web pages that may ask; none without it, * for all"
    add("--cors-allowed-origins", nargs="*", default=[], metavar="ORIGIN", help=text)
    add("--tls-cert-path", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    text = f"and this key; its password, if it has one, in {KEYFILE_PASSWORD}"
    add("--tls-key-path", type=Path, metavar="PEM", help=text)
    add("--ca-cert-paths", type=Path, nargs="*", default=[], metavar="PEM", help="authorities of https servers")
    add("--client-cert-path", type=Path, metavar="PEM", help="certificate to show to https servers")
    add("--client-key-path", type=Path, metavar="PEM", help="and its key")


def access_of(args: argparse.Namespace) -> RouterAccessConfig:
    """Who may ask; `ConfigError` names the flag at fault."""
    return RouterAccessConfig(
        api_key=_secret(args.api_key, API_KEY),
        admin_api_key=_secret(args.admin_api_key, ADMIN_API_KEY),
        worker_api_key=_secret(args.worker_api_key, WORKER_API_KEY),
        worker_admin_api_key=_secret(args.worker_admin_api_key, WORKER_ADMIN_API_KEY),
        worker_proof_key=_proof_key() if args.worker_control_proof else None,
        max_concurrent_requests_per_client=args.max_concurrent_requests_per_client,
        forwarded_allow_ips=args.forwarded_allow_ips,
        cors_allowed_origins=tuple(args.cors_allowed_origins),
        request_id_headers=tuple(args.request_id_headers),
    )


def tls_of(args: argparse.Namespace) -> TlsConfig:
    """Over what; `ConfigError` where half of a pair is missing."""
    return TlsConfig(
        cert=args.tls_cert_path,
        key=args.tls_key_path,
        key_password=_secret(None, KEYFILE_PASSWORD),
        worker_ca=tuple(args.ca_cert_paths),
        client_cert=args.client_cert_path,
        client_key=args.client_key_path,
    )


def _proof_key() -> MacKey:
    """From the environment, which must have it."""
    secret, token = worker_proof_secret(), control_token()
    if secret is None and not token:
        text = f"--worker-control-proof needs {CONTROL_TOKEN} or {WORKER_PROOF_KEY} in the environment"
        raise ConfigError(text, field="worker_control_proof")
    return worker_key(token) if secret is None else MacKey(secret)


def _secret(given: str | None, variable: str) -> str | None:
    """The flag, else the variable; an empty variable does not count."""
    return given if given is not None else os.environ.get(variable, "").strip() or None
