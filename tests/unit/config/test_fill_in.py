"""Defaults that depend on the machine or on other flags: what is chosen, in which order, and what is refused."""

from __future__ import annotations

import logging

import pytest

from pdserve.config.cli import parse_server_args
from pdserve.config.resolve import (
    Choice,
    Machine,
    fill_in,
    for_mode,
    idle_priority_flags,
    look_at_machine,
    resolve,
    without_effect,
)
from pdserve.errors import ConfigError

CPU = Machine(has_cuda=False, num_cores=2)
GPU = Machine(has_cuda=True, num_cores=16)


def choices(words: str, machine: Machine = CPU) -> dict[str, Choice]:
    """What is filled in for `--model-path m` and more words."""
    _, chosen = fill_in(parse_server_args(["--model-path", "m", *words.split()]), machine)
    return {choice.field: choice for choice in chosen}


@pytest.mark.parametrize(("machine", "device", "chunk"), [(CPU, "cpu", 2048), (GPU, "cuda", 8192)])
def test_device_and_chunk_follow_the_machine(machine: Machine, device: str, chunk: int) -> None:
    config, _ = fill_in(parse_server_args(["--model-path", "m"]), machine)
    assert config.kernels.device == device
    assert config.schedule.chunked_prefill_size == chunk
    assert config.schedule.max_running_requests == 256
    assert config.model.served_model_name == "m"


@pytest.mark.parametrize(("original", "mode"), [("", "raw"), ("1", "raw"), ("0", "processed")])
def test_logprobs_are_the_models_own_unless_sglangs_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, original: str, mode: str
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    assert choices("")["logprobs_mode"].value == mode
    assert "logprobs_mode" not in choices("--logprobs-mode processed")


def test_the_chunk_follows_a_device_that_was_asked_for() -> None:
    assert choices("--device cpu", GPU)["chunked_prefill_size"].value == 2048


def test_steps_that_decode_take_a_quarter_of_the_prompt_tokens_unless_told_how_many() -> None:
    assert choices("")["mixed_chunk_size"].value == 512
    assert choices("", GPU)["mixed_chunk_size"].value == 2048
    for words in ("--chunked-prefill-size 2048", "--chunked-prefill-size -1", "--mixed-chunk-size 100"):
        assert "mixed_chunk_size" not in choices(words), words


@pytest.mark.parametrize("words", ["--chunked-prefill-size 64 --mixed-chunk-size 65", "--mixed-chunk-size 2049",
                                   "--chunked-prefill-size -1 --mixed-chunk-size 64"])  # fmt: skip
