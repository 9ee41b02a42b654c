"""Checks the values of a configuration. Pure; called by `cli`, and again by `resolve` after it filled in defaults."""

from __future__ import annotations

import ipaddress
import math
import re

from pdserve.base.cpu_affinity import check_cores
from pdserve.base.hosts import parse_host_patterns
from pdserve.base.plugins import PROCESSOR_PLUGINS, TRANSPORT_PLUGINS, check_name
from pdserve.config.groups import (
    TRANSPORTS,
    DisaggConfig,
    GrammarConfig,
    MemoryConfig,
    ModelConfig,
    ObserveConfig,
    ParallelConfig,
    ServerConfig,
    ServingConfig,
)
from pdserve.config.kv_events_group import parse_kv_events, parse_load_endpoint
from pdserve.config.schedule_group import MAX_PRIORITY, MIN_PRIORITY, ScheduleConfig
from pdserve.errors import ConfigError

MAX_PAGE_SIZE = 128
MAX_THREADS = 1024
MAX_NICENESS = 19
MAX_VERSION_CHARS = 128
"""Longest name of a version of the weights."""
MAX_SNAPSHOT_GB = 10_000
MAX_GRACE_S = 86_400
MAX_RANKS = 4096
MAX_GRAPH_ROWS = 4096
MAX_EXPERTS = 65536
MAX_WHITESPACE = 10_000
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def check(config: ServerConfig) -> None:
    """Check all values; ConfigError states the flag, the given value and the allowed values."""
    _check_model(config.model)
    _check_parallel(config.parallel)
    _check_memory(config.memory)
    _check_schedule(config.schedule)
    _check_disagg(config.disagg)
    config.pairing.check()
    config.tier.check()
    config.storage.check()
    backup = config.disagg.disaggregation_decode_retraction_backup
    has_tier = config.tier.enable_hierarchical_cache or config.storage.disaggregation_decode_enable_offload_kvcache
    if backup == "host_pool" and not has_tier:
        _refuse("disaggregation_decode_retraction_backup", backup, "it needs --enable-hierarchical-cache")
    _between("cpu_threads", config.kernels.cpu_threads, 1, MAX_THREADS)
    _between("cpu_nice", config.kernels.cpu_nice, 0, MAX_NICENESS)
    if config.kernels.cpu_pin is not None:
        check_cores(config.kernels.cpu_pin)
    _between("base_gpu_id", config.kernels.base_gpu_id, 0, MAX_RANKS)
    _between("cuda_graph_max_bs", config.kernels.cuda_graph_max_bs, 1, MAX_GRAPH_ROWS)
    _check_grammar(config.grammar)
    _between("port", config.serving.port, 0, 65535)
    _between("timeout_graceful_shutdown", config.serving.timeout_graceful_shutdown, 0, MAX_GRACE_S)
    _at_least("max_request_bytes", config.serving.max_request_bytes, 1024)
    _check_snapshots(config.serving)
    _check_host("host", config.serving.host)
    config.access.check()
    config.speculative.check(config.model.model_path, config.parallel.pp_size)
    config.lora.check((config.model.model_path, config.model.served_model_name))
    config.responses.check()
    config.embedding.check(config.disagg.disaggregation_mode, drafts=config.speculative.is_on)
    config.accepted.check()
    _check_observe(config.observe)
    events = parse_kv_events(config.observe.kv_events_config, config.parallel.dp_size)
    parse_load_endpoint(config.observe.load_publish_endpoint, events, config.parallel.dp_size)


def _check_snapshots(serving: ServingConfig) -> None:
    for field, value in (
        ("snapshot_max_gb", serving.snapshot_max_gb),
        ("snapshot_store_gb", serving.snapshot_store_gb),
    ):
        if not (math.isfinite(value) and 0 <= value <= MAX_SNAPSHOT_GB):
            _refuse(field, value, f"must be 0 to {MAX_SNAPSHOT_GB}")
    if serving.snapshot_dir is not None and (not serving.snapshot_dir.strip() or "\0" in serving.snapshot_dir):
        _refuse("snapshot_dir", serving.snapshot_dir, "must not be empty")


