"""Converts the keyword arguments of `LLM` to the command lines of its servers. Called once, by `LLM`.

Every server flag is accepted by its Python name, and some also by vLLM's name. Flags that the offline API cannot
support are refused by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdserve.base.cpu_affinity import cores_of, share_cores
from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.cli import flags, parse_server_args
from pdserve.config.local_access import flags_for
from pdserve.config.resolve import MAX_RUNNING_REQUESTS, NVIDIA_DRIVER, WSL_DRIVER
from pdserve.errors import ConfigError
from pdserve.launch_engine import CUDA_DEVICES

Value = str | int | float | bool | None
Given = Value | Mapping[str, Value] | Sequence[str | Mapping[str, Value]]
"""A value of an argument; `speculative_config` is a mapping, `lora_paths` a mapping or a list."""

VLLM_NAMES = {
    "block_size": "page_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_loras": "max_loras_per_batch",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "seed": "random_seed",
    "tokenizer": "tokenizer_path",
}
CACHING = "enable_prefix_caching"
"""vLLM's argument, the opposite of `disable_radix_cache`."""
SPECULATION = "speculative_config"
"""vLLM's argument, a dict of the names below."""
ADAPTERS = "lora_paths"
"""SGLang's argument: directories of LoRA adapters by name, or a list of `NAME=DIRECTORY` or of directories."""
RUNNER = "runner"
"""vLLM's argument: whether the model embeds or generates."""
RUNNERS: Mapping[str, bool | None] = {"auto": None, "generate": None, "pooling": True}
SPECULATION_NAMES = {
    "model": "speculative_draft_model_path",
    "prompt_lookup_min": "speculative_ngram_min_match_window_size",
    "prompt_lookup_max": "speculative_ngram_max_match_window_size",
}
METHODS = {"ngram": "NGRAM", "eagle3": "EAGLE3", "mtp": "NEXTN", "draft_model": "STANDALONE"}
"""vLLM's names of drafters, and ours."""
OWNED = (
    "host", "port", "disaggregation_mode", "disaggregation_bootstrap_port", "nnodes", "node_rank", "dist_init_addr",
    "access_log", "log_level_http", "log_stats_interval",
)  # fmt: skip
"""Flags that are refused: the offline API has no HTTP server, and all its processes run on this machine."""
PATIENT = ("disaggregation_bootstrap_timeout_s", "disaggregation_waiting_timeout_s")
PATIENCE_S = 86400.0
"""Seconds, the default of the `PATIENT` timeouts. A request of a batch may wait for KV memory until earlier requests
have ended. A dead server is detected by its process, not by a timeout.
"""
ROLES: tuple[DisaggMode, ...] = ("prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """One server to start: its name for messages, its command line, and the parsed configuration.

    `devices`: the CUDA devices that the server may use; None: all that this process may use.
    """

    name: str
    argv: tuple[str, ...]
    config: ServerConfig
    devices: tuple[str, ...] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of rank processes, each with its own device."""
        parallel = self.config.parallel
        return parallel.shape.num_ranks * parallel.dp_size

    @property
    def mode(self) -> DisaggMode:
        """The disaggregation mode: prefill, decode or null."""
        return self.config.disagg.disaggregation_mode

    @property
    def most_requests(self) -> int:
        """Maximum sequences to submit at once: all rows and as many queued ones, so that no row is idle."""
        schedule = self.config.schedule
        rows = (schedule.max_running_requests or MAX_RUNNING_REQUESTS) * self.config.parallel.dp_size
        waiting = rows if schedule.most_queued is None else min(rows, schedule.most_queued)
        return rows + waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """The servers of one LLM. `threads`: CPU threads of each server; None: as many as cores."""

    servers: tuple[ServerCommand, ...]
    threads: int | None


def plan(
    given: Mapping[str, Given],
    pairs: tuple[int, int] | None,
    prefill_flags: Mapping[str, Given],
    decode_flags: Mapping[str, Given],
) -> Deployment:
    """Plan the servers for the arguments `given`.

    `pairs`: numbers of prefill and decode servers; None: one server without disaggregation.

    Raises:
        ConfigError: an argument is unknown or invalid; `field` names it.
    """
    values = {"log_level": "warning", **_by_field(given)}
    own = {"null": {}, "prefill": _by_field(prefill_flags), "decode": _by_field(decode_flags)}
    if pairs is None:
        if own["prefill"] or own["decode"]:
            raise ConfigError("prefill_flags and decode_flags are for disaggregation", field="prefill_flags")
        return Deployment(servers=(_server("engine", "null", _words(values)),), threads=None)
    if min(pairs) < 1:
        raise ConfigError(f"num_prefill and num_decode must be at least 1, got {pairs}", field="num_prefill")
    if values.get("disaggregation_transfer_backend") is None and _on_cpu(values):
        values["disaggregation_transfer_backend"] = "shm"  # within one host, and it opens no port
    for field in PATIENT:
        values.setdefault(field, PATIENCE_S)
    pin = values.pop("cpu_pin", None)
    shares = [] if pin is None else share_cores(str(pin), sum(pairs))
    num_cores = len(os.sched_getaffinity(0) if pin is None else cores_of(str(pin)))
    threads = max(1, num_cores // sum(pairs))
    values.setdefault("cpu_threads", threads)
    servers: list[ServerCommand] = []
    for role, count in zip(ROLES, pairs, strict=True):
        words = flags_for("prefill" if role == "prefill" else "decode", _words(values))
        for i in range(count):
            pinned = ["--cpu-pin", shares[len(servers)]] if shares else []
            servers.append(_server(f"{role}-{i}", role, [*words, *pinned, *_words(own[role])]))
    return Deployment(servers=tuple(deal_devices(servers, visible_devices())), threads=threads)


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, as named in `CUDA_VISIBLE_DEVICES`. Does not import torch."""
    given = os.environ.get(CUDA_DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def deal_devices(servers: Sequence[ServerCommand], devices: Sequence[str]) -> list[ServerCommand]:
    """Assign each server its own devices if there are enough; otherwise all servers share all devices."""
    if sum(server.num_ranks for server in servers) > len(devices):
        return list(servers)
    left = iter(devices)
    return [dataclasses.replace(server, devices=tuple(itertools.islice(left, server.num_ranks))) for server in servers]


def _by_field(given: Mapping[str, Given]) -> dict[str, Value]:
    """Rename arguments to the fields of the flags. Unknown arguments stay: the command line parser refuses them.

    Raises:
        ConfigError: an argument is not for the offline API, or is given under two names.
    """
    known = {name.lstrip("-").replace("-", "_"): flag.field for flag in flags() for name in flag.names}
    refused = {*OWNED, *(flag.field for flag in flags() if flag.group == "access")}
    values: dict[str, Value] = {}
    for name, value in _flat(given):
        field = known.get(name) or VLLM_NAMES.get(name, name)
        if field == CACHING and isinstance(value, bool | None):
            field, value = "disable_radix_cache", None if value is None else not value
        if field in refused:
            raise ConfigError(f"{name}: LLM has no HTTP server and runs on this machine; leave it out", field=name)
        if value is None:
            continue
        if field in values:
            raise ConfigError(f"{name} is given twice, also under another name", field=name)
        values[field] = value
    return values


def _flat(given: Mapping[str, Given]) -> Iterator[tuple[str, Value]]:
    """Yield the arguments, with the flags of `speculative_config` in its place, and `lora_paths` as one text.

    Raises:
        ConfigError: `speculative_config` has an unknown name or method, `lora_paths` has an entry without a directory,
            `runner` is unknown, or another argument is a mapping or a list.
    """
    for name, value in given.items():
        if name == SPECULATION and isinstance(value, Mapping):
            yield from _speculation(value)
        elif name == RUNNER:
            if not isinstance(value, str) or value not in RUNNERS:
                raise ConfigError(f"{RUNNER} must be one of {', '.join(RUNNERS)}, got {value!r}", field=RUNNER)
            yield "is_embedding", RUNNERS[str(value)]
        elif name == ADAPTERS and isinstance(value, Mapping | list | tuple):
            yield name, _adapters(value)
        elif name == SPECULATION or not isinstance(value, str | int | float | None):
            raise ConfigError(f"{name}: must not be {type(value).__name__}", field=name)
        else:
            yield name, value


def _adapters(given: Mapping[str, Value] | Sequence[object]) -> str:
    """Return `lora_paths` as its flag takes it.

    An entry of a list is `NAME=DIRECTORY`, a directory, or a mapping with SGLang's `lora_name` and `lora_path`.
    """
    if isinstance(given, Mapping):
        given = [{"lora_name": name, "lora_path": path} for name, path in given.items()]
    words = []
    for entry in given:
        if isinstance(entry, Mapping) and entry.keys() == {"lora_name", "lora_path"}:
            name, path = entry["lora_name"], entry["lora_path"]
            entry = f"{name}={path}" if isinstance(name, str) and isinstance(path, str) else None
        if isinstance(entry, str) and "," not in entry:
            words.append(entry)
    if len(words) != len(given):
        text = f"{ADAPTERS}: entries must be a name and a directory without commas, got {given!r}"
        raise ConfigError(text, field=ADAPTERS)
    return ",".join(words)


def _speculation(config: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """Yield the flags of vLLM's `speculative_config`."""
    method = config.get("method", "draft_model" if "model" in config else None)
    algorithm = METHODS.get("mtp" if str(method).endswith("_mtp") else str(method))
    if algorithm is None:
        text = f"{SPECULATION}: method must be one of {', '.join(METHODS)}, got {method!r}"
        raise ConfigError(text, field=SPECULATION)
    yield "speculative_algorithm", algorithm
    for name, value in config.items():
        if name == "num_speculative_tokens" and isinstance(value, int):
            yield "speculative_num_draft_tokens", value + 1
        elif name in SPECULATION_NAMES:
            yield SPECULATION_NAMES[name], value
        elif name != "method":
            raise ConfigError(f"{SPECULATION}: {name} is unknown or has a wrong type: {value!r}", field=SPECULATION)


def _words(values: Mapping[str, Value]) -> list[str]:
    """Convert fields and values to command line flags."""
    words = []
    for field, value in values.items():
        name = field.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                words.append(f"--{name}" if value else f"--no-{name}")
            case _:
                words.append(f"--{name}={value}")
    return words


def _server(name: str, mode: DisaggMode, words: Sequence[str]) -> ServerCommand:
    argv = ["--disaggregation-mode", mode, *(["--disaggregation-bootstrap-port", "0"] if mode == "prefill" else [])]
    argv += words
    return ServerCommand(name=name, argv=tuple(argv), config=parse_server_args(argv))


def _on_cpu(values: Mapping[str, Value]) -> bool:
    has_driver = os.path.exists(NVIDIA_DRIVER) or os.path.exists(WSL_DRIVER)
    device = values.get("device", "auto")
    return device == "cpu" or (device == "auto" and not has_driver)
