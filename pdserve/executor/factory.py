"""Builds an executor from a server's configuration. Each rank's process calls it at start-up.

Where a replica has several ranks, call `join_replica` first, then `build_executor`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from pdserve.base.hf_tokenizer import read_tokenizer_json
from pdserve.base.parallel import DpRankCoord, RankCoord
from pdserve.base.startup_times import POOLS, WARM_UP, StartupTimes
from pdserve.config.groups import KernelConfig, ParallelConfig, ServerConfig
from pdserve.errors import ConfigError, GrammarError
from pdserve.executor.device_memory import DeviceMemory
from pdserve.executor.draft_loading import add_drafter
from pdserve.executor.drafter import Drafter, draft_pool
from pdserve.executor.grammar_rows import GrammarRows
from pdserve.executor.local_executor import LocalExecutor
from pdserve.executor.logit_processors import LogitProcessors
from pdserve.executor.loras import LoraAdapters, begin_with, check_adapters, make_loras
from pdserve.executor.model_in_use import ModelParts
from pdserve.executor.model_loading import LoadedModel, ModelToLoad, load, read_model
from pdserve.executor.model_runner import NativeDecode
from pdserve.executor.pools import Agree, PoolDemand, captured_sizes, longest_chunk, make_pools, size_pools
from pdserve.executor.sampler import choose_with_torch
from pdserve.executor.weights import WeightsLoader
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import GroupKind, KVLayout
from pdserve.model.attention.interface import StateBackend
from pdserve.model.attention.page_gather import GroupPool
from pdserve.model.config import ModelSpec, resolve_context_length
from pdserve.model.drafting.cost import pass_cost
from pdserve.model.drafting.interface import DraftModel
from pdserve.model.parallel import Parallel, SingleRank, is_sampler
from pdserve.model.paths import resolve_model_path, resolve_tokenizer_path
from pdserve.model.pooling import read_pooling
from pdserve.model.torch_parallel import open_parallel
from pdserve.protocol.hidden_states import Pooling

_LOG = logging.getLogger(__name__)
MAX_PAGE_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """One rank's executor and its sizes. `dtype`: number format of weights. `kv_dtype`: that of the KV cache.

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
    loras: LoraAdapters | None = None
    """LoRA adapters of this rank; None without --enable-lora."""
    weights: WeightsLoader | None = None
    """Loads other weights of the same model; None in tests whose weights stay."""
    moves_experts: bool = False
    """True with --enable-eplb."""
    pooling: Pooling | None = None
    """How the model makes one vector of a text; None without --is-embedding."""
    takes_embeds: bool = False
    """Whether rows may have input embeddings: native code runs the model."""

    @functools.cached_property
    def device_memory(self) -> DeviceMemory:
        """Reads weights by name, and gives memory back to the system."""
        return DeviceMemory(self.executor, refuses_experts=self.moves_experts)

    @property
    def drafter(self) -> Drafter | None:
        """The model that drafts, with its state; None without one."""
        drafter = self.executor.drafter
        assert drafter is None or isinstance(drafter, Drafter)
        return drafter

    @property
    def layout(self) -> KVLayout:
        """Geometry of the whole model's pages; this rank's pages are `layout.of_rank(coord)`."""
        return self.executor.layout

    @property
    def kv_dtype(self) -> str:
        """Number format of keys and values; see `memory/dtypes.py`."""
        return self.layout.groups[0].dtype

    @property
    def draft_hidden_bytes(self) -> int | None:
        """Bytes of `Executor.draft_hidden`; None: no model drafts."""
        return None if self.drafter is None else self.drafter.hidden_bytes

    @property
    def draft_pass_cost(self) -> float:
        """Time of a pass of the drafter's model, relative to a step of one token; 0: no model drafts."""
        if self.drafter is None:
            return 0.0
        return pass_cost(self.drafter.num_weights, self.spec, self.device.type, self.coord.shape.tp_size)

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
    agree: Agree | None = None,
    returns_results: bool = True,
    startup: StartupTimes | None = None,
) -> LoadedEngine:
    """Load this rank's part of the model and allocate its pools for `max_rows` concurrent requests.

    `parallel`: the result of `join_replica`; None: the model is not split. `agree`: see `size_pools`; all ranks call
    it equally often. `returns_results`: see `LocalExecutor`. `startup` records how long each part takes.

    Raises:
        ConfigError: a flag does not fit the model or the machine.
        ModelError: the checkpoint is missing, unreadable, or of an unsupported model.
    """
    parallel, startup = parallel or SingleRank(), startup or StartupTimes()
    page_tokens = config.memory.page_size
    if not 1 <= page_tokens <= MAX_PAGE_TOKENS:
        raise ConfigError(f"page_size must be in [1, {MAX_PAGE_TOKENS}], got {page_tokens}", field="page_size")
    local = LocalRanks.of(config.parallel, parallel.coord)
    device = prepare_device(config.kernels, local)
    max_lora_rank = check_adapters(config)
    wanted = read_model(config, resolve_model_path(config.model.model_path), device, parallel, startup)
    context_length = resolve_context_length(config.model.context_length, wanted.spec)
    loaded = load(wanted)
    loras = make_loras(wanted, loaded, max_lora_rank)
    loaded, draft_model = add_drafter(wanted, loaded)
    held, shape = loaded.layout.of_rank(parallel.coord), parallel.coord.shape
    demand = PoolDemand(
        wanted.spec, held, wanted.dtype, device, max_rows, context_length, local.count * config.parallel.dp_size,
        loaded.can_split_prompts, shape.tp_size, shape.pp_size,
        config.speculative.max_drafts,
    )  # fmt: skip
    sizes = size_pools(config, demand, agree)
    if parallel.coord.rank == 0:
        _warn_of_small_pool(held.tokens_in(sizes.num_pages), context_length)
    with startup.part(POOLS):
        pools = make_pools(held, sizes, device, shareable=config.disagg.may_share_memory)
        table = PageTable(max_rows, held.pages_for(context_length), has_window=held.window > 0)
    bind = partial(_bind, pools, held, sizes.num_pages, max_rows, loras)
    parts = bind(wanted, loaded, draft_model)
    executor = LocalExecutor(
        parts.model, loaded.layout, pools, parts.attention, table, context_length=context_length, device=device,
        overlap=config.schedule.disable_overlap_schedule is False, grammars=_grammars(wanted),
        returns_results=returns_results, choose=parts.choose, decode=parts.decode,
        returns_prompt_results=not config.kernels.enable_deterministic_inference,
        processed_logprobs=config.model.logprobs_mode == "processed", drafter=parts.drafter, fold=parts.fold,
        max_forced=config.speculative.max_drafts, loras=loras,
        processors=LogitProcessors.load(config.grammar.processor_names if is_sampler(parallel.coord) else ()),
    )  # fmt: skip
    with startup.part(WARM_UP):
        make_ready(executor, config, max_rows, context_length)
    _LOG.info(
        "%s in %s on %s: %d MB of weights, KV pool of %d tokens in %d pages (%d MB)",
        wanted.spec.architectures[0], wanted.dtype, device, loaded.model.params.num_bytes >> 20,
        held.tokens_in(sizes.num_pages), sizes.num_pages, sum(size for _, size in executor.buffers) >> 20,
    )  # fmt: skip
    if draft_model is not None:
        _LOG.info("the drafter has %d MB of weights of its own", draft_model.num_bytes >> 20)
    weights = WeightsLoader(
        executor, wanted, loaded, bind, lambda: make_ready(executor, config, max_rows, context_length), draft_model
    )
    return LoadedEngine(
        executor, table, wanted.spec, sizes.num_pages, context_length, wanted.dtype, device, parallel.coord,
        loaded.arithmetic, sizes.groups, loaded.can_split_prompts, loras, weights,
        config.parallel.enable_eplb,
        read_pooling(wanted.path, config.embedding.embedding_pooling) if config.embedding.is_embedding else None,
        takes_embeds=loaded.decoder is not None,
    )  # fmt: skip


