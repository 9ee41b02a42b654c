"""LoRA adapters: tokens equal those of merged weights, alone, beside each other, in a pair and on several ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.lora_group import LoraConfig
from pdserve.config.resolve import Machine, fill_in
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.errors import ConfigError, ModelError
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.graphs import Replay
from pdserve.model.loader import read_spec
from pdserve.model.lora import WEIGHTS, lora_targets, read_adapter
from pdserve.model.parallel import Parallel
from pdserve.protocol.messages import AbortRequest, LoadLora, UnloadLora
from tests.adapters import ATTENTION, merged, write_adapter
from tests.driver import Driver
from tests.model_families import FAMILIES, prompts_of
from tests.model_pair import running_models
from tests.reference import load_reference, reference_greedy
from tests.tiny import make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.model.triton_kit import DEVICE

NUM_NEW = 8
PROMPTS = prompts_of((40, 63, 130, 40))
NATIVE: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native"}


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A checkpoint, directories of adapters by name, and the tokens behind each of `PROMPTS`, by adapter."""

    base: Path
    paths: Mapping[str, Path]
    tokens: Mapping[str | None, list[list[int]]]

    def config(self, *names: str, **changes: Any) -> LoraConfig:
        """The flags of a server with some of the adapters, under their names."""
        return LoraConfig(lora_paths=",".join(f"{name}={self.paths[name]}" for name in names), **changes)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny("qwen2", root / "base", eos_token_id=None)
    paths = {
        "all": write_adapter(root / "all", base, seed=1),
        "attention": write_adapter(root / "attention", base, seed=2, rank=8, modules=ATTENTION, use_rslora=False),
    }
    models: dict[str | None, Path] = {None: base}
    models |= {name: merged(root / f"{name}-merged", base, path) for name, path in paths.items()}
    tokens: dict[str | None, list[list[int]]] = {}
    for name, path in models.items():
        reference = load_reference(path)
        tokens[name] = [reference_greedy(reference, prompt, NUM_NEW) for prompt in PROMPTS]
    return Adapted(base, paths, tokens)


@pytest.mark.parametrize("is_pair", [False, True], ids=["monolith", "pair"])
def test_adapters_side_by_side_give_the_merged_weights_tokens(is_pair: bool, adapted: Adapted) -> None:
    """The same prompts with each adapter and with none: a prefix of another adapter's is no hit."""
    names = [None, "all", "attention"]
    assert len({str(adapted.tokens[name]) for name in names}) == 3
    with running_models(adapted.base, pair=is_pair, lora=adapted.config("all", "attention"), **NATIVE) as server:
        computing = server.prefill or server.answering
        for name in names:
            assert server.generate(PROMPTS, NUM_NEW, loras=[name] * len(PROMPTS)) == adapted.tokens[name]
        assert computing.state().counters.get("cached_tokens", 0) == 0
        mixed = [names[i % 3] for i in range(len(PROMPTS))]
        expected = [adapted.tokens[name][i] for i, name in enumerate(mixed)]
        assert server.generate(PROMPTS, NUM_NEW, loras=mixed) == expected, "in one batch"
        assert computing.state().counters["cached_tokens"] > 0, "of the same adapter's"
        server.assert_idle()


def test_drafts_of_a_model_without_adapters_are_verified_by_the_adapted_one(adapted: Adapted) -> None:
    """Draft KV and first drafts change no token, also where prefixes are cached."""
    drafter = SpeculativeConfig(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(adapted.base), speculative_num_steps=3,
        speculative_adaptive=False,
    )  # fmt: skip
    names = [None, "all", "attention", "all"]
    expected = [adapted.tokens[name][i] for i, name in enumerate(names)]
    with running_models(
        adapted.base, pair=True, lora=adapted.config("all", "attention"), speculative=drafter,
        prefill_speculative=drafter, **NATIVE,
    ) as pair:  # fmt: skip
        for _ in range(2):
            assert pair.generate(PROMPTS, NUM_NEW, loras=names) == expected
        counters = pair.answering.state().counters
        assert counters["spec_verify_steps"] > counters["spec_accepted_tokens"] > 0
        pair.assert_idle()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_windows_and_states_in_the_cache_belong_to_an_adapter(family: str, tmp_path: Path) -> None:
    base, prompts = tmp_path / "base", prompts_of((150, 300))
    FAMILIES[family].write(base)
    paths = {name: write_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("first", "second"))}
    models: dict[str | None, Path] = {name: merged(tmp_path / f"{name}-merged", base, paths[name]) for name in paths}
    models[None] = base
    expected = {}
    for name, path in models.items():
        reference = load_reference(path)
        expected[name] = [reference_greedy(reference, prompt, NUM_NEW) for prompt in prompts]
    assert len({str(tokens) for tokens in expected.values()}) == 3
    lora = LoraConfig(lora_paths=",".join(f"{name}={path}" for name, path in paths.items()))
    with running_models(base, pair=False, lora=lora, **NATIVE) as server:
        for has_cached in (False, True):
            for name in models:
                assert server.generate(prompts, NUM_NEW, loras=[name] * 2) == expected[name], (name, has_cached)
            assert (server.answering.state().counters.get("cached_tokens", 0) > 0) == has_cached
        server.assert_idle()


