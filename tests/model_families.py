"""Tiny random checkpoints of model families, and what each one's KV layout is.

Each entry is the smallest configuration that has all kinds of layers of its family. `python -m tests.model_families`
prints the table of docs/models.md; `--write` updates the page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pdserve.base.parallel import ParallelShape
from pdserve.errors import ConfigError
from pdserve.model.config import ModelSpec, check_spec, read_model_spec
from pdserve.model.families import FAMILIES as NATIVE
from pdserve.model.native.support import cannot_run
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

_BASE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_DEEPSEEK_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_DSA = {"index_topk": 32, "index_head_dim": 16, "index_n_heads": 32}
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1,
    "temporal_patch_size": 1, "out_hidden_size": 32,
}  # fmt: skip
_HYBRID = ["linear_attention", "full_attention"]
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True)
class TinyFamily:
    """A model family: its transformers class, and the changes of `_BASE` that make a tiny config of `model_type`.

    `vision`: the changes of the vision tower of a model that has one; `changes` then belong to `text_config`.
    `random_norms`: the weights of norms differ from their usual value.
    """

    model_type: str
    architecture: str
    changes: dict[str, Any]
    vision: dict[str, Any] | None = None
    random_norms: bool = False

    @property
    def name(self) -> str:
        """The name in tests and in the table."""
        return self.model_type

    def config(self) -> Any:
        """Make the transformers config."""
        from transformers import AutoConfig

        values = {**_BASE, **self.changes}
        if self.vision is not None:
            return AutoConfig.for_model(self.model_type, text_config=values, vision_config=self.vision)
        return AutoConfig.for_model(self.model_type, **values)

    def write(self, directory: Path, seed: int = 0) -> None:
        """Write a random float32 checkpoint."""
        import transformers

        torch.manual_seed(seed)
        config = self.config()
        model = getattr(transformers, self.architecture)._from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "A_log" not in name and (parameter.dim() >= 2 or name.endswith(("bias", "sinks"))):
                    parameter.normal_(0.0, 0.25, generator=generator)
                elif self.random_norms and "norm" in name:
                    parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_(0.0, 0.25, generator=generator)
        model.generation_config.eos_token_id = None
        model.save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)

    def reference_tokens(self, path: Path, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        """Return what transformers generates greedily in float32 from a checkpoint, for each prompt alone."""
        import transformers

        model_class = getattr(transformers, self.architecture)
        model = model_class.from_pretrained(path, dtype=torch.float32).eval()
        found = []
        for prompt in prompts:
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)
            found.append(ids[0, len(prompt) :].tolist())
        return found


FAMILIES = {
    family.name: family
    for family in (
        TinyFamily("llama", "LlamaForCausalLM", {}),
        TinyFamily("qwen2", "Qwen2ForCausalLM", {}),
        TinyFamily("qwen3", "Qwen3ForCausalLM", {}),
        TinyFamily("mistral", "MistralForCausalLM", {"sliding_window": 24}),
        TinyFamily("qwen3_moe", "Qwen3MoeForCausalLM", _MOE),
        TinyFamily("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        TinyFamily(
            "qwen2_moe", "Qwen2MoeForCausalLM",
            {**_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 16},
            random_norms=True,
        ),
        TinyFamily(
            "glm4_moe", "Glm4MoeForCausalLM",
            {**_DEEPSEEK_MOE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
             "use_qk_norm": True, "attention_bias": True},
            random_norms=True,
        ),
        TinyFamily(
            "minimax_m2", "MiniMaxM2ForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}, random_norms=True,
        ),
        TinyFamily(
            "granitemoe", "GraniteMoeForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
             "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 4.0},
            random_norms=True,
        ),
        TinyFamily("olmoe", "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}, random_norms=True),
        TinyFamily("gemma2", "Gemma2ForCausalLM",
            {"sliding_window": 24, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0,
             "final_logit_softcapping": 8.0, "tie_word_embeddings": False},
            random_norms=True,
        ),
        TinyFamily(
            "gemma3_text", "Gemma3ForCausalLM",
            {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 10,
             "tie_word_embeddings": False},
            random_norms=True,
        ),
        TinyFamily(
            "gemma3", "Gemma3ForConditionalGeneration",
            {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
            {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 16, "patch_size": 4},
            random_norms=True,
        ),
        TinyFamily("glm", "GlmForCausalLM", {}),
        TinyFamily("glm4", "Glm4ForCausalLM", {}, random_norms=True),
        TinyFamily("phi3", "Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
        TinyFamily("olmo2", "Olmo2ForCausalLM", {}, random_norms=True),
        TinyFamily(
            "olmo3", "Olmo3ForCausalLM",
            {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}, random_norms=True,
        ),
        TinyFamily(
            "granite", "GraniteForCausalLM",
            {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4,
             "logits_scaling": 4.0},
            random_norms=True,
        ),
        TinyFamily("smollm3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
        TinyFamily("seed_oss", "SeedOssForCausalLM", {}),
        TinyFamily(
            "ministral", "MinistralForCausalLM",
            {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        TinyFamily(
            "gpt_oss", "GptOssForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "rope_parameters": None},
        ),
        TinyFamily(
            "mimo_v2_flash", "MiMoV2FlashForCausalLM",
            {
                "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"], "v_head_dim": 12,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                "topk_group": 1,
            },
        ),
        TinyFamily("deepseek_v2", "DeepseekV2ForCausalLM", {**_MLA, **_DEEPSEEK_MOE}),
        TinyFamily("deepseek_v3", "DeepseekV3ForCausalLM", {**_MLA, **_DEEPSEEK_MOE}),
        TinyFamily("deepseek_v32", "DeepseekV32ForCausalLM", {**_MLA, **_DEEPSEEK_MOE, **_DSA}),
        TinyFamily(
            "glm_moe_dsa", "GlmMoeDsaForCausalLM",
            {**_MLA, **_DEEPSEEK_MOE, **_DSA, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
        ),
        TinyFamily(
            "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
            {**_MLA, **_DEEPSEEK_MOE, "mlp_layer_types": ["dense", "sparse"]},
        ),
        TinyFamily(
            "qwen3_next", "Qwen3NextForCausalLM",
            {**_MOE, **_GDN, "layer_types": _HYBRID, "shared_expert_intermediate_size": 16},
        ),
        TinyFamily("qwen3_5_text", "Qwen3_5ForCausalLM", {**_GDN, "layer_types": _HYBRID, "head_dim": 16}),
        TinyFamily(
            "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
            {**_MOE, **_GDN, "layer_types": _HYBRID, "shared_expert_intermediate_size": 16, "head_dim": 16},
        ),
        TinyFamily(
            "kimi_linear", "KimiLinearForCausalLM",
            {**_MLA, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16,
             "linear_head_dim": 8, "linear_num_heads": 4,
             "layer_types": _HYBRID},
        ),
        TinyFamily("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        TinyFamily("falcon_h1", "FalconH1ForCausalLM", {**_MAMBA2, "mamba_d_ssm": 64}),
        TinyFamily("bamba", "BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1]}),
        TinyFamily(
            "nemotron_h", "NemotronHForCausalLM",
            {
                "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8,
                "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": 3,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "moe_shared_expert_intermediate_size": 16,
            },
        ),
        TinyFamily(
            "granitemoehybrid", "GraniteMoeHybridForCausalLM",
            {**_MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
             "shared_intermediate_size": 16, "logits_scaling": 2.0},
        ),
        TinyFamily(
            "zamba2", "Zamba2ForCausalLM",
            {
                "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
                "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16, "num_mem_blocks": 1,
                "adapter_rank": 4, "num_key_value_heads": 4, "attention_head_dim": 16,
            },
        ),
        TinyFamily(
            "jamba", "JambaForCausalLM",
            {
                "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
                "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
                "mamba_dt_rank": 4, "use_mamba_kernels": False,
            },
        ),
        TinyFamily(
            "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"rope_parameters": _MROPE},
            {**_VISION, "fullatt_block_indexes": [0], "window_size": 16},
        ),
        TinyFamily(
            "qwen3_vl", "Qwen3VLForConditionalGeneration", {"rope_parameters": _MROPE},
            {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        ),
        TinyFamily(
            "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {**_MOE, "rope_parameters": _MROPE},
            {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        ),
        TinyFamily(
            "qwen3_5", "Qwen3_5ForConditionalGeneration",
            {**_GDN, "layer_types": _HYBRID, "head_dim": 16},
            {**_VISION, "num_position_embeddings": 16},
        ),
        TinyFamily(
            "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
            {**_MOE, **_GDN, "layer_types": _HYBRID, "shared_expert_intermediate_size": 16, "head_dim": 16},
            {**_VISION, "num_position_embeddings": 16},
        ),
    )
}  # fmt: skip


LATENT = ("deepseek_v3", "deepseek_v32", "deepseek_v2", "glm_moe_dsa", "glm4_moe_lite")
"""Families with latent attention that run natively."""
DENSE = (
    "olmo3", "gemma2", "glm4", "smollm3", "granite", "gemma3_text", "gemma3", "glm", "phi3", "olmo2", "seed_oss",
    "ministral",
)  # fmt: skip
"""Dense families with options of their own that run natively, those with most options first."""
SPARSE = ("gpt_oss", "glm4_moe", "minimax_m2", "qwen2_moe", "granitemoe", "olmoe")
"""Families with experts and options of their own that run natively, those with most options first."""
PLAIN_DENSE = ("llama", "qwen2", "qwen3", "mistral")
PLAIN_SPARSE = ("qwen3_moe", "mixtral")
"""Dense and sparse families without options of their own, which run natively."""
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
"""Families with GatedDeltaNet layers that run natively."""
KIMI = "kimi_linear"
"""The family with Kimi Delta Attention, latents that are not rotated, and experts."""


def deep_hybrid(name: str) -> TinyFamily:
    """Return one of `HYBRIDS`, or `KIMI`, with three recurrent layers before the attention layer."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    changes = {"num_hidden_layers": 4, "layer_types": kinds, "max_position_embeddings": 2048}
    return dataclasses.replace(FAMILIES[name], changes=FAMILIES[name].changes | changes)


