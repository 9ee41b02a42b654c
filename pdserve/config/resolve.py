"""Fills in defaults of absent flags: ordered pure steps, each with a reason. Called by `launch_server`."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.base.cpu_affinity import granted_cores
from pdserve.base.env import RETURN_ORIGINAL_LOGPROB, returns_original_logprobs, triton_is_interpreted
from pdserve.config.groups import DisaggConfig, DisaggMode, KernelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.config.transfer_engines import missing_engines
from pdserve.config.validate import check
from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192}
MIXED_SHARE = 4
MAX_RUNNING_REQUESTS = 256
BOOTSTRAP_PORT = 8998
NVIDIA_DRIVER, WSL_DRIVER = "/dev/nvidiactl", "/dev/dxg"
LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")
ANY_ADDRESS = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Properties of the machine on which defaults depend."""

    has_cuda: bool
    num_cores: int
    missing_engines: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a transfer backend cannot be used here, by its name; see `transfer_engines.missing_engines`."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One default that was filled in, and the reason."""

    field: str
    value: object
    reason: str


Step = Callable[[ServerConfig, Machine], tuple[ServerConfig, Choice] | None]


def look_at_machine() -> Machine:
    """Detect CUDA, cores and transfer engines of this process. Torch is imported only if a driver exists."""
    has_driver = os.path.exists(NVIDIA_DRIVER) or os.path.exists(WSL_DRIVER)
    has_cuda = has_driver and bool(importlib.import_module("torch").cuda.is_available())
    return Machine(has_cuda=has_cuda, num_cores=len(granted_cores()), missing_engines=missing_engines())


def resolve(config: ServerConfig, machine: Machine | None = None) -> ServerConfig:
    """Return the configuration with all defaults filled in that do not depend on the model; logs each default.

    Raises:
        ConfigError: a value is not supported on this machine, or values contradict each other.
    """
    resolved, choices = fill_in(config, look_at_machine() if machine is None else machine)
    for choice in choices:
        log.info("%s = %s: %s", choice.field, choice.value, choice.reason)
    for line in without_effect(resolved):
        log.warning("%s", line)
    for name in idle_priority_flags(config.schedule):
        log.info("%s has no effect without --enable-priority-scheduling", name)
    return resolved


def idle_priority_flags(schedule: ScheduleConfig) -> list[str]:
    """Return the given flags of priority scheduling that have no effect because it is off."""
    if schedule.enable_priority_scheduling:
        return []
    defaults = ScheduleConfig()
    fields = ["priority_scheduling_preemption_threshold", "disable_priority_preemption"]
    if not schedule.uses_priority:
        fields.append("schedule_low_priority_values_first")
    return [f"--{name.replace('_', '-')}" for name in fields if getattr(schedule, name) != getattr(defaults, name)]


def fill_in(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, list[Choice]]:
    """Run `resolve` as a pure function: returns the new configuration, and the choices in order."""
    choices: list[Choice] = []
    for step in STEPS:
        outcome = step(config, machine)
        if outcome is not None:
            config, choice = outcome
            choices.append(choice)
    check(config)
    _check_together(config, machine)
    return config, choices


def without_effect(config: ServerConfig) -> list[str]:
    """Return a line for each given flag that changes nothing on this server, with the reason. Other flags of SGLang
    that pdserve does not honour are refused.
    """
    lines = list(config.accepted.notes())
    kernels, schedule, mode = config.kernels, config.schedule, config.disagg.disaggregation_mode
    defaults = ServerConfig()
    if kernels.device == "cpu":
        for field in ("base_gpu_id", "cuda_graph_max_bs", "disable_cuda_graph"):
            if getattr(kernels, field) != getattr(defaults.kernels, field):
                lines.append(f"--{field.replace('_', '-')} has no effect: --device is cpu")
    disagg = config.disagg
    backend = disagg.disaggregation_transfer_backend
    for field, backends in (
        ("disaggregation_ib_traffic_class", ("mooncake", "auto", "nixl")),
        ("mooncake_protocol", ("mooncake", "auto")),
    ):
        given = getattr(disagg, field) != getattr(defaults.disagg, field)
        if given and disagg.disaggregation_mode == "null":
            lines.append(f"--{field.replace('_', '-')} has no effect: --disaggregation-mode is null")
        elif given and backend not in backends:
            lines.append(f"--{field.replace('_', '-')} has no effect: --disaggregation-transfer-backend is {backend}")
    reasons = {
        "prefill": "a prefill server generates one token of a request",
        "decode": "a decode server keeps --num-reserved-decode-tokens free for each request, and room for the largest",
    }
    lines += config.pairing.notes(mode)
    if mode == "prefill" and config.speculative.speculative_algorithm == "NGRAM":
        lines.append(f"--speculative-algorithm NGRAM has no effect: {reasons[mode]}")
    if mode in reasons:
        for field in ("init_new_token_ratio", "clip_max_new_tokens_estimation"):
            if getattr(schedule, field) != getattr(defaults.schedule, field):
                lines.append(f"--{field.replace('_', '-')} has no effect: {reasons[mode]}")
    if config.kv_events is not None and not config.wants_prefix_cache:
        lines.append("--kv-events-config has no effect: the server has no prefix cache")
    if config.tier.enable_hierarchical_cache and not config.wants_host_tier:
        lines.append("--enable-hierarchical-cache has no effect: the server has no prefix cache")
    return lines


