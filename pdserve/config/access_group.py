"""API keys, client limits, CORS and TLS of a server: a group of `ServerConfig`. Flag names of SGLang and uvicorn."""

from __future__ import annotations

import dataclasses
import enum
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError
from pdserve.http.access import Network, parse_networks
from pdserve.http.credentials import ADMIN_API_KEY, API_KEY, Keys, check_keys, port_context, verify_clients


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    names: tuple[str, ...] = (),
    env: str | None = None,
    secret: bool = False,
    refused: Mapping[str, str] | None = None,
    many: bool = False,
) -> Any:
    """Declare a dataclass field that is also a command-line flag; `names` are additional flag names.

    `env` is an environment variable that replaces an absent flag. A `secret` never appears in a repr, in
    `/get_server_info` or in a log. `refused`: advice by value, for values of SGLang that are not supported here.
    With `many` the flag takes several words, which are joined by commas.
    """
    metadata = {"help": help, "names": names, "env": env, "secret": secret, "refused": refused or {}, "many": many}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def shown(group: Any) -> dict[str, Any]:
    """Return the fields of a config group by name, without secrets."""
    secret = {field.name for field in dataclasses.fields(group) if field.metadata["secret"]}
    return {name: value for name, value in dataclasses.asdict(group).items() if name not in secret}


KEYFILE_PASSWORD = "PDSERVE_SSL_KEYFILE_PASSWORD"


class ProofRule(enum.Enum):
    """Which requests need a proof of the control token. Open paths never need one."""

    OPTIONAL = "optional"
    """None: a valid proof replaces the key."""
    UNLESS_KEY = "unless key"
    """All but those with a valid key. The default of a server with a control token and no `--api-key`."""
    ALWAYS = "always"
    """All, whatever key they have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """API keys, client limits, CORS and TLS."""

    api_key: str | None = flag(
        None,
        help="comma-separated keys; clients must send one as Authorization: Bearer KEY. /health, /ready and /metrics "
        "need none. When absent, requests need no key",
        env=API_KEY,
        secret=True,
    )
    admin_api_key: str | None = flag(
        None,
        help="keys that replace --api-key for admin paths: flush, abort, pause, profile, and /observe",
        env=ADMIN_API_KEY,
        secret=True,
    )
    require_control_proof: bool | None = flag(
        None,
        help="accept only requests with a proof of PDSERVE_CONTROL_TOKEN, as pdserve's router sends them; API keys do "
        "not suffice. When absent, a server with the token and without --api-key requires the proof; "
        "--no-require-control-proof admits everyone there. /health, /health_generate, /ping, /ready, /readiness, "
        "/metrics and /control_challenge need no proof",
    )
    max_concurrent_requests_per_client: int | None = flag(
        None, help="concurrent generating requests per client; more are refused with 429. No limit when absent"
    )
    forwarded_allow_ips: str | None = flag(
        None,
        help="trusted proxies, as comma-separated addresses and networks; their X-Forwarded-For names the client",
    )
    cors_allowed_origins: str | None = flag(
        None, help="comma-separated origins of web pages that may send requests, * for all; none when absent"
    )
    ssl_certfile: str | None = flag(None, help="serve HTTPS with this certificate (PEM)")
    ssl_keyfile: str | None = flag(None, help="private key of --ssl-certfile (PEM)")
    ssl_keyfile_password: str | None = flag(None, help="password of the key file", env=KEYFILE_PASSWORD, secret=True)
    ssl_ca_certs: str | None = flag(
        None,
        help="CA certificates (PEM) that verify client certificates; launch_local's router verifies the servers with "
        "them",
    )
    ssl_cert_reqs: int = flag(0, help="client certificates: 0 not requested, 1 verified if sent, 2 required")

    @property
    def keys(self) -> Keys:
        """The valid keys."""
        return Keys.of(self.api_key, self.admin_api_key)

    def proof_rule(self, *, has_token: bool) -> ProofRule:
        """Return which requests need a proof; `has_token`: the server has a control token."""
        if self.require_control_proof is None:
            return ProofRule.UNLESS_KEY if has_token and self.api_key is None else ProofRule.OPTIONAL
        return ProofRule.ALWAYS if self.require_control_proof else ProofRule.OPTIONAL

    @property
    def proxies(self) -> tuple[Network, ...]:
        """Networks of trusted proxies."""
        return parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)

    @property
    def origins(self) -> tuple[str, ...]:
        """Allowed CORS origins."""
        return tuple(origin.strip() for origin in (self.cors_allowed_origins or "").split(",") if origin.strip())

    @property
    def scheme(self) -> str:
        """Scheme of the server's URL."""
        return "http" if self.ssl_certfile is None else "https"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the HTTP port; None for plain HTTP.

        Raises:
            ConfigError: a file is not a certificate or key, the two do not match, or the password is wrong.
        """
        if self.ssl_certfile is None:
            return None
        flags = "--ssl-certfile, --ssl-keyfile and its password"
        context = port_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password, flags)
        verify_clients(context, self.ssl_ca_certs, self.ssl_cert_reqs, "--ssl-ca-certs")
        return context

    def check(self) -> None:
        """Check all values; ConfigError names the flag and contains no secret."""
        check_keys("--api-key", self.api_key)
        check_keys("--admin-api-key", self.admin_api_key)
        most = self.max_concurrent_requests_per_client
        if most is not None and most < 1:
            _refuse("max_concurrent_requests_per_client", f"is {most}, but must be at least 1")
        parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            _refuse("ssl_certfile", "and --ssl-keyfile need each other")
        if self.ssl_cert_reqs not in (0, 1, 2):
            _refuse("ssl_cert_reqs", f"is {self.ssl_cert_reqs}, but must be 0, 1 or 2")
        if self.ssl_cert_reqs and (self.ssl_ca_certs is None or self.ssl_certfile is None):
            _refuse("ssl_cert_reqs", "needs --ssl-certfile and --ssl-ca-certs")
        for field, path in (
            ("ssl_certfile", self.ssl_certfile),
            ("ssl_keyfile", self.ssl_keyfile),
            ("ssl_ca_certs", self.ssl_ca_certs),
        ):
            if path is not None and ("\0" in path or not Path(path).is_file()):
                _refuse(field, f"is {path!r}, but this file does not exist; give the path of a PEM file")


def _refuse(field: str, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} {rule}", field=field)