LENGTHS = (1, 63, 64, 65, 300)
"""Tokens of prompts: about a page, and of several chunks."""


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


HEAD = (
    "model_type", "architecture", "runs", "KV groups", "state_type", "chunked prefill", "native ranks", "quantized",
    "gguf", "tested",
)  # fmt: skip
_REAL_SERVERS = (*LATENT, *HYBRIDS, KIMI, *DENSE, *SPARSE, "qwen3_moe")
"""Families whose native pairs run as real servers with unequal ranks, in `tests/e2e`."""
_IN_PROCESS = (*LATENT, *HYBRIDS, KIMI, *DENSE, *SPARSE, *PLAIN_DENSE, *PLAIN_SPARSE)
"""Families whose native pairs run in one process, in `tests/unit`."""


def native_ranks(spec: ModelSpec) -> str:
    """Return the ways in which ranks can share a model natively, those that `check_spec` accepts for two ranks."""
    ways = {
        "TP": (ParallelShape(tp_size=2), 1, 1),
        "PP": (ParallelShape(pp_size=2), 1, 1),
        "EP": (ParallelShape(tp_size=2), 2, 1),
        "DPA": (ParallelShape(), 1, 2),
    }
    found = []
    for name, (shape, ep_size, num_sharing) in ways.items():
        with contextlib.suppress(ConfigError):
            check_spec(spec, shape, ep_size, num_sharing)
            found.append(name)
    return ", ".join(found)