def test_an_adapter_of_fused_layers_gives_the_merged_weights_tokens(tmp_path: Path) -> None:
    base = tmp_path / "base"
    FAMILIES["phi3"].write(base)
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    path = write_adapter(tmp_path / "adapter", base, modules=modules)
    reference = load_reference(merged(tmp_path / "merged", base, path))
    expected = [reference_greedy(reference, prompt, NUM_NEW) for prompt in PROMPTS[:2]]
    with running_models(base, pair=False, lora=LoraConfig(lora_paths=f"a={path}"), **NATIVE) as server:
        assert server.generate(PROMPTS[:2], NUM_NEW, loras=["a"] * 2) == expected
        assert server.generate(PROMPTS[:2], NUM_NEW) != expected
    tensors = load_file(path / WEIGHTS)
    prefix = "base_model.model.model.layers.0.self_attn"
    tensors[f"{prefix}.q_proj.lora_A.weight"] = tensors[f"{prefix}.qkv_proj.lora_A.weight"].clone()
    tensors[f"{prefix}.q_proj.lora_B.weight"] = tensors[f"{prefix}.o_proj.lora_B.weight"].clone()
    save_file(tensors, path / WEIGHTS)
    targets = lora_targets(read_spec(base), ParallelShape(tp_size=1, pp_size=1).coord(0))
    with pytest.raises(ModelError, match=r"q_proj is changed twice"):
        read_adapter(path, "a", 1, targets, torch.float32, torch.device("cpu"), max_rank=8)


def test_a_pair_whose_adapters_differ_fails_by_name(adapted: Adapted, tmp_path: Path) -> None:
    other = write_adapter(tmp_path, adapted.base, seed=3)
    others = LoraConfig(lora_paths=f"all={other}")
    with running_models(adapted.base, pair=True, lora=adapted.config("all"), prefill_lora=others, **NATIVE) as pair:
        assert pair.prefill is not None
        rids = pair.send(PROMPTS[:1], NUM_NEW, ["all"])
        pair.answering.wait_for(rids)
        assert pair.answering.finish[rids[0]].err_type == "lora_mismatch"
        pair.prefill.mailbox.post(AbortRequest(rid=rids[0]))  # as a router does
        pair.prefill.wait_for(rids)
        assert pair.generate(PROMPTS[:1], NUM_NEW) == adapted.tokens[None][:1]
        pair.assert_idle()