def wrong_version(version: str) -> str | None:
    """Return why `version` cannot name a version of the weights; None: it can."""
    if not version.strip() or "\0" in version:
        return "must not be empty"
    if len(version) > MAX_VERSION_CHARS:
        return f"must have at most {MAX_VERSION_CHARS} characters"
    return None


def _check_model(model: ModelConfig) -> None:
    for field, text in (
        ("model_path", model.model_path),
        ("tokenizer_path", model.tokenizer_path),
        ("served_model_name", model.served_model_name),
        ("revision", model.revision),
        ("download_dir", model.download_dir),
    ):
        if text is not None and (not text.strip() or "\0" in text):
            _refuse(field, text, "must not be empty")
    wrong = wrong_version(model.weight_version)
    if wrong is not None:
        _refuse("weight_version", model.weight_version, wrong)
    _at_least("context_length", model.context_length, 1)
    _between("random_seed", model.random_seed, 0, (1 << 63) - 1)


def _check_parallel(parallel: ParallelConfig) -> None:
    for field, size in (
        ("tp_size", parallel.tp_size),
        ("pp_size", parallel.pp_size),
        ("dp_size", parallel.dp_size),
        ("nnodes", parallel.nnodes),
    ):
        _between(field, size, 1, MAX_RANKS)
    _check_experts(parallel)
    if parallel.enable_dp_attention:
        _check_dp_attention(parallel)
    num_ranks = parallel.shape.num_ranks
    if num_ranks % parallel.nnodes:
        of_what = "--tp-size and --pp-size" if parallel.num_sharing == 1 else "each replica, --tp-size / --dp-size"
        _refuse("nnodes", parallel.nnodes, f"must divide the {num_ranks} ranks of {of_what}")
    _between("node_rank", parallel.node_rank, 0, parallel.nnodes - 1)
    if parallel.nnodes > 1 and parallel.dp_size > parallel.num_sharing:
        _refuse("dp_size", parallel.dp_size, "must be 1 with --nnodes: start each replica as a server of its own")
    if parallel.nnodes > 1 and parallel.dist_init_addr is None:
        _refuse("dist_init_addr", None, "must be given with --nnodes")
    if parallel.dist_init_addr is not None:
        host, _, port = parallel.dist_init_addr.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            _refuse("dist_init_addr", parallel.dist_init_addr, "must be HOST:PORT")
        _check_host("dist_init_addr", host.removeprefix("[").removesuffix("]"))


def _check_dp_attention(parallel: ParallelConfig) -> None:
    if parallel.tp_size % parallel.dp_size:
        rule = f"must divide the {parallel.tp_size} ranks of --tp-size with --enable-dp-attention"
        _refuse("dp_size", parallel.dp_size, rule)
    if parallel.pp_size > 1 and parallel.dp_size > 1:
        _refuse("pp_size", parallel.pp_size, "must be 1 with --enable-dp-attention")


def _check_experts(parallel: ParallelConfig) -> None:
    if parallel.ep_size not in (1, parallel.tp_size):
        _refuse("ep_size", parallel.ep_size, f"must be 1 or --tp-size, which is {parallel.tp_size}")
    _between("ep_num_redundant_experts", parallel.ep_num_redundant_experts, 0, MAX_EXPERTS)
    _at_least("eplb_rebalance_num_iterations", parallel.eplb_rebalance_num_iterations, 1)
    if not parallel.init_expert_location.strip():
        _refuse("init_expert_location", parallel.init_expert_location, "must be trivial or a file")
    if parallel.ep_size == 1:
        for field, asked in (
            ("ep_num_redundant_experts", parallel.ep_num_redundant_experts > 0),
            ("init_expert_location", parallel.init_expert_location != "trivial"),
            ("enable_eplb", parallel.enable_eplb),
        ):
            if asked:
                _refuse(field, "given", "it needs --ep-size above 1")


def _check_memory(memory: MemoryConfig) -> None:
    _between("page_size", memory.page_size, 1, MAX_PAGE_SIZE)
    _at_least("max_total_tokens", memory.max_total_tokens, memory.page_size)
    fraction = memory.mem_fraction_static
    if fraction is not None and not 0.0 < fraction < 1.0:
        _refuse("mem_fraction_static", fraction, "must lie between 0 and 1")
    _at_least("max_mamba_cache_size", memory.max_mamba_cache_size, 1)
    ratio = memory.mamba_full_memory_ratio
    if not (math.isfinite(ratio) and ratio > 0):
        _refuse("mamba_full_memory_ratio", ratio, "must be more than 0")


