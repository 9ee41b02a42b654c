"""Options of `--hicache-storage-backend-extra-config`: those of all backends, and those of one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from pdserve.errors import ConfigError

FIELD = "hicache_storage_backend_extra_config"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """What the flag says.

    `threshold_tokens`: a prompt with fewer tokens beyond the other tiers is not looked up. `timeout_base_s` and
    `timeout_per_ki_token_s`: seconds that a look-up may take, and more for each 1,024 tokens. `decode_stride`: a decode
    server that stores what it generates does so after this many tokens of a running request, rounded up to whole pages;
    0: only when the request ends. `of_backend`: the other options, which the backend reads. `largest_object`: bytes of
    the largest object of this rank, header included; 0: not known.
    """

    threshold_tokens: int = 256
    timeout_base_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    decode_stride: int = 256
    of_backend: Mapping[str, object] = dataclasses.field(default_factory=dict)
    largest_object: int = 0

    def deadline_s(self, num_tokens: int) -> float:
        """Return how many seconds a look-up of `num_tokens` tokens may take."""
        return self.timeout_base_s + self.timeout_per_ki_token_s * num_tokens / 1024

    def only(self, names: Iterable[str]) -> None:
        """Raises ConfigError when there is an option of the backend other than `names`."""
        known = sorted(names)
        for name in self.of_backend:
            if name not in known:
                raise _wrong(f"unknown option {name!r}; this backend has {', '.join(known)}")

    def text(self, name: str, default: str) -> str:
        """Return a text option of the backend."""
        value = self.of_backend.get(name, default)
        if not isinstance(value, str) or not value:
            raise _wrong(f"{name} must be text, not {value!r}")
        return value

    def size(self, name: str, default: int, *, least: int = 1) -> int:
        """Return an option in bytes, at least `least`: a number, or text such as `4gb`."""
        value = self.of_backend.get(name, default)
        if isinstance(value, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)i?b?", value.strip().lower())
            if match is not None:
                value = int(float(match[1]) * _UNITS[match[2]])
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(f"{name} must be a number of bytes or text such as 4gb, not {value!r}")
        return value


def parse_storage_options(text: str | None) -> StorageOptions:
    """Read the flag's value: None, a JSON object, or `@` and the path of a file with one.

    Raises:
        ConfigError: it is no JSON object, or an option has a wrong type or range.
    """
    if text is None:
        return StorageOptions()
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(f"cannot read {text[1:]}: {error}") from error
    try:
        options = json.loads(text)
    except ValueError as error:
        raise _wrong(f"not valid JSON: {error}") from error
    if not isinstance(options, dict):
        raise _wrong("a JSON object is needed")
    fields = cast(dict[str, object], options)
    return StorageOptions(
        threshold_tokens=_tokens(fields, "prefetch_threshold"),
        decode_stride=_tokens(fields, "decode_offload_stride"),
        timeout_base_s=_number(fields, "prefetch_timeout_base", 1.0),
        timeout_per_ki_token_s=_number(fields, "prefetch_timeout_per_ki_token", 0.25),
        of_backend=fields,
    )


def _tokens(fields: dict[str, object], name: str) -> int:
    value = _number(fields, name, 256)
    if value != int(value):
        raise _wrong(f"{name} must be a whole number of tokens")
    return int(value)


def _number(fields: dict[str, object], name: str, default: float) -> float:
    value = fields.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise _wrong(f"{name} must be a number from 0 to 1000000, not {value!r}")
    return float(value)


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"--{FIELD.replace('_', '-')}: {message}", field=FIELD)
