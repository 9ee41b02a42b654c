"""Labels for log lines of child processes that one terminal shows together, as `launch_local` prints them.

    text    2026-11-28 02:32:40.672 INFO decode scheduler[4711] ...      ->  ... INFO decode-0 scheduler[4711] ...
    json    {"time": ..., "role": "decode scheduler", ...}               ->  {"process": "decode-0", "time": ..., ...}

The name takes the place of the role that it begins with, so that lines still begin with the date and can be sorted. A
line that is not in the format, such as one of a traceback, gets the name in front; in JSON it becomes the message of a
line.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import orjson

from pdserve.base.log import json_line

_DATED = re.compile(
    r"(?P<head>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ )(?P<role>[a-z]+)(?P<rest>[ \[].*)", re.DOTALL
)


class TextLabel:
    """Adds the name of a process, such as `decode-0`, to a line of text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, line: str) -> str:
        """Return the labelled line."""
        dated = _DATED.fullmatch(line)
        if dated is None:
            return f"[{self._name}] {line}"
        role = dated["role"]
        name = self._name if self._name == role or self._name.startswith(f"{role}-") else f"{self._name} {role}"
        return f"{dated['head']}{name}{dated['rest']}"


class JsonLabel:
    """Adds the name of a process to a line of JSON; any other line becomes one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, line: str) -> str:
        """Return the labelled line."""
        found: Any = None
        if line.startswith("{"):
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError:
                found = None
        if isinstance(found, dict):
            return json_line({"process": self._name, **found})
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        unknown = {"level": "info", "role": self._name, "pid": None, "logger": None, "request_id": None}
        return json_line({"process": self._name, "time": now, **unknown, "message": line})
