"""`TransformersModel`: runs transformers' own modeling code over pdserve's pools, as the executor's `Model`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.model.attention.interface import StepAttention
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.attention.paged_rows import PassRows, passes_of
from pdserve.model.config import ModelSpec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.hf.cache import PagedCache
from pdserve.model.hf.checkpoint_names import adopt_weights
from pdserve.model.hf.config import TransformersSource
from pdserve.model.hf.interface import NAME, handled_by
from pdserve.model.hf.latent import find_projections
from pdserve.model.hf.probe import CacheProbe
from pdserve.model.hf.self_check import check_against, own_hidden
from pdserve.model.interface import LayerTaps, MoELayer
from pdserve.model.named_weights import MemoryRange
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots, torch_dtype

_SPLIT_TOLERANCE = 0.1
"""Largest relative difference of hidden states between a prompt in one chunk and the same prompt in two."""
_SPLIT_TOKENS = 8


class TransformersModel:
    """Implements `Model` with a causal class of transformers. Call `bind` before the first `forward`.

    `can_split_prompts`: False where a prompt must be one chunk, because the model's code ignores its recurrent state
    when several tokens follow.
    """

    def __init__(
        self, source: TransformersSource, found: CacheProbe, model: Any, dtype: torch.dtype, parallel: Parallel
    ) -> None:
        self.spec: ModelSpec = source.spec
        self.dtype = dtype
        self.parallel = parallel
        self.moe_layers: Mapping[int, MoELayer] = {}
        self.num_layers = source.num_layers
        self._model, self._found = model, found
        self._decoder = model.get_decoder()
        base = getattr(model, model.base_model_prefix)
        self._below_head = [base] if base is self._decoder else [base, self._decoder]
        """Modules that the head's code may call for hidden states."""
        self.device = next(model.parameters()).device
        self.params = ParamSlots(dtype, self.device)
        adopt_weights(model, self.params)
        self.can_split_prompts = not found.is_stateful or _can_split(model)
        self._text = self._decoder.config
        self._text._attn_implementation = NAME
        self._where = str(source.path)
        self._cache: PagedCache | None = None
        self._page_tokens = 0
        self._output: Any = None
        """The decoder's last output, whose other fields the head's code may read."""

    def bind(self, pools: Sequence[GroupPool]) -> None:
        """Keep keys, values and states in `pools`, one for each group of the probe's layout.

        Raises:
            ModelError: the hidden states differ from those of transformers' own cache; see `self_check`.
        """
        self._page_tokens = pools[0].group.page_tokens
        with torch.inference_mode():
            self._text._attn_implementation = "eager"
            own = own_hidden(self._model, self.device)
            self._text._attn_implementation = NAME
            projections = find_projections(self._decoder, self._found)
            self._cache = cache = PagedCache(
                self._found, pools, {number: projection for number, (_, projection) in projections.items()}
            )
            for module, _ in projections.values():
                module.expand_kv = partial(_expand_kv, cache, module.expand_kv)
            check_against(own, self._hidden, pools, self.spec.vocab_size, self._where)

    @property
    def argmax(self) -> None:
        """See `Model.argmax`. Always None."""

    def weight_memory(self) -> list[MemoryRange]:
        """See `Model.weight_memory`."""
        return self.params.memory()

    def idle(self) -> None:
        """See `Model.idle`. The feed-forward layers are not shared."""

    def forward(
        self,
        batch: ForwardBatch,
        attention: StepAttention,
        on_layer: Callable[[int], None] | None = None,
        hidden: Tensor | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `Model.forward`. `on_hidden` receives the hidden states behind the final norm."""
        assert taps is None, "the layers of transformers' models have no taps"
        assert self._cache is not None, "bind the model to its pools first"
        out = self._hidden(batch, on_layer)
        if on_hidden is not None:
            on_hidden(out)
        return self._head(out.index_select(0, batch.sample_index))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`. `hidden` are states behind the final norm."""
        return self._head(hidden).float()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """See `Model.final_norm`. `hidden` are states behind the final norm."""
        return hidden

    def _hidden(self, batch: ForwardBatch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Compute the hidden states of all tokens, `[N, hidden_size]`, behind the final norm."""
        assert self._cache is not None
        passes = passes_of(batch, self._page_tokens, is_stateful=self._found.is_stateful)
        out = torch.empty(batch.num_tokens, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        for number, rows in enumerate(passes):
            is_last = number == len(passes) - 1
            found = self._run(batch, rows, self._cache, on_layer if is_last else None)
            if len(passes) == 1:
                out = found
            else:
                out[rows.indices] = found
        if on_layer is not None:
            on_layer(self.num_layers - 1)
        return out

    def _run(
        self, batch: ForwardBatch, rows: PassRows, cache: PagedCache, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """Run the decoder over one pass; returns hidden states `[tokens, hidden_size]` in the pass's order."""
        shape = (-1, 1) if rows.is_decode else (1, -1)
        ids, positions = (tensor[rows.indices].view(shape) for tensor in (batch.input_ids, batch.positions))
        cache.begin(rows, on_layer)
        with handled_by(cache):
            self._output = self._decoder(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, return_dict=True
            )
        cache.end()
        hidden: Tensor = self._output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])

    def _head(self, hidden: Tensor) -> Tensor:
        """Compute the logits of `[n, hidden_size]` by the code of the causal class, which may scale or bound them."""
        output = copy.copy(self._output)
        output.last_hidden_state = hidden[None]
        if not hasattr(output, "image_hidden_states"):  # vision-language classes read it from their base model's output
            output.image_hidden_states = None
        for module in self._below_head:
            module.forward = lambda *_, **__: output
        try:
            found = self._model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), return_dict=True)
        finally:
            for module in self._below_head:
                del module.forward
        logits: Tensor = found.logits[0]
        return logits


