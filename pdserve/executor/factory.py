"""Builds an executor from a server's configuration. Each rank's process calls it at start-up.

Where a replica has several ranks, call `join_replica` first, then `build_executor`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import Store

from pdserve.base.hf_tokenizer import read_tokenizer_json
from pdserve.base.host_memory import give_back_freed
from pdserve.base.native import arithmetic_of
from pdserve.base.parallel import DpRankCoord, RankCoord, layers_of
from pdserve.base.startup_times import PACK, POOLS, WARM_UP, WEIGHTS, StartupTimes
from pdserve.config.groups import KernelConfig, ParallelConfig, ServerConfig
from pdserve.errors import ConfigError, GrammarError, ModelError, UnsupportedModelError
from pdserve.executor.backend_choice import (
    Choice,
    choose_attention,
    choose_level,
    make_attention,
    make_kernels,
    make_native,
)
from pdserve.executor.grammar_rows import GrammarRows
from pdserve.executor.graphs import DEFAULT_MAX_ROWS, graph_sizes
from pdserve.executor.local_executor import LocalExecutor
from pdserve.executor.memory_sizing import bytes_behind_pool, group_bytes, group_pool_sizes, pool_tokens
from pdserve.executor.sampler import choose_with_torch
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.config import ModelSpec, check_spec, kv_layout, resolve_context_length
from pdserve.model.decoder import Decoder
from pdserve.model.loader import empty_model, fill_model, read_spec, resolve_dtype
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.packer import AttentionInProgram
from pdserve.model.parallel import Parallel, SingleRank, is_sampler
from pdserve.model.params import torch_dtype
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path
from pdserve.model.placement import ExpertMap, first_placement
from pdserve.model.torch_parallel import open_parallel

if TYPE_CHECKING:
    from pdserve.model.hf.config import TransformersSource
    from pdserve.model.hf.model import TransformersModel

_LOG = logging.getLogger(__name__)
MAX_PAGE_TOKENS = 128
DEFAULT_CHUNK = 2048
"""Tokens of the longest prefill chunk where no flag sets it."""


TORCH = "torch"


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """One rank's executor and its sizes. `dtype`: number format of weights and KV.

    `arithmetic`: TORCH, or level and number format of the CPU kernels. Levels that give the same bits share one name.
    `group_sizes`: window pages and state slots. `can_split_prompts`: False where a prompt must be one chunk.
    """

    executor: LocalExecutor
    table: PageTable
    spec: ModelSpec
    num_pages: int
    context_length: int
    dtype: str
    device: torch.device
    coord: RankCoord
    arithmetic: str
    group_sizes: GroupPoolSizes = GroupPoolSizes()
    can_split_prompts: bool = True

    @property
    def layout(self) -> KVLayout:
        """Geometry of the whole model's pages; this rank's pages are `layout.of_rank(coord)`."""
        return self.executor.layout

    @property
    def max_total_tokens(self) -> int:
        """Token slots in the KV pool."""
        return self.layout.tokens_in(self.num_pages)


def join_replica(
    config: ServerConfig, coord: RankCoord, store: Store, *, host: str = "127.0.0.1", dp_rank: int = 0
) -> Parallel:
    """Connect to the other ranks over `store`, on the device that `build_executor` will use; see `open_parallel`.

    With DP attention the ranks of all replicas connect, and this replica is `dp_rank`.

    Raises:
        ConfigError: the device does not exist, or no network interface has the address `host`.
        RankError: a rank did not arrive.
    """
    device = prepare_device(config.kernels, LocalRanks.of(config.parallel, coord))
    fixed_order = config.kernels.enable_deterministic_inference
    dp_coord = DpRankCoord(coord, config.parallel.num_sharing, dp_rank if config.parallel.num_sharing > 1 else 0)
    return open_parallel(dp_coord, store, device, host=host, fixed_order=fixed_order)


def build_executor(
    config: ServerConfig,
    *,
    max_rows: int,
    parallel: Parallel | None = None,
    agree_num_pages: Callable[[int], int] | None = None,
    returns_results: bool = True,
    startup: StartupTimes | None = None,
) -> LoadedEngine:
    """Load this rank's part of the model and allocate its KV pool for `max_rows` concurrent requests.

    `parallel`: the result of `join_replica`; None: the model is not split. `agree_num_pages` is called once, before the
    allocation: its argument is the pages that this rank could hold, its result the pages of every rank.
    `returns_results`: see `LocalExecutor`. `startup` records how long each part takes.

    Raises:
        ConfigError: a flag does not fit the model or the machine.
        ModelError: the checkpoint is missing, unreadable, or of an unsupported model.
    """
    parallel = parallel or SingleRank()
    startup = startup or StartupTimes()
    coord = parallel.coord
    page_tokens = config.memory.page_size
    if not 1 <= page_tokens <= MAX_PAGE_TOKENS:
        raise ConfigError(f"page_size must be in [1, {MAX_PAGE_TOKENS}], got {page_tokens}", field="page_size")
    local = LocalRanks.of(config.parallel, coord)
    device = prepare_device(config.kernels, local)
    path = resolve_model_path(config.model.model_path)
    load_format = config.model.load_format
    spec, source = _read_model(config, path)
    if source is None:
        check_spec(spec, coord.shape, config.parallel.ep_size, parallel.dp_attention_group.size // coord.shape.tp_size)
    context_length = resolve_context_length(config.model.context_length, spec)
    dtype = resolve_dtype(path, spec, config.model.dtype, load_format=load_format)
    batch_invariant = config.kernels.enable_deterministic_inference
    level: str | None = None
    choice: Choice = "torch"
    model: Decoder | NativeDecoder | TransformersModel
    through: TransformersModel | None = None
    if source is not None:
        from pdserve.executor.transformers_loading import plan_transformers  # its import takes seconds

        plan = plan_transformers(source, config, dtype)
        layout = plan.layout
        with startup.part(WEIGHTS):
            model = through = plan.load(config, dtype, device, parallel)
    else:
        level = choose_level(config.kernels, config.model, spec, torch_dtype(dtype), device)
        if level is None:
            choice = choose_attention(config.kernels, spec, torch_dtype(dtype), device)
        if batch_invariant:
            _keep_bits(device)
        with startup.part(WEIGHTS):
            expert_map = _expert_map(config.parallel, spec, parallel, device)
            decoder = empty_model(
                spec, dtype, device, kernels=make_kernels(choice), parallel=parallel, expert_map=expert_map
            )
            model = decoder
            if level is not None:  # the native model takes over the weights during the load
                model = make_native(decoder, config.model, level, lambda: startup.part(PACK))
            fill_model(
                decoder, path, load_format=load_format, seed=config.model.random_seed, on_progress=startup.loaded
            )
            give_back_freed()
        layout = kv_layout(spec, page_tokens, dtype)
    layout = layout.with_stamps()
    held, max_pages = layout.of_rank(coord), layout.pages_for(context_length)
    num_sharing = local.count * config.parallel.dp_size
    reserved_bytes = 0
    if device.type == "cuda":
        reserved_bytes = bytes_behind_pool(
            spec, torch_dtype(dtype).itemsize, chunk=longest_chunk(config, context_length), max_rows=max_rows,
            sizes=captured_sizes(config.kernels, max_rows), max_pages=max_pages,
            tp_size=coord.shape.tp_size,
        )  # fmt: skip
    can_split = through is None or through.can_split_prompts
    group_sizes = group_pool_sizes(
        config.memory, held, device, context_length=context_length, max_rows=max_rows, num_sharing=num_sharing,
        reserved_bytes=reserved_bytes, step_tokens=longest_chunk(config, context_length) if can_split else None,
        caches_states=config.wants_prefix_cache and can_split and not layout.window,
    )  # fmt: skip
    num_tokens = pool_tokens(
        config.memory, held, device, context_length=context_length, max_rows=max_rows, num_sharing=num_sharing,
        reserved_bytes=reserved_bytes, group_bytes=group_bytes(held, group_sizes),
    )  # fmt: skip
    num_pages = most_pages = layout.whole_pages(num_tokens)
    if agree_num_pages is not None:
        num_pages = agree_num_pages(most_pages)
        assert 0 < num_pages <= most_pages, "agreed on more pages than this rank can hold"
    if coord.rank == 0 and context_length > layout.tokens_in(num_pages):
        _LOG.warning(
            "the KV pool of %d tokens (--max-total-tokens) is smaller than the context of %d tokens "
            "(--context-length): prompt and output of a request together must fit the pool",
            layout.tokens_in(num_pages), context_length,
        )  # fmt: skip
    with startup.part(POOLS):
        shareable = config.disagg.may_share_memory
        sizes = {PageSpace.WINDOW: group_sizes.num_window_pages, PageSpace.SLOTS: group_sizes.num_slots}
        make = KVPool if through is None else GroupPool
        pools = tuple(
            make(group, sizes.get(group.space, num_pages), device, shareable=shareable) for group in held.groups
        )
    table = PageTable(max_rows, max_pages, has_window=layout.window > 0)
    asked = config.kernels.attention_backend != "auto"
    if level is None and through is None:
        _LOG.info("attention backend: %s", choice)
    of_model = [pool for pool in pools if pool.group.kind is not GroupKind.STAMP]
    attention = _attention(model, choice, of_model, coord, device, was_asked_for=asked)
    overlap = config.schedule.disable_overlap_schedule is False
    native = model if isinstance(model, NativeDecoder) else None
    executor = LocalExecutor(
        model, layout, pools, attention, table, context_length=context_length, device=device, overlap=overlap,
        grammars=_grammars(config, path, spec, coord), returns_results=returns_results,
        choose=choose_with_torch if native is None else native.chooser(),
        decode=None if native is None else (native.decode, native.max_native_rows),
        returns_prompt_results=not batch_invariant,
        processed_logprobs=config.model.logprobs_mode == "processed",
    )  # fmt: skip
    with startup.part(WARM_UP):
        make_ready(executor, config, max_rows, context_length)
    _LOG.info(
        "%s in %s on %s: %d MB of weights, KV pool of %d tokens in %d pages (%d MB)",
        spec.architectures[0], dtype, device, model.params.num_bytes >> 20,
        layout.tokens_in(num_pages), num_pages, sum(size for _, size in executor.buffers) >> 20,
    )  # fmt: skip
    arithmetic = TORCH if level is None else f"{arithmetic_of(level)} {config.model.quantization or dtype}"
    return LoadedEngine(
        executor, table, spec, num_pages, context_length, dtype, device, coord, arithmetic, group_sizes, can_split
    )


def _read_model(config: ServerConfig, path: Path) -> tuple[ModelSpec, TransformersSource | None]:
    """Read the model's configuration, and decide by `--model-impl` what runs it: None stands for native code."""
    impl = config.model.model_impl
    refusal: ModelError | None = None
    if impl != "transformers":
        try:
            return read_spec(path), None
        except UnsupportedModelError as error:
            if impl == "native" or path.suffix == ".gguf":
                raise
            refusal = error
    from pdserve.executor.transformers_loading import find_source  # its import takes seconds

    source = find_source(path, refusal)
    return source.spec, source