def test_steps_that_decode_take_no_more_than_others(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choices(words)
    assert caught.value.field == "mixed_chunk_size"


def test_what_was_given_stays_as_it_is() -> None:
    words = (
        "--device cpu --attention-backend torch --chunked-prefill-size 64 --max-running-requests 3 "
        "--served-model-name n --disaggregation-mode decode --disaggregation-host node1 --disable-overlap-schedule "
        "--disaggregation-bootstrap-port 9000 --logprobs-mode raw --disaggregation-transfer-backend nixl"
    )
    given = parse_server_args(["--model-path", "m", *words.split()])
    resolved, chosen = fill_in(given, CPU)
    assert resolved == given
    assert chosen == []


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_transfer_host_is_the_http_host(mode: str) -> None:
    assert choices(f"--disaggregation-mode {mode} --host 10.0.0.1")["disaggregation_host"].value == "10.0.0.1"
    assert "disaggregation_host" not in choices("--host 10.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_listens_everywhere_must_say_where_it_is(host: str) -> None:
    with pytest.raises(ConfigError, match="--disaggregation-host") as caught:
        choices(f"--disaggregation-mode prefill --host {host}")
    assert caught.value.field == "disaggregation_host"
    assert choices(f"--disaggregation-mode prefill --host {host} --disaggregation-host n1")
    assert choices(f"--host {host}")


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--device cuda", "device"),
        ("--cpu-threads 3", "cpu_threads"),
    ],
)
def test_what_contradicts_the_machine_or_itself_is_refused(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choices(words)
    assert caught.value.field == field


@pytest.mark.parametrize("words", ["", "--disaggregation-bootstrap-port 0"])
def test_decode_looks_for_prefill_at_sglang_s_port(words: str) -> None:
    assert choices(f"--disaggregation-mode decode {words}")["disaggregation_bootstrap_port"].value == 8998
    assert "disaggregation_bootstrap_port" not in choices(
        "--disaggregation-mode prefill --disaggregation-bootstrap-port 0"
    )


def test_prefill_s_stages_are_its_own_on_prefill_and_its_peers_on_decode() -> None:
    given = parse_server_args(["--disaggregation-mode", "decode", "--disaggregation-prefill-pp", "2"])
    assert fill_in(given, CPU)[0].disagg.disaggregation_prefill_pp == 2
    assert for_mode(given, "prefill").disagg.disaggregation_prefill_pp is None
    assert for_mode(given, "decode").disagg.disaggregation_prefill_pp == 2


WITHOUT_EFFECT = (
    "--enable-mixed-chunk --disaggregation-decode-polling-interval 2 --nccl-port 29500 --decode-log-interval 40 "
    "--enable-request-time-stats-logging --enable-dynamic-chunking --optimistic-prefill-attempts 3 "
    "--hicache-io-backend kernel --hicache-mem-layout page_first --hicache-host-memory-mode cache "
    "--hicache-storage-prefetch-retry-max-attempts 0 --hicache-storage-prefetch-retry-poll-interval 8"
)


def test_flags_without_effect_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    given = parse_server_args([*WITHOUT_EFFECT.split(), "--base-gpu-id", "1", "--cuda-graph-max-bs-decode", "8"])
    resolve(given, CPU)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    names = [word for word in WITHOUT_EFFECT.split() if word.startswith("--")]
    names += ["--base-gpu-id", "--cuda-graph-max-bs"]
    assert sorted(line.partition(" has no effect: ")[0] for line in told) == sorted(names)
    assert all(line.partition(" has no effect: ")[2] for line in told)
    assert without_effect(fill_in(parse_server_args([]), CPU)[0]) == []
    on_gpu = fill_in(parse_server_args(["--base-gpu-id", "1", "--cuda-graph-max-bs-decode", "8"]), GPU)[0]
    assert without_effect(on_gpu) == [] and on_gpu.kernels.cuda_graph_max_bs == 8


def test_flags_of_other_engines_are_logged() -> None:
    words = "--disaggregation-mode decode --mooncake-protocol tcp --disaggregation-ib-traffic-class 106"
    for backend, told in (("mooncake", 0), ("auto", 0), ("nixl", 1), ("shm", 2), ("fake", 2)):
        given = parse_server_args([*words.split(), "--disaggregation-transfer-backend", backend])
        assert len(without_effect(fill_in(given, CPU)[0])) == told, backend
    assert len(without_effect(fill_in(parse_server_args(words.split()[2:]), CPU)[0])) == 2


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_an_estimate_of_new_tokens_is_for_a_monolith(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_INIT_NEW_TOKEN_RATIO", "0.3")
    monkeypatch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "1024")
    pair = fill_in(parse_server_args(["--disaggregation-mode", mode]), CPU)[0]
    assert [line.split()[0] for line in without_effect(pair)] == [
        "--init-new-token-ratio", "--clip-max-new-tokens-estimation",
    ]  # fmt: skip
    monolith = fill_in(parse_server_args([]), CPU)[0]
    assert without_effect(monolith) == []
    assert (monolith.schedule.init_new_token_ratio, monolith.schedule.clip_max_new_tokens_estimation) == (0.3, 1024)


def test_cores_are_for_cpus() -> None:
    with pytest.raises(ConfigError, match="--cpu-pin is for --device cpu") as caught:
        choices("--cpu-pin auto", GPU)
    assert caught.value.field == "cpu_pin"


def test_every_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.config.resolve")
    resolve(parse_server_args(["--model-path", "m"]), CPU)
    assert "chunked_prefill_size = 2048: fills a step on cpu" in caplog.messages
    assert "device = cpu: torch finds no GPU" in caplog.messages


def test_this_machine_has_a_core() -> None:
    assert look_at_machine().num_cores >= 1


def test_shared_memory_is_no_transport_for_a_gpu() -> None:
    words = "--disaggregation-mode decode --disaggregation-transfer-backend shm"
    with pytest.raises(ConfigError, match="use mooncake or auto") as caught:
        choices(words, GPU)
    assert caught.value.field == "disaggregation_transfer_backend"
    choices(words, CPU)
    choices(f"{words} --device cpu", GPU)


SEVERAL = "--tp-size 2 --nnodes 2 --dist-init-addr {} --disaggregation-mode decode --host {}"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (SEVERAL.format("10.0.0.1:900", "127.0.0.1"), "disaggregation_host"),
        ("--disaggregation-mode decode --disaggregation-decode-tp 2", "disaggregation_decode_tp"),
        ("--disaggregation-mode prefill --disaggregation-prefill-pp 2", "disaggregation_prefill_pp"),
        ("--tp-size 4 --dp-size 3 --enable-dp-attention", "dp_size"),
        ("--tp-size 2 --dp-size 4 --enable-dp-attention", "dp_size"),
        ("--tp-size 2 --dp-size 2 --enable-dp-attention --pp-size 2", "pp_size"),
        ("--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 2", "ep_size"),
        ("--tp-size 4 --dp-size 2 --enable-dp-attention --nnodes 4 --dist-init-addr 10.0.0.1:2", "nnodes"),
    ],
)
def test_splits_that_contradict_something_are_refused_by_field(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill_in(parse_server_args(["--model-path", "m", *words.split()]), CPU)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "words",
    [
        SEVERAL.format("127.0.0.1:900", "127.0.0.1"),
        SEVERAL.format("[::1]:900", "::1"),
        SEVERAL.format("10.0.0.1:900", "10.0.0.2"),
        "--disaggregation-mode prefill --disaggregation-prefill-pp 2 --pp-size 2 --disaggregation-decode-tp 4",
    ],
)
def test_splits_that_fit_are_taken(words: str) -> None:
    fill_in(parse_server_args(["--model-path", "m", *words.split()]), CPU)


