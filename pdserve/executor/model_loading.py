"""Loads one rank's model: by native code with torch or with the CPU kernels, or through transformers.

`factory` calls `read_model`, then `load`. Each way to run a model is a function in `LOADERS`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from pdserve.base.host_memory import give_back_freed
from pdserve.base.native import arithmetic_of
from pdserve.base.parallel import layers_of
from pdserve.base.startup_times import PACK, WEIGHTS, StartupTimes
from pdserve.config.groups import ServerConfig
from pdserve.errors import ConfigError, ModelError, UnsupportedModelError
from pdserve.executor.backend_choice import (
    Choice,
    choose_attention,
    choose_level,
    latents_maker,
    make_attention,
    make_delta_kernels,
    make_kernels,
    make_native,
)
from pdserve.memory.layout import GroupKind, KVLayout
from pdserve.model.attention.interface import AttentionBackend, ScoreRule
from pdserve.model.attention.layer_backends import make_backends
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.config import ModelSpec, check_spec, kv_layout
from pdserve.model.decoder import Decoder
from pdserve.model.gated_delta_net import GatedDeltaNet
from pdserve.model.grouped_weights import MIN_GROUP, GroupFormat, within
from pdserve.model.interface import Model
from pdserve.model.layer_spec import AttentionSpec, MLASpec
from pdserve.model.layers.kernels import Kernels
from pdserve.model.loader import (
    empty_model,
    fill_model,
    quantization_of,
    quantized_formats,
    read_spec,
    resolve_dtype,
)
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.packer import AttentionInModel
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots, torch_dtype
from pdserve.model.placement import ExpertMap, first_placement
from pdserve.model.pooling import read_embedding_spec
from pdserve.model.tensor_sources import TensorSource

if TYPE_CHECKING:
    from pdserve.model.hf.config import TransformersSource
    from pdserve.model.hf.model import TransformersModel

_LOG = logging.getLogger(__name__)
TORCH = "torch"
Way = Literal["torch", "kernels", "transformers"]
"""What runs a model: torch, on CUDA with Triton and flashinfer; the CPU kernels; transformers' code."""


@dataclasses.dataclass(frozen=True)
class ModelToLoad:
    """A checkpoint whose config has been read. `source`: None where native code runs it. `dtype` is resolved.

    `beside`: the model in use, which other weights are loaded beside. They share its threads, and no rank is asked.
    `overlay`: tensors by their names in the checkpoint that are read instead of those of its files.
    """

    config: ServerConfig
    path: Path
    spec: ModelSpec
    source: TransformersSource | None
    dtype: str
    device: torch.device
    parallel: Parallel
    startup: StartupTimes
    beside: LoadedModel | None = None
    overlay: Mapping[str, TensorSource] = dataclasses.field(default_factory=dict)
    carried: ParamSlots | None = None
    """Parameters in use, which the model has where `overlay` has no other values; None: those of the checkpoint."""
    carried_draft: ParamSlots | None = None
    """Those of the model that drafts."""

    @property
    def kv_dtype(self) -> str:
        """Number format of the model's keys and values, by its name in `memory/dtypes.py`."""
        asked = self.config.memory.kv_cache_dtype
        return self.dtype if asked == "auto" else asked


class Bind(Protocol):
    """Binds a model to the pools of its rank; see `LoadedModel`."""

    def __call__(self, pools: Sequence[GroupPool], *, max_drafts: int = 0) -> AttentionBackend:
        """Return the backend of the model's layers. `max_drafts`: most draft tokens of a row.

        Raises:
            ConfigError: the model cannot compute rows with `max_drafts` drafts; names the flag.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A rank's model with its weights. `layout` is the whole model's, with a STAMP group where it has states.

    `bind` binds the model to this rank's pools, one for each other group of the layout, and returns the backend of its
    layers. `arithmetic`: TORCH, or level and number format of the CPU kernels. `can_split_prompts`: False where a
    prompt must be one chunk. `kernels`: the model, if the CPU kernels run it. `decoder`: the modules of a model in
    native code; `choice`: its attention, where torch runs it. A model that drafts shares their ends. `formats`: those
    of the weights that stay quantized as the checkpoint has them, by their names there.
    """

    model: Model
    layout: KVLayout
    bind: Bind
    arithmetic: str = TORCH
    can_split_prompts: bool = True
    kernels: NativeDecoder | None = None
    decoder: Decoder | None = None
    choice: Choice | None = None
    formats: Mapping[str, GroupFormat] = dataclasses.field(default_factory=dict)