def _bind(
    pools: tuple[GroupPool, ...],
    held: KVLayout,
    num_pages: int,
    num_rows: int,
    loras: LoraAdapters | None,
    wanted: ModelToLoad,
    loaded: LoadedModel,
    draft_model: DraftModel | None,
) -> ModelParts:
    """Bind a loaded model to the pools of its rank, which has the layout `held`, and give it the adapters `loras`."""
    kernels, max_drafts = loaded.kernels, wanted.config.speculative.max_drafts
    drafter = None
    if draft_model is not None:
        drafter = Drafter(
            draft_model, draft_pool(pools), held, num_drafts=max_drafts, num_pages=num_pages, num_rows=num_rows,
            dtype=loaded.model.dtype, device=wanted.device,
        )  # fmt: skip
    lora_layers = None
    if loras is not None:
        assert loaded.decoder is not None, "a model through transformers takes no adapters"
        is_first = wanted.beside is None
        lora_layers = loras.layers if is_first else loras.attach(loaded.decoder, loaded.kernels)
    targets = [pool for pool in pools if pool.group.kind not in (GroupKind.STAMP, GroupKind.DRAFT)]
    attention = loaded.bind(targets, max_drafts=max_drafts)
    return ModelParts(
        loaded.model,
        attention if lora_layers is None else begin_with(lora_layers, attention),
        choose_with_torch if kernels is None else kernels.chooser(),
        None if kernels is None else NativeDecode(kernels.decode, kernels.max_native_rows, kernels.tapped),
        drafter,
        attention.fold if isinstance(attention, StateBackend) else None,
        lora_layers,
    )


def _warn_of_small_pool(num_tokens: int, context_length: int) -> None:
    """Log a warning if a request may be too long for a pool of `num_tokens` tokens."""
    if context_length > num_tokens:
        _LOG.warning(
            "the KV pool of %d tokens (--max-total-tokens) is smaller than the context of %d tokens "
            "(--context-length): prompt and output of a request together must fit the pool",
            num_tokens, context_length,
        )  # fmt: skip


def make_ready(executor: LocalExecutor, config: ServerConfig, max_rows: int, context_length: int) -> None:
    """On CUDA, compile kernels and capture decode steps where possible; logs the reason where not."""
    if executor.device.type != "cuda":
        return
    if not executor.can_capture:
        _LOG.info("decode steps are not captured: split over ranks, attention by torch, or LoRA adapters")
        return
    executor.warm_up(longest_chunk(config, context_length))
    sizes = captured_sizes(config.kernels, max_rows)
    if sizes:
        executor.capture_decode(sizes)
    else:
        _LOG.info("decode steps are not captured: disable_cuda_graph is set")


def _grammars(model: ModelToLoad) -> GrammarRows:
    """Make the `GrammarRows` of this rank; without a vocabulary on ranks that do not sample."""
    config, spec = model.config, model.spec
    wanted = config.grammar.grammar_backend != "none" and is_sampler(model.parallel.coord)

    def open_vocabulary() -> Vocabulary:
        directory = config.model.tokenizer_path or resolve_tokenizer_path(model.path)
        text = read_tokenizer_json(directory)
        if text is None:
            raise GrammarError(f"no tokenizer in {directory}")
        return Vocabulary(text, spec.vocab_size, spec.eos_token_ids)

    return GrammarRows(open_vocabulary if wanted else None, JsonRules.of(config.grammar), spec.eos_token_ids)


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
