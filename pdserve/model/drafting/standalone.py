"""A draft model: a small model with the target's vocabulary, which drafts from the tokens alone.

Its KV cache is computed beside the target's, token by token and page by page, and takes no hidden states.
"""

from __future__ import annotations

from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import ModelSpec
from pdserve.model.drafting.cost import weights_read
from pdserve.model.drafting.interface import Bind, Drafted, draft_group, likeliest
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import Model
from pdserve.model.named_weights import MemoryRange
from pdserve.model.params import ParamSlots, WeightSamples


class StandaloneDraftModel:
    """Implements `DraftModel` with a whole model that `cannot_draft` does not refuse. `bind` binds it to its pool."""

    def __init__(self, target: ModelSpec, model: Model, bind: Bind) -> None:
        self._target, self._model, self._bind = target, model, bind
        self._attention: AttentionBackend | None = None

    @property
    def hidden_size(self) -> int:
        """See `DraftModel.hidden_size`. It takes no hidden states."""
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        """See `DraftModel.taps`. It reads no layers."""
        return ()

    def kv_group(self, page_tokens: int, dtype: str) -> KVGroup:
        """See `DraftModel.kv_group`."""
        spec = self._model.spec
        op = spec.attentions[0]
        return draft_group(
            self._target, num_layers=spec.num_layers, page_tokens=page_tokens, num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim, dtype=dtype,
        )  # fmt: skip

    def bind(self, pool: KVPool) -> None:
        """See `DraftModel.bind`."""
        self._attention = self._bind(pool)

    def take(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.take`. Must not be called."""
        raise AssertionError("a draft model takes no hidden states")

    @property
    def num_weights(self) -> int:
        """See `DraftModel.num_weights`."""
        return weights_read(self._model.spec)

    @property
    def params(self) -> ParamSlots:
        """See `DraftModel.params`."""
        return self._model.params

    @property
    def num_bytes(self) -> int:
        """See `DraftModel.num_bytes`."""
        return self._model.params.num_bytes

    def weight_samples(self) -> WeightSamples:
        """See `DraftModel.weight_samples`."""
        return self._model.params.samples()

    def weight_memory(self) -> list[MemoryRange]:
        """See `DraftModel.weight_memory`."""
        return self._model.weight_memory()

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Drafted | None:
        """See `DraftModel.forward`. `hidden` `[N, 0]` is not read."""
        assert self._attention is not None, "bind comes first"
        num_samples = batch.sample_index.shape[0]
        logits = self._model.forward(batch, self._attention.begin(batch))
        if not num_samples:
            return None
        drafts = likeliest(logits, self._model.argmax, self._target.vocab_size, self._model.parallel)
        return Drafted(drafts, hidden[:num_samples])
