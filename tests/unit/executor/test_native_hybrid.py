"""Models with recurrent layers and windows by the CPU kernels: near float32, and the same bits however they are run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.base import native
from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import ParallelConfig
from pdserve.memory.layout import GroupKind, PageSpace
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.parallel import SingleRank
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.model_families import FAMILIES, KIMI, TinyFamily
from tests.model_pair import running_models
from tests.reference import load_reference, reference_logits
from tests.tiny import VOCAB_SIZE, WINDOW_FAMILIES, make_tiny
from tests.unit.executor import expert_ranks
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import LENGTHS, outcome
from tests.unit.executor.test_native_executor import divergence
from tests.unit.executor.test_native_experts import ROUNDING, apart
from tests.unit.model.native_kit import LEVELS_HERE, needs_kernels

pytestmark = needs_kernels
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", KIMI)
NAMES = (*RECURRENT, *WINDOW_FAMILIES)
PROMPT, NUM_NEW, TOP = random_prompt(300, VOCAB_SIZE), 6, 10


def with_heads(name: str) -> TinyFamily:
    """Return a family with heads of its recurrent layers that the kernels can compute."""
    family = FAMILIES[name]
    heads = {"linear_head_dim": 16} if name == KIMI else {"linear_key_head_dim": 32, "linear_value_head_dim": 16}
    return dataclasses.replace(family, changes={**family.changes, **heads})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny checkpoint of a family, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("native") / name
            if name in RECURRENT:
                with_heads(name).write(made[name])
            else:
                make_tiny(name, made[name], eos_token_id=None, **WINDOW_FAMILIES[name])
        return made[name]

    return make


def make(path: Path, **changes: Any) -> Driver:
    """A driver of the kernels in bfloat16."""
    return Driver(build(path, dtype="bfloat16", cpu_kernels="native", **changes))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_nearer_to_float32_than_torch_in_bfloat16(name: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(name)
    reference = load_reference(path)
    wanted = torch.stack(
        [reference_logits(reference, random_prompt(length, VOCAB_SIZE))[-1].log_softmax(-1) for length in LENGTHS]
    )
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels) for kernels in ("native", "torch"))
    assert divergence(mine.logprobs, wanted) < max(2e-3, 1.2 * divergence(torchs.logprobs, wanted))


@dataclasses.dataclass(frozen=True)
class Answer:
    """Tokens with log probabilities, and the bytes that a request leaves in each pool, in order."""

    tokens: tuple[object, ...]
    memory: tuple[torch.Tensor, ...]

    def same_bits(self, other: Answer) -> bool:
        """Every bit equal."""
        return self.tokens == other.tokens and all(map(torch.equal, self.memory, other.memory))


def answer(driver: Driver, *, chunk: int = 300, others: int = 0, known: tuple[Any, ...] = ()) -> Answer:
    """`PROMPT` and `NUM_NEW` tokens. `known` of them were computed before, as after a retraction.

    `others` requests prefill and decode in the same steps, before it.
    """
    tokens = [*PROMPT, *(token.token_id for token in known)]
    row = driver.open(tokens, 400, GREEDY, num_prompt=len(PROMPT), top_logprobs=TOP)
    beside = [driver.open(random_prompt(40 + 90 * i, VOCAB_SIZE), 400) for i in range(others)]
    sampled: list[Any] = list(known)
    start, at = 0, [0] * others
    while len(sampled) < NUM_NEW:
        have = len(PROMPT) + len(sampled)
        end = min(start + chunk, have)
        plan = []
        for i, other in enumerate(beside):
            to = min(at[i] + 64, 40 + 90 * i) if at[i] < 40 + 90 * i else at[i] + 1
            plan.append((other, at[i], to, to >= 40 + 90 * i))
            at[i] = to
        result = driver.step(*plan, (row, start, end, end == have))[-1]
        if result is not None:
            sampled.append(result)
        start = end
    memory = tuple(of_row(driver, row, start))
    for opened in (row, *beside):
        driver.close(opened)
    return Answer(tuple(sampled), memory)


def of_row(driver: Driver, row: int, num_tokens: int) -> list[torch.Tensor]:
    """The bytes of a row's tokens that later tokens read, and of its slot."""
    built, found = driver.built, []
    layout = built.executor.layout
    for pool in built.executor.pools:
        if pool.group.kind is GroupKind.STAMP:
            continue
        if pool.group.space is PageSpace.SLOTS:
            found.append(pool.pages_as_bytes[int(built.table.slots[row])].clone())
            continue
        in_window = pool.group.space is PageSpace.WINDOW
        numbers = layout.window_pages(num_tokens, num_tokens) if in_window else range(layout.pages_for(num_tokens))
        table = built.table.window if in_window else built.table.pages
        pages = pool.pages[[int(table[row, number]) for number in numbers]]
        kv = pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        kv = kv[..., : num_tokens - numbers.start * layout.page_tokens, :]
        first = max(0, num_tokens - layout.window + 1) - numbers.start * layout.page_tokens if in_window else 0
        found.append(kv[..., max(0, first) :, :].contiguous().view(torch.uint8))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_any_company_threads_pages_and_chunks_on_the_grid(name: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(name)
    driver = make(path, max_rows=16)
    plain = answer(driver)
    assert answer(driver, others=3).same_bits(plain)
    for chunk, others in ((64, 0), (128, 2)):
        assert answer(driver, chunk=chunk, others=others).same_bits(plain)
    for page_size, threads in ((64, 2), (48, 3)):
        other = make(path, page_size=page_size, cpu_threads=threads, max_rows=16)
        assert answer(other, chunk=192, others=4).same_bits(plain)
    known = plain.tokens[:3]
    assert answer(driver, known=known, chunk=320).same_bits(plain)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_mode_has_the_same_bits_in_any_chunk(name: str, checkpoint: Callable[[str], Path]) -> None:
    driver = make(checkpoint(name), deterministic=True, max_rows=16)
    plain = answer(driver)
    assert answer(driver, chunk=50, others=2).same_bits(plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", LEVELS_HERE)
def test_one_call_decodes_what_several_do(
    name: str, level: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows without log probabilities take one call of the kernels for a step."""
    monkeypatch.setenv(native.LEVEL_VARIABLE, level)
    calls: list[int] = []
    decode = NativeDecoder.decode

    def counted(self: NativeDecoder, *tables: Any) -> list[int]:
        calls.append(1)
        return decode(self, *tables)

    monkeypatch.setattr(NativeDecoder, "decode", counted)
    driver = make(checkpoint(name))
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (1, 63, 65, 130)]
    tokens = driver.generate(prompts, 20)
    assert len(calls) == 19
    for prompt, expected in zip(prompts, tokens, strict=True):
        row = driver.open(prompt, 200, top_logprobs=1)
        found, end = [], len(prompt)
        for at in (0, *range(end, end + 19)):
            token = driver.step((row, at, max(end, at + 1), True))[0]
            assert token is not None
            found.append(token.token_id)
        driver.close(row)
        assert found == expected
    assert len(calls) == 19


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", KIMI, "qwen3"])
def test_a_pair_gives_the_monolith_s_tokens(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Chunks end at multiples of 64; with retractions, and states and window pages that travel."""
    path, answers = checkpoint(name), []
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (1, 63, 64, 65, 300)]
    impls: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native", "dtype": "bfloat16"}
    for pair, tokens in ((False, 4096), (True, 448)):
        with running_models(path, pair=pair, max_total_tokens=tokens, chunk=64, **impls) as servers:
            answers.append([servers.generate([prompt], 20)[0] for prompt in prompts])
            answers.append(servers.generate(prompts, 20))
            servers.assert_idle()
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (ParallelShape(tp_size=2), "qwen3_next"),
        (ParallelShape(pp_size=2), "qwen3_5_text"),
        (ParallelShape(tp_size=2), KIMI),
        (ParallelShape(tp_size=2, pp_size=2), "qwen3_5_moe_text"),
        (ParallelShape(tp_size=2, pp_size=2), "qwen3"),
    ],
    ids=str,
)
def test_a_split_model_is_near_the_whole_one(
    shape: ParallelShape, name: str, gang: Gang, checkpoint: Callable[[str], Path]
) -> None:
    """A rank has some heads of each kind, and a stage layers of some kinds."""
    path = checkpoint(name)
    whole = outcome(SingleRank(), path, VOCAB_SIZE, "native")
    for rank in gang.run(shape, outcome, path, VOCAB_SIZE, "native"):
        assert divergence(rank.logprobs, whole.logprobs) < 5e-3


