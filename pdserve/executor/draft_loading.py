"""Loads the model that drafts for a loaded model, as `--speculative-algorithm` says. `factory` calls it."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from pdserve.base.startup_times import WEIGHTS
from pdserve.errors import ConfigError
from pdserve.executor.backend_choice import make_kernels
from pdserve.executor.model_loading import LoadedModel, ModelToLoad, bind_decoder, expert_map_of
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.decoder import Decoder
from pdserve.model.drafting.interface import DraftModel
from pdserve.model.drafting.mtp import MTPInput, MTPModule, mtp_spec
from pdserve.model.loader import empty_model, fill_model, has_tensors
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.packer import AttentionInProgram

_FIELD = "speculative_algorithm"


def load_draft_model(wanted: ModelToLoad, loaded: LoadedModel) -> DraftModel | None:
    """Load this rank's part of the model that drafts for `loaded`; None where no model drafts.

    Raises:
        ConfigError: the drafter does not fit the model or the server.
        ModelError: its weights are missing or damaged.
    """
    config = wanted.config.speculative
    if not config.uses_draft_model:
        return None
    if wanted.parallel.coord.shape.pp_size > 1:
        raise _refusal(wanted, "with --pp-size above 1 it must be NGRAM")
    if wanted.parallel.dp_attention_group.spans_replicas:
        raise _refusal(wanted, "with --enable-dp-attention it must be NGRAM")
    if config.speculative_algorithm != "NEXTN":
        raise _refusal(wanted, "it is not supported yet; supported: NGRAM, NEXTN")
    return load_mtp(wanted, loaded)


def load_mtp(wanted: ModelToLoad, loaded: LoadedModel) -> DraftModel:
    """Load this rank's part of the target's MTP module. `loaded` is the target with its weights.

    Raises:
        ConfigError: the checkpoint has no MTP module, or pdserve cannot run it beside this server's target.
        ModelError: its weights are damaged.
    """
    decoder, names, model = loaded.decoder, wanted.spec.names.mtp, wanted.config.model
    if decoder is None or names is None or decoder.embedding is None or decoder.norm is None:
        raise _refusal(wanted, "the model has no MTP module that native code runs")
    if model.load_format != "dummy" and not has_tensors(wanted.path, names.prefix):
        raise _refusal(wanted, f"{wanted.path} has no tensors under {names.prefix}")
    own = dataclasses.replace(wanted, spec=mtp_spec(wanted.spec))
    native = loaded.kernels
    with torch.inference_mode(), wanted.startup.part(WEIGHTS):
        kernels = make_kernels("torch" if loaded.choice is None else loaded.choice)
        layer = empty_model(
            own.spec, own.dtype, own.device, kernels=kernels, parallel=own.parallel, expert_map=expert_map_of(own),
            has_ends=False,
        )  # fmt: skip
        norm = layer.norm
        assert norm is not None
        inputs = MTPInput.allocate(wanted.spec, decoder.embedding, layer.params, kernels)
        if native is None:
            layer.head = decoder.head
            module = MTPModule(
                inputs, layer, partial(bind_torch, layer, loaded, own), final_norm=decoder.norm, norm=norm,
                target=wanted.spec, project=inputs.project,
            )  # fmt: skip
        else:
            program = native.beside(layer)
            module = MTPModule(
                inputs, program, partial(bind_native, program), final_norm=decoder.norm, norm=norm,
                target=wanted.spec, project=program.pack(inputs.project),
            )  # fmt: skip
        fill_model(layer, wanted.path, load_format=model.load_format, seed=model.random_seed, prefix=names.prefix)
    return module


def bind_torch(layer: Decoder, loaded: LoadedModel, own: ModelToLoad, pool: KVPool) -> AttentionBackend:
    """Bind the layer of a `Decoder` to the DRAFT pool."""
    assert loaded.choice is not None
    was_asked_for = own.config.kernels.attention_backend != "auto"
    return bind_decoder(layer, loaded.choice, own.device, was_asked_for, [pool], pool.group.layers[0])


def bind_native(layer: NativeDecoder, pool: KVPool) -> AttentionBackend:
    """Bind the layer of a `NativeDecoder` to the DRAFT pool."""
    layer.bind([pool], pool.group.layers[0])
    return AttentionInProgram()


def _refusal(wanted: ModelToLoad, reason: str) -> ConfigError:
    algorithm = wanted.config.speculative.speculative_algorithm
    return ConfigError(f"--speculative-algorithm {algorithm}: {reason}", field=_FIELD)