def test_adapters_come_and_go_while_the_server_runs(adapted: Adapted, tmp_path: Path) -> None:
    config = LoraConfig(enable_lora=True, max_loras_per_batch=1, max_lora_rank=8)
    with running_models(adapted.base, pair=False, lora=config, **NATIVE) as server:
        scheduler, paths = server.answering, {name: str(path) for name, path in adapted.paths.items()}

        def load(number: int, name: str, path: str) -> str:
            reply = scheduler.command(LoadLora(query_id=f"load{number}", name=name, path=path))
            return "" if reply.ok else reply.message

        assert server.generate(PROMPTS[:1], NUM_NEW, loras=["all"]) == [[]]
        assert [finish.status_code for finish in scheduler.finish.values()] == [404]
        assert not load(0, "all", paths["all"])
        assert server.generate(PROMPTS, NUM_NEW, loras=["all"] * 4) == adapted.tokens["all"]
        assert "loaded already" in load(1, "all", paths["all"])
        assert "--max-loras-per-batch" in load(2, "attention", paths["attention"])
        assert not scheduler.command(UnloadLora(query_id="no", name="attention")).ok
        rids = server.send(PROMPTS, NUM_NEW, ["all"] * 4)
        assert scheduler.command(UnloadLora(query_id="all", name="all")).ok
        assert not load(3, "all", paths["attention"]), "another one of the same name"
        scheduler.wait_for(rids)
        assert [scheduler.tokens[rid] for rid in rids] == adapted.tokens["all"], "requests keep their adapter"
        assert server.generate(PROMPTS, NUM_NEW, loras=["all"] * 4) == adapted.tokens["attention"]
        assert scheduler.command(UnloadLora(query_id="again", name="all")).ok
        too_large = write_adapter(tmp_path / "large", adapted.base, rank=16)
        assert "--max-lora-rank 8" in load(4, "large", str(too_large))
        wide = make_tiny("qwen2", tmp_path / "wide", eos_token_id=None, hidden_size=128)
        assert "has shape" in load(5, "wide", str(write_adapter(tmp_path / "of-wide", wide)))
        deep = write_adapter(tmp_path / "deep", adapted.base)
        (deep / "adapter_config.json").write_text("[" * 200_000)
        pipe, long = tmp_path / "pipe", write_adapter(tmp_path / "long", adapted.base)
        pipe.mkdir()
        os.mkfifo(pipe / "adapter_config.json")
        (long / "adapter_config.json").write_text("[" * (1 << 21))
        refused = {str(deep): "RecursionError", str(tmp_path / "none"): "cannot be read", "a\0b": "cannot be read",
                   str(pipe): "not a regular file", str(long): "more than"}  # fmt: skip
        for number, (path, message) in enumerate(refused.items(), start=6):
            assert message in load(number, "no", path)
        assert "means the model itself" in load(11, "default", paths["all"])
        server.assert_idle()


def test_an_adapter_is_read_beside_the_steps_and_installed_between_two(adapted: Adapted) -> None:
    """What `load` takes is what `prepare` has read, also after the files have changed."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(adapted.base), dtype="float32"),
        memory=MemoryConfig(page_size=16, max_total_tokens=512),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
        lora=LoraConfig(enable_lora=True, max_loras_per_batch=1),
    )
    loras = build_executor(config, max_rows=2).loras
    assert loras is not None
    path = str(adapted.paths["all"])
    reading = loras.prepare("a", path)
    assert reading is not None and loras.prepare("a", path) is None, "it is being read"
    read = reading.result(timeout=60)
    assert loras.names == ()
    loaded = loras.load("a", path)
    assert loras.find("a") is loaded and loaded.weights is read.weights and loaded.number == 1
    assert loras.prepare("b", path) is None, "no other adapter can be loaded"
    loras.unload("a")
    failing = loras.prepare("b", "/nowhere")
    assert failing is not None and isinstance(failing.exception(timeout=60), ModelError)
    with pytest.raises(ModelError, match="cannot be read"):
        loras.load("b", "/nowhere")


class Counted:
    """Implements `Capture` without a device; counts the replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Replay:
        """See `Capture`."""
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_captured_steps_are_those_without_adapters(adapted: Adapted) -> None:
    """A step with adapters is computed kernel by kernel."""
    prompts, kernels = prompts_of((5, 3)), KernelConfig(device="cpu", cpu_threads=1, cpu_kernels="torch")
    config = ServerConfig(
        model=ModelConfig(model_path=str(adapted.base), dtype="float32", context_length=64),
        memory=MemoryConfig(page_size=8, max_total_tokens=512),
        kernels=kernels,
        lora=adapted.config("all"),
    )
    triton = dataclasses.replace(
        kernels, device="cuda" if DEVICE == "cuda" else "cpu", attention_backend="triton", disable_cuda_graph=True
    )
    expected, mine = (
        build_executor(config, max_rows=4),
        build_executor(dataclasses.replace(config, kernels=triton), max_rows=4),
    )
    counted = Counted()
    assert mine.executor.can_capture
    mine.executor.capture_decode((2,), counted)
    for name, replays in ((None, 2), ("all", 2), (None, 4)):
        assert generate(mine, [name] * 2, prompts, 3) == generate(expected, [name] * 2, prompts, 3)
        assert counted.replays == replays


