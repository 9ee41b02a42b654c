"""The command line: what it understands, and how it refuses what it does not."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.config import ServerConfig
from pdserve.config.cli import flags, parse_server_args
from pdserve.errors import ConfigError

MODEL = ["--model-path", "m"]


def test_no_flag_at_all_gives_every_default() -> None:
    config = parse_server_args([])
    assert config.model.model_path == "smollm2"
    for flag in flags():
        group = {field.name: getattr(config, field.name) for field in dataclasses.fields(ServerConfig)}[flag.group]
        assert dataclasses.asdict(group)[flag.field] == flag.default


def test_values_arrive_in_their_groups_with_their_types() -> None:
    words = (
        "--model m --page-size 64 --mem-fraction-static 0.5 --chunked-prefill-size=-1 --disaggregation-mode decode "
        "--disaggregation-heartbeat-interval-s 0.5 --port 0 --host ::1 --device cpu"
    )
    config = parse_server_args(words.split())
    assert config.memory.page_size == 64
    assert config.memory.mem_fraction_static == 0.5
    assert config.schedule.chunked_prefill_size == -1
    assert config.disagg.disaggregation_mode == "decode"
    assert config.disagg.disaggregation_heartbeat_interval_s == 0.5
    assert (config.serving.host, config.serving.port, config.kernels.device) == ("::1", 0, "cpu")


@pytest.mark.parametrize(
    ("words", "most"), [("", 8192), ("--max-queued-requests 7", 7), ("--max-queued-requests -1", None)]
)
def test_requests_that_wait_are_bounded_unless_the_flag_says_otherwise(words: str, most: int | None) -> None:
    assert parse_server_args([*MODEL, *words.split()]).schedule.most_queued == most


@pytest.mark.parametrize(
    "name", ["--moe-a2a-backend", "--dcp-size", "--disable-cuda-graph-padding", "--enable-torch-compile"]
)
def test_a_flag_of_sglang_that_is_not_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: SGLang has this flag") as caught:
        parse_server_args([*MODEL, name, "2"])
    assert caught.value.field == name


@pytest.mark.parametrize("word", ["--dcp-size=2", "--moe-dp-size=2"])
def test_a_foreign_flag_is_refused_with_an_equals_sign_too(word: str) -> None:
    with pytest.raises(ConfigError, match="SGLang has this flag"):
        parse_server_args([*MODEL, word])


VARIABLES = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": ("60", "disaggregation_bootstrap_timeout_s", 60.0),
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": ("600", "disaggregation_waiting_timeout_s", 600.0),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": ("5.0", "disaggregation_heartbeat_interval_s", 5.0),
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": ("2", "disaggregation_heartbeat_misses", 2),
    "SGLANG_INIT_NEW_TOKEN_RATIO": ("0.5", "init_new_token_ratio", 0.5),
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": ("1024", "clip_max_new_tokens_estimation", 1024),
    "SGLANG_LOG_LEVEL": ("WARNING", "log_level", "warning"),
}


def field_of(config: ServerConfig, name: str) -> object:
    """The value of a field of any group."""
    return {name: value for group in dataclasses.asdict(config).values() for name, value in group.items()}[name]


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_of_sglang_replaces_an_absent_flag(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, field, value = VARIABLES[variable]
    monkeypatch.setenv(variable, f" {text} ")
    assert field_of(parse_server_args(MODEL), field) == value
    given = "error" if field == "log_level" else "1"
    assert str(field_of(parse_server_args([*MODEL, f"--{field.replace('_', '-')}={given}"]), field)) in (given, "1.0")
    monkeypatch.setenv(variable, "")
    assert field_of(parse_server_args(MODEL), field) == field_of(ServerConfig(), field)
    for bad in ("x", "-1", "nan"):
        monkeypatch.setenv(variable, bad)
        with pytest.raises(ConfigError, match=f"^{variable}.*but must") as caught:
            parse_server_args(MODEL)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--nccl-port 0", "nccl_port"),
        ("--nccl-port x", "nccl_port"),
        ("--nccl-port 65536", "nccl_port"),
        ("--decode-log-interval 0", "decode_log_interval"),
        ("--disaggregation-decode-polling-interval 0", "disaggregation_decode_polling_interval"),
        ("--base-gpu-id=-1", "base_gpu_id"),
        ("--mooncake-protocol udp", "mooncake_protocol"),
        ("--mooncake-protocol tcp --disaggregation-ib-device mlx5_0", "disaggregation_ib_device"),
        ("--enable-mixed-chunk=maybe", "enable_mixed_chunk"),
    ],
)
def test_a_flag_without_effect_must_still_have_a_valid_value(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server_args([*MODEL, *words.split()])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--optimistic-prefill-attempts=-1", "optimistic_prefill_attempts"),
        ("--optimistic-prefill-memory-fraction 0", "optimistic_prefill_memory_fraction"),
        ("--optimistic-prefill-memory-fraction nan", "optimistic_prefill_memory_fraction"),
        ("--disaggregation-prefill localhost:1", "disaggregation_prefill"),
        ("--disaggregation-prefill http://a:1/v1", "disaggregation_prefill"),
        ("--disaggregation-prefill http://a:1 http://a:1/", "disaggregation_prefill"),
        ("--disaggregation-prefill http://a:99999", "disaggregation_prefill"),
        ("--disaggregation-prefill-choice best", "disaggregation_prefill_choice"),
    ],
)
def test_how_the_halves_of_a_request_meet_is_checked(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server_args([*MODEL, *words.split()])
    assert caught.value.field == field


def test_several_prefill_servers_are_named_and_their_key_is_never_shown() -> None:
    words = "--disaggregation-prefill http://a:1 https://[::1]:2/ --disaggregation-prefill-api-key concealed"
    config = parse_server_args([*MODEL, *words.split()])
    assert config.pairing.prefill_urls == ("http://a:1", "https://[::1]:2")
    assert "concealed" not in repr(config)
    assert len(list(config.pairing.notes("prefill"))) == 2 and not list(config.pairing.notes("decode"))


def test_an_unknown_flag_names_what_comes_close() -> None:
    with pytest.raises(ConfigError, match=r"no such flag; did you mean .*--page-size"):
        parse_server_args([*MODEL, "--page-sise", "16"])
    with pytest.raises(ConfigError, match=r"no such flag$"):
        parse_server_args([*MODEL, "--zzzzzzzz"])


def test_a_flag_may_not_be_shortened() -> None:
    with pytest.raises(ConfigError, match="--page: there is no such flag"):
        parse_server_args([*MODEL, "--page", "16"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model-path", "model-path"),
        ("--model m --page-size", "page-size"),
        ("--model m --page-size x", "page-size"),
        ("--model m --page-size 1.5", "page-size"),
        ("--model m --dtype int8", "dtype"),
        ("--model m --disaggregation-mode both", "disaggregation-mode"),
        ("--model m stray", "stray"),
    ],
)
def test_what_does_not_parse_is_a_config_error_naming_the_flag(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_server_args(words.split())


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("model-path", ["", " "]),
        ("served-model-name", [""]),
        ("context-length", ["0", "-1"]),
        ("random-seed", ["-1"]),
        ("page-size", ["0", "-16", "129"]),
        ("max-total-tokens", ["0", "15"]),
        ("mem-fraction-static", ["0", "1", "-0.5", "nan", "inf"]),
        ("max-running-requests", ["0"]),
        ("max-queued-requests", ["0", "-2"]),
        ("req-waiting-timeout-s", ["nan", "inf"]),
        ("req-running-timeout-s", ["nan", "-inf"]),
        ("default-priority-value", ["-2147483649", "2147483648"]),
        ("priority-scheduling-preemption-threshold", ["-1"]),
        ("chunked-prefill-size", ["0", "-2"]),
        ("mixed-chunk-size", ["0", "-1"]),
        ("cpu-nice", ["-1", "20"]),
        ("disaggregation-bootstrap-port", ["-1", "65536"]),
        ("disaggregation-host", ["0.0.0.0", "::", "a b", ""]),
        ("disaggregation-bootstrap-timeout-s", ["0", "-1", "nan", "inf"]),
        ("disaggregation-waiting-timeout-s", ["0", "nan"]),
        ("disaggregation-heartbeat-interval-s", ["0", "-inf"]),
        ("disaggregation-heartbeat-misses", ["0"]),
        ("disaggregation-transfer-threads", ["0"]),
        ("disaggregation-ib-traffic-class", ["-1", "256"]),
        ("weight-version", [""]),
        ("cpu-threads", ["0", "-1"]),
        ("host", ["", "http://x", "a/b", "-x"]),
        ("port", ["-1", "65536"]),
        ("max-request-bytes", ["0"]),
    ],
)
def test_a_value_out_of_range_is_refused_with_flag_value_and_rule(flag: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"--{flag} is .* but must") as caught:
            parse_server_args([*MODEL, f"--{flag}={value}"])
        assert caught.value.field == flag.replace("-", "_")


def test_timeouts_come_from_sglangs_variables_unless_a_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "1.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "-1")
    schedule = parse_server_args(MODEL).schedule
    assert (schedule.waiting_timeout_s, schedule.running_timeout_s) == (1.5, None)
    schedule = parse_server_args([*MODEL, "--req-waiting-timeout-s", "0", "--req-running-timeout-s", "9"]).schedule
    assert (schedule.waiting_timeout_s, schedule.running_timeout_s) == (None, 9.0)
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="SGLANG_REQ_RUNNING_TIMEOUT is 'soon', but must be a number"):
        parse_server_args(MODEL)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--tp-size 4 --ep-size 2", "ep_size"),
        ("--ep 2", "ep_size"),
        ("--tp 2 --ep-num-redundant-experts 2", "ep_num_redundant_experts"),
        ("--tp 2 --ep 2 --ep-num-redundant-experts -1", "ep_num_redundant_experts"),
        ("--tp 2 --init-expert-location where.json", "init_expert_location"),
        ("--tp 2 --enable-eplb", "enable_eplb"),
        ("--tp 2 --ep 2 --eplb-rebalance-num-iterations 0", "eplb_rebalance_num_iterations"),
    ],
)
def test_flags_of_experts_that_do_not_fit_together_are_refused(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server_args([*MODEL, *words.split()])
    assert caught.value.field == field
    good = parse_server_args([*MODEL, "--tp", "4", "--ep", "4", "--ep-num-redundant-experts", "2"])
    assert (good.parallel.ep_size, good.parallel.ep_num_redundant_experts) == (4, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "localhost", "node-3.rack_1.example"])
def test_hosts_may_be_addresses_or_names(host: str) -> None:
    assert parse_server_args([*MODEL, "--host", host]).serving.host == host


@pytest.mark.parametrize("size", ["1", "128"])
def test_page_sizes_at_the_ends_are_allowed(size: str) -> None:
    assert parse_server_args([*MODEL, "--page-size", size]).memory.page_size == int(size)


def test_help_prints_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(["--help"])
    assert caught.value.code == 0
    assert "--disaggregation-mode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "default", "uses"),
    [
        ("", 0, False),
        ("--schedule-policy priority", 0, True),
        ("--enable-priority-scheduling", -(1 << 31), True),
        ("--enable-priority-scheduling --schedule-low-priority-values-first", (1 << 31) - 1, True),
        ("--enable-priority-scheduling --schedule-policy priority", 0, True),
        ("--enable-priority-scheduling --default-priority-value 3", 3, True),
        ("--default-priority-value 3", 3, False),
    ],
)
def test_requests_without_a_priority_are_the_least_urgent_unless_the_flags_say_otherwise(
    words: str, default: int, uses: bool
) -> None:
    schedule = parse_server_args([*MODEL, *words.split()]).schedule
    assert (schedule.default_priority, schedule.uses_priority) == (default, uses)


@pytest.mark.parametrize("policy", ["lpm", "random"])
def test_priority_scheduling_refuses_another_order(policy: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--schedule-policy is '{policy}', but --enable-priority-scheduling"
    ) as caught:
        parse_server_args([*MODEL, "--enable-priority-scheduling", "--schedule-policy", policy])
    assert caught.value.field == "schedule_policy"
