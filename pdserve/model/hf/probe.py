"""Finds out what a transformers model caches, by a forward pass without weights.

The model is built on torch's meta device, which computes shapes only. A cache that records its calls then sees, for
each layer, the shapes of keys, values, index keys and recurrent states, and an attention function sees windows and
masks. The KV layout follows from these calls, never from names in the config.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from pdserve.errors import ModelError
from pdserve.memory.layout import GroupKind, KVLayout, Plane, Shard
from pdserve.model.config import LayerKind, layout_of_layers
from pdserve.model.hf.interface import NAME, AttentionCall, MaskFunction, handled_by

NUM_TOKENS = 2
"""Tokens of the probe's prompt."""
_FAR = 1 << 20
"""A query position beyond every window."""
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclasses.dataclass
class LayerCalls:
    """What one layer does with the cache.

    `kv`: heads and width of keys, then of values. `index_width`: width of the index key. `states`: by name, shape and
    dtype of one request's recurrent state. `is_direct`: attention reads the keys and values as the cache returned them,
    so that it can read them from the pool. `window`: see `KVGroup.window`.
    """

    kv: tuple[tuple[int, int], tuple[int, int]] | None = None
    kv_dtype: str = ""
    index_width: int | None = None
    states: dict[str, tuple[tuple[int, ...], str]] = dataclasses.field(default_factory=dict)
    is_direct: bool = False
    is_attended: bool = False
    window: int | None = None

    @property
    def is_latent(self) -> bool:
        """True when the layer expands one cached vector to the keys and values of all heads (MLA)."""
        return self.kv is not None and not self.is_direct and self.kv[0][0] == self.kv[1][0] == 1


@dataclasses.dataclass(frozen=True)
class CacheProbe:
    """Calls of each layer that caches something, and whether a layer selects tokens by an index."""

    layers: dict[int, LayerCalls]
    num_layers: int

    @property
    def is_stateful(self) -> bool:
        """True when a layer has recurrent state."""
        return any(layer.states for layer in self.layers.values())

    @property
    def is_sparse(self) -> bool:
        """True when a layer has index keys."""
        return any(layer.index_width is not None for layer in self.layers.values())