def _expand_kv(cache: PagedCache, expand: Callable[..., Any], latent: Tensor, rope: Tensor) -> Any:
    """Stands for the method of an MLA layer that expands latents: those that `cache` attends over stay as they are."""
    return expand(latent, rope) if cache.expands(latent) else (latent, rope)


def load_transformers_model(
    source: TransformersSource,
    found: CacheProbe,
    dtype: str,
    device: torch.device,
    parallel: Parallel,
    *,
    load_format: Literal["auto", "dummy"],
    seed: int,
) -> TransformersModel:
    """Load the weights, only from safetensors, or make random ones.

    Raises:
        ModelError: a file or tensor is missing, damaged, or not of this architecture.
    """
    with torch.inference_mode():
        model = source.build(dtype) if load_format == "dummy" else _read(source, dtype)
        model = model.to(device).eval()
        loaded = TransformersModel(source, found, model, torch_dtype(dtype), parallel)
        if load_format == "dummy":
            loaded.params.fill_random(seed)
        return loaded


def _read(source: TransformersSource, dtype: str) -> Any:
    where = str(source.path)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, facts = source.model_class.from_pretrained(
            source.path, config=source.config, dtype=torch_dtype(dtype), attn_implementation="eager",
            use_safetensors=True, trust_remote_code=False, local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # transformers' code may raise anything
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{where}: transformers cannot load the weights: {reason}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if facts.get(kind):
            first = sorted(map(str, facts[kind]))[0]
            raise ModelError(
                f"{where}: the checkpoint has {len(facts[kind])} {kind.replace('_', ' ')}, such as {first}"
            )
    return model


def _can_split(model: Any) -> bool:
    """True when the second half of a prompt continues from the recurrent states of the first half.

    Its hidden states must be those of a prompt in one chunk, and must change when the states are replaced.
    """
    text = model.config.get_text_config(decoder=True)
    decoder, device = model.get_decoder(), next(model.parameters()).device
    ids = torch.arange(1, 1 + _SPLIT_TOKENS, device=device)[None] % text.vocab_size
    positions = torch.arange(_SPLIT_TOKENS, device=device)[None]
    half = _SPLIT_TOKENS // 2

    def run(part: slice, cache: Any) -> Tensor:
        output = decoder(input_ids=ids[:, part], position_ids=positions[:, part], past_key_values=cache, use_cache=True)
        hidden: Tensor = output.last_hidden_state[:, half - _SPLIT_TOKENS :].float()
        return hidden

    def with_first_half() -> Any:
        cache = transformers.DynamicCache(config=text)
        run(slice(0, half), cache)
        return cache

    with torch.no_grad():
        whole = run(slice(None), transformers.DynamicCache(config=text))
        second = run(slice(half, None), with_first_half())
        if float((whole - second).norm() / whole.norm().clamp_min(1e-12)) > _SPLIT_TOLERANCE:
            return False
        for name in ("conv_states", "recurrent_states"):
            cache = with_first_half()
            states = [state for layer in cache.layers for state in getattr(layer, name, {}).values()]
            states = [state for state in states if state is not None]
            for state in states:
                state.add_(1.0)
            if states and torch.equal(run(slice(half, None), cache), second):
                return False
    return True