def _device(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.kernels.device != "auto":
        return None
    device, reason = ("cuda", "torch finds a GPU") if machine.has_cuda else ("cpu", "torch finds no GPU")
    return _set(config, "kernels", "device", device, reason)


def _served_model_name(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.model.served_model_name is not None:
        return None
    return _set(config, "model", "served_model_name", config.model.model_path, "the model path")


def _logprobs_mode(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.model.logprobs_mode is not None:
        return None
    original = returns_original_logprobs()
    if original is None:
        return _set(config, "model", "logprobs_mode", "raw", "the model's own distribution")
    return _set(config, "model", "logprobs_mode", "raw" if original else "processed", RETURN_ORIGINAL_LOGPROB)


def _mixed_chunk_size(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.schedule.mixed_chunk_size is not None or config.schedule.chunked_prefill_size is not None:
        return None
    size = CHUNK_TOKENS[config.kernels.device] // MIXED_SHARE
    return _set(config, "schedule", "mixed_chunk_size", size, "bounds the pauses of running streams")


def _chunked_prefill_size(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.schedule.chunked_prefill_size is not None:
        return None
    device = config.kernels.device
    return _set(config, "schedule", "chunked_prefill_size", CHUNK_TOKENS[device], f"fills a step on {device}")


def _disable_overlap_schedule(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.schedule.disable_overlap_schedule is not None:
        return None
    on_cpu = config.kernels.device == "cpu"
    reason = "planning and computing share the CPU" if on_cpu else "the GPU computes while the CPU plans"
    return _set(config, "schedule", "disable_overlap_schedule", on_cpu, reason)


def _max_running_requests(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.schedule.max_running_requests is not None:
        return None
    return _set(
        config, "schedule", "max_running_requests", MAX_RUNNING_REQUESTS, "rows cost little; KV memory is the limit"
    )


def _disaggregation_host(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    if config.disagg.disaggregation_host is not None or config.disagg.disaggregation_mode == "null":
        return None
    if config.serving.host in ANY_ADDRESS:
        raise ConfigError(
            f"--host {config.serving.host} listens on all addresses, so peers need the address of this server: "
            "give --disaggregation-host ADDRESS",
            field="disaggregation_host",
        )
    return _set(config, "disagg", "disaggregation_host", config.serving.host, "the address of the HTTP server")


def _disaggregation_bootstrap_port(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    port, mode = config.disagg.disaggregation_bootstrap_port, config.disagg.disaggregation_mode
    if mode == "prefill" and port is None:
        return _set(config, "disagg", "disaggregation_bootstrap_port", BOOTSTRAP_PORT, "SGLang's default")
    if mode == "decode" and not port:
        reason = "SGLang's default, for requests without bootstrap_port"
        return _set(config, "disagg", "disaggregation_bootstrap_port", BOOTSTRAP_PORT, reason)
    return None


def _disaggregation_transfer_backend(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    """Choose the first installed engine. Both servers of a host choose alike; the handshake compares their choices."""
    if config.disagg.disaggregation_transfer_backend is not None or config.disagg.disaggregation_mode == "null":
        return None
    missing = machine.missing_engines
    group, field = "disagg", "disaggregation_transfer_backend"
    for engine in ("mooncake", "nixl"):
        if engine not in missing:
            reason = "SGLang's default" if engine == "mooncake" else f"it is installed; {missing['mooncake']}"
            return _set(config, group, field, engine, reason)
    on_gpu, on_hosts = config.kernels.device != "cpu", config.parallel.nnodes > 1
    if on_gpu or on_hosts:
        what = "--device cuda" if on_gpu else "--nnodes above 1"
        raise ConfigError(f"{what} needs a transfer engine for KV pages, but {missing['mooncake']}", field=field)
    return _set(config, group, field, "shm", f"both servers must run on this host, as {missing['mooncake']}")


def _speculative_num_steps(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    speculative, field = config.speculative, "speculative_num_steps"
    if not speculative.uses_draft_model or speculative.speculative_num_steps is not None:
        return None
    given = speculative.speculative_num_draft_tokens
    reason = "SGLang's default for most models" if given is None else "--speculative-num-draft-tokens less one"
    return _set(config, "speculative", field, speculative.max_drafts, reason)


def _speculative_num_draft_tokens(config: ServerConfig, machine: Machine) -> tuple[ServerConfig, Choice] | None:
    speculative, field = config.speculative, "speculative_num_draft_tokens"
    if not speculative.is_on or speculative.speculative_num_draft_tokens is not None:
        return None
    reason = "--speculative-num-steps plus one" if speculative.uses_draft_model else "SGLang's default"
    return _set(config, "speculative", field, speculative.max_drafts + 1, reason)


STEPS: tuple[Step, ...] = (
    _device,
    _served_model_name,
    _logprobs_mode,
    _mixed_chunk_size,  # before `_chunked_prefill_size`: it depends on whether that value was given
    _chunked_prefill_size,
    _disable_overlap_schedule,
    _max_running_requests,
    _disaggregation_host,
    _disaggregation_bootstrap_port,
    _disaggregation_transfer_backend,  # after `_device`
    _speculative_num_steps,
    _speculative_num_draft_tokens,
)

MODES: Mapping[str, tuple[DisaggMode, ...]] = {
    "disaggregation_layerwise_transfer": ("prefill",),
    "disaggregation_decode_tp": ("prefill",),
    "disaggregation_decode_dp": ("prefill",),
    "disaggregation_prefill_pp": ("prefill", "decode"),
    "disaggregation_decode_enable_radix_cache": ("decode",),
    "disaggregation_decode_retraction_backup": ("decode", "null"),
    "disaggregation_allowed_prefill": ("decode", "prefill"),  # a prefill server may become a decode server
}
"""Fields of `DisaggConfig` that are valid in these modes only."""


def for_mode(given: ServerConfig, mode: DisaggMode) -> ServerConfig:
    """Return the configuration of a server after a role switch to `mode`.

    `given` is the configuration before `resolve`; the server keeps it for later switches. Flags that are invalid in
    `mode` get their defaults, as in `launch_local`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(DisaggConfig)}
    left_out = {field: defaults[field] for field, modes in MODES.items() if mode not in modes}
    changes: dict[str, Any] = left_out | {"disaggregation_mode": mode}
    if mode != given.disagg.disaggregation_mode:
        changes["disaggregation_prefill_pp"] = None  # it means this server on prefill, and its peers on decode
    return dataclasses.replace(given, disagg=dataclasses.replace(given.disagg, **changes))


def disagg_fields(config: ServerConfig) -> dict[str, str | int | float | bool | None]:
    """Return the fields of `config.disagg`, by name: what a role change tells a running engine."""
    return dataclasses.asdict(config.disagg)


def with_disagg(config: ServerConfig, fields: Mapping[str, str | int | float | bool | None]) -> ServerConfig:
    """Return a rank's configuration after a role change that told `disagg_fields`.

    A rank on another host than rank 0 keeps its own address and NICs.

    Raises:
        ConfigError: that rank has no address for peers.
    """
    disagg = DisaggConfig(**dict(fields))  # type: ignore[arg-type]
    if config.parallel.node_rank > 0:
        own = config.disagg
        host = own.disaggregation_host or config.serving.host
        if host in ANY_ADDRESS:
            message = f"--host {host} listens on all addresses: give --disaggregation-host ADDRESS on this host, too"
            raise ConfigError(message, field="disaggregation_host")
        disagg = dataclasses.replace(
            disagg, disaggregation_host=host, disaggregation_ib_device=own.disaggregation_ib_device
        )
    return dataclasses.replace(config, disagg=disagg)


def _check_together(config: ServerConfig, machine: Machine) -> None:
    """Check combinations of values, after all defaults are filled in."""
    if config.kernels.device == "cuda" and not machine.has_cuda:
        raise ConfigError("--device cuda, but torch finds no GPU; install a CUDA build of torch", field="device")
    backend = config.disagg.disaggregation_transfer_backend
    if backend is not None and backend in machine.missing_engines and config.disagg.disaggregation_mode != "null":
        raise ConfigError(
            f"--disaggregation-transfer-backend {backend}: {machine.missing_engines[backend]}",
            field="disaggregation_transfer_backend",
        )
    if config.kernels.device == "cuda" and backend == "shm":
        raise ConfigError(
            "--disaggregation-transfer-backend shm copies from CPU to CPU, but --device is cuda; use mooncake or auto",
            field="disaggregation_transfer_backend",
        )
    _check_attention(config.kernels)
    if config.kernels.device == "cuda" and config.kernels.cpu_pin is not None:
        raise ConfigError("--cpu-pin is for --device cpu, not cuda", field="cpu_pin")
    if config.kernels.cpu_threads is not None and config.kernels.cpu_threads > machine.num_cores:
        raise ConfigError(
            f"--cpu-threads is {config.kernels.cpu_threads}, but this process may use {machine.num_cores} cores",
            field="cpu_threads",
        )
    disagg, mode = config.disagg, config.disagg.disaggregation_mode
    values = dataclasses.asdict(disagg)
    for field, modes in MODES.items():
        if values[field] not in (None, False, "none") and mode not in modes:
            raise ConfigError(
                f"--{field.replace('_', '-')} is for --disaggregation-mode {' or '.join(modes)}, not {mode}",
                field=field,
            )
    host = disagg.disaggregation_host
    meets_at = (config.parallel.dist_init_addr or "").rpartition(":")[0]
    if config.parallel.nnodes > 1 and host in LOOPBACK and meets_at not in LOOPBACK:
        raise ConfigError(
            f"ranks on several hosts cannot be reached at {host}: set --host or --disaggregation-host to an address of "
            "this host",
            field="disaggregation_host",
        )
    if mode == "prefill" and disagg.disaggregation_prefill_pp not in (None, config.parallel.pp_size):
        raise ConfigError(
            f"--disaggregation-prefill-pp is {disagg.disaggregation_prefill_pp}, but --pp-size is "
            f"{config.parallel.pp_size}",
            field="disaggregation_prefill_pp",
        )
    _check_lora(config)
    if config.model.quantization not in (None, "bf16"):
        kernels = config.kernels
        other = None
        if kernels.device == "cuda":
            other = "--device cuda"
        elif kernels.cpu_kernels == "torch":
            other = "--cpu-kernels torch"
        elif kernels.attention_backend != "auto":
            other = f"--attention-backend {kernels.attention_backend}"
        if other is not None:
            raise ConfigError(
                f"--quantization {config.model.quantization} is for the native CPU kernels, not {other}",
                field="quantization",
            )


def _check_lora(config: ServerConfig) -> None:
    """Check that nothing else is asked for that adapters do not have."""
    kernels, parallel = config.kernels, config.parallel
    without = {
        "enable_deterministic_inference": kernels.enable_deterministic_inference,
        "enable_dp_attention": parallel.enable_dp_attention,
    }
    for field, is_given in without.items():
        if config.lora.is_on and is_given:
            raise ConfigError(f"--{field.replace('_', '-')} is not supported with --enable-lora", field=field)


def _check_attention(kernels: KernelConfig) -> None:
    """Check values that no machine supports; libraries and model support are checked when the model is loaded."""
    asked = kernels.attention_backend
    if asked == "auto":
        return
    reason = None
    if asked != "torch" and kernels.enable_deterministic_inference:
        reason = "--enable-deterministic-inference uses its own attention kernels"
    elif kernels.device == "cpu" and asked != "torch" and not (asked == "triton" and triton_is_interpreted()):
        reason = "it is for CUDA, but --device is cpu"
    elif kernels.cpu_kernels == "native":
        reason = "--cpu-kernels native uses its own attention kernels"
    if reason is not None:
        raise ConfigError(f"--attention-backend {asked}: {reason}", field="attention_backend")


def _set(config: ServerConfig, group: str, field: str, value: object, reason: str) -> tuple[ServerConfig, Choice]:
    """Return `config` with one field of one group replaced, and the choice."""
    groups = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    groups[group] = dataclasses.replace(groups[group], **{field: value})
    return ServerConfig(**groups), Choice(field, value, reason)
