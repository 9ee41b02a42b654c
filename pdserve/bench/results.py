"""Results of several benchmarks side by side: the loads of their runs, and files of `--output-json` that are joined."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

Json = dict[str, Any]
Load = tuple[Any, ...]
"""Values of `LOAD_FIELDS` of a result."""
LOAD_FIELDS = ("request_rate", "max_concurrency", "background_concurrency")
NEEDED_FIELDS = (
    "label", "endpoint", "model_id", "dataset_name", "date", "request_rate", "max_concurrency", "round", "completed",
    "failed", "error_kinds", "error_messages",
)  # fmt: skip
LONG_FIELDS = ("distributions_ms", "timeline")
"""Fields of a result that joined results are without."""


def load_of(result: Json) -> Load:
    """Return the load of a run: its request rate, requests in flight at most, and background clients."""
    return tuple(result.get(name) for name in LOAD_FIELDS)


def loads_of(results: Sequence[Json]) -> list[Load]:
    """Return the loads of the results, each once, in the order of their first runs."""
    return list(dict.fromkeys(map(load_of, results)))


def load_names(results: Sequence[Json]) -> dict[Load, str]:
    """Return a name for each load, such as `4 in flight`: what differs between the loads, or all of a single one."""
    loads = loads_of(results)
    differs = [len({load[index] for load in loads}) > 1 or len(loads) == 1 for index in range(len(LOAD_FIELDS))]
    prompt_len = max((result.get("background_input_len") or 0 for result in results), default=0)
    return {load: _load_name(load, differs, prompt_len) for load in loads}


def _load_name(load: Load, differs: Sequence[bool], prompt_len: int) -> str:
    rate, limit, background = load
    parts = []
    if differs[0] and rate is not None:
        parts.append({"inf": "all at once", "trace": "times of the file"}.get(rate, f"{rate:g} requests/s"
                     if isinstance(rate, int | float) else str(rate)))  # fmt: skip
    if differs[1] and limit is not None:
        parts.append(f"{limit} in flight")
    if differs[2] and background is not None:
        prompts = f"{prompt_len:,}-token prompts" if prompt_len else "background prompts"
        many = f"{background} x " if background > 1 else ""
        parts.append(f"beside {many}{prompts}" if background else "alone")
    return ", ".join(parts)


def read_report(path: Path) -> Json:
    """Return the report in a file that `pdserve bench --output-json` or `pdserve bench compare` has written.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="files") from error
    except ValueError as error:
        raise ConfigError(f"{path}: it is no JSON: {error}", field="files") from error
    results = report.get("results") if isinstance(report, dict) else None
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results) or not results:
        raise ConfigError(f"{path}: it has no results of pdserve bench --output-json", field="files")
    missing = [name for name in NEEDED_FIELDS for one in results if name not in one]
    if missing:
        raise ConfigError(f"{path}: a result has no {missing[0]}", field="files")
    return dict(report)


def joined(reports: Mapping[str, Json], labels: Sequence[str] | None = None) -> Json:
    """Return one report with the results of several, by the name of their files.

    `labels`: new names of the services, in their order. Machine and version are those of the first report; a line on
    stderr says when the others' machines differ.

    Raises:
        ConfigError: two files have a service of the same name, or there are more or fewer `labels` than services.
    """
    owner: dict[str, str] = {}
    for name, report in reports.items():
        for label in dict.fromkeys(str(one["label"]) for one in report["results"]):
            if label in owner and labels is None:
                text = f"{owner[label]} and {name} both have results of {label!r}; give --labels"
                raise ConfigError(text, field="labels")
            owner.setdefault(label, name)
    services = [(name, label) for name, report in reports.items()
                for label in dict.fromkeys(str(one["label"]) for one in report["results"])]  # fmt: skip
    if labels is not None and (len(labels) != len(services) or len(set(labels)) != len(labels)):
        found = ", ".join(f"{label} ({name})" for name, label in services)
        raise ConfigError(f"--labels must have a name of its own for each service: {found}", field="labels")
    names = dict(zip(services, labels or [label for _, label in services], strict=True))
    results = [
        {field: value for field, value in one.items() if field not in LONG_FIELDS}
        | {"label": names[name, str(one["label"])]}
        for name, report in reports.items() for one in report["results"]
    ]  # fmt: skip
    first = next(iter(reports.values()))
    machines = {json.dumps(report.get("machine"), sort_keys=True) for report in reports.values()}
    if len(machines) > 1:
        print("the clients of these results ran on different machines", file=sys.stderr)
    return {
        "benchmark": "pdserve bench compare",
        "version": first.get("version", ""),
        "machine": first.get("machine", {}),
        "flags": {name: report.get("flags", {}) for name, report in reports.items()},
        "results": results,
    }