def _check_schedule(schedule: ScheduleConfig) -> None:
    _at_least("max_running_requests", schedule.max_running_requests, 1)
    if schedule.max_queued_requests != -1:
        _at_least("max_queued_requests", schedule.max_queued_requests, 1, "at least 1, or -1 for no bound")
    _at_least("max_prefill_tokens", schedule.max_prefill_tokens, 1)
    _at_least("num_reserved_decode_tokens", schedule.num_reserved_decode_tokens, 0)
    _at_least("clip_max_new_tokens_estimation", schedule.clip_max_new_tokens_estimation, 1)
    if not 0 < schedule.init_new_token_ratio <= 1:
        _refuse("init_new_token_ratio", schedule.init_new_token_ratio, "must be above 0 and at most 1")
    for field, number in (
        ("schedule_aging_s", schedule.schedule_aging_s),
        ("schedule_conservativeness", schedule.schedule_conservativeness),
    ):
        if not (math.isfinite(number) and number > 0):
            _refuse(field, number, "must be more than 0")
    for field, seconds in (
        ("req_waiting_timeout_s", schedule.req_waiting_timeout_s),
        ("req_running_timeout_s", schedule.req_running_timeout_s),
    ):
        if not math.isfinite(seconds):
            _refuse(field, seconds, "must be a number of seconds, or -1 for no limit")
    _between("default_priority_value", schedule.default_priority_value, MIN_PRIORITY, MAX_PRIORITY)
    threshold = schedule.priority_scheduling_preemption_threshold
    _between("priority_scheduling_preemption_threshold", threshold, 0, MAX_PRIORITY - MIN_PRIORITY)
    if schedule.enable_priority_scheduling and schedule.schedule_policy not in ("fcfs", "priority"):
        rule = "--enable-priority-scheduling orders by priority: use fcfs or priority"
        _refuse("schedule_policy", schedule.schedule_policy, rule)
    if schedule.chunked_prefill_size != -1:
        _at_least("chunked_prefill_size", schedule.chunked_prefill_size, 1, "at least 1, or -1 for no chunking")
    if schedule.prefill_saturation_tokens != -1:
        _at_least("prefill_saturation_tokens", schedule.prefill_saturation_tokens, 1, "at least 1, or -1 for no parts")
    _at_least("mixed_chunk_size", schedule.mixed_chunk_size, 1)
    if schedule.mixed_chunk_size is not None and schedule.chunked_prefill_size is not None:
        if schedule.chunked_prefill_size == -1:
            _refuse("mixed_chunk_size", schedule.mixed_chunk_size, "--chunked-prefill-size -1 disables chunked prefill")
        if schedule.mixed_chunk_size > schedule.chunked_prefill_size:
            rule = f"must be at most --chunked-prefill-size, {schedule.chunked_prefill_size}"
            _refuse("mixed_chunk_size", schedule.mixed_chunk_size, rule)


