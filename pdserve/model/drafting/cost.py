"""What a pass of a draft model costs beside a step of its target, from their shapes.

A step of few tokens mostly reads weights, so its time is about their number. The scheduler weighs drafts by it
(`scheduler/draft_length.py`). Shapes are equal on all ranks, so all ranks decide alike; no time is measured.
"""

from __future__ import annotations

from pdserve.model.config import ModelSpec
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, GatedDeltaSpec, MLASpec, MLPSpec, MoeSpec

FIXED_WEIGHTS = {"cpu": 4_000_000, "cuda": 200_000_000}
"""By type of device: weights that are read in the time of a pass's fixed work, which does not depend on its shape.

CPU: `python -m benchmarks.bench_drafting_off` and the passes of an EAGLE-3 head of SmolLM2-135M, on a Xeon with AMX.
CUDA: launches of some dozen kernels without a graph, at 2 TB/s. Not measured.
"""


def pass_cost(num_weights: int, target: ModelSpec, device_type: str, num_ranks: int = 1) -> float:
    """Return the time of a draft model's pass over one token, relative to a step of one token of `target`.

    `num_weights`: those that the pass reads, see `DraftModel.num_weights`. They are taken to have the number format of
    the target's. `num_ranks`: tensor ranks; they share the weights, and each has the fixed work.
    """
    return (num_weights + num_ranks * FIXED_WEIGHTS[device_type]) / max(1, weights_read(target))


def weights_read(spec: ModelSpec) -> int:
    """Return how many weights of linear layers, the head included, a model reads for one token.

    Of experts it reads those that the token is routed to.
    """
    counts = {layer: _layer_weights(layer, spec.hidden_size) for layer in set(spec.layers)}
    return sum(counts[layer] for layer in spec.layers) + spec.vocab_size * spec.hidden_size


def _layer_weights(layer: DecoderLayerSpec, hidden: int) -> int:
    """Return how many weights of linear layers a layer reads for one token. `hidden`: width of the hidden states."""
    total = 0
    for sublayer in layer.sublayers:
        match sublayer.op:
            case AttentionSpec() as op:
                inputs = hidden if sublayer.embedding_norm is None else 2 * hidden
                total += inputs * op.qkv_width + op.num_heads * op.head_dim * hidden
            case MLASpec() as op:
                total += _mla_weights(op, hidden)
            case GatedDeltaSpec() as op:
                total += _delta_weights(op, hidden)
            case MLPSpec() as op:
                total += 3 * hidden * op.intermediate_size
            case MoeSpec() as op:
                columns = op.top_k * op.intermediate_size + op.shared_intermediate_size
                total += 3 * hidden * columns + hidden * op.num_experts
    return total


def _delta_weights(op: GatedDeltaSpec, hidden: int) -> int:
    width = 2 * op.key_width + 2 * op.value_width + op.num_value_heads  # q, k, v, the output, b
    if not op.channel_decay:
        return hidden * (width + op.value_width + op.num_value_heads)  # z, a
    return hidden * (width + 2 * op.key_dim) + op.key_dim * (op.num_value_heads * op.key_dim + op.value_width)


def _mla_weights(op: MLASpec, hidden: int) -> int:
    queries = op.num_heads * op.key_dim
    total = hidden * queries if op.q_lora_rank is None else op.q_lora_rank * (hidden + queries)
    total += hidden * op.latent_dim + op.kv_lora_rank * op.num_heads * (op.nope_dim + op.value_dim)
    if op.index is not None and not op.index.shared:
        index, inputs = op.index, hidden if op.q_lora_rank is None else op.q_lora_rank
        total += inputs * index.num_heads * index.head_dim + hidden * (index.head_dim + index.num_heads)
    return total + op.num_heads * op.value_dim * hidden
