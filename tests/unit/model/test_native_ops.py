"""The kernels as operations of torch: the arithmetic, what is refused, and that torch knows their shapes."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from pdserve.model.native import ops
from pdserve.model.native.ops import SCHEMAS
from pdserve.model.native.resources import Threads
from pdserve.model.native.weights import Arena, Format, Packed, open_packed, pack, pack_gated
from tests.unit.model.native_kit import (
    LEVELS_HERE,
    attended,
    batch_of,
    fill_known,
    needs_kernels,
    rms,
    rotated,
    rounded,
    rounded_weight,
)
from tests.unit.model.native_programs import relative

pytestmark = needs_kernels
OPS = torch.ops.pdserve
WIDTH, INNER, ROWS = 70, 40, 5
HEADS, KV_HEADS, DIM, PAGE_TOKENS = 4, 2, 16, 8
FORMATS = pytest.mark.parametrize("format", ["bf16", "int8"])


def layers(format: Format, count: int, width: int = WIDTH, inner: int = INNER) -> tuple[Tensor, Tensor, Packed, Packed]:
    """Gate and up, and down of `count` layers, as they are and packed."""
    wide, deep = (torch.randn(count, 2 * inner, width) * 0.2).bfloat16(), torch.randn(count, width, inner).bfloat16()
    arena = Arena()
    gate_up = open_packed(arena, format, 2 * inner, width, num_parts=2, count=count)
    down = open_packed(arena, format, width, inner, count=count)
    for index in range(count):
        gate_up.put(wide[index], index=index)
        down.put(deep[index], index=index)
    return wide, deep, gate_up, down


def gated(x: Tensor, wide: Tensor, deep: Tensor, format: Format, act: str = "silu") -> Tensor:
    gate, up = F.linear(rounded(x, format), rounded_weight(wide, format)).chunk(2, -1)
    shown = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
    return F.linear(rounded(shown * up, format), rounded_weight(deep, format))


def examples() -> dict[str, tuple[object, ...]]:
    """Arguments of each operation."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    linear = pack(Arena(), "int8", torch.randn(33, WIDTH).bfloat16(), torch.randn(33))
    _, _, gate_up, down = layers("int8", 3)
    one_up, one_down = (
        pack_gated(Arena(), "bf16", torch.randn(2 * INNER, WIDTH).bfloat16()),
        pack(Arena(), "bf16", torch.randn(WIDTH, INNER).bfloat16()),
    )
    heads = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM)
    pages = torch.zeros(4, 2, 2, KV_HEADS, PAGE_TOKENS, DIM, dtype=torch.bfloat16)
    starts, ends, table = torch.tensor([0, 3]), torch.tensor([4, 4]), torch.tensor([[2, 0], [1, 3]])
    return {
        "rms_norm": (x, torch.rand(WIDTH), 1e-5),
        "linear": (x, linear.data, linear.scale, linear.bias, 33),
        "feed_forward": (x, one_up.data, None, None, one_down.data, None, None),
        "route": (torch.randn(ROWS, 6), 2, True),
        "experts": (
            x, torch.randint(0, 3, (ROWS, 2)), torch.rand(ROWS, 2), gate_up.data, gate_up.scale, down.data, down.scale,
        ),
        "argmax": (torch.randn(ROWS, 9),),
        "choose": (torch.randn(ROWS, 9), torch.rand(ROWS), 0.8, 5, 0.9, 0.01),
        "attend": (heads, pages, 1, starts, ends, table, torch.zeros(DIM // 2)),
    }  # fmt: skip


@pytest.mark.parametrize("name", [function.__name__ for function in SCHEMAS])
def test_torch_can_trust_what_is_registered(name: str) -> None:
    """Schemas say what is changed, and meta tensors come out in the shapes, dtypes and strides of real ones."""
    torch.library.opcheck(getattr(OPS, name), examples()[name])


@pytest.mark.parametrize("name", ["rms_norm", "linear", "feed_forward", "route", "experts", "argmax", "choose"])
def test_rows_may_lie_anyhow(name: str) -> None:
    """What comes out is contiguous, however what went in lies; torch is told so."""
    first, *others = examples()[name]
    assert isinstance(first, Tensor)
    lying = first.t().contiguous().t()
    torch.library.opcheck(getattr(OPS, name), (lying, *others), test_utils="test_faketensor")
    for got, wanted in zip(values(OPS, name, (lying, *others)), values(OPS, name, (first, *others)), strict=True):
        assert torch.equal(got, wanted)


def test_models_that_are_compiled_are_compiled_once_for_all_numbers_of_rows() -> None:
    weight = examples()["linear"]
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def layer(x: Tensor) -> Tensor:
        mixed = OPS.linear(x, *weight[1:])
        experts, shares = OPS.route(mixed, 2, True)
        return mixed * shares.sum() + OPS.argmax(mixed)[:, None] + experts[:, :1]

    for rows in range(101, 106):  # like no other size here, which torch would take for the same
        assert layer(torch.randn(rows, WIDTH)).shape == (rows, 33)
    assert counter.frame_count == 1


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert OPS.argmax(torch.ones(3, 4)).tolist() == [0, 0, 0]
    child = multiprocessing.get_context("fork").Process(target=OPS.argmax, args=(torch.ones(3, 4),))
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_threads_that_nobody_else_keeps_are_not_kept() -> None:
    ops.use(threads := Threads(2), LEVELS_HERE[-1])
    assert OPS.argmax(torch.ones(1, 4)).tolist() == [0]
    alive = weakref.ref(threads)
    del threads
    assert alive() is None
    assert OPS.argmax(torch.ones(1, 4)).tolist() == [0]


def values(ops: object, name: str, arguments: tuple[object, ...]) -> tuple[Tensor, ...]:
    found = getattr(ops, name)(*arguments)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(("rows", "num_in", "num_out"), [(ROWS, WIDTH, 33), (1, 31, 7), (17, 576, 96), (40, 129, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@FORMATS
def test_linear(format: Format, dtype: torch.dtype, rows: int, num_in: int, num_out: int) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(num_out, num_in).bfloat16(), torch.randn(num_out)
    x = torch.randn(rows, num_in).to(dtype)
    packed = pack(Arena(), format, weight, bias)
    got = OPS.linear(x, packed.data, packed.scale, packed.bias, num_out)
    assert got.dtype == dtype
    assert relative(got, F.linear(rounded(x.float(), format), rounded_weight(weight, format), bias)) < 0.01


@pytest.mark.parametrize(("rows", "width", "inner"), [(ROWS, WIDTH, INNER), (1, 33, 32), (17, 128, 96), (40, 31, 65)])
@FORMATS
def test_feed_forward_and_experts(format: Format, rows: int, width: int, inner: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(rows, width)
    wide, deep, gate_up, down = layers(format, 3, width, inner)
    scales = [None if scale is None else scale[:1] for scale in (gate_up.scale, down.scale)]
    one = OPS.feed_forward(x, gate_up.data[:1], scales[0], None, down.data[:1], scales[1], None)
    assert relative(one, gated(x, wide[0], deep[0], format)) < 0.02
    gelu = OPS.feed_forward(x, gate_up.data[:1], scales[0], None, down.data[:1], scales[1], None, "gelu_tanh")
    assert relative(gelu, gated(x, wide[0], deep[0], format, "gelu_tanh")) < 0.02
    with pytest.raises(ValueError, match="act is 'relu'"):
        OPS.feed_forward(x, gate_up.data[:1], scales[0], None, down.data[:1], scales[1], None, "relu")
    chosen, shares = torch.rand(rows, 3).argsort(-1)[:, :2], torch.rand(rows, 2)
    mixed = OPS.experts(x, chosen, shares, gate_up.data, gate_up.scale, down.data, down.scale)
    every = torch.stack([gated(x, *pair, format) for pair in zip(wide, deep, strict=True)], 1)
    wanted = torch.stack([shares[row] @ every[row, chosen[row]] for row in range(rows)])
    assert relative(mixed, wanted) < 0.02
    nothing = OPS.experts(x[:0], chosen[:0], shares[:0], gate_up.data, gate_up.scale, down.data, down.scale)
    assert nothing.shape == (0, width)


@pytest.mark.parametrize(("rows", "width"), [(ROWS, WIDTH), (1, 4), (17, 128), (40, 31), (0, WIDTH)])
def test_norm_routes_and_argmax(rows: int, width: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(rows, width), torch.rand(width)
    torch.testing.assert_close(
        OPS.rms_norm(x, weight, 1e-5), rms(x, weight, 1e-5).bfloat16().float(), atol=1e-3, rtol=0.01
    )
    experts, weights = OPS.route(x, 4, False)
    best = x.softmax(-1).topk(4)
    assert torch.equal(experts, best.indices)
    torch.testing.assert_close(weights, best.values)
    assert torch.equal(OPS.argmax(x), x.argmax(-1))


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), [
    (1.0, None, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, None, 0.8, 0.0), (1.0, None, 1.0, 0.1), (0.9, 20, 0.9, 0.02)
])  # fmt: skip
def test_choose(rows: int, temperature: float, top_k: int | None, top_p: float, min_p: float) -> None:
    torch.manual_seed(5)
    logits, points = torch.randn(rows, 600) * 2, torch.rand(rows)
    every = (logits / temperature).softmax(-1)
    likeliest = every.sort(-1, descending=True)
    kept = (likeliest.values.cumsum(-1) - likeliest.values < top_p) & (torch.arange(600) < (top_k or 600))
    kept &= likeliest.values >= min_p * likeliest.values[:, :1]
    shares = every * torch.zeros_like(kept).scatter(-1, likeliest.indices, kept)
    below = (shares / shares.sum(-1, keepdim=True)).double().cumsum(-1)
    wanted = torch.searchsorted(below, points.double()[:, None], right=True)[:, 0]
    assert torch.equal(OPS.choose(logits, points, temperature, top_k, top_p, min_p), wanted)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens"),
    [(HEADS, KV_HEADS, DIM, PAGE_TOKENS), (9, 3, 64, 16), (3, 3, 34, 5), (2, 1, 256, 16), (4, 1, 80, 1)],
)
def test_attend(heads: int, kv_heads: int, dim: int, page_tokens: int) -> None:
    """A prompt, a chunk and a row that decodes; K and V are written, and nothing else."""
    torch.manual_seed(4)
    rows = [(0, 20), (5, 12), (17, 18)]
    batch, num_pages = batch_of(rows, page_tokens)
    kv = torch.full((num_pages, 2, 2, kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    x = torch.randn(len(batch.positions), heads + 2 * kv_heads, dim)
    inverse, norm = 1e4 ** (-torch.arange(0, dim, 2) / dim), torch.rand(dim) + 0.5
    mine = kv.clone()
    host = [torch.from_numpy(array) for array in (batch.host.starts, batch.host.ends, batch.host.pages)]
    got = OPS.attend(x.flatten(1), mine, 1, *host, inverse, q_norm=norm, k_norm=norm, eps=1e-6, window=9)
    q, k, v = (rms(part, norm, 1e-6) for part in (x[:, :heads], x[:, heads:-kv_heads])), None, x[:, -kv_heads:]
    q, k = (rotated(part, batch.positions, inverse) for part in q)
    kv[batch.write_pages, 1, 0, :, batch.write_slots] = k.bfloat16()
    kv[batch.write_pages, 1, 1, :, batch.write_slots] = v.bfloat16()
    torch.testing.assert_close(mine, kv, atol=0.04, rtol=0.01, equal_nan=True)
    wanted = attended(q, kv, batch, page_tokens, layer=1, window=9, softcap=0.0, sinks=None)
    torch.testing.assert_close(got, wanted, atol=0.03, rtol=0.02)


def changed(name: str, index: int, change: Callable[[Tensor], object]) -> tuple[object, ...]:
    """The example of an operation with one argument changed."""
    arguments = list(examples()[name])
    tensor = arguments[index]
    assert isinstance(tensor, Tensor)
    arguments[index] = change(tensor)
    return tuple(arguments)


@pytest.mark.parametrize(
    ("name", "index", "change", "named"),
    [
        ("rms_norm", 1, lambda weight: weight[:-1], "weight is"),
        ("linear", 0, lambda x: x[0], "x is"),
        ("linear", 0, lambda x: x[:, :40], "weight is"),
        ("linear", 2, lambda scale: None, "needs a scale unless"),
        ("linear", 3, lambda bias: bias[:, :-1], "bias of weight"),
        ("linear", 3, lambda bias: bias[:, :1].expand(1, 64), "contiguous"),
        ("linear", 2, lambda scale: scale.t().contiguous().t().expand(1, 64).repeat(1, 2)[:, ::2], "contiguous"),
        ("linear", 0, lambda x: x.requires_grad_(), "no gradients"),
        ("linear", 0, lambda x: x.to("meta"), "one device"),
        ("feed_forward", 4, lambda down: down[:, :1], "down is not"),
        ("feed_forward", 1, lambda gate_up: gate_up[:, :1], "blocks"),
        ("feed_forward", 1, lambda gate_up: gate_up[:, :0], "gate_up is"),
        ("feed_forward", 1, lambda gate_up: gate_up.flatten(), "gate_up is"),
        ("route", 0, lambda logits: logits[:, :1], "top_k is 2"),
        ("experts", 1, lambda experts: experts + 2, "experts are"),
        ("experts", 1, lambda experts: experts.int(), "not int64"),
        ("experts", 2, lambda weights: weights[:, :1], "weights is"),
        ("argmax", 0, lambda logits: logits.long(), "logits is"),
        ("choose", 0, lambda logits: logits[0], "logits is"),
        ("choose", 1, lambda points: points[:-1], "points is"),
        ("choose", 1, lambda points: points + 1.0, "not in"),
        ("attend", 0, lambda qkv: qkv[:-1], "the rows are 5 tokens"),
        ("attend", 0, lambda qkv: qkv[:, :-1], "qkv is"),
        ("attend", 1, lambda pages: pages.float(), "pages is"),
        ("attend", 1, lambda pages: pages[..., :0, :], "pages is"),
        ("attend", 1, lambda pages: pages[..., :15].contiguous(), "odd"),
        ("attend", 0, lambda qkv: qkv[:, : 2 * KV_HEADS * DIM], "no query heads"),
        ("attend", 3, lambda starts: starts[0], "same rows"),
        ("attend", 4, lambda ends: ends * 8, "tokens"),
        ("attend", 5, lambda table: table + 2, "names pages"),
        ("attend", 5, lambda table: table[:1], "same rows"),
        ("attend", 6, lambda inverse: inverse[1:], "inverse is not"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    name: str, index: int, change: Callable[[Tensor], object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        getattr(OPS, name)(*changed(name, index, change))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"min_p": 1.5}, "min_p 1.5"),
    ],
)
def test_no_token_is_drawn_by_settings_that_make_no_sense(setting: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OPS.choose(torch.randn(2, 9), torch.rand(2), **setting)
