"""Removes keys, tokens and passwords from what a support bundle contains.

Each of three rules alone finds a secret: a JSON field whose name says that it is one, a value that this process
knows (flags and environment), and a form that only secrets have, such as a Bearer header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

REDACTED = "[redacted]"
SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api_?keys?|access_?keys?|account_?keys?|keys|password|passwd|passphrase|secret\w*|token|"
    r"auth_?token|hf_?token|control_?token|proofs?|credentials?|authorization|cookie)$",
    re.IGNORECASE,
)
"""Names of fields whose text is a secret. Numbers stay, so that counts such as `max_token` do not vanish."""
SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASS|PROOF|CREDENTIAL|AUTH", re.IGNORECASE)
"""Names of environment variables whose value is removed wherever it occurs."""
FORMS = (
    re.compile(r"(?i)(\bBearer\s+)[^\s\"',;]+"),
    re.compile(r"(?i)(\bBasic\s+)[A-Za-z0-9+/=]{8,}"),
    re.compile(r"()\b(?:sk-|hf_|ghp_|glpat-|xox[a-z]-)[A-Za-z0-9_\-]{8,}"),
    re.compile(r"()\bAKIA[A-Z0-9]{16}\b"),
    re.compile(r"(://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),
    re.compile(r"(?i)([?&](?:api_?key|key|token|access_token|secret|password|signature|sig)=)[^&\s\"'#]+"),
    re.compile(r"(?i)(--?(?:[a-z]+-)*(?:api-key|token|password|secret)(?:=|\s+))(?!-)[^\s\"']+"),
    re.compile(
        r"(?i)(\b\w*(?:api_?key|token|password|passwd|secret(?:_?access)?(?:_?key)?)[\"']?\s*[:=]\s*[\"'])[^\"']+"
    ),
    re.compile(r"(?i)(\b[A-Z_]*(?:API_KEY|_TOKEN|PASSWORD|SECRET|PROOF_KEY)=)[^\s\"']+"),
    re.compile(r"(?s)()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
)
"""Forms of secrets in text; the first group stays."""
MIN_CHARS = 4
"""Shorter known values are removed only as whole words, since they occur in other words."""
MIN_VARIABLE_CHARS = 6
"""Shorter values of environment variables are no secrets, but numbers and switches."""
TOKEN_ID, NO_TOKEN = "control_token_id", "none"


class Redactor:
    """Removes the secrets `known` and everything that looks like one. A repr does not contain them."""

    def __init__(self, known: Iterable[str]) -> None:
        values = {part.strip() for value in known for part in (value, *value.split(","))}
        longest_first = sorted((value for value in values if value), key=len, reverse=True)
        forms = (
            re.escape(value) if len(value) >= MIN_CHARS else rf"(?<!\w){re.escape(value)}(?!\w)"
            for value in longest_first
        )
        self._token_ids: dict[str, str] = {}
        self._known = re.compile("|".join(forms)) if longest_first else None

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for form in FORMS:
            text = form.sub(rf"\g<1>{REDACTED}", text)
        return text

    def value(self, value: Any, name: str = "") -> Any:
        """Return a JSON value without secrets; `name` is the field that has it. Objects inside strings are parsed."""
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(one, str(key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one, name) for one in value]
        if not isinstance(value, str):
            return value
        if name == TOKEN_ID and value != NO_TOKEN:  # equal ones stay equal, but no guess of the token can be tested
            return self._token_ids.setdefault(value, f"id {len(self._token_ids) + 1}")
        if value and SECRET_NAME.search(name):
            return REDACTED
        if value.lstrip().startswith(("{", "[")):
            try:
                return json.dumps(self.value(json.loads(value)))
            except (ValueError, RecursionError):
                return self.text(value)
        return self.text(value)


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of the environment variables whose names say that they are secrets."""
    return [
        value
        for name, value in environ.items()
        if SECRET_VARIABLE.search(name) and len(value.strip()) >= MIN_VARIABLE_CHARS
    ]
