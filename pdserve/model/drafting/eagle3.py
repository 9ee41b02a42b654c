"""EAGLE-3 (arXiv:2503.01840): a head of one layer that drafts tokens from hidden states inside the target.

    x      = fc([h_a ; h_b ; h_c] of position j - 1)       h: outputs of some layers of the target, by default of three
    hidden = layer(x)                                      q, k and v read [input_layernorm(e) ; hidden_norm(x)],
                                                           e being the embedding of token j
    draft  = token of argmax(lm_head(norm(hidden)))

The drafts after the first take `hidden`, as it is before `norm`, in place of x. The head has a vocabulary of its own:
`lm_head` scores the draft tokens, and `d2t[i]` is added to the draft token i to get a token of the target.

The checkpoints are those of `LlamaForCausalLMEagle3`. The layer runs as a `Decoder` or `NativeDecoder` of one layer
that takes hidden states. Its embedding is the target's where the checkpoint has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.errors import ModelError
from pdserve.memory.layout import KVGroup
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.decoder import Decoder
from pdserve.model.drafting.cost import weights_read
from pdserve.model.drafting.interface import Bind, Drafted, draft_group, likeliest
from pdserve.model.drafting.spec import EMBEDDING, Eagle3Spec
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import LayerTaps, Model
from pdserve.model.layers.dense import Linear, VocabEmbedding, vocab_rows
from pdserve.model.layers.kernels import Kernels
from pdserve.model.named_weights import MemoryRange
from pdserve.model.params import Param, ParamSlots, WeightSamples


@dataclasses.dataclass(frozen=True)
class Eagle3Weights:
    """The parts of a head around its layer, whose module is `layer`; all of them are in `layer.params`.

    `fc` is `[N, spec.num_inputs]` to `[N, hidden]`. `d2t` int64 `[draft vocab]`. Every tensor rank has all of both, and
    its share of the rows of `layer.head`.
    """

    layer: Decoder
    fc: Linear
    d2t: Tensor

    @classmethod
    def allocate(
        cls,
        spec: Eagle3Spec,
        layer: Decoder,
        kernels: Kernels,
        *,
        target_embedding: VocabEmbedding,
        has_embedding: bool,
    ) -> Eagle3Weights:
        """Allocate the weights, and give `layer` its embedding and head.

        `has_embedding`: whether the checkpoint has an embedding; without it `target_embedding` is used.
        """
        params, own, coord = layer.params, spec.layer, layer.parallel.coord
        fc = params.new("fc.weight", own.hidden_size, spec.num_inputs)
        bias = params.new("fc.bias", own.hidden_size) if spec.fc_bias else None
        d2t = params.stacked(Param("d2t", (own.vocab_size,)), dtype=torch.int64)
        layer.head = Linear(kernels, vocab_rows(params, "lm_head.weight", own.vocab_size, own.hidden_size, coord))
        layer.read_embedding = target_embedding
        if has_embedding:
            vocab_size = spec.target.vocab_size
            rows = vocab_rows(params, f"{EMBEDDING}.weight", vocab_size, own.hidden_size, coord)
            layer.read_embedding = VocabEmbedding(rows, vocab_size, layer.parallel)
        return cls(layer, Linear(kernels, fc, bias), d2t)

    def check(self, vocab_size: int, where: str) -> None:
        """Raise ModelError when a draft token stands for no token of a target with `vocab_size` tokens."""
        tokens = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < vocab_size:
                raise ModelError(f"{where}: d2t names token {token}, and the model has {vocab_size} tokens")


class Eagle3Head:
    """Implements `DraftModel`.

    `layer` computes what follows `fc`, with the head's `lm_head`; `bind` binds it to its pool. `fc` stands for that of
    the weights and may run elsewhere. `d2t`: see `Eagle3Weights`.
    """

    def __init__(
        self, spec: Eagle3Spec, layer: Model, bind: Bind, *, fc: Callable[[Tensor], Tensor], d2t: Tensor
    ) -> None:
        self._spec, self._layer, self._bind, self._fc, self._d2t = spec, layer, bind, fc, d2t
        self._attention: AttentionBackend | None = None
        self._output = LayerTaps((0,))

    @property
    def hidden_size(self) -> int:
        """See `DraftModel.hidden_size`."""
        return self._spec.layer.hidden_size

    @property
    def taps(self) -> tuple[int, ...]:
        """See `DraftModel.taps`."""
        return self._spec.taps

    def kv_group(self, page_tokens: int, dtype: str) -> KVGroup:
        """See `DraftModel.kv_group`."""
        (op,) = self._layer.spec.attentions
        return draft_group(
            self._spec.target, num_layers=1, page_tokens=page_tokens, num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim, dtype=dtype,
        )  # fmt: skip

    def bind(self, pool: KVPool) -> None:
        """See `DraftModel.bind`."""
        self._attention = self._bind(pool)

    def take(self, hidden: Tensor) -> Tensor:
        """See `DraftModel.take`. `hidden` `[N, len(taps) * hidden_size]`: the outputs of the target's layers `taps`."""
        return self._fc(hidden)

    @property
    def num_weights(self) -> int:
        """See `DraftModel.num_weights`."""
        return weights_read(self._spec.layer) + self._spec.num_inputs * self.hidden_size

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
        attention, num_samples = self._attention.begin(batch), batch.sample_index.shape[0]
        logits = self._layer.forward(batch, attention, hidden=hidden, taps=self._output if num_samples else None)
        if not num_samples:
            return None
        drafts = likeliest(logits, self._layer.argmax, self._spec.layer.vocab_size, self._layer.parallel)
        states = self._output.hidden.index_select(0, batch.sample_index)
        return Drafted(drafts + self._d2t.index_select(0, drafts), states)