def longest_chunk(config: ServerConfig, context_length: int) -> int:
    """Tokens of the longest prompt, or prefill chunk, of a step."""
    chunk = config.schedule.chunked_prefill_size or DEFAULT_CHUNK
    return min(chunk, context_length) if chunk > 0 else context_length


def captured_sizes(kernels: KernelConfig, max_rows: int) -> tuple[int, ...]:
    """Batch sizes at which decode steps are captured, where they can be."""
    if kernels.disable_cuda_graph:
        return ()
    return graph_sizes(min(max_rows, kernels.cuda_graph_max_bs or DEFAULT_MAX_ROWS))


def make_ready(executor: LocalExecutor, config: ServerConfig, max_rows: int, context_length: int) -> None:
    """On CUDA, compile kernels and capture decode steps where possible; logs the reason where not."""
    if executor.device.type != "cuda":
        return
    if not executor.can_capture:
        _LOG.info("decode steps are not captured: the model is split over ranks, or attention runs with torch")
        return
    executor.warm_up(longest_chunk(config, context_length))
    sizes = captured_sizes(config.kernels, max_rows)
    if sizes:
        executor.capture_decode(sizes)
    else:
        _LOG.info("decode steps are not captured: disable_cuda_graph is set")


def _attention(
    model: Decoder | NativeDecoder | TransformersModel,
    choice: Choice,
    pools: Sequence[GroupPool],
    coord: RankCoord,
    device: torch.device,
    *,
    was_asked_for: bool,
) -> AttentionBackend:
    """Make the attention backend over the pages of `pools`; models that attend on their own are bound to them."""
    if not isinstance(model, NativeDecoder | Decoder):
        model.bind(pools)
        return AttentionInProgram()
    (pool,) = pools
    assert isinstance(pool, KVPool)
    if isinstance(model, NativeDecoder):
        model.bind(pool)
        return AttentionInProgram()
    num_heads = model.spec.attention.num_heads // coord.shape.tp_size
    return make_attention(choice, pool, num_heads, device, was_asked_for=was_asked_for)