def table_row(family: TinyFamily, directory: Path) -> str:
    """Return the line of a family in the table. `directory` gets its checkpoint."""
    from pdserve.model.hf.config import read_source
    from pdserve.model.hf.model import load_transformers_model
    from pdserve.model.parallel import SingleRank

    family.write(directory)
    source = read_source(directory)
    found = source.probe("float32")
    layout = source.layout(found, 16)
    model = load_transformers_model(
        source, found, "float32", torch.device("cpu"), SingleRank(), load_format="auto", seed=0
    )
    native = NATIVE.get(family.architecture)
    runs, ranks, quantized, gguf, tested = "transformers", "", "no", "", "transformers"
    if native is not None:
        spec = read_model_spec(directory)
        reason = cannot_run(spec, torch.bfloat16, torch.device("cpu"))  # heads of tiny hybrids are too small for them
        only_torch = reason is not None and family.name not in (*HYBRIDS, KIMI)
        runs = "native (torch), transformers" if only_torch else "native, transformers"
        ranks, quantized = native_ranks(spec), "yes"
        gguf = "" if native.gguf is None else f"`{native.gguf.architecture}`"
        tested += ", pair" * (family.name in _IN_PROCESS) + ", servers" * (family.name in _REAL_SERVERS)
    fields = (
        f"`{family.model_type}`", f"`{family.architecture}`", runs,
        ", ".join(group.kind.name for group in layout.groups), layout.state_type,
        "yes" if model.can_split_prompts else "no: one chunk for each prompt", ranks, quantized, gguf, tested,
    )  # fmt: skip
    return _line(fields)


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |\n"


def table() -> str:
    """Return the table of docs/models.md."""
    head = _line(HEAD) + f"|{'---|' * len(HEAD)}\n"
    with tempfile.TemporaryDirectory() as directory:
        return head + "".join(table_row(family, Path(directory) / name) for name, family in FAMILIES.items())


def page_with(found: str) -> str:
    """Return docs/models.md with this table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, behind = rest.partition(END)
    return before + BEGIN + found + END + behind


if __name__ == "__main__":
    made = table()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(made), encoding="utf-8")
    else:
        sys.stdout.write(made)
