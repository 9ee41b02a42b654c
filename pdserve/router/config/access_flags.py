"""Access and TLS flags of the router. Part of `flags`.

Keys and passwords can also be environment variables: every user of the machine can read a command line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pdserve.base.env import CONTROL_TOKEN, WORKER_PROOF_KEY, control_token, worker_proof_secret
from pdserve.base.proof import MacKey
from pdserve.errors import ConfigError
from pdserve.http.clients import ADMIN_API_KEY, API_KEY, WORKER_ADMIN_API_KEY, WORKER_API_KEY
from pdserve.http.session_proof import worker_key
from pdserve.router.config.access_config import RouterAccessConfig, TlsConfig

KEYFILE_PASSWORD = "PDSERVE_SSL_KEYFILE_PASSWORD"
DEFAULTS = RouterAccessConfig()


def add_access(group: argparse._ArgumentGroup) -> None:
    """Add the access and TLS flags to an argument group."""
    add = group.add_argument
    text = "comma-separated keys; clients must send one as Authorization: Bearer KEY. When absent, no key is needed"
    add("--api-key", metavar="KEY", help=f"{text} (or in {API_KEY})")
    text = "keys that replace --api-key for admin paths: add and remove servers, flush caches, abort requests"
    add("--admin-api-key", metavar="KEY", help=f"{text} (or in {ADMIN_API_KEY})")
    text = "key sent to servers; when absent --api-key, and without that the client's Authorization header"
    add("--worker-api-key", metavar="KEY", help=f"{text} (or in {WORKER_API_KEY})")
    text = "key sent to servers with admin requests; when absent --admin-api-key, and without that --worker-api-key"
    add("--worker-admin-api-key", metavar="KEY", help=f"{text} (or in {WORKER_ADMIN_API_KEY})")
    text = (
        f"prove {CONTROL_TOKEN} to servers with every request instead of sending keys, and use only servers that prove "
        f"it first; needs the variable, or {WORKER_PROOF_KEY}, which is derived from it"
    )
    add("--worker-control-proof", action="store_true", help=text)
    text = "concurrent generating requests per client; more are refused with 429. No limit when absent"
    add("--max-concurrent-requests-per-client", type=int, metavar="N", help=text)
    text = "trusted proxies, as comma-separated addresses and networks; their X-Forwarded-For names the client"
    add("--forwarded-allow-ips", metavar="ADDRESSES", help=text)
    text = "origins of web pages that may send requests, * for all; none when absent"
    add("--cors-allowed-origins", nargs="*", default=[], metavar="ORIGIN", help=text)
    add("--tls-cert-path", type=Path, metavar="PEM", help="serve HTTPS with this certificate")
    text = f"private key of --tls-cert-path; the password of an encrypted key is read from {KEYFILE_PASSWORD}"
    add("--tls-key-path", type=Path, metavar="PEM", help=text)
    add("--ca-cert-paths", type=Path, nargs="*", default=[], metavar="PEM", help="CA certificates of https servers")
    add("--client-cert-path", type=Path, metavar="PEM", help="client certificate for https servers")
    add("--client-key-path", type=Path, metavar="PEM", help="private key of --client-cert-path")


def access_of(args: argparse.Namespace) -> RouterAccessConfig:
    """Read the access flags; `ConfigError` names the invalid flag."""
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
    """Read the TLS flags; `ConfigError` if a certificate has no key, or a key no certificate."""
    return TlsConfig(
        cert=args.tls_cert_path,
        key=args.tls_key_path,
        key_password=_secret(None, KEYFILE_PASSWORD),
        worker_ca=tuple(args.ca_cert_paths),
        client_cert=args.client_cert_path,
        client_key=args.client_key_path,
    )


def _proof_key() -> MacKey:
    """Read the key from the environment; `ConfigError` if it is not set."""
    secret, token = worker_proof_secret(), control_token()
    if secret is None and not token:
        text = f"--worker-control-proof needs {CONTROL_TOKEN} or {WORKER_PROOF_KEY} in the environment"
        raise ConfigError(text, field="worker_control_proof")
    return worker_key(token) if secret is None else MacKey(secret)


def _secret(given: str | None, variable: str) -> str | None:
    """Return the flag's value, else the environment variable; an empty variable is ignored."""
    return given if given is not None else os.environ.get(variable, "").strip() or None