@pytest.mark.parametrize("name", RECURRENT)
def test_8_bits_are_near_too(name: str, checkpoint: Callable[[str], Path]) -> None:
    path, prompt = checkpoint(name), PROMPT[:70]
    wanted = reference_logits(load_reference(path), prompt)[-1].log_softmax(-1)
    driver = make(path, quantization="int8", cpu_threads=2)
    token = driver.step((driver.open(prompt, 80, top_logprobs=VOCAB_SIZE), 0, len(prompt), True))[0]
    assert token is not None
    ids, values = zip(*token.top, strict=True)
    logprobs = torch.zeros(VOCAB_SIZE)
    logprobs[list(ids)] = torch.tensor(values)
    assert divergence(logprobs[None], wanted[None]) < 0.05


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_whole_experts_on_ranks_beside_a_shared_one(name: str, gang: Gang, checkpoint: Callable[[str], Path]) -> None:
    path, experts = checkpoint(name), ParallelConfig(tp_size=2, ep_size=2)
    whole = expert_ranks.outcome(SingleRank(), path, VOCAB_SIZE, ParallelConfig(), "bfloat16")
    ranks = gang.run(ParallelShape(tp_size=2), expert_ranks.outcome, path, VOCAB_SIZE, experts, "bfloat16")
    heads = torch.cat([rank.pages for rank in ranks], 3)
    assert ranks[0].greedy == ranks[1].greedy
    assert apart(heads, whole.pages) < ROUNDING
