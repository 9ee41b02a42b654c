"""Loads the model that drafts for a loaded model, as `--speculative-algorithm` says. `factory` calls it.

It is the target's own MTP module (NEXTN), or what `--speculative-draft-model-path` names: an EAGLE-3 head (EAGLE3), or
a small model with the target's vocabulary (STANDALONE).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from pdserve.base.hf_tokenizer import read_tokenizer_json
from pdserve.base.startup_times import WEIGHTS
from pdserve.errors import ConfigError
from pdserve.executor.backend_choice import choose_attention, make_kernels
from pdserve.executor.model_loading import LoadedModel, ModelToLoad, bind_decoder, expert_map_of, kept_formats
from pdserve.memory.draft_groups import with_draft
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import check_spec
from pdserve.model.decoder import Decoder
from pdserve.model.drafting.eagle3 import Eagle3Head, Eagle3Weights
from pdserve.model.drafting.interface import DraftModel
from pdserve.model.drafting.mtp import MTPInput, MTPModule, mtp_spec
from pdserve.model.drafting.spec import EMBEDDING, cannot_draft, path_refusal, read_eagle3
from pdserve.model.drafting.standalone import StandaloneDraftModel
from pdserve.model.layers.kernels import Kernels
from pdserve.model.loader import empty_model, fill_model, has_tensors, read_spec
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.packer import AttentionInModel
from pdserve.model.native.support import cannot_run
from pdserve.model.params import torch_dtype
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path

_FIELD = "speculative_algorithm"


def add_drafter(wanted: ModelToLoad, loaded: LoadedModel) -> tuple[LoadedModel, DraftModel | None]:
    """Load the model that drafts for `loaded`, and return `loaded` with the drafter's KV in its layout.

    Raises ConfigError and ModelError as `load_draft_model`.
    """
    draft_model = load_draft_model(wanted, loaded)
    if draft_model is None:
        return loaded, None
    group = draft_model.kv_group(wanted.config.memory.page_size, wanted.dtype)
    if loaded.kernels is not None:
        loaded.kernels.tap_samples(draft_model.taps)
    return dataclasses.replace(loaded, layout=with_draft(loaded.layout, group)), draft_model


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
    assert config.speculative_algorithm is not None
    return LOADERS[config.speculative_algorithm](wanted, loaded)


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
        kernels = _kernels(loaded)
        layer = _empty(own, kernels, has_ends=False)
        norm = layer.norm
        assert norm is not None
        inputs = MTPInput.allocate(wanted.spec, decoder.embedding, layer.params, kernels)
        if native is None:
            layer.head = decoder.head
            module = MTPModule(
                inputs, layer, partial(_bind_torch, layer, loaded, own), final_norm=decoder.norm, norm=norm,
                target=wanted.spec, project=inputs.project,
            )  # fmt: skip
        else:
            program = native.beside(layer, loaded.formats)
            module = MTPModule(
                inputs, program, partial(_bind_native, program), final_norm=decoder.norm, norm=norm,
                target=wanted.spec, project=program.pack(inputs.project),
            )  # fmt: skip
        fill_model(
            layer, wanted.path, load_format=model.load_format, seed=model.random_seed, prefix=names.prefix,
            overlay=wanted.overlay, carried=wanted.carried_draft,
        )  # fmt: skip
    return module


def load_eagle3(wanted: ModelToLoad, loaded: LoadedModel) -> DraftModel:
    """Load this rank's part of an EAGLE-3 head. `loaded` is the target with its weights.

    Raises:
        ConfigError: the head is of another vocabulary or hidden size, or pdserve cannot run it beside this target.
        ModelError: the head is missing, damaged or of an unknown form.
    """
    path, target = _path(wanted), _target(wanted, loaded)
    assert target.embedding is not None, "a model that drafts runs in one stage"
    spec = read_eagle3(path, wanted.spec)
    own = dataclasses.replace(wanted, path=path, spec=spec.layer)
    _check_split(own)
    with torch.inference_mode(), wanted.startup.part(WEIGHTS):
        kernels = _kernels(loaded)
        layer = _empty(own, kernels, has_ends=False)
        is_dummy = own.config.model.load_format == "dummy"
        weights = Eagle3Weights.allocate(
            spec, layer, kernels, target_embedding=target.embedding,
            has_embedding=not is_dummy and any(has_tensors(path, f"{start}{EMBEDDING}.") for start in ("", "model.")),
        )  # fmt: skip
        if loaded.kernels is None:
            head = Eagle3Head(spec, layer, partial(_bind_torch, layer, loaded, own), fc=weights.fc, d2t=weights.d2t)
        else:
            program = loaded.kernels.beside(layer, kept_formats(own))
            head = Eagle3Head(
                spec, program, partial(_bind_native, program), fc=program.pack(weights.fc), d2t=weights.d2t
            )
        _fill(layer, own)
        weights.check(wanted.spec.vocab_size, str(path))
    return head


def load_standalone(wanted: ModelToLoad, loaded: LoadedModel) -> DraftModel:
    """Load this rank's part of a draft model. `loaded` is the target with its weights.

    Raises:
        ConfigError: the draft model has another vocabulary, or pdserve cannot run it beside this target.
        ModelError: it is missing, damaged or of an unsupported architecture.
    """
    _target(wanted, loaded)
    path = _path(wanted)
    own = dataclasses.replace(wanted, path=path, spec=read_spec(path))
    reason = cannot_draft(own.spec, wanted.spec) or _other_tokenizer(path, wanted)
    if reason is None and loaded.kernels is not None:
        reason = cannot_run(own.spec, torch_dtype(own.dtype), own.device)
    if reason is not None:
        raise path_refusal(f"{path} cannot draft for this model: {reason}")
    _check_split(own)
    choice = loaded.choice
    if choice is not None:
        choice = choose_attention(own.config.kernels, own.spec, torch_dtype(own.dtype), own.device)
        loaded = dataclasses.replace(loaded, choice=choice)
    with torch.inference_mode(), wanted.startup.part(WEIGHTS):
        decoder = _empty(own, _kernels(loaded), has_ends=True)
        if loaded.kernels is None:
            draft = StandaloneDraftModel(wanted.spec, decoder, partial(_bind_torch, decoder, loaded, own))
        else:
            program = loaded.kernels.beside(decoder, kept_formats(own))
            draft = StandaloneDraftModel(wanted.spec, program, partial(_bind_native, program))
        _fill(decoder, own)
    return draft


LOADERS: Mapping[str, Callable[[ModelToLoad, LoadedModel], DraftModel]] = {
    "EAGLE3": load_eagle3,
    "NEXTN": load_mtp,
    "STANDALONE": load_standalone,
}
"""By `--speculative-algorithm`."""


def _bind_torch(layer: Decoder, loaded: LoadedModel, own: ModelToLoad, pool: KVPool) -> AttentionBackend:
    """Bind the layer of a `Decoder` to the DRAFT pool."""
    assert loaded.choice is not None
    was_asked_for = own.config.kernels.attention_backend != "auto"
    return bind_decoder(layer, loaded.choice, own.device, was_asked_for, [pool], first=pool.group.layers[0])


def _bind_native(layer: NativeDecoder, pool: KVPool) -> AttentionBackend:
    """Bind the layer of a `NativeDecoder` to the DRAFT pool."""
    layer.bind([pool], first=pool.group.layers[0])
    return AttentionInModel()


def _path(wanted: ModelToLoad) -> Path:
    """Return the checkpoint of the head or the draft model."""
    path = wanted.config.speculative.speculative_draft_model_path
    assert path is not None, "the flags were checked"
    return resolve_model_path(path)


def _target(wanted: ModelToLoad, loaded: LoadedModel) -> Decoder:
    """Return the target's modules. Raises ConfigError when no model can draft for it."""
    if loaded.decoder is None:
        raise path_refusal("the model runs through transformers, for which no other model drafts")
    return loaded.decoder