@pytest.mark.parametrize(
    "words",
    [
        "--device cpu --attention-backend flashinfer",
        "--device cpu --attention-backend triton",
        "--attention-backend triton --enable-deterministic-inference",
        "--attention-backend flashinfer --cpu-kernels native",
        "--device cpu --attention-backend torch --cpu-kernels native",
    ],
)
def test_attention_that_cannot_be_had_is_refused_by_its_flag(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="--attention-backend") as caught:
        choices(words, GPU)
    assert caught.value.field == "attention_backend"


def test_attention_waits_for_the_model_wherever_it_runs() -> None:
    assert "attention_backend" not in choices("", CPU)
    assert "attention_backend" not in choices("", GPU)


def test_eight_bits_are_not_for_torch_s_attention() -> None:
    with pytest.raises(ConfigError, match="CPU kernels, not --attention-backend torch") as caught:
        choices("--quantization int8 --attention-backend torch", CPU)
    assert caught.value.field == "quantization"


def test_flags_of_graphs_are_taken_on_cpus() -> None:
    """Command lines of SGLang carry them."""
    assert choices("--cuda-graph-max-bs 8 --disable-cuda-graph", CPU) == choices("", CPU)


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("", []),
        ("--disable-priority-preemption", ["--disable-priority-preemption"]),
        ("--schedule-low-priority-values-first", ["--schedule-low-priority-values-first"]),
        ("--schedule-low-priority-values-first --schedule-policy priority", []),
        ("--enable-priority-scheduling --priority-scheduling-preemption-threshold 3", []),
        ("--priority-scheduling-preemption-threshold 3", ["--priority-scheduling-preemption-threshold"]),
    ],
)
def test_flags_of_priority_scheduling_without_effect_are_told(words: str, idle: list[str]) -> None:
    assert idle_priority_flags(parse_server_args(["--model-path", "m", *words.split()]).schedule) == idle


NO_MOONCAKE = {"mooncake": "the engine is not installed: `pip install 'pdserve[mooncake]'`"}
NO_ENGINES = NO_MOONCAKE | {"nixl": "the other is not installed"}
PREFILL = "--disaggregation-mode prefill"


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [({}, "mooncake"), ({"nixl": "it is not installed"}, "mooncake"), (NO_MOONCAKE, "nixl"), (NO_ENGINES, "shm")],
)
def test_the_transfer_backend_is_the_first_that_is_installed(missing: dict[str, str], chosen: str) -> None:
    machine = Machine(has_cuda=False, num_cores=2, missing_engines=missing)
    for role in ("prefill", "decode"):
        choice = choices(f"--disaggregation-mode {role}", machine)["disaggregation_transfer_backend"]
        assert choice.value == chosen
        assert "mooncake" not in missing or "pip install 'pdserve[mooncake]'" in choice.reason
    assert "disaggregation_transfer_backend" not in choices("", machine), "a monolith transfers nothing"


@pytest.mark.parametrize(
    ("words", "has_cuda", "reason"),
    [
        (
            f"{PREFILL} --disaggregation-transfer-backend mooncake",
            False,
            "mooncake: the engine is not installed: `",
        ),
        (f"{PREFILL} --disaggregation-transfer-backend nixl", False, "nixl: the other is not installed"),
        (PREFILL, True, r"--device cuda needs a transfer engine.*not installed: `pip"),
        (f"{PREFILL} --tp-size 2 --nnodes 2 --dist-init-addr 10.0.0.1:9 --host 10.0.0.1", False, "--nnodes above 1"),
    ],
)
def test_a_missing_engine_is_told_before_the_start(words: str, has_cuda: bool, reason: str) -> None:
    machine = Machine(has_cuda=has_cuda, num_cores=2, missing_engines=NO_ENGINES)
    with pytest.raises(ConfigError, match=reason) as caught:
        choices(words, machine)
    assert caught.value.field == "disaggregation_transfer_backend"
