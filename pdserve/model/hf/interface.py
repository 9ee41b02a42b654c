"""The attention and mask functions that transformers calls, registered under one name.

transformers finds attention by the name in a config (`AttentionInterface`). The function registered here passes each
call to the object that handles the forward pass under way on this thread: the probe, or the paged cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "pdserve_paged"
"""Value of `_attn_implementation` in the configs of models that run here."""
MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' `(batch, head, query position, key position)` -> whether the query sees the key."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of one attention call.

    `query` `[batch, heads, tokens, width]`; `key` and `value` as the layer passes them. `window`: tokens that a query
    sees, its own included; None: all earlier ones. `softcap` bounds the scores. `sinks` `[heads]`: logits that take
    part in the softmax and have no value. `indices`: keys that each query may see (sparse attention).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    indices: Tensor | None


class ForwardHandler(Protocol):
    """Computes the attention of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return `[batch, tokens, heads, value width]`."""
        ...

    def mask(self, function: MaskFunction, dtype: Any) -> Tensor | None:
        """Return the mask that the layers of one kind get; None: the layers get no mask."""
        ...


class _Active(threading.local):
    handler: ForwardHandler | None = None


_active = _Active()


@contextlib.contextmanager
def handled_by(handler: ForwardHandler) -> Iterator[None]:
    """Let `handler` compute the attention of the forward passes in this context, on this thread."""
    before, _active.handler = _active.handler, handler
    try:
        yield
    finally:
        _active.handler = before


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; see `AttentionInterface`. Dropout does not apply in inference."""
    assert _active.handler is not None, "attention outside of a handled forward pass"
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    call = AttentionCall(query, key, value, attention_mask, scale, sliding_window, softcap, s_aux, indices)
    return _active.handler.attend(call), None


def _mask(*, mask_function: MaskFunction, dtype: Any = None, **_options: Any) -> Tensor | None:
    """The mask function that transformers calls; see `AttentionMaskInterface`."""
    assert _active.handler is not None, "a mask outside of a handled forward pass"
    return _active.handler.mask(mask_function, dtype)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
