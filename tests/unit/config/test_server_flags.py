"""What holds for every flag: one per field, none of SGLang's refused ones, each error naming its field."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config.cli import flags, group_classes, parse_server_args
from pdserve.config.groups import ServerConfig
from pdserve.config.sglang_flags import SGLANG_FLAGS
from pdserve.errors import ConfigError

MODEL = ("--model-path", "m")


def refusal(*argv: str) -> ConfigError:
    """The error that this command line meets."""
    with pytest.raises(ConfigError) as caught:
        parse_server_args(argv)
    return caught.value


def test_every_field_of_every_group_has_a_flag_of_its_own() -> None:
    fields = [(group, field.name) for group, cls in group_classes().items() for field in dataclasses.fields(cls)]
    assert [(flag.group, flag.field) for flag in flags()] == fields
    names = [name for flag in flags() for name in flag.names]
    assert len(names) == len(set(names))


def test_no_flag_is_both_ours_and_refused() -> None:
    assert not SGLANG_FLAGS & {name for flag in flags() for name in flag.names}
    assert all(name.startswith("--") and name == name.strip() for name in SGLANG_FLAGS)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("--page-size", "many"), "page_size"),
        (("--page-size", "1.5"), "page_size"),
        (("--page-size",), "page_size"),
        (("--mem-fraction-static", "half"), "mem_fraction_static"),
        (("--dtype", "int8"), "dtype"),
        (("--disaggregation-mode", "both"), "disaggregation_mode"),
        (("stray",), "stray"),
        (("-x",), "-x"),
    ],
)
def test_malformed_arguments_name_their_flag(argv: tuple[str, ...], field: str) -> None:
    error = refusal(*MODEL, *argv)
    assert error.field == field
    assert (f"--{field.replace('_', '-')}" if "_" in field else field) in str(error)


def test_a_malformed_alias_names_the_field() -> None:
    assert refusal("--model").field == "model_path"


def test_help_prints_every_flag_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for flag in flags() for name in flag.names)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--page-size", "1"), ("--page-size", "128"), ("--max-total-tokens", "64"), ("--mem-fraction-static", "0.99"),
        ("--chunked-prefill-size", "1"), ("--chunked-prefill-size", "-1"), ("--port", "0"), ("--port", "65535"),
        ("--max-running-requests", "1"), ("--max-queued-requests", "1"), ("--host", "::1"), ("--host", "node-3.local"),
        ("--context-length", "1"),
    ],
)  # fmt: skip
def test_the_ends_of_a_range_are_in_it(flag: str, value: str) -> None:
    config = parse_server_args([*MODEL, f"{flag}={value}"])
    values = {name: held for group in dataclasses.asdict(config).values() for name, held in group.items()}
    assert str(values[flag[2:].replace("-", "_")]) == value


def test_the_pool_must_hold_a_page() -> None:
    assert refusal(*MODEL, "--page-size", "64", "--max-total-tokens", "63").field == "max_total_tokens"
    assert parse_server_args([*MODEL, "--page-size", "64", "--max-total-tokens", "64"]).memory.max_total_tokens == 64


_WORDS = st.one_of(st.sampled_from([name for flag in flags() for name in flag.names]), st.text(max_size=8))


@settings(deadline=None)
@given(st.lists(_WORDS, max_size=6))
def test_any_words_give_a_configuration_or_a_config_error(words: list[str]) -> None:
    argv = [word for word in words if not word.startswith(("-h", "--help"))]
    outcome: ServerConfig | ConfigError
    try:
        outcome = parse_server_args(argv)
    except ConfigError as error:
        outcome = error
    if isinstance(outcome, ServerConfig):
        path = outcome.model.model_path
        assert path == "smollm2" or any(word == path or word.endswith(f"={path}") for word in argv)
    else:
        assert str(outcome)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--hicache-host-memory-mode", "buffer_only", "not supported; host memory is always a tier"),
        ("--hicache-host-memory-mode", "disk", "invalid choice"),
        ("--hicache-io-backend", "copy", "invalid choice"),
        ("--hicache-mem-layout", "rows", "invalid choice"),
        ("--hicache-storage-prefetch-retry-max-attempts", "-1", "must be 0 to"),
        ("--hicache-storage-prefetch-retry-poll-interval", "soon", "invalid int"),
        ("--hicache-host-memory-fraction", "0", "must be above 0 and at most 1"),
        ("--hicache-host-memory-fraction", "1.01", "must be above 0 and at most 1"),
        ("--hicache-host-memory-fraction", "nan", "must be above 0 and at most 1"),
    ],
)
def test_wrong_values_of_hicache_flags_are_named(flag: str, value: str, says: str) -> None:
    """Those without effect, too."""
    refused = refusal(*MODEL, "--enable-hierarchical-cache", flag, value)
    assert says in str(refused) and refused.field == flag[2:].replace("-", "_")


def test_the_host_pool_of_retracted_requests_is_that_of_the_host_tier() -> None:
    """SGLang's two names for it: they keep the KV cache of retracted requests in the same place here."""
    backup = ("--disaggregation-decode-retraction-backup", "host_pool")
    assert refusal(*MODEL, *backup).field == "disaggregation_decode_retraction_backup"
    config = parse_server_args([*MODEL, *backup, "--enable-hierarchical-cache"])
    assert config.disagg.disaggregation_decode_retraction_backup == "host_pool"