class _ProbeCache(Cache):  # type: ignore[misc, unused-ignore]
    """Records the calls of a forward pass that starts at position 0."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.calls: dict[int, LayerCalls] = {}
        self._returned: dict[int, tuple[int, Tensor, Tensor]] = {}
        self._updated: int | None = None
        self._masks: list[tuple[Tensor, MaskFunction]] = []

    def _layer(self, layer_idx: int) -> LayerCalls:
        return self.calls.setdefault(layer_idx, LayerCalls())

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        layer = self._layer(layer_idx)
        layer.kv = tuple((states.shape[1], states.shape[3]) for states in (key_states, value_states))  # type: ignore[assignment]
        layer.kv_dtype = _dtype_name(key_states.dtype)
        self._returned[id(key_states)] = (layer_idx, key_states, value_states)
        self._updated = layer_idx
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self._layer(layer_idx).index_width = indexer_key_states.shape[-1]
        return indexer_key_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        if conv_kernel_size is None:
            raise ModelError(f"layer {layer_idx} does not tell the width of its convolution state")
        shape = (*conv_states.shape[1:-1], conv_kernel_size)
        self._layer(layer_idx).states[f"conv{state_idx}"] = (shape, _dtype_name(conv_states.dtype))
        return nn.functional.pad(conv_states, (max(0, conv_kernel_size - conv_states.shape[-1]), 0))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        shape = tuple(recurrent_states.shape[1:])
        self._layer(layer_idx).states[f"state{state_idx}"] = (shape, _dtype_name(recurrent_states.dtype))
        return recurrent_states

    def mask(self, function: MaskFunction, dtype: Any) -> Tensor:
        """See `ForwardHandler.mask`. Each mask is a tensor of its own, which attention finds again."""
        made = torch.empty(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool, device="meta")
        self._masks.append((made, function))
        return made

    def attend(self, call: AttentionCall) -> Tensor:
        """See `ForwardHandler.attend`."""
        found = self._returned.get(id(call.key))
        is_direct = found is not None and found[2] is call.value
        number = found[0] if found is not None and is_direct else self._updated
        if number is None:
            raise ModelError("a layer attends before it has cached keys and values")
        layer = self.calls[number]
        window = call.window
        functions = [function for made, function in self._masks if made is call.mask]
        if functions:
            if not _sees(functions[0], window):
                raise ModelError(f"the attention mask of layer {number} is neither causal nor a window of tokens")
        elif call.mask is not None and call.indices is None:
            raise ModelError(f"layer {number} changes its attention mask")
        if layer.is_attended and (layer.window, layer.is_direct) != (window, is_direct):
            raise ModelError(f"layer {number} is read with different windows")
        layer.is_attended, layer.is_direct, layer.window = True, is_direct, window
        query = call.query
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], call.value.shape[-1])


def _sees(function: MaskFunction, window: int | None) -> bool:
    """True when a mask shows each query itself and all earlier tokens, or the last `window` ones."""
    nearest = 0 if window is None else _FAR - window + 1
    visible = (_FAR, nearest, (_FAR + nearest) // 2)
    hidden = (_FAR + 1, *(() if window is None else (nearest - 1, 0)))

    def sees(key: int) -> bool:
        zero, query, position = (torch.tensor(number, device="cpu") for number in (0, _FAR, key))
        return bool(function(zero, zero, query, position))

    try:
        return all(map(sees, visible)) and not any(map(sees, hidden))
    except (NotImplementedError, RuntimeError):  # the mask depends on values, which are absent here
        return False


def probe(build: Callable[[], Any], num_layers: int, where: str) -> CacheProbe:
    """Run the model that `build` makes on the meta device, and return what its layers cache.

    `num_layers`: the model's layers. Errors begin with `where`.

    Raises:
        ModelError: transformers cannot build or run the model this way, or a layer caches in an unknown way.
    """
    cache = _ProbeCache()
    try:
        with torch.device("meta"), torch.no_grad():
            model = build().eval()
            decoder = model.get_decoder()
            decoder.config._attn_implementation = NAME
            for module in decoder.modules():
                if (
                    any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
                    and "xpert" in type(module).__name__
                ):
                    module.forward = _pass_on  # which experts run depends on values, which are absent here
            takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
            ids = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
            before = _module_tensors(decoder)
            with handled_by(cache):
                decoder(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
            kept = sorted(_module_tensors(decoder) - before)
            if any(layer.kv is not None for layer in cache.calls.values()) and not takes_positions:
                raise ModelError("the model's forward takes no position_ids, so requests cannot share a pass")
            if kept:
                raise ModelError(f"the model keeps state in its module {kept[0]}, outside of the cache")
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except Exception as error:  # transformers' code may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{where}: a probe of the model without weights failed: {reason}") from error
    for number, layer in cache.calls.items():
        if layer.kv is not None and not layer.is_attended:
            raise ModelError(f"{where}: layer {number} does not call transformers' attention interface")
    strange = [number for number in cache.calls if not 0 <= number < num_layers]
    if strange:
        raise ModelError(f"{where}: layer {strange[0]} caches, but num_hidden_layers is {num_layers}")
    return CacheProbe(dict(sorted(cache.calls.items())), num_layers)


def layout_of(found: CacheProbe, page_tokens: int, where: str) -> KVLayout:
    """Return the KV layout of a model: layers that cache the same planes form a group.

    The layers of a model without any full attention keep all tokens, whatever their window is.

    Raises:
        ModelError: the model has no attention.
    """
    attended = [layer for layer in found.layers.values() if layer.kv is not None]
    if not attended:
        raise ModelError(f"{where}: the model has recurrent layers only; at least one attention layer is needed")
    keeps_all = all(layer.window is not None for layer in attended)
    layers: dict[LayerKind, list[int]] = {}
    for number, layer in found.layers.items():
        if layer.kv is not None:
            has_pool = layer.window is not None and layer.is_direct and not keeps_all
            kind = GroupKind.MLA if layer.is_latent else GroupKind.WINDOW if has_pool else GroupKind.FULL
            window = layer.window if has_pool else None
            layers.setdefault((kind, window, _kv_planes(layer, kind, page_tokens)), []).append(number)
        planes: tuple[Plane, ...]
        if layer.index_width is not None:
            planes = (_plane("index", 1, page_tokens, layer.index_width, layer.kv_dtype, Shard.REPLICATED),)
            layers.setdefault((GroupKind.INDEX, None, planes), []).append(number)
        if layer.states:
            planes = tuple(_state_plane(name, *state) for name, state in sorted(layer.states.items()))
            layers.setdefault((GroupKind.STATE, None, planes), []).append(number)
    return layout_of_layers(layers, found.num_layers, page_tokens)


def _kv_planes(layer: LayerCalls, kind: GroupKind, page_tokens: int) -> tuple[Plane, ...]:
    assert layer.kv is not None
    (k_heads, k_width), (v_heads, v_width) = layer.kv
    if kind is GroupKind.MLA:
        return (_plane("latent", 1, page_tokens, k_width + v_width, layer.kv_dtype, Shard.REPLICATED),)
    return (
        _plane("k", k_heads, page_tokens, k_width, layer.kv_dtype, Shard.KV_HEAD),
        _plane("v", v_heads, page_tokens, v_width, layer.kv_dtype, Shard.KV_HEAD),
    )


def _state_plane(name: str, shape: tuple[int, ...], dtype: str) -> Plane:
    """A recurrent state is divided by its first dimension; a convolution's channels are of several kinds, so it is one
    block.
    """
    *outer, width = shape
    if name.startswith("conv") or len(outer) < 2:
        return _plane(name, 1, _product(outer), width, dtype, Shard.REPLICATED)
    return _plane(name, outer[0], _product(outer[1:]), width, dtype, Shard.VALUE_HEAD)


def _plane(name: str, heads: int, rows: int, width: int, dtype: str, shard: Shard) -> Plane:
    return Plane(name=name, num_heads=heads, num_heads_total=heads, rows=rows, width=width, dtype=dtype, shard=shard)


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _module_tensors(decoder: nn.Module) -> set[str]:
    """Return the names of tensors that are plain attributes of modules: neither parameters nor buffers."""
    modules = decoder.named_modules()
    return {
        f"{name}.{key}" for name, module in modules for key, value in vars(module).items() if torch.is_tensor(value)
    }


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise ModelError(f"a layer caches {dtype}, which has no place in the KV layout")
    return _DTYPE_NAMES[dtype]