def generate(built: LoadedEngine, names: list[str | None], prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Greedy tokens of prompts at once, each with its adapter."""
    driver, loras = Driver(built), built.loras
    assert loras is not None
    rows = [driver.open(prompt, len(prompt) + num_new) for prompt in prompts]
    for row, name in zip(rows, names, strict=True):
        if name is not None:
            loras.open_row(row, loras.find(name))
    outputs: list[list[int]] = [[] for _ in rows]
    computed = [0] * len(rows)
    for _ in range(num_new):
        ends = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
        steps = [(row, start, end, True) for row, start, end in zip(rows, computed, ends, strict=True)]
        for output, token in zip(outputs, driver.step(*steps), strict=True):
            assert token is not None
            output.append(token.token_id)
        computed = ends
    for row in rows:
        driver.close(row)
    return outputs


def on_rank(parallel: Parallel, base: Path, lora: LoraConfig, names: list[str | None]) -> list[list[int]]:
    """Tokens of `PROMPTS` at once, each with its adapter, on one rank."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(base), dtype="float32"),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
        lora=lora,
    )
    return generate(build_executor(config, max_rows=8, parallel=parallel), names, PROMPTS, NUM_NEW)


def test_tensor_ranks_and_stages_cut_adapters(adapted: Adapted, gang: Gang) -> None:
    names = ["all", None, "attention", "all"]
    wanted = [adapted.tokens[name][i] for i, name in enumerate(names)]
    for shape in (ParallelShape(tp_size=2, pp_size=1), ParallelShape(tp_size=1, pp_size=2)):
        found = gang.run(shape, on_rank, adapted.base, adapted.config("all", "attention"), names)
        assert found == [wanted, wanted]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
        ({"modules": ("embed_tokens",)}, "changes no linear layer"),
    ],
)
def test_adapters_that_are_not_served_are_refused_at_the_start(
    changes: dict[str, Any], message: str, adapted: Adapted, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "adapter", adapted.base, **changes)
    with pytest.raises(ConfigError, match=r"--lora-paths a: ") as caught:
        on_rank_config(adapted, LoraConfig(lora_paths=f"a={path}"))
    assert message in str(caught.value) and caught.value.field == "lora_paths"


def on_rank_config(adapted: Adapted, lora: LoraConfig, **model: Any) -> None:
    """Build an executor with these adapters."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(adapted.base), dtype="float32", **model),
        memory=MemoryConfig(page_size=16, max_total_tokens=512),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
        lora=lora,
    )
    build_executor(config, max_rows=2)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("deepseek_v32", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("deepseek_v32", ("wq_b", "wk", "weights_proj")),
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("kimi_linear", ("f_a_proj", "g_b_proj", "b_proj", "v_proj")),
        ("mixtral", ("w1", "w2", "w3", "gate")),
    ],
)
def test_layers_that_have_no_adapters_are_refused_by_name(
    family: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Multi-head latent attention, its index, GatedDeltaNet, Kimi Delta Attention, and experts."""
    base = tmp_path / "base"
    FAMILIES[family].write(base)
    targets = lora_targets(read_spec(base), ParallelShape(tp_size=1, pp_size=1).coord(0))
    for module in modules:
        path = write_adapter(tmp_path / module, base, modules=(module,))
        with pytest.raises(ModelError, match=rf"\.{module}\.lora_A\.weight changes no linear layer"):
            read_adapter(path, "a", 1, targets, torch.float32, torch.device("cpu"), max_rank=8)


def test_other_ways_to_run_a_model_take_no_adapters(adapted: Adapted) -> None:
    with pytest.raises(ConfigError, match=r"--enable-lora does not fit a model through transformers"):
        on_rank_config(adapted, LoraConfig(enable_lora=True), model_impl="transformers")
    machine = Machine(has_cuda=False, num_cores=4)
    kernels = KernelConfig(enable_deterministic_inference=True)
    with pytest.raises(ConfigError, match="with --enable-lora"):
        fill_in(ServerConfig(lora=LoraConfig(enable_lora=True), kernels=kernels), machine)


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        (LoraConfig(lora_paths="a=x,a=y"), "lora_paths"),
        (LoraConfig(lora_paths="a="), "lora_paths"),
        (LoraConfig(lora_paths="smollm2=x"), "lora_paths"),
        (LoraConfig(lora_paths="default=x"), "lora_paths"),
        (LoraConfig(lora_paths="a=x,b=y", max_loras_per_batch=1), "lora_paths"),
        (LoraConfig(max_loras_per_batch=0), "max_loras_per_batch"),
        (LoraConfig(max_lora_rank=0), "max_lora_rank"),
    ],
)
def test_wrong_flags_are_named(lora: LoraConfig, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fill_in(ServerConfig(lora=lora), Machine(has_cuda=False, num_cores=4))
    assert caught.value.field == field