def _grammars(config: ServerConfig, path: Path, spec: ModelSpec, coord: RankCoord) -> GrammarRows:
    """Make the `GrammarRows` of this rank; without a vocabulary on ranks that do not sample."""
    wanted = config.grammar.grammar_backend != "none" and is_sampler(coord)

    def open_vocabulary() -> Vocabulary:
        directory = config.model.tokenizer_path or resolve_tokenizer_path(path)
        text = read_tokenizer_json(directory)
        if text is None:
            raise GrammarError(f"no tokenizer in {directory}")
        return Vocabulary(text, spec.vocab_size, spec.eos_token_ids)

    return GrammarRows(open_vocabulary if wanted else None, JsonRules.of(config.grammar), spec.eos_token_ids)


def _expert_map(config: ParallelConfig, spec: ModelSpec, parallel: Parallel, device: torch.device) -> ExpertMap | None:
    """The initial placement of whole experts, equal on all ranks; None where each tensor rank has a part of every
    expert.
    """
    if config.ep_size == 1 or spec.moe is None:
        return None
    leads = layers_of(spec.num_layers, parallel.coord.shape.pp_size, 0)
    if config.enable_eplb and not any(layer in leads for layer in spec.moe_layers):
        raise ConfigError(
            f"--enable-eplb needs experts in the first stage; its layers {leads.start} to {leads.stop - 1} have none",
            field="enable_eplb",
        )
    expert_map = first_placement(
        spec.moe, spec.moe_layers, config.ep_size, config.ep_num_redundant_experts, config.init_expert_location
    )
    own = torch.tensor([expert_map.digest()], device=device)
    if bool((parallel.dp_attention_group.all_gather_rows(own, [1] * parallel.dp_attention_group.size) != own).any()):
        raise ConfigError(
            f"--init-expert-location {config.init_expert_location} differs between the hosts of this server",
            field="init_expert_location",
        )
    return expert_map


