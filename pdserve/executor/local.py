"""The executor of one process and one device: owns the model, the KV pool, and every row's tokens.

Built by `factory`, called by the scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pdserve.executor.batch_builder import build_batch, plan_arrays, to_device
from pdserve.executor.interface import BatchPlan, HostPages, SampledToken, StepHandle, StepResult
from pdserve.executor.row_params import RowParams
from pdserve.executor.sampler import sample, to_host
from pdserve.memory.layout import KVLayout
from pdserve.memory.page_table import PageTable
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.kv_pool import KVPool
from pdserve.model.families.decoder import Decoder
from pdserve.protocol.sampling import SamplingParams


class LocalExecutor:
    """Implements `Executor`. `context_length` is the most tokens a row can have, prompt and output together."""

    def __init__(
        self,
        model: Decoder,
        layout: KVLayout,
        pools: tuple[KVPool, ...],
        attention: AttentionBackend,
        table: PageTable,
        *,
        context_length: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._layout = layout
        self.pools = pools
        self._attention = attention
        self._table = table
        self.device = device
        self._tokens = torch.empty(table.num_rows, context_length + 1, dtype=torch.int32, device=device)
        self._params = RowParams(table.num_rows, model.spec.eos_token_ids)
        self._open: set[int] = set()

    @property
    def layout(self) -> KVLayout:
        """Geometry of the KV pool."""
        return self._layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """`(address, bytes)` of the KV pool of each layout group."""
        return tuple(pool.buffer for pool in self.pools)

    @property
    def weights_fingerprint(self) -> str:
        """Short hash of a sample of the weights: equal for peers that loaded the same model in the same dtype."""
        return self._model.params.fingerprint()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, which a decode step reads once."""
        return self._model.params.num_bytes

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        top_logprobs: int | None,
    ) -> None:
        """See `Executor.open_row`."""
        assert row not in self._open, f"row {row} opened twice"
        assert 0 < len(token_ids) < self._tokens.shape[1], f"{len(token_ids)} tokens do not fit a row"
        self._open.add(row)
        ids = np.asarray(token_ids, dtype=np.int64)
        self._tokens[row, : len(ids)] = to_device(ids, self.device)
        self._params.set(row, num_prompt_tokens, sampling, top_logprobs)

    def close_row(self, row: int) -> None:
        """See `Executor.close_row`."""
        assert row in self._open, f"row {row} closed but not open"
        self._open.remove(row)
        self._params.clear(row)

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """See `Executor.launch`."""
        result = self._run(plan)
        return StepHandle(plan, None, lambda: result)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`."""
        return handle.finish()

    def offload(self, pages: Sequence[int]) -> HostPages:
        """See `Executor.offload`."""
        raise NotImplementedError

    def restore(self, saved: HostPages, pages: Sequence[int]) -> None:
        """See `Executor.restore`."""
        raise NotImplementedError

    @torch.inference_mode()
    def _run(self, plan: BatchPlan) -> StepResult:
        if not plan.rows:
            return StepResult(plan.step, ())
        assert all(row.row in self._open for row in plan.rows), "the plan names a row that is not open"
        batch = build_batch(plan, self._table, self._layout.page_tokens, self._tokens)
        logits = self._model.forward(batch, self._attention.begin(batch))
        results: list[SampledToken | None] = [None] * len(plan.rows)
        sampling = np.flatnonzero([row.sample for row in plan.rows])
        if len(sampling):
            lines, _, ends = plan_arrays(plan)
            params = self._params.pick(lines[sampling], ends[sampling])
            chosen = sample(logits, params, self._tokens)
            where = to_device(np.stack((params.lines, params.positions)), self.device)
            self._tokens.index_put_((where[0], where[1]), chosen.token_ids.int())
            for index, token in zip(sampling.tolist(), to_host(chosen, params), strict=True):
                results[index] = token
        return StepResult(plan.step, tuple(results))
