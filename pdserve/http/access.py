"""Access rules of a server or router: keys, pages of other origins, bodies, concurrent requests per client.

Each side has one middleware, which asks these rules in this order and sends the refusals:

    `rules.framing_refusal` ──> `AccessRules.key_refusal` ──> `page_refusal` ──> `bodies` ──> `place`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from pdserve.http.bodies import BodyBudget
from pdserve.http.clients import ClientLimit, Keys, Network, client_address
from pdserve.http.errors import HttpRefusal
from pdserve.http.rules import page_refusal

COMMANDS = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/declare_peer_dead",
        "/start_profile",
        "/stop_profile",
        "/pd_role_switch",
        "/observe",
    }
)
"""Admin paths of servers and router: they affect other clients, or show requests of other clients."""

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
GENERATE_PATH = "/generate"
RESPONSES_PATH = "/v1/responses"
GENERATING = (CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, RESPONSES_PATH)
"""Paths that generate tokens: they count toward a client's limit, and their calls are recorded."""

NO_SNIFF = ("X-Content-Type-Options", "nosniff")
"""Header of all responses: browsers must not guess their type."""
NO_STORE = ("Cache-Control", "no-store")
"""Header of responses with the data of one client: proxies must not store them."""
PREFLIGHT_S = 600
"""Seconds for which a browser remembers the answer to a CORS preflight request."""
EXPOSED_HEADERS = ("X-Request-Id",)
"""Headers of responses that pages of allowed origins can read."""


class AccessRules:
    """The access rules of one application. Event loop only."""

    def __init__(
        self,
        keys: Keys,
        origins: Collection[str],
        proxies: Sequence[Network],
        max_requests_per_client: int | None,
        max_body_bytes: int,
    ) -> None:
        """`origins`: CORS origins, `*` for all. `proxies`: trusted ones. `max_body_bytes`: limit of one body."""
        self.keys = keys
        self.bodies = BodyBudget(max_body_bytes)
        self._origins = origins
        self._proxies = proxies
        self._limit = ClientLimit(max_requests_per_client)

    def key_refusal(self, authorization: str | None, *, command: bool) -> HttpRefusal | None:
        """Check the `Authorization` header of a request; `command`: it needs an admin key. None if it is allowed."""
        if self.keys.may(authorization, command=command):
            return None
        text = "this path needs a valid API key as Authorization: Bearer KEY"
        return HttpRefusal(401, text, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    def page_refusal(
        self, method: str, headers: Mapping[str, str], *, command: bool, proven: bool = False
    ) -> HttpRefusal | None:
        """See `rules.page_refusal`. `proven`: a proof of the control token is needed, which pages cannot send."""
        return page_refusal(method, headers, self._origins, command=command, has_keys=self.keys.some or proven)

    def allows_origin(self, origin: str | None) -> bool:
        """Whether CORS allows pages of this origin."""
        return "*" in self._origins or origin in self._origins

    def client(self, authorization: str | None, peer: str | None, forwarded_for: Sequence[str]) -> str:
        """Return the client that a request is counted for; see `clients`. `peer`: address, None if unknown."""
        key = self.keys.find(authorization)
        if key is not None and not self._proxies:
            return f"key {key}"
        return "unknown" if peer is None else client_address(peer, forwarded_for, self._proxies)

    def place(self, client: str) -> AbstractContextManager[None]:
        """See `ClientLimit.take`."""
        return self._limit.take(client)
