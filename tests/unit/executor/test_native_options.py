"""A model with every option of a dense decoder, by the CPU kernels: near to torch, and the same bits however it runs.

The model is of no family: its layers are given here, and its checkpoint is written here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.base import native
from pdserve.model.families import FAMILIES
from pdserve.model.families.family import Family, HFConfig, Scales
from pdserve.model.families.llama import LLAMA
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, MLPSpec, SublayerSpec
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.parallel import SingleRank
from pdserve.model.rope import RopeSpec
from tests.driver import Driver, build, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.unit.executor.native_ranks import divergence, outcome
from tests.unit.executor.same_bits import Answer, answer
from tests.unit.model.native_kit import LEVELS_HERE, needs_kernels

pytestmark = needs_kernels
HIDDEN, HEADS, KV_HEADS, DIM, INNER, WINDOW = 48, 4, 2, 16, 40, 24
PRE, POST, PRE_MLP, POST_MLP = (f"{name}_norm" for name in ("pre", "post", "pre_mlp", "post_mlp"))


def layers_of(config: HFConfig, rope: RopeSpec, where: str) -> tuple[DecoderLayerSpec, ...]:
    """A layer as in gpt-oss and Gemma-2, one as in OLMo-2 that is not rotated, and one as in Granite."""
    heads = AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=rope, qkv_bias=False, o_bias=False, qk_norm=False
    )
    capped = dataclasses.replace(
        heads, qkv_bias=True, o_bias=True, window=WINDOW, scale=0.4, softcap=3.0, sinks=True,
        rope=RopeSpec(theta=500.0, partial_rotary_factor=0.5),
    )  # fmt: skip
    whole = dataclasses.replace(heads, rope=None, qk_norm=True, whole_qk_norm=True)
    gelu, silu = (MLPSpec(intermediate_size=INNER, bias=act != "silu", act=act) for act in ("gelu_tanh", "silu"))
    of_heads = dataclasses.replace(heads, qk_norm=True)
    return (
        DecoderLayerSpec((SublayerSpec(PRE, capped, post_norm=POST), SublayerSpec(PRE_MLP, gelu, post_norm=POST_MLP))),
        DecoderLayerSpec((SublayerSpec(None, whole, post_norm=POST), SublayerSpec(None, silu, post_norm=POST_MLP))),
        DecoderLayerSpec(
            (
                SublayerSpec(PRE, of_heads, residual_scale=0.7),
                SublayerSpec(PRE_MLP, gelu, post_norm=POST_MLP, residual_scale=0.6),
            )
        ),
        DecoderLayerSpec((SublayerSpec(None, heads), SublayerSpec(PRE_MLP, silu, residual_scale=0.4))),
    )


def scales_of(config: HFConfig, where: str) -> Scales:
    """Of embeddings and logits, with a soft cap."""
    return Scales(embedding=5.1, logits=0.8, logit_softcap=6.0)


def family_of(norm_offset: float) -> Family:
    """The family of the checkpoint."""
    return dataclasses.replace(
        LLAMA, architecture="EveryOption", read_layers=layers_of, read_scales=scales_of, norm_offset=norm_offset
    )


def write(directory: Path, norm_offset: float) -> Path:
    """A random checkpoint, with the tensors that the layers have."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width, generator=generator) + 0.5 - norm_offset

    q_width, kv_width = HEADS * DIM, KV_HEADS * DIM
    sizes = {
        "self_attn.q_proj": (q_width, HIDDEN), "self_attn.k_proj": (kv_width, HIDDEN),
        "self_attn.v_proj": (kv_width, HIDDEN), "self_attn.o_proj": (HIDDEN, q_width),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    tensors["lm_head.weight"] = normal(VOCAB_SIZE, HIDDEN)
    layers = layers_of({}, RopeSpec(theta=1e4), "here")
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in sizes.items()}
        for sublayer in layer.sublayers:
            op = sublayer.op
            names = [name for name in (sublayer.norm, sublayer.post_norm) if name is not None]
            tensors |= {f"{prefix}{name}.weight": norm(HIDDEN) for name in names}
            if isinstance(op, AttentionSpec):
                if op.qk_norm:
                    widths = (q_width, kv_width) if op.whole_qk_norm else (DIM, DIM)
                    for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
                        tensors[f"{prefix}self_attn.{name}.weight"] = norm(width)
                if op.sinks:
                    tensors[f"{prefix}self_attn.sinks"] = normal(HEADS, scale=1.0)
                biased = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} if op.qkv_bias else set()
                biased |= {"self_attn.o_proj"} if op.o_bias else set()
            else:
                assert isinstance(op, MLPSpec)
                biased = {name for name in sizes if name.startswith("mlp.")} if op.bias else set()
            tensors |= {f"{prefix}{name}.bias": normal(sizes[name][0]) for name in biased}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["EveryOption"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN,
        "num_hidden_layers": len(layers), "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(params=[0.0, 1.0])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint, with plain norms or such whose weights have 1 added."""
    monkeypatch.setitem(FAMILIES, "EveryOption", family_of(request.param))
    return write(tmp_path, request.param)


def made(path: Path, *, page_size: int = 16, threads: int = 1) -> Driver:
    """A driver of the kernels."""
    return Driver(
        build(path, dtype="bfloat16", cpu_kernels="native", page_size=page_size, cpu_threads=threads, max_rows=40)
    )


def test_logits_are_nearer_to_float32_than_torch_in_bfloat16(path: Path) -> None:
    truth = outcome(SingleRank(), path, VOCAB_SIZE, "torch", "float32").logprobs
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels).logprobs for kernels in ("native", "torch"))
    assert divergence(mine, truth) < max(1e-3, 1.2 * divergence(torchs, truth))
    assert float(truth.exp().max()) > 0.02, "the model distinguishes tokens"


def test_any_company_chunk_page_size_and_thread_gives_the_same_bits(path: Path) -> None:
    alone = answer(made(path))
    assert answer(made(path), others=8, chunk=7).same_bits(alone)
    assert answer(made(path, page_size=5, threads=2), others=3, chunk=64).same_bits(alone)


@pytest.mark.parametrize("level", rest_slow(LEVELS_HERE[:0:-1]))
def test_every_level_gives_the_same_bits_however_it_runs(
    level: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.LEVEL_VARIABLE, level)
    alone: Answer = answer(made(path))
    assert answer(made(path, threads=2), others=4, chunk=30).same_bits(alone)


def test_a_step_of_one_call_gives_the_same_tokens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(length, VOCAB_SIZE, seed=length) for length in (1, 30, 70)]
    calls: list[int] = []
    decode: Callable[..., list[int]] = NativeDecoder.decode

    def counted(self: NativeDecoder, *tables: object, **more: object) -> list[int]:
        calls.append(1)
        return decode(self, *tables, **more)

    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "decode", counted)
        found = made(path).generate(prompts, 8)
    assert len(calls) >= 7
    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "max_native_rows", 0)
        assert made(path).generate(prompts, 8) == found
