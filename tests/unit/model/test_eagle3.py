"""EAGLE-3 heads: drafts equal an independent computation, and heads that do not fit are refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pdserve.config.cli import parse_server_args
from pdserve.errors import ConfigError, ModelError
from pdserve.launch_checks import LocalModel
from pdserve.model.config import read_model_spec
from pdserve.model.drafting.interface import Drafted
from pdserve.model.drafting.spec import read_eagle3
from pdserve.model.interface import LayerTaps
from tests.driver import random_prompt
from tests.reference import load_reference
from tests.tiny import VOCAB_SIZE, Family, make_tiny
from tests.unit.model.eagle_kit import TAPS, Bench, ReferenceHead, Way, assert_near, make_eagle3, ways

LENGTHS = (40, 3, 17)
NUM_DRAFTS = 4
LAYERS = 6


def edit_config(directory: Path, **own: Any) -> None:
    """Change fields of a head's config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))


@torch.inference_mode()
def drafts_of(bench: Bench, chunk: int, forced: list[list[int]]) -> list[Drafted]:
    """Run prompts in chunks of the target and the head, then draft; `forced[step]` are the tokens of that step."""
    taps = LayerTaps(bench.draft.taps)
    width = bench.draft.hidden_size
    kept = [torch.zeros(1, width) for _ in LENGTHS]
    for at in range(0, max(LENGTHS), chunk):
        rows = [(row, at, min(at + chunk, length)) for row, length in enumerate(LENGTHS) if at < length]
        batch = bench.batch(rows)
        bench.forward(batch, taps)
        fresh = bench.draft.take(taps.hidden).split([end - start for _, start, end in rows])
        inputs = []
        for (row, *_), new in zip(rows, fresh, strict=True):
            inputs += [kept[row].to(new.dtype), new[:-1]]
            kept[row] = new[-1:].clone()
        assert bench.draft.forward(bench.batch(rows, samples=False), torch.cat(inputs)) is None
    found, hidden = [], torch.cat(kept)
    for step, tokens in enumerate(forced):
        for row, token in enumerate(tokens):
            bench.tokens[row, LENGTHS[row] + step] = token
        rows = [(row, length + step, length + step + 1) for row, length in enumerate(LENGTHS)]
        drafted = bench.draft.forward(bench.batch(rows), hidden)
        assert drafted is not None
        found.append(Drafted(drafted.token_ids.clone(), drafted.hidden.clone()))
        hidden = drafted.hidden
    return found


@torch.inference_mode()
def reference_chains(
    reference: PreTrainedModel, head: ReferenceHead, prompts: list[list[int]], sampled: list[int]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each prompt and the token sampled behind it: state and logits of each draft."""
    chains = []
    for prompt, token in zip(prompts, sampled, strict=True):
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        x = head.take(torch.cat([states[layer + 1][0] for layer in TAPS], -1))
        chains.append(head.chain([*prompt, token], torch.cat((torch.zeros_like(x[:1]), x)), NUM_DRAFTS))
    return chains


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("embedding", [False, True])
def test_drafts_equal_an_independent_computation(family: Family, way: Way, embedding: bool, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path / "target", num_hidden_layers=LAYERS)
    directory = make_eagle3(tmp_path / "head", path, embedding=embedding)
    reference = load_reference(path)
    head = ReferenceHead(directory, reference.get_input_embeddings().weight)
    prompts, sampled = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS], [7, 8, 9]
    chains = reference_chains(reference, head, prompts, sampled)
    forced = [sampled] + [[int(chain[step][1].argmax()) for chain in chains] for step in range(NUM_DRAFTS - 1)]
    for chunk in (16, 7, 40):
        bench = Bench(path, way, prompts, head=directory, num_more=NUM_DRAFTS + 1)
        for step, drafted in enumerate(drafts_of(bench, chunk, forced)):
            states, scores = (torch.stack([chain[step][i] for chain in chains]) for i in (0, 1))
            assert_near(drafted.hidden, states, way.tolerance)
            best = scores.amax(-1) - scores.gather(1, drafted.token_ids[:, None])[:, 0]
            assert float(best.max()) <= way.tolerance * float(scores[scores.isfinite()].std()), best


def test_the_layers_that_a_head_reads(tmp_path: Path) -> None:
    spec = read_model_spec(make_tiny("llama", tmp_path / "target", num_hidden_layers=12))
    name = "eagle_aux_hidden_state_layer_ids"

    def taps(**own: Any) -> tuple[int, ...]:
        return read_eagle3(make_eagle3(tmp_path / "head", tmp_path / "target", taps=None, **own), spec).taps

    assert taps() == (1, 5, 8)  # what enters layers 2, 6 and 9
    assert taps(eagle_config={name: [1, 5, 11]}) == (1, 5, 11)
    assert taps(**{name: [2, 6, 12]}) == (1, 5, 11)
    with pytest.raises(ModelError, match=name):
        taps(eagle_config={name: [1, 5, 12]})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"vocab_size": 999}, "its vocab_size is 999, the model's is 320"),
        ({"hidden_size": 32}, "its hidden_size is 32, the model's is 64"),
        ({"target_hidden_size": 128}, "its target_hidden_size is 128, the model's is 64"),
        ({"eagle_config": {}}, "the model has 3 layers, so eagle_config must have eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_a_head_of_another_model_is_refused_by_field(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target")
    directory = make_eagle3(tmp_path / "head", path, taps=(0, 1, 2))
    edit_config(directory, **own)
    with pytest.raises(ConfigError, match=message) as refused:
        read_eagle3(directory, read_model_spec(path))
    assert refused.value.field == "speculative_draft_model_path"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not that of an EAGLE-3 head"),
        ({"norm_before_residual": True}, "norm_before_residual is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"draft_vocab_size": 321}, "draft_vocab_size is 321"),
    ],
)
def test_a_head_of_an_unknown_form_is_refused(own: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target")
    directory = make_eagle3(tmp_path / "head", path, taps=(0, 1, 2))
    edit_config(directory, **own)
    with pytest.raises(ModelError, match=message):
        read_eagle3(directory, read_model_spec(path))


def test_a_launcher_checks_the_head_before_it_starts_anything(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "target", num_hidden_layers=LAYERS)
    directory = make_eagle3(tmp_path / "head", path)

    def find(head: Path, algorithm: str = "EAGLE3") -> LocalModel:
        flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(head)]
        config = parse_server_args(["--device", "cpu", "--port", "0", "--model-path", str(path), *flags])
        found = LocalModel.find(config)
        assert found.in_engine(config).speculative.speculative_draft_model_path == str(found.draft)
        return found

    assert find(directory).draft == directory
    assert find(path, "STANDALONE").draft == path
    with pytest.raises(ModelError, match=r"--speculative-draft-model-path: .* does not exist"):
        find(tmp_path / "none")
    with pytest.raises(ModelError, match="LlamaForCausalLMEagle3"):
        find(directory, "STANDALONE")
    edit_config(directory, vocab_size=999)
    with pytest.raises(ConfigError, match="its vocab_size is 999, the model's is 320") as refused:
        find(directory)
    assert refused.value.field == "speculative_draft_model_path"
