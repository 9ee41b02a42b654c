"""Multi-token prediction (MTP): the module of Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4-MoE that drafts tokens.

    x      = project([embedding_norm(embedding of token j) ; hidden_norm(h of position j - 1)])
    hidden = norm(layer(x))      one layer as the target's with full attention, over slots of its own
    draft  = argmax of the target's head over hidden

h is the target's hidden state after its final norm; the drafts after the first take `hidden` in its place. Embedding
and head are the target's. The layer runs as a `Decoder` or `NativeDecoder` of one layer that takes hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import ModelSpec
from pdserve.model.drafting.cost import weights_read
from pdserve.model.drafting.interface import Bind, Drafted, draft_group, likeliest
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import Model
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, MLASpec, WeightNames
from pdserve.model.layers.dense import Linear, RMSNorm, VocabEmbedding
from pdserve.model.layers.kernels import Kernels
from pdserve.model.named_weights import MemoryRange
from pdserve.model.parallel import Parallel
from pdserve.model.params import ParamSlots, WeightSamples


def mtp_spec(target: ModelSpec) -> ModelSpec:
    """Return the configuration of the MTP module's layer: the target's last layer with full attention, alone."""
    names = target.names.mtp
    assert names is not None, "the family has no MTP module"
    layer = next(layer for layer in reversed(target.layers) if _attention(layer) is not None)
    own = WeightNames(norm=names.norm, layers=names.layers, layer=target.names.layer, ignored=names.ignored)
    return dataclasses.replace(target, layers=(layer,), names=own)


def _attention(layer: DecoderLayerSpec) -> AttentionSpec | MLASpec | None:
    """Return the attention of a layer over keys and values, or over latents; None: it has none."""
    return next((op for op in layer.operations if isinstance(op, AttentionSpec | MLASpec)), None)


@dataclasses.dataclass(frozen=True)
class MTPInput:
    """The part before the layer. `project` is a linear layer `[N, 2 * hidden]` to `[N, hidden]`."""

    embedding: VocabEmbedding
    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    project: Linear

    @classmethod
    def allocate(cls, target: ModelSpec, embedding: VocabEmbedding, params: ParamSlots, kernels: Kernels) -> MTPInput:
        """Allocate the weights in `params`; every tensor rank has all of them. `embedding` is the target's."""
        names, size = target.names.mtp, target.hidden_size
        assert names is not None, "the family has no MTP module"
        embedding_norm, hidden_norm = (
            RMSNorm(params.new(f"{name}.weight", size), target.rms_norm_eps, kernels, target.norm_offset)
            for name in (names.embedding_norm, names.hidden_norm)
        )
        project = Linear(kernels, params.new(f"{names.project}.weight", size, 2 * size))
        return cls(embedding, embedding_norm, hidden_norm, project)


class MTPModule:
    """Implements `DraftModel`.

    `layer` computes what follows `inputs`, with the head of the target; `project` stands for `inputs.project` and may
    run elsewhere. `final_norm` is the target's, `norm` the module's own.
    """

    def __init__(
        self,
        inputs: MTPInput,
        layer: Model,
        bind: Bind,
        *,
        final_norm: RMSNorm,
        norm: RMSNorm,
        target: ModelSpec,
        project: Callable[[Tensor], Tensor],
    ) -> None:
        self._inputs, self._layer, self._bind = inputs, layer, bind
        self._final_norm, self._norm, self._target = final_norm, norm, target
        self._project = project
        self._parallel: Parallel = layer.parallel
        self._attention: AttentionBackend | None = None

    @property
    def hidden_size(self) -> int:
        """See `DraftModel.hidden_size`."""
        return self._target.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """See `DraftModel.taps`."""
        return (self._target.num_layers - 1,)

    def kv_group(self, page_tokens: int, dtype: str) -> KVGroup:
        """See `DraftModel.kv_group`."""
        op = _attention(self._layer.spec.layers[0])
        assert op is not None, "see mtp_spec"
        if isinstance(op, MLASpec):
            return draft_group(
                self._target, num_layers=1, page_tokens=page_tokens, num_kv_heads=1, head_dim=op.latent_dim,
                dtype=dtype, of_latents=True,
            )  # fmt: skip
        return draft_group(
            self._target, num_layers=1, page_tokens=page_tokens, num_kv_heads=op.num_kv_heads, head_dim=op.head_dim,
            dtype=dtype,
        )  # fmt: skip

    def bind(self, pool: KVPool) -> None:
        """See `DraftModel.bind`."""
        self._attention = self._bind(pool)

    def take(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.take`. `hidden` `[N, hidden_size]` is the output of the target's last layer."""
        return self._final_norm(hidden)

    @property
    def num_weights(self) -> int:
        """See `DraftModel.num_weights`."""
        return weights_read(self._layer.spec) + 2 * self.hidden_size**2

    @property
    def params(self) -> ParamSlots:
        """See `DraftModel.params`."""
        return self._layer.params

    @property
    def num_bytes(self) -> int:
        """See `DraftModel.num_bytes`."""
        return self._layer.params.num_bytes

    def weight_samples(self) -> WeightSamples:
        """See `DraftModel.weight_samples`."""
        return self._layer.params.samples()

    def weight_memory(self) -> list[MemoryRange]:
        """See `DraftModel.weight_memory`."""
        return self._layer.weight_memory()

    def forward(self, batch: ForwardBatch, hidden: Tensor) -> Drafted | None:
        """See `DraftModel.forward`."""
        assert self._attention is not None, "bind comes first"
        x = self._combine(batch.input_ids, hidden)
        found: list[Tensor] = []

        def keep(output: Tensor) -> None:
            found.append(self._norm(output.index_select(0, batch.sample_index)))

        num_samples = batch.sample_index.shape[0]
        logits = self._layer.forward(batch, self._attention.begin(batch), None, x, keep if num_samples else None)
        if not num_samples:
            return None
        return Drafted(likeliest(logits, self._layer.argmax, self._target.vocab_size, self._parallel), found[0])

    def _combine(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input for tokens `[N]` with the hidden states before them, `[N, hidden_size]`."""
        inputs = self._inputs
        embedded = inputs.embedding(input_ids).to(hidden.dtype)
        return self._project(torch.cat((inputs.embedding_norm(embedded), inputs.hidden_norm(hidden)), -1))