def read_model(
    config: ServerConfig, path: Path, device: torch.device, parallel: Parallel, startup: StartupTimes
) -> ModelToLoad:
    """Read the checkpoint's config, and check that the model can be split over the ranks.

    Raises:
        ConfigError: the model cannot be split so, or its KV cache has no 8-bit form.
        ModelError: the checkpoint is missing, damaged, or of a model that runs in no way.
    """
    spec, source = _read_spec(config, path)
    if source is None:
        shape, group = parallel.coord.shape, parallel.dp_attention_group
        check_spec(spec, shape, config.parallel.ep_size, group.size // shape.tp_size)
    dtype = resolve_dtype(path, spec, config.model.dtype, load_format=config.model.load_format)
    if (dtype, config.model.dtype, device.type) == ("float16", "auto", "cpu") and quantization_of(path) is not None:
        _LOG.info("the quantized checkpoint runs in bfloat16, the dtype of the CPU kernels, instead of float16")
        dtype = "bfloat16"
    wanted = ModelToLoad(config, path, spec, source, dtype, device, parallel, startup)
    if source is None and wanted.kv_dtype != dtype:
        _check_codes(wanted)
    return wanted


def _check_codes(wanted: ModelToLoad) -> None:
    """Raise ConfigError for a model whose KV cache has no 8-bit form: latents and index keys have the model's dtype."""
    layout = kv_layout(wanted.spec, wanted.config.memory.page_size, wanted.dtype, wanted.kv_dtype)
    for group in layout.groups:
        if group.kind in (GroupKind.MLA, GroupKind.INDEX):
            raise ConfigError(
                f"--kv-cache-dtype {wanted.kv_dtype} does not fit this model: its {group.kind.value} group has the "
                "model's dtype",
                field="kv_cache_dtype",
            )


def load(wanted: ModelToLoad) -> LoadedModel:
    """Load this rank's part of the model.

    Raises:
        ConfigError: a flag does not fit the model or the machine.
        ModelError: the weights are missing or damaged.
    """
    way, level = _choose_way(wanted)
    loaded = LOADERS[way](wanted, level)
    return dataclasses.replace(loaded, layout=loaded.layout.with_stamps())


def _choose_way(wanted: ModelToLoad) -> tuple[Way, str]:
    """Return what runs the model, and the level of the CPU kernels. Raises ConfigError."""
    if wanted.source is not None:
        return "transformers", ""
    config = wanted.config
    if config.kernels.enable_deterministic_inference:
        _keep_bits(wanted.device)
    level = choose_level(config.kernels, config.model, wanted.spec, torch_dtype(wanted.dtype), wanted.device)
    return ("torch", "") if level is None else ("kernels", level)


def _load_torch(wanted: ModelToLoad, level: str) -> LoadedModel:
    """Load for torch. The attention backend follows `--attention-backend`."""
    kernels, device, spec = wanted.config.kernels, wanted.device, wanted.spec
    choice = choose_attention(kernels, spec, torch_dtype(wanted.dtype), device, wanted.kv_dtype)
    with wanted.startup.part(WEIGHTS):
        decoder = _torch_decoder(wanted, choice)
        for op in (op for layer in decoder.layers for op in layer.operations):
            if isinstance(op, GatedDeltaNet):
                op.kernels = make_delta_kernels(choice)
        _fill(decoder, wanted)
    _LOG.info("attention backend: %s", choice)
    bind = partial(bind_decoder, decoder, choice, device, kernels.attention_backend != "auto")
    layout = kv_layout(spec, wanted.config.memory.page_size, wanted.dtype, wanted.kv_dtype)
    return LoadedModel(decoder, layout, bind, decoder=decoder, choice=choice)


def _torch_decoder(wanted: ModelToLoad, choice: Choice) -> Decoder:
    """Build the model for torch, without weights. With Triton kernels quantized weights stay packed on the device.

    Adapters (LoRA) read the weights of the layers that they change, so beside them all weights are dequantized.
    """
    kernels = make_kernels(choice)
    if choice in ("torch", "batch_invariant") or wanted.config.lora.is_on:
        return _empty_decoder(wanted, kernels)
    formats = kept_formats(wanted)
    if not formats:
        return _empty_decoder(wanted, kernels)
    from pdserve.model.packed_layers import keep_packed, packable  # imports triton

    names = _empty_decoder(dataclasses.replace(wanted, device=torch.device("cpu")), make_kernels("torch"))
    known = {own: form for name, form in formats.items() for own in names.params.names_of(name)}
    refuse_cut_groups(wanted, names.params, formats)
    decoder = _empty_decoder(wanted, kernels, packable(names, known))
    keep_packed(decoder, known, wanted.device)
    return decoder


def _load_kernels(wanted: ModelToLoad, level: str) -> LoadedModel:
    """Load for the CPU kernels, which take over the weights during the load."""
    model, page_tokens = wanted.config.model, wanted.config.memory.page_size
    with wanted.startup.part(WEIGHTS):
        decoder = _empty_decoder(wanted, make_kernels("torch"))
        formats = kept_formats(wanted)
        refuse_cut_groups(wanted, decoder.params, formats)
        packs_embedding = not wanted.config.speculative.uses_draft_model
        beside = None if wanted.beside is None else wanted.beside.kernels
        native = make_native(
            decoder, model, level, lambda: wanted.startup.part(PACK), formats, packs_embedding=packs_embedding,
            threads=None if beside is None else beside.threads,
        )  # fmt: skip
        _fill(decoder, wanted)
    number_format = model.quantization or ("quantized" if formats else wanted.dtype)
    arithmetic = f"{arithmetic_of(level)} {wanted.dtype if number_format == 'bf16' else number_format}"
    layout = kv_layout(wanted.spec, page_tokens, wanted.dtype, wanted.kv_dtype)
    bind = partial(_bind_program, native)
    return LoadedModel(native, layout, bind, arithmetic, kernels=native, decoder=decoder, formats=formats)


def kept_formats(wanted: ModelToLoad) -> Mapping[str, GroupFormat]:
    """Return the formats of the weights that stay quantized as the checkpoint has them. Logs their number."""
    model = wanted.config.model
    if model.load_format == "dummy" or model.quantization in ("bf16", "int8"):
        return {}
    formats = quantized_formats(wanted.path, wanted.spec)
    if model.quantization == "int4":  # FP8 is rounded to fewer bits
        formats = {name: form for name, form in formats.items() if not form.is_float or form.bits == 4}
    if formats:
        counts = Counter(str(form) for form in formats.values())
        shown = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
        _LOG.info("quantized weights stay packed: %s", shown)
    return formats


def refuse_cut_groups(wanted: ModelToLoad, params: ParamSlots, formats: Mapping[str, GroupFormat]) -> None:
    """Refuse ranks whose share of a packed weight's inputs cuts a group of inputs with one scale.

    The CPU and Triton kernels divide groups into groups of 64 or 32 inputs, and no smaller ones. All ranks refuse
    alike. `formats`: those of weights that stay packed, by their names in the checkpoint. With `--quantization int4`
    such a weight is rounded anew instead.

    Raises:
        ConfigError: `tp_size`; the message names the weight.
    """
    if wanted.config.model.quantization is not None:
        return
    known = {own: form for name, form in formats.items() for own in params.names_of(name)}
    for param in params.of_some_inputs:
        form = known.get(param.name)
        if form is None:
            continue
        size = param.held_shape[1]
        starts = range(0, param.shape[1], size)
        cut = [start for start in starts if within(form, range(start, start + size)) is None]
        if cut:
            tp_size = wanted.config.parallel.tp_size
            other = f"--ep-size {tp_size}" if ".experts." in param.name else "another --tp-size"
            raise ConfigError(
                f"--tp-size {tp_size}: {param.name} has a scale for each {form.group} inputs, and the inputs of a rank "
                f"would begin at {cut[0]}, which is no multiple of {MIN_GROUP}; use {other}, or --quantization bf16, "
                "which dequantizes all weights",
                field="tp_size",
            )


def _load_transformers(wanted: ModelToLoad, level: str) -> LoadedModel:
    """Load for transformers' code."""
    from pdserve.executor.transformers_loading import plan_transformers  # its import takes seconds

    assert wanted.source is not None
    plan = plan_transformers(wanted.source, wanted.config, wanted.dtype)
    with wanted.startup.part(WEIGHTS):
        model = plan.load(wanted.config, wanted.dtype, wanted.device, wanted.parallel)
    return LoadedModel(
        model, plan.layout, partial(_bind_transformers, model), can_split_prompts=model.can_split_prompts
    )


LOADERS: Mapping[Way, Callable[[ModelToLoad, str], LoadedModel]] = {
    "torch": _load_torch,
    "kernels": _load_kernels,
    "transformers": _load_transformers,
}
"""Functions of a model and the level of the CPU kernels, which is empty without them."""


def bind_decoder(
    model: Decoder,
    choice: Choice,
    device: torch.device,
    was_asked_for: bool,
    pools: Sequence[GroupPool],
    first: int | None = None,
    *,
    max_drafts: int = 0,
) -> AttentionBackend:
    """Make the backends of a `Decoder` over `pools`.

    `first`: the number in the layout of this rank's first layer; None: that of its stage.
    """
    coord = model.parallel.coord
    mine = layers_of(model.spec.num_layers, coord.shape.pp_size, coord.pp_rank)

    def make(pool: KVPool, op: AttentionSpec) -> AttentionBackend:
        num_heads = op.num_heads // coord.shape.tp_size
        return make_attention(choice, pool, num_heads, device, was_asked_for=was_asked_for, rule=ScoreRule.of(op))

    attended = [
        next((op for op in model.spec.layers[i].operations if isinstance(op, AttentionSpec | MLASpec)), None)
        for i in mine
    ]
    begin = mine.start if first is None else first
    by_channel = model.spec.has_channel_decay
    return make_backends(
        attended, begin, pools, make, device, max_drafts, latents_maker(choice), channel_decay=by_channel
    )


def _bind_program(model: NativeDecoder, pools: Sequence[GroupPool], *, max_drafts: int = 0) -> AttentionBackend:
    """Bind a model whose program attends."""
    model.bind(pools, max_drafts)
    return AttentionInModel(model.fold)


def _bind_transformers(
    model: TransformersModel, pools: Sequence[GroupPool], *, max_drafts: int = 0
) -> AttentionBackend:
    """Bind a model that attends by transformers' code."""
    if max_drafts and any(pool.group.kind is GroupKind.STATE for pool in pools):
        raise ConfigError(
            f"{model.spec.architectures[0]} runs through transformers and has recurrent layers, whose states cannot be "
            "taken back behind rejected drafts; leave --speculative-algorithm out",
            field="speculative_algorithm",
        )
    model.bind(pools)
    return AttentionInModel()


def _empty_decoder(wanted: ModelToLoad, kernels: Kernels, on_host: Collection[str] = ()) -> Decoder:
    return empty_model(
        wanted.spec, wanted.dtype, wanted.device, kernels=kernels, parallel=wanted.parallel,
        expert_map=expert_map_of(wanted), on_host=on_host,
    )  # fmt: skip


def _fill(decoder: Decoder, wanted: ModelToLoad) -> None:
    model = wanted.config.model
    fill_model(
        decoder, wanted.path, load_format=model.load_format, seed=model.random_seed, on_progress=wanted.startup.loaded,
        overlay=wanted.overlay, carried=wanted.carried,
    )  # fmt: skip
    give_back_freed()


def _read_spec(config: ServerConfig, path: Path) -> tuple[ModelSpec, TransformersSource | None]:
    """Read the model's configuration, and decide by `--model-impl` what runs it: None stands for native code."""
    impl = config.model.model_impl
    refusal: ModelError | None = None
    if impl != "transformers":
        try:
            if config.embedding.is_embedding and path.suffix != ".gguf":
                return read_embedding_spec(path), None
            return read_spec(path), None
        except UnsupportedModelError as error:
            if impl == "native" or path.suffix == ".gguf":
                raise
            refusal = error
    from pdserve.executor.transformers_loading import find_source  # its import takes seconds

    source = find_source(path, refusal)
    return source.spec, source


def expert_map_of(wanted: ModelToLoad) -> ExpertMap | None:
    """The initial placement of whole experts, equal on all ranks; None where each tensor rank has a part of every
    expert.
    """
    config, spec, parallel = wanted.config.parallel, wanted.spec, wanted.parallel
    if config.ep_size == 1 or spec.moe is None:
        return None
    in_use = None if wanted.beside is None else wanted.beside.decoder
    if in_use is not None and in_use.expert_map is not None and in_use.expert_map.rows.keys() == set(spec.moe_layers):
        return in_use.expert_map  # the file of --init-expert-location may have changed
    leads = layers_of(spec.num_layers, parallel.coord.shape.pp_size, 0)
    if config.enable_eplb and not any(layer in leads for layer in spec.moe_layers):
        raise ConfigError(
            f"--enable-eplb needs experts in the first stage; its layers {leads.start} to {leads.stop - 1} have none",
            field="enable_eplb",
        )
    expert_map = first_placement(
        spec.moe, spec.moe_layers, config.ep_size, config.ep_num_redundant_experts, config.init_expert_location
    )
    if wanted.beside is not None:  # the ranks have compared it at start-up
        return expert_map
    own = torch.tensor([expert_map.digest()], device=wanted.device)
    if bool((parallel.dp_attention_group.all_gather_rows(own, [1] * parallel.dp_attention_group.size) != own).any()):
        raise ConfigError(
            f"--init-expert-location {config.init_expert_location} differs between the hosts of this server",
            field="init_expert_location",
        )
    return expert_map


def _keep_bits(device: torch.device) -> None:
    """Disable reduced precision in torch's matrix products, for the deterministic mode."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
