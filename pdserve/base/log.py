"""Logging set-up, once per process: one dated line per event on stderr, as text or JSON, with role, pid and request id.

    2026-11-28 02:32:40.672 INFO decode[4711] pdserve.access: [req-7f] 127.0.0.1 POST /generate ...

A line about a request has its id: `X-Request-Id`, which router and both servers of a pair share. `request_context` sets
the id for a task, `about` for one line.

`TextLabel` and `JsonLabel` put the name of a child process on its lines, where one terminal shows those of several, as
`launch_local` does. The name takes the place of the role that it begins with, so that lines still begin with the date:

    text    2026-11-28 02:32:40.672 INFO decode scheduler[4711] ...      ->  ... INFO decode-0 scheduler[4711] ...
    json    {"time": ..., "role": "decode scheduler", ...}               ->  {"process": "decode-0", "time": ..., ...}

A line in another format, such as one of a traceback, gets the name in front; in JSON it becomes the message of a line.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import datetime
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import orjson

from pdserve.base.log_ring import ring_handler

Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
QUIET = ("aiohttp.access", "asyncio", "httpx", "httpcore", "httpx2", "urllib3", "transformers")

_chosen: LogFormat = "text"
_REQUEST_ID: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class LogOrigin:
    """The process that a line comes from, where another process writes the line."""

    role: str
    pid: int


@contextlib.contextmanager
def request_context(request_id: str | None) -> Iterator[None]:
    """Put `request_id` on all lines that this task, and tasks that it starts, log inside the block."""
    token = _REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        _REQUEST_ID.reset(token)


def current_request_id() -> str | None:
    """Return the request id of the running task; None outside of `request_context`."""
    return _REQUEST_ID.get()


def no_request() -> contextvars.Context:
    """Return a copy of the context without a request id, for a task that outlives the request that starts it."""
    context = contextvars.copy_context()
    context.run(_REQUEST_ID.set, None)
    return context


def about(
    request_id: str | None = None, *, origin: LogOrigin | None = None, fields: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """Return the `extra=` argument of a log call.

    `request_id` replaces that of the task. `fields` are the numbers of the message, for `--log-format json`.
    """
    given = {"request_id": request_id, "origin": origin, "fields": fields}
    return {name: value for name, value in given.items() if value}


def _request_id_of(record: logging.LogRecord) -> str | None:
    given: str | None = getattr(record, "request_id", None) or _REQUEST_ID.get()
    return None if given is None else escaped(given)


def _origin_of(record: logging.LogRecord, role: str) -> LogOrigin:
    origin: LogOrigin | None = getattr(record, "origin", None)
    return origin or LogOrigin(role, record.process or os.getpid())


class OneLine(logging.Formatter):
    """Formats a record as text. Escapes line breaks, so that each event is one line; a traceback follows."""

    def __init__(self, role: str) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S")
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line; line breaks of the message become `\\n`."""
        origin, request_id = _origin_of(record, self._role), _request_id_of(record)
        at = f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}"
        request = "" if request_id is None else f"[{request_id}] "
        text = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return f"{at} {record.levelname} {origin.role}[{origin.pid}] {record.name}: {request}{text}"


class JsonLine(logging.Formatter):
    """Formats a record as one JSON object.

    Keys: `time` (ISO 8601), `level`, `role`, `pid`, `logger`, `message`, `request_id` (null: no request), and where the
    event has them `fields` and `traceback`.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        origin = _origin_of(record, self._role)
        moment = datetime.datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": origin.role,
            "pid": origin.pid,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id_of(record),
        }
        fields = getattr(record, "fields", None)
        if fields:
            line["fields"] = fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_line(line)


def json_line(line: dict[str, Any]) -> str:
    """Return `line` as JSON on one line; a value that JSON does not have becomes text."""
    try:
        return orjson.dumps(line, default=str).decode()
    except orjson.JSONEncodeError:  # lone surrogates, from bytes that are not UTF-8
        return orjson.dumps({name: ascii(value) for name, value in line.items()}).decode()


def setup_logging(level: Level, role: str, log_format: LogFormat = "text") -> None:
    """Send all logs and Python warnings at or above `level` to stderr and to the ring. Replaces earlier handlers.

    With `json`, uncaught exceptions are lines as well.
    """
    global _chosen
    _chosen = log_format
    handlers = [logging.StreamHandler(sys.stderr), ring_handler(role)]
    for handler in handlers:
        handler.setFormatter(OneLine(role) if log_format == "text" else JsonLine(role))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.captureWarnings(True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    if log_format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def chosen_format() -> LogFormat:
    """Return the format of the last `setup_logging`, for processes that this one starts; `text` before it."""
    return _chosen


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger(__name__).critical("uncaught %s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def escaped(text: str, most: int = 300) -> str:
    """Escape untrusted `text` for a log as printable ASCII; only its first `most` characters."""
    shown = ascii(text[:most])[1:-1]
    return shown if len(text) <= most else f"{shown}..."


class SparingLog:
    """Rate limit for warnings that untrusted clients can trigger: a token bucket of `burst`, refilled every `every_s`.

    The next logged warning states the number of suppressed warnings. Any thread.
    """

    def __init__(self, logger: logging.Logger, burst: int = 5, every_s: float = 5.0) -> None:
        self._logger = logger
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._looked_at = time.monotonic()
        self._num_left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str, *args: object, extra: dict[str, Any] | None = None) -> None:
        """Log a warning like `Logger.warning`, or suppress it. `extra`: see `about`."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._looked_at) / self._every_s)
            self._looked_at = now
            if self._left < 1:
                self._num_left_out += 1
                return
            self._left -= 1
            num_left_out, self._num_left_out = self._num_left_out, 0
        more = f" ({num_left_out} more were not logged)" if num_left_out else ""
        self._logger.warning(f"{text}{more}", *args, extra=extra)


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