def _check_disagg(disagg: DisaggConfig) -> None:
    if (backend := disagg.disaggregation_transfer_backend) is not None:
        check_name("disaggregation_transfer_backend", backend, TRANSPORTS, TRANSPORT_PLUGINS)
    _between("disaggregation_bootstrap_port", disagg.disaggregation_bootstrap_port, 0, 65535)
    _at_least("disaggregation_layerwise_groups", disagg.disaggregation_layerwise_groups, 1)
    for field, size in (
        ("disaggregation_decode_tp", disagg.disaggregation_decode_tp),
        ("disaggregation_decode_dp", disagg.disaggregation_decode_dp),
        ("disaggregation_prefill_pp", disagg.disaggregation_prefill_pp),
    ):
        _between(field, size, 1, MAX_RANKS)
    offload_gb = disagg.disaggregation_decode_offload_gb
    if not (math.isfinite(offload_gb) and offload_gb > 0):
        _refuse("disaggregation_decode_offload_gb", offload_gb, "must be more than 0")
    for field, seconds in (
        ("disaggregation_bootstrap_timeout_s", disagg.disaggregation_bootstrap_timeout_s),
        ("disaggregation_waiting_timeout_s", disagg.disaggregation_waiting_timeout_s),
        ("disaggregation_heartbeat_interval_s", disagg.disaggregation_heartbeat_interval_s),
        ("disaggregation_silent_peer_timeout_s", disagg.disaggregation_silent_peer_timeout_s),
    ):
        if not (math.isfinite(seconds) and seconds > 0):
            _refuse(field, seconds, "must be more than 0 seconds")
    _between("disaggregation_heartbeat_misses", disagg.disaggregation_heartbeat_misses, 1, 1000)
    _between("disaggregation_ib_traffic_class", disagg.disaggregation_ib_traffic_class, 0, 255)
    if disagg.mooncake_protocol == "tcp" and disagg.disaggregation_ib_device is not None:
        rule = "--mooncake-protocol tcp uses no RDMA device"
        _refuse("disaggregation_ib_device", disagg.disaggregation_ib_device, rule)
    _between("disaggregation_transfer_threads", disagg.disaggregation_transfer_threads, 1, MAX_THREADS)
    if disagg.disaggregation_allowed_prefill is not None:
        parse_host_patterns("--disaggregation-allowed-prefill", disagg.disaggregation_allowed_prefill)
    if disagg.disaggregation_host is not None:
        _check_host("disaggregation_host", disagg.disaggregation_host)
        if disagg.disaggregation_host in ("0.0.0.0", "::"):
            _refuse("disaggregation_host", disagg.disaggregation_host, "must be an address that peers can reach")


def _check_grammar(grammar: GrammarConfig) -> None:
    for name in grammar.processor_names:
        check_name("logit_processors", name, (), PROCESSOR_PLUGINS)
    if grammar.processor_names and grammar.grammar_backend == "none":
        _refuse("logit_processors", grammar.logit_processors, "needs --grammar-backend llguidance")
    seconds = grammar.grammar_compile_timeout
    if not (math.isfinite(seconds) and 0.01 <= seconds <= 60):
        _refuse("grammar_compile_timeout", seconds, "must be a number of seconds in [0.01, 60]")
    pattern, count = grammar.constrained_json_whitespace_pattern, grammar.constrained_json_max_whitespace_cnt
    _between("constrained_json_max_whitespace_cnt", count, 0, MAX_WHITESPACE)
    given = {
        "constrained_json_whitespace_pattern": pattern is not None,
        "constrained_json_disable_any_whitespace": grammar.constrained_json_disable_any_whitespace,
        "constrained_json_max_whitespace_cnt": count is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        _refuse(names[0], "given", f"--{names[1].replace('_', '-')} is given, too; only one of them is allowed")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--constrained-json-whitespace-pattern: {error}", field=names[0]) from error


def _check_observe(observe: ObserveConfig) -> None:
    seconds = observe.watchdog_timeout
    if not (math.isfinite(seconds) and seconds > 0):
        _refuse("watchdog_timeout", seconds, "must be a number of seconds above 0")
    interval = observe.log_stats_interval
    if not (math.isfinite(interval) and interval >= 0):
        _refuse("log_stats_interval", interval, "must be a number of seconds, or 0 for none")
    _between("log_requests_level", observe.log_requests_level, 0, 3)
    for field, text in (
        ("otlp_traces_endpoint", observe.otlp_traces_endpoint),
        ("log_requests_target", observe.log_requests_target),
        ("log_kv_target", observe.log_kv_target),
    ):
        if text is not None and (not text.strip() or "\0" in text):
            _refuse(field, text, "must not be empty")


def _check_host(field: str, host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            _refuse(field, host, "must be an IP address or a host name")


def _between(field: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        _refuse(field, value, f"must be {low} to {high}")


def _at_least(field: str, value: int | None, low: int, what: str | None = None) -> None:
    if value is not None and value < low:
        _refuse(field, value, f"must be {what or f'at least {low}'}")


def _refuse(field: str, value: object, rule: str) -> None:
    raise ConfigError(f"--{field.replace('_', '-')} is {value!r}, but {rule}", field=field)
