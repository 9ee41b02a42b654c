"""`pdserve support-bundle URL -o FILE.tar.gz`: state, metrics, diagnosis and log ends of a deployment in one archive.

`redaction` removes keys, tokens and passwords from every file. No file has prompts or answers, unless a log that the
user names has some. A part that cannot be read does not end the command: `manifest.json` has the reason.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pdserve
from pdserve.base.redaction import Redactor, secrets_of
from pdserve.cli.doctor import diagnose
from pdserve.cli.environment import collect
from pdserve.cli.fleet import FleetClient, add_connection_flags, client_of
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError, RequestError

JSON_PATHS = {
    "server_info.json": ("/get_server_info", False),
    "observe.json": ("/observe", True),
    "workers.json": ("/workers", False),
    "models.json": ("/v1/models", False),
    "loads.json": ("/get_loads", False),
}
"""Files and the paths that they come from, with whether the admin key is sent."""
TEXT_PATHS = {"metrics.txt": "/metrics", "engine_metrics.txt": "/engine_metrics", "health.txt": "/health"}
LOG_LINES = 5000
MAX_LINE_CHARS = 10_000
MAX_LOG_FILES = 64
FAILED = 1


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve support-bundle`."""
    parser = CommandParser(
        prog="pdserve support-bundle",
        allow_abbrev=False,
        description="Writes state, metrics, diagnosis and versions of a deployment into one archive. Keys, tokens and "
        "passwords are removed.",
    )
    add_connection_flags(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the archive to write, FILE.tar.gz")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="PATH",
        help=f"a log file, or a folder of *.log files, such as of `pdserve pair --log-dir`: the last {LOG_LINES:,} "
        "lines of each are added; repeatable",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the archive; return the exit status: 0, 1 when nothing answers, 2 for a wrong command line."""
    args = make_parser().parse_args(argv)
    output = Path(args.output)
    if not output.name.endswith((".tar.gz", ".tgz")):
        raise ConfigError(f"--output is {args.output!r}, but must end in .tar.gz", field="output")
    logs = list(_log_files(args.log))
    known = [key for key in (args.api_key, args.admin_api_key) if key]
    redactor = Redactor([*known, *secrets_of(os.environ)])
    with client_of(args) as client:
        files, errors = gather(client, logs, redactor)
    try:
        write(output, files)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error.strerror or error}", field="output") from error
    print(f"{output}: {len(files)} files, {output.stat().st_size / 1024:.0f} KiB")
    for name, reason in errors.items():
        print(f"  without {name}: {reason}", file=sys.stderr)
    return FAILED if "server_info.json" in errors else 0


def gather(client: FleetClient, logs: Sequence[Path], redactor: Redactor) -> tuple[dict[str, str], dict[str, str]]:
    """Return the redacted files by name, and for each missing one the reason."""
    files: dict[str, str] = {}
    errors: dict[str, str] = {}
    for name, (path, admin) in JSON_PATHS.items():
        try:
            files[name] = _as_json(redactor, client.get_json(path, admin=admin))
        except RequestError as error:
            errors[name] = redactor.text(error.message)
    for name, path in TEXT_PATHS.items():
        try:
            files[name] = redactor.text(client.get_bytes(path).decode(errors="replace"))
        except RequestError as error:
            errors[name] = redactor.text(error.message)
    diagnosis = diagnose(client)
    files["doctor.json"] = _as_json(redactor, diagnosis.as_json())
    files["doctor.txt"] = redactor.text(diagnosis.as_text()) + "\n"
    files["environment.json"] = _as_json(redactor, collect())
    files |= _kept_lines(client, redactor, errors)
    for index, log in enumerate(logs):
        name = f"logs/{index:02d}-{log.name}"
        try:
            files[name] = redactor.text(_end_of(log))
        except OSError as error:
            errors[name] = error.strerror or str(error)
    manifest = {
        "url": client.url,
        "created_at_s": time.time(),
        "pdserve": pdserve.__version__,
        "files": sorted([*files, "manifest.json"]),
        "missing": errors,
    }
    files["manifest.json"] = _as_json(redactor, manifest)
    return files, errors


def _kept_lines(client: FleetClient, redactor: Redactor, errors: dict[str, str]) -> dict[str, str]:
    """Return the log lines that the servers and the router keep, a file for each process."""
    try:
        found = client.get_json(f"/logs?lines={LOG_LINES}", admin=True)
    except RequestError as error:
        errors["logs/"] = redactor.text(error.message)
        return {}
    files: dict[str, str] = {}
    workers = found.get("workers")
    answers = {"": found, **(workers if isinstance(workers, dict) else {})}
    for url, answer in answers.items():
        where = "".join(part if part.isalnum() or part in ".-" else "-" for part in url.partition("://")[2])
        processes = answer.get("processes") if isinstance(answer, dict) else None
        if not isinstance(processes, list):
            reason = answer.get("error") if isinstance(answer, dict) else None
            errors[f"logs/{where}"] = redactor.text(str(reason or "/logs has no list of processes"))
            continue
        for number, process in enumerate(processes):
            if not isinstance(process, dict) or not isinstance(process.get("lines"), list):
                errors[f"logs/{where}{number}"] = "no list of lines"
                continue
            lines, name = process["lines"], str(process.get("name"))
            stem = "-".join(
                filter(None, [where, str(number), *"".join(c if c.isalnum() else " " for c in name).split()])
            )
            files[f"logs/{stem}.log"] = redactor.text("".join(f"{line}\n" for line in lines))
    return files


def write(output: Path, files: Mapping[str, str]) -> None:
    """Write the archive for its owner alone (mode 0600): it has addresses and ids. Raises OSError."""
    folder = output.name.removesuffix(".tar.gz").removesuffix(".tgz")
    unfinished = output.with_name(output.name + ".part")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in files.items():
                content = text.encode(errors="backslashreplace")
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))
        unfinished.replace(output)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _as_json(redactor: Redactor, value: Any) -> str:
    return json.dumps(redactor.value(value), indent=1) + "\n"


def _log_files(given: Sequence[str]) -> Iterator[Path]:
    """Yield the files of `--log`. Raises ConfigError for a path that does not exist, and for more than 64 files."""
    found: list[Path] = []
    for text in given:
        path = Path(text)
        if not path.exists():
            raise ConfigError(f"--log {text}: there is no such file or folder", field="log")
        found += sorted(path.glob("*.log")) if path.is_dir() else [path]
    if len(found) > MAX_LOG_FILES:
        raise ConfigError(f"--log names {len(found)} files, but at most {MAX_LOG_FILES} are added", field="log")
    yield from found


def _end_of(path: Path) -> str:
    """Return the last lines of a log, each cut to 10,000 characters. Raises OSError."""
    with path.open(errors="replace") as file:
        return "".join(
            line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " [cut]\n"
            for line in collections.deque(file, maxlen=LOG_LINES)
        )
