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
    r"(?:^|_)(?:(?:api|access|account|private|signing|encryption|proof|ssh)_?keys?|keys|password|passwd|passphrase|pwd|"
    r"secret\w*|token|auth_?token|proofs?|credentials?|authorization|cookies?|connection_?string|headers)$"
)
"""Names of fields whose text is a secret, as `_plain` writes them. Numbers stay, so that counts such as `max_token` do
not vanish.
"""
SECRET_FLAG = re.compile(r"--?(?:[a-z]{1,20}-){0,4}(?:api-key|proof-key|token|password|secret)")
SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASS|PROOF|CREDENTIAL|AUTH", re.IGNORECASE)
"""Names of environment variables whose value is removed wherever it occurs."""
_WORD = r"(?:(?:api|access|account|private)[_-]?key|secret(?:[_-]?access)?(?:[_-]?key)?|passw(?:or)?d|passphrase|pwd)"
_QUOTE = r"\\{0,4}[\"']"
"""A quote, with the backslashes that it has inside a JSON string."""
_IS = r"\s{0,4}[:=]\s{0,4}"
_VALUE = r"(?!\[redacted)[^\s\"',;&\\]"
FORMS = tuple(
    re.compile(form)
    for form in (
        rf"(?i)(?=[acxp])((?:authorization|cookie|x-api-key|pdserve-proof)(?:{_QUOTE})?{_IS}(?:{_QUOTE})?)[^\"'\\\r\n]+",
        r"(?i)(\bBasic(?:\s+|%20))[A-Za-z0-9+/=]{8,}",
        r"(?i)(\bBearer(?:\s+|%20))[^\s\"',;\\]+",
        r"()\b(?:sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|npm_|pypi-|AIza|ya29\.)[\w\-]{8,}",
        r"()\b(?:eyJ[\w\-]{8,}\.[\w\-]+(?:\.[\w\-]+)?|AKIA[A-Z0-9]{16}\b)",
        r"(://)[^/\s\"'<>]+(?=@)",
        r"(?i)([?&][\w\-]{0,40}(?:key|token|secret|password|signature|credential|sig)=)[^&\s\"'#]+",
        rf"(?i)({SECRET_FLAG.pattern}(?:=|\s+|{_QUOTE},\s{{0,4}}(?={_QUOTE}))(?:{_QUOTE})?)(?!-)[^\s\"'\\]+",
        rf"(?i)(?=[aspt])((?:{_WORD}|token|pass)(?:{_QUOTE})?{_IS}{_QUOTE})[^\"'\\]+",
        rf"(?i)(?=[asp])({_WORD}{_IS}){_VALUE}+",
        rf"(?i)(token{_IS})(?!https?:)(?=[^\s\"',;&]{{0,200}}\d)(?=[^\s\"',;&]{{0,200}}[a-z]){_VALUE}{{6,}}",
        rf"((?:KEY|TOKEN|PASS|SECRET|HEADERS)=(?:{_QUOTE})?)(?!\[redacted)[^\s\"'\\]+",
        r"(\s-u\s+)[^\s:]{1,200}:\S+",
        r"(?s)()-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
    )
)
"""Forms of secrets in text; the first group stays."""
MIN_CHARS = 4
"""Shorter known values are removed only as whole words, since they occur in other words."""
MIN_VARIABLE_CHARS = 6
"""Shorter values of environment variables are no secrets, but numbers and switches."""
TOKEN_ID, NO_TOKEN = "control_token_id", "none"


def _plain(name: str) -> str:
    """Return a name such as `accessToken` or `X-Api-Key` as `access_token`, `x_api_key`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", name).lower()


def _is_secret(name: object) -> bool:
    return isinstance(name, str) and SECRET_NAME.search(_plain(name)) is not None


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
        """Return a JSON value without secrets; `name` is the field that has it. Objects inside strings are parsed.

        All texts inside a field with the name of a secret are removed, and those that follow such a name: in an object
        with `name` and `value`, in a pair, behind a flag of a command line.
        """
        if isinstance(value, Mapping):
            inner = name if _is_secret(name) else ""
            if _is_secret(value.get("name")) and "value" in value:
                value = {**value, "value": self.value(value["value"], str(value["name"]))}
            return {self.text(str(key)): self.value(one, inner or str(key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(one, self._name_at(value, index) or name) for index, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        if name == TOKEN_ID and value != NO_TOKEN:  # equal ones stay equal, but no guess of the token can be tested
            return self._token_ids.setdefault(value, f"id {len(self._token_ids) + 1}")
        if value and _is_secret(name):
            return REDACTED
        if value.lstrip().startswith(("{", "[")):
            try:
                return json.dumps(self.value(json.loads(value)))
            except (ValueError, RecursionError):
                return self.text(value)
        return self.text(value)

    def _name_at(self, items: list[Any] | tuple[Any, ...], index: int) -> str:
        """Return the name that the item before `index` gives it; empty for none."""
        before = items[index - 1] if index else None
        if not isinstance(before, str) or not (
            SECRET_FLAG.fullmatch(before) or (len(items) == 2 and _is_secret(before))
        ):
            return ""
        return before.lstrip("-")


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of the environment variables whose names say that they are secrets."""
    return [
        value
        for name, value in environ.items()
        if SECRET_VARIABLE.search(name) and len(value.strip()) >= MIN_VARIABLE_CHARS
    ]
