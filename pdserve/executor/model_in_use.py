"""The model that an executor computes with: its parts, its weights, captured steps, and the change to other weights."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from pdserve.base.parallel import RankCoord
from pdserve.executor.deferred_drafter import DeferredDrafter
from pdserve.executor.drafter import ModelDrafter
from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.graphs import Capture, DecodeGraphs, GraphCapture, Padding
from pdserve.executor.input_batch import SamplingMetadata, TokenPool
from pdserve.executor.interface import StepHandle
from pdserve.executor.logit_processors import LogitProcessors
from pdserve.executor.loras import LoraAdapters, LoraLayers
from pdserve.executor.model_runner import ModelRunner, NativeDecode, NativeDecodePath, StepRunner
from pdserve.executor.page_copies import HostTierCopies
from pdserve.executor.sampler import Sampler, TokenSampler
from pdserve.executor.verify import Fold
from pdserve.executor.warm_up import warm_up
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.interface import Model, MoELayer
from pdserve.model.layers.expert_parallel import ExpertParallelMoe
from pdserve.model.named_weights import MemoryRange, NamedRows
from pdserve.model.params import WeightSamples, fingerprint_of


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A model over an executor's pools, with the functions that depend on it; see `LocalExecutor` for each."""

    model: Model
    attention: AttentionBackend
    choose: TokenSampler
    decode: NativeDecode | None = None
    drafter: ModelDrafter | None = None
    fold: Fold | None = None
    lora_layers: LoraLayers | None = None
    """The model's layers that adapters change; None without adapters."""