def _check_split(own: ModelToLoad) -> None:
    """Raise ConfigError when the head or the draft model cannot be split over the ranks."""
    try:
        check_spec(own.spec, own.parallel.coord.shape, own.config.parallel.ep_size if own.spec.moe else 1)
    except ConfigError as error:
        raise path_refusal(f"{own.path}: {error}") from error


def _kernels(loaded: LoadedModel) -> Kernels:
    """Make the layer kernels of a model beside the target."""
    return make_kernels("torch" if loaded.choice is None else loaded.choice)


def _empty(own: ModelToLoad, kernels: Kernels, *, has_ends: bool) -> Decoder:
    return empty_model(
        own.spec, own.dtype, own.device, kernels=kernels, parallel=own.parallel, expert_map=expert_map_of(own),
        has_ends=has_ends,
    )  # fmt: skip


def _fill(decoder: Decoder, own: ModelToLoad) -> None:
    model = own.config.model
    fill_model(decoder, own.path, load_format=model.load_format, seed=model.random_seed)


def _other_tokenizer(path: Path, wanted: ModelToLoad) -> str | None:
    """Return how the tokenizers of two models with as many tokens differ; None where they do not, or one has none."""
    own, target = (
        read_tokenizer_json(directory)
        for directory in (
            resolve_tokenizer_path(path),
            wanted.config.model.tokenizer_path or resolve_tokenizer_path(wanted.path),
        )
    )
    if own is None or target is None or own == target:
        return None
    ours, theirs = _tokens(own), _tokens(target)
    differing = ours.items() ^ theirs.items()
    if not differing:
        return None
    text, number = min(differing, key=lambda item: (item[1], item[0]))
    return f"its tokenizer differs from the model's, first at token {number}, {text!r}"


def _tokens(tokenizer_json: str) -> dict[str, int]:
    """Return the number of each token of a tokenizer.json, where its vocabulary is a mapping; else only added ones."""
    content = json.loads(tokenizer_json)
    vocab = content.get("model", {}).get("vocab")
    tokens = dict(vocab) if isinstance(vocab, dict) else {str(entry): i for i, entry in enumerate(vocab or ())}
    return tokens | {added["content"]: added["id"] for added in content.get("added_tokens", ())}


def _refusal(wanted: ModelToLoad, reason: str) -> ConfigError:
    algorithm = wanted.config.speculative.speculative_algorithm
    return ConfigError(f"--speculative-algorithm {algorithm}: {reason}", field=_FIELD)
