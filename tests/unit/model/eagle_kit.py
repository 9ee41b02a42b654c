"""EAGLE-3 heads for tests: random ones, their arithmetic in torch, and a target and a head without an executor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pdserve.base.startup_times import StartupTimes
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.draft_loading import load_eagle3
from pdserve.executor.input_batch import build_batch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.executor.model_loading import load, read_model
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.drafting.interface import DraftModel
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import LayerTaps
from pdserve.model.parallel import SingleRank
from tests.unit.model.native_kit import needs_kernels, rms, rotated

CPU = torch.device("cpu")
PAGE = 16
DRAFT_VOCAB = 96
TAPS = (0, 2, 4)
NUM_DRAFTS = 3


@dataclasses.dataclass(frozen=True)
class Way:
    """What computes a model, and how far its hidden states may be from those in float32, as a share."""

    kernels: Literal["torch", "native"]
    dtype: Literal["float32", "bfloat16"]
    tolerance: float


TORCH, NATIVE = Way("torch", "float32", 1e-4), Way("native", "bfloat16", 0.1)


def ways() -> list[object]:
    """Parameters of a test: torch in float32, and the CPU kernels in bfloat16 where there are some."""
    return [pytest.param(TORCH, id="torch"), pytest.param(NATIVE, id="native", marks=needs_kernels)]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Every row of `found` `[n, width]` differs from `wanted` by at most that share of its length."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    share = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(share.max()) <= tolerance, share


def make_eagle3(
    directory: Path,
    target: Path,
    *,
    seed: int = 0,
    taps: Sequence[int] | None = TAPS,
    embedding: bool = False,
    **own: Any,
) -> Path:
    """Save a random head for the checkpoint `target`; `own` are further fields of its config."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab = of_target["hidden_size"], of_target["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    if taps is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    config |= own
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    draft, inner = config["draft_vocab_size"], config["intermediate_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (draft, hidden),
    }
    generator = torch.Generator().manual_seed(1 + seed)
    tensors = {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 0.5 + torch.rand(hidden, generator=generator)
    if embedding:
        tensors["embed_tokens.weight"] = 0.15 * torch.randn(vocab, hidden, generator=generator)
    tokens = torch.randperm(vocab, generator=generator)[:draft].sort().values
    tensors["d2t"] = tokens - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


class ReferenceHead:
    """A head's arithmetic in float32, without a cache. `embedding` `[vocab, hidden]` is the target's."""

    def __init__(self, directory: Path, embedding: Tensor) -> None:
        tensors = load_file(directory / "model.safetensors")
        self._weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self._config = json.loads((directory / "config.json").read_text())
        self._embedding = self._weights.get("embed_tokens.weight", embedding.float())
        self._tokens = self._weights["d2t"] + torch.arange(len(self._weights["d2t"]))

    def take(self, hidden: Tensor) -> Tensor:
        """Map the outputs of the target's layers, side by side, to the head's inputs."""
        return hidden @ self._weights["fc.weight"].T

    def hidden(self, tokens: Sequence[int], x: Tensor) -> Tensor:
        """The states before the final norm, `[n, hidden]`: token j goes with the input `x[j]`."""
        config, heads, kv, dim = self._config, *(self._config[n] for n in _HEADS)
        e = self._norm(self._embedding[list(tokens)], "midlayer.input_layernorm")
        both = torch.cat((e, self._norm(x, "midlayer.hidden_norm")), -1)
        positions = torch.arange(len(tokens))
        inverse = config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        q, k, v = (
            (both @ self._weights[f"midlayer.self_attn.{n}_proj.weight"].T).view(len(tokens), -1, dim) for n in "qkv"
        )
        q, k = (rotated(each, positions, inverse).transpose(0, 1) for each in (q, k))
        k, v = (each.repeat_interleave(heads // kv, 0) for each in (k, v.transpose(0, 1)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + mixed @ self._weights["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (self._weights[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the target's vocabulary, `[n, vocab]`; -inf for tokens that the head does not know."""
        scores = self._norm(hidden, "norm") @ self._weights["lm_head.weight"].T
        return torch.full((len(hidden), len(self._embedding)), float("-inf")).index_copy_(1, self._tokens, scores)

    def chain(self, tokens: Sequence[int], x: Tensor, num_drafts: int) -> list[tuple[Tensor, Tensor]]:
        """Draft greedily behind `tokens`: for each draft the state that gives it, `[hidden]`, and its logits."""
        known, found = list(tokens), []
        for _ in range(num_drafts):
            state = self.hidden(known, x)[-1:]
            scores = self.logits(state)
            found.append((state[0], scores[0]))
            known, x = [*known, int(scores[0].argmax())], torch.cat((x, state))
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self._weights[f"{name}.weight"], self._config["rms_norm_eps"])


_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@torch.inference_mode()
def head_drafts(reference: PreTrainedModel, head: ReferenceHead, known: list[int]) -> list[int]:
    """What a head drafts behind the last of the known tokens."""
    states = reference(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    x = head.take(torch.cat([states[layer + 1][0] for layer in TAPS], -1))
    chain = head.chain(known, torch.cat((torch.zeros_like(x[:1]), x)), NUM_DRAFTS)
    return [int(scores.argmax()) for _, scores in chain]


class Bench:
    """A target, and with `head` an EAGLE-3 head, with a row for each prompt. Pages are scattered and hold NaN at first.

    `num_more`: tokens of a row behind its prompt.
    """

    def __init__(
        self, path: Path, way: Way, prompts: Sequence[Sequence[int]], *, head: Path | None = None, num_more: int = 0
    ) -> None:
        wanted = read_model(config_of(path, way, head), path, CPU, SingleRank(), StartupTimes())
        loaded = load(wanted)
        self.model, self.layout = loaded.model, loaded.layout
        counts = [-(-(len(prompt) + num_more) // PAGE) for prompt in prompts]
        self.attention = loaded.bind([_pool(self.layout, sum(counts))])
        self._draft: DraftModel | None = None
        if head is not None:
            self._draft = load_eagle3(wanted, loaded)
            self._draft.bind(_pool(KVLayout((self._draft.kv_group(PAGE, way.dtype),)), sum(counts)))
        order = np.random.default_rng(0).permutation(sum(counts)).tolist()
        self.table = PageTable(len(prompts), max(counts))
        for count in counts:
            self.table.open([order.pop() for _ in range(count)])
        self._prompts = np.array([len(prompt) for prompt in prompts])
        self.tokens = torch.zeros(len(prompts), max(counts) * PAGE + 1, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)

    @property
    def draft(self) -> DraftModel:
        """The head."""
        assert self._draft is not None, "made with a head"
        return self._draft

    def batch(self, rows: Sequence[tuple[int, int, int]], *, samples: bool = True) -> ForwardBatch:
        """Positions `[start, end)` of some rows; with `samples` the last token of each is a sample."""
        plan = BatchPlan(0, tuple(BatchRow(str(row), row, start, end, samples) for row, start, end in rows))
        return build_batch(read_plan(plan, self.table, self._prompts, self.layout), self.tokens)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, taps: LayerTaps | None = None) -> Tensor:
        """Compute the target's logits of the samples."""
        return self.model.forward(batch, self.attention.begin(batch), taps=taps)


def config_of(path: Path, way: Way, head: Path | None = None) -> ServerConfig:
    """The configuration of a server on CPU, of the checkpoint `path`."""
    speculative = SpeculativeConfig()
    if head is not None:
        speculative = SpeculativeConfig(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head))
    return ServerConfig(
        model=ModelConfig(model_path=str(path), dtype=way.dtype),
        memory=MemoryConfig(page_size=PAGE),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=way.kernels),
        speculative=speculative,
    )


def _pool(layout: KVLayout, num_pages: int) -> KVPool:
    """A pool of NaN for the only group of `layout`."""
    pool = KVPool(layout.groups[0], num_pages, CPU)
    pool.pages[:] = float("nan")
    return pool


def options(way: Way, algorithm: str, path: Path) -> dict[str, Any]:
    """Arguments of `build`: a target that is computed in some way, with a drafter."""
    speculative = SpeculativeConfig(
        speculative_algorithm=algorithm, speculative_draft_model_path=str(path), speculative_num_steps=NUM_DRAFTS
    )
    return {"dtype": way.dtype, "cpu_kernels": way.kernels, "speculative": speculative}