class ModelInUse(HostTierCopies):
    """Mixin of `LocalExecutor`: what depends on the model. `use` begins with it, `swap_model` changes its weights."""

    max_forced: int
    experts: ExpertBalance | None
    """Moves experts between ranks; None where this rank has no whole experts."""
    _layout: KVLayout
    _table: PageTable
    _tokens: TokenPool
    _sampling_metadata: SamplingMetadata
    _runner: StepRunner
    _loras: LoraAdapters | None
    _open: set[int]
    _launched: deque[StepHandle]
    _processed_logprobs: bool
    _processors: LogitProcessors
    _native_decode: bool
    _model: Model
    _attention: AttentionBackend
    _drafter: ModelDrafter | None
    _model_runner: ModelRunner
    _native_path: NativeDecodePath | None
    _deferred: DeferredDrafter | None
    _fold: Fold | None

    def use(self, parts: ModelParts) -> None:
        """Compute with `parts` from the next step on. No row is open. Steps are not captured yet."""
        model, drafter = parts.model, parts.drafter
        self._model, self._attention, self._drafter, self._fold = model, parts.attention, drafter, parts.fold
        self._model_runner = ModelRunner(
            model, parts.attention, Sampler(parts.choose, self._processed_logprobs, self._processors),
            taps=None if drafter is None else drafter.taps,
        )  # fmt: skip
        if self._loras is not None and parts.lora_layers is not None:
            self._loras.use(parts.lora_layers)
        self._native_path, self._deferred = None, None
        if parts.decode is not None and self._native_decode:
            self._native_path = NativeDecodePath(
                parts.decode, self._tokens.tensor.numpy(), self._table, self._sampling_metadata,
                has_state=self._layout.has_state, adapters_of=None if self._loras is None else self._loras.of_rows,
            )  # fmt: skip
        if drafter is not None:
            known = self._sampling_metadata.num_prompt
            self._deferred = DeferredDrafter(drafter, model, self._table, self._layout, known, self.device)

    def balance_experts(self) -> None:
        """Make the balance of the experts that this rank has whole. Called once, after `use`."""
        whole = self._whole_experts
        num_sharing = self._model.parallel.dp_attention_group.size
        self.experts = ExpertBalance(whole, num_sharing, self._runner.behind) if whole else None

    @property
    def _whole_experts(self) -> dict[int, ExpertParallelMoe]:
        return {i: moe for i, moe in self._model.moe_layers.items() if isinstance(moe, ExpertParallelMoe)}

    @torch.inference_mode()
    def swap_model(self, parts: ModelParts) -> None:
        """Compute with other weights of the same model from the next step on. No row is open, no step unresolved.

        `capture_decode` may follow. The present model is no longer used when the call returns. Experts go where the
        present ones are, and all ranks that share them call this at the same point; raises RankError when one is lost.
        """
        assert not self._open and not self._launched, "weights change while no request has a row"
        former = self._model.moe_layers
        with self._runner.behind():
            self.use(parts)
            parts.model.parallel.dp_attention_group.change_weights()
            for layer, moe in self._model.moe_layers.items():
                moe.counts.copy_(former[layer].counts)
        if self.experts is not None:
            self.experts.change_layers(self._whole_experts)

    @property
    def drafter(self) -> ModelDrafter | None:
        """The model that drafts, with its state; None without one."""
        return self._drafter

    @property
    def coord(self) -> RankCoord:
        """Coordinates of this rank in its replica."""
        return self._model.parallel.coord

    @property
    def can_capture(self) -> bool:
        """True when `capture_decode` may be called: the model is not split, and its attention can be captured."""
        is_whole = self.coord.shape.num_ranks == 1 and self._model.parallel.dp_attention_group.size == 1
        return is_whole and self._attention.capturing() is not None

    @property
    def _padding(self) -> Padding:
        return Padding.of(self.pools, self._table.num_rows)

    @torch.inference_mode()
    def warm_up(self, chunk: int) -> None:
        """Compile the kernels of all shapes of a step, with chunks of up to `chunk` tokens. Call before any step.

        Needs `can_capture`, as `capture_decode` does: only such attention can skip the write of KV.
        """
        assert self.can_capture, "this attention would write KV"
        with self._runner.behind():
            warm_up(
                self._model, self._attention, self._tokens.tensor, layout=self._layout,
                padding=self._padding, max_rows=self._table.num_rows, chunk=chunk, max_drafts=self.max_forced,
            )  # fmt: skip

    @torch.inference_mode()
    def capture_decode(self, sizes: Sequence[int], capture: Capture | None = None) -> None:
        """Capture decode steps at batch sizes `sizes`, ascending, between steps.

        `capture` None: CUDA graphs.
        """
        backend = self._attention.capturing()
        assert backend is not None and self.can_capture, "not a model whose steps can be captured"
        with self._runner.behind():
            self._model_runner.graphs = DecodeGraphs(
                self._model, backend, self._tokens.tensor, padding=self._padding,
                max_pages=self._table.pages.shape[1], sizes=sizes, capture=capture or GraphCapture(),
                tapped=() if self._model_runner.taps is None else self._model_runner.taps.layers,
            )  # fmt: skip

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The captured decode steps; None: none are captured."""
        return self._model_runner.graphs

    def weight_samples(self) -> WeightSamples:
        """Return samples of this rank's weights, for `fingerprint_of` with those of the other ranks.

        Called at start-up. An expert that moves later still counts as the one that was there before.
        """
        return self._model.params.samples()

    @property
    def weights_fingerprint(self) -> str:
        """Short hash of a sample of this rank's weights: equal for peers that loaded the same model in the same dtype.

        For several ranks see `weight_samples`.
        """
        return fingerprint_of([self.weight_samples()])

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights, which a decode step reads once."""
        return self._model.params.num_bytes

    def weight_memory(self) -> list[MemoryRange]:
        """Return the memory of this rank's weights, those of its drafter included; see `Model.weight_memory`."""
        drafter = self._drafter
        return [*self._model.weight_memory(), *(() if drafter is None else drafter.weight_memory())]

    def read_weights(self, name: str, max_rows: int) -> list[NamedRows]:
        """See `ParamSlots.read`. No step is under way."""
        return self._model.params.read(name, max_rows)

    @property
    def moe_layers(self) -> Mapping[int, MoELayer]:
        """This rank's feed-forward layers with experts, by index in the model."""
        return self._model.moe_layers

    def expert_counts(self) -> dict[int, list[int]]:
        """Return the tokens routed to each expert since start-up, by layer of the model; waits for launched steps.

        Equal on all tensor ranks of a stage. Empty for a model without experts.
        """
        with self._runner.behind():
            counts = {layer: moe.counts.clone() for layer, moe in self._model.moe_layers.items()}
        return {layer: of_layer.tolist() for layer, of_layer in counts.items()}
