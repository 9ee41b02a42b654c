"""Who may ask a server, and over what: a group of `ServerConfig`. Names of flags are SGLang's and uvicorn's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pdserve.base.clients import ADMIN_API_KEY, API_KEY, Keys, Network, check_keys, parse_networks
from pdserve.errors import ConfigError


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    names: tuple[str, ...] = (),
    env: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag; `names` are extra or replacing flag names.

    `env` is a variable that stands for the flag where it is not given. A `secret` is never shown: not in a repr, not in
    `/get_server_info`, not in a log.
    """
    metadata = {"help": help, "names": names, "env": env, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def shown(group: Any) -> dict[str, Any]:
    """The fields of a config group that may be shown, by name."""
    secret = {field.name for field in dataclasses.fields(group) if field.metadata["secret"]}
    return {name: value for name, value in dataclasses.asdict(group).items() if name not in secret}


KEYFILE_PASSWORD = "PDSERVE_SSL_KEYFILE_PASSWORD"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Who may ask, and over what."""

    api_key: str | None = flag(
        None,
        help="what clients must send as Authorization: Bearer KEY, several with commas between them; /health, /ready "
        "and /metrics need none. Everyone may ask without it",
        env=API_KEY,
        secret=True,
    )
    admin_api_key: str | None = flag(
        None,
        help="instead of --api-key for commands: flush, abort, pause, profile, and for /observe",
        env=ADMIN_API_KEY,
        secret=True,
    )
    require_control_proof: bool = flag(
        False,
        help="take only requests that prove PDSERVE_CONTROL_TOKEN, as routers with --worker-control-proof send them; "
        "API keys are not enough. /health, /health_generate, /ready, /readiness, /metrics and /control_challenge "
        "stay open",
    )
    max_concurrent_requests_per_client: int | None = flag(
        None, help="generating requests that a client may have at a time; one more is a 429. No limit when absent"
    )
    forwarded_allow_ips: str | None = flag(
        None,
        help="proxies, as addresses and networks with commas between them, whose X-Forwarded-For names the client",
    )
    cors_allowed_origins: str | None = flag(
        None, help="origins of web pages that may ask, with commas between them, * for all; none when absent"
    )
    ssl_certfile: str | None = flag(None, help="serve HTTPS with this certificate (PEM)")
    ssl_keyfile: str | None = flag(None, help="and this key (PEM)")
    ssl_keyfile_password: str | None = flag(None, help="password of the key file", env=KEYFILE_PASSWORD, secret=True)
    ssl_ca_certs: str | None = flag(
        None,
        help="authorities (PEM) that certificates of clients are checked against, and ours by launch_local's router",
    )
    ssl_cert_reqs: int = flag(0, help="certificates of clients: 0 not asked for, 1 checked if there is one, 2 needed")

    @property
    def keys(self) -> Keys:
        """The keys that are known."""
        return Keys.of(self.api_key, self.admin_api_key)

    @property
    def proxies(self) -> tuple[Network, ...]:
        """Who is believed about whom it asks for."""
        return parse_networks("--forwarded-allow-ips", self.forwarded_allow_ips)

    @property
    def origins(self) -> tuple[str, ...]:
        """Of web pages that may ask."""
        return tuple(origin.strip() for origin in (self.cors_allowed_origins or "").split(",") if origin.strip())

    @property
    def scheme(self) -> str:
        """Of the server's URL."""
        return "http" if self.ssl_certfile is None else "https"

    def check(self) -> None:
        """Raise ConfigError, naming the flag and never showing a secret."""
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
            _refuse("ssl_cert_reqs", "needs --ssl-certfile and the authorities in --ssl-ca-certs")
        for field, path in (
            ("ssl_certfile", self.ssl_certfile),
            ("ssl_keyfile", self.ssl_keyfile),
            ("ssl_ca_certs", self.ssl_ca_certs),
        ):
            if path is not None and ("\0" in path or not Path(path).is_file()):
                _refuse(field, f"is {path!r}, but there is no such file")


def _refuse(field: str, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} {rule}", field=field)