@dataclasses.dataclass(frozen=True)
class LocalRanks:
    """This rank's index among the `count` ranks of its replica on this host."""

    index: int = 0
    count: int = 1

    @staticmethod
    def of(config: ParallelConfig, coord: RankCoord) -> LocalRanks:
        """Every host has the same number of ranks, in rank order."""
        count = max(1, coord.shape.num_ranks // config.nnodes)
        return LocalRanks(coord.rank % count, count)


def prepare_device(kernels: KernelConfig, local: LocalRanks | None = None) -> torch.device:
    """Return this rank's device, one per rank; on CPU also set torch's threads.

    Raises:
        ConfigError: CUDA is requested and absent, or there are fewer devices than ranks.
    """
    local = local or LocalRanks()
    if kernels.cpu_threads is not None:
        if kernels.cpu_threads < 1:
            raise ConfigError(f"cpu_threads must be at least 1, got {kernels.cpu_threads}", field="cpu_threads")
        torch.set_num_threads(kernels.cpu_threads)
    available = torch.cuda.is_available()
    if kernels.device == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no CUDA device; use --device cpu", field="device")
    if kernels.device == "cpu" or not available:
        return torch.device("cpu")
    if local.count > 1:
        if local.count > torch.cuda.device_count():
            raise ConfigError(
                f"{local.count} ranks on this host need a CUDA device each, torch sees {torch.cuda.device_count()}",
                field="tp_size",
            )
        torch.cuda.set_device(local.index)
    return torch.device("cuda", torch.cuda.current_device())


def _keep_bits(device: torch.device) -> None:
    """Disable reduced precision in torch's matrix products, for the deterministic mode."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
