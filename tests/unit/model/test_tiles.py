"""Fixed-size products: how rows are cut, and that a row's bits are the same at any place among any others."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.model.layers.batch_invariant import BatchInvariantKernels
from pdserve.model.layers.kernels import FastKernels
from pdserve.model.layers.tiles import PROBE_ROWS, cut, safe_sizes, telling

CPU = torch.device("cpu")
SHAPES = {
    "SmolLM2 qkv": (960, 576),
    "SmolLM2 down": (576, 1536),
    "SmolLM2 head": (49152, 576),
    "Qwen2.5 gate and up": (9728, 896),
    "Qwen3 down": (1024, 3072),
    "odd": (37, 65),
}


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16, 32, 64, 128, 256), (4, 16, 256), (16,), (2, 5, 85)])
def test_tiles_cover_all_rows_once_in_allowed_sizes(sizes: tuple[int, ...]) -> None:
    for num_rows in (1, 2, 3, 15, 16, 17, 33, 100, 255, 256, 257, 1000):
        tiles = cut(num_rows, sizes)
        assert [row for tile in tiles for row in range(tile.start, tile.start + tile.rows)] == list(range(num_rows))
        assert all(tile.size in sizes and 0 < tile.rows <= tile.size for tile in tiles)
        assert sum(tile.size for tile in tiles) <= max(2 * num_rows, sizes[0], 32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in SHAPES for dtype in (torch.float32, torch.bfloat16) if name != "SmolLM2 head"]
    + [pytest.param("SmolLM2 head", dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)]
    + [("SmolLM2 qkv", torch.float16), ("odd", torch.float16)],
)
def test_a_row_has_the_same_bits_wherever_it_lies(name: str, dtype: torch.dtype) -> None:
    num_out, num_in = SHAPES[name]
    kernels = BatchInvariantKernels()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if num_out < 10_000 else None
    kernels.prepare_linear(num_out, num_in, dtype, CPU, bias is not None)
    rows = torch.randn(300, num_in, generator=generator).to(dtype)
    whole = kernels.linear(rows, weight, bias)
    for start, end in ((0, 1), (299, 300), (7, 9), (3, 36), (100, 200), (1, 300)):
        assert torch.equal(kernels.linear(rows[start:end], weight, bias), whole[start:end])
    order = torch.randperm(300, generator=generator)
    assert torch.equal(kernels.linear(rows[order], weight, bias), whole[order])
    usual = FastKernels().linear(rows.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(whole.float(), usual, rtol=1e-2, atol=0.05 * num_in**0.5)


@pytest.mark.parametrize("width", [96, 100, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_does_not_depend_on_the_number_of_rows(width: int, dtype: torch.dtype) -> None:
    both = (torch.randn(101, 2 * width, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    gate, up = both.chunk(2, -1)
    kernels = BatchInvariantKernels()
    whole = kernels.swiglu(gate, up)
    for row in range(0, 101, 10):
        assert torch.equal(kernels.swiglu(gate[row : row + 1], up[row : row + 1]), whole[row : row + 1])
    torch.testing.assert_close(whole.float(), FastKernels().swiglu(gate, up).float(), rtol=2e-2, atol=1e-5)
    extremes = torch.tensor([[-1e4, -0.0, 0.0, 1e4]], dtype=dtype)
    assert (
        kernels.swiglu(extremes, torch.ones_like(extremes)).tolist()
        == FastKernels().swiglu(extremes.clone(), torch.ones_like(extremes)).tolist()
    )


def _halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product summed in another order: the two halves of `in` apart."""
    middle = x.shape[-1] // 2 + 3
    return x[:, :middle] @ w[:, :middle].t() + x[:, middle:] @ w[:, middle:].t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_size_with_another_order_of_sums_is_not_used(dtype: torch.dtype) -> None:
    x, w = telling(PROBE_ROWS, 64, 256, dtype, CPU)
    sizes = safe_sizes(lambda rows: _halves(rows, w) if len(rows) in (8, 64) else rows @ w.t(), x, "test")
    assert {16, 32, 128, 256} <= set(sizes) and not {8, 64} & set(sizes)


def test_a_device_whose_rows_depend_on_their_place_is_refused() -> None:
    x, w = telling(PROBE_ROWS, 64, 256, torch.float32, CPU)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((_halves(rows[:1], w), rows[1:] @ w.t()))

    with pytest.raises(ConfigError, match="a product of a test") as caught:
        safe_sizes(product, x, "a product of a test")
    assert caught.value.field == "enable_deterministic_inference"


def test_where_threads_matter_the_machine_s_own_are_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    x, w = telling(PROBE_ROWS, 64, 256, torch.float32, CPU)
    torch.set_num_threads(2)
    try:
        sizes = safe_sizes(lambda rows: _halves(rows, w) if torch.get_num_threads() > 1 else rows @ w.t(), x, "a test")
    finally:
        torch.set_num_threads(1)
    assert 16 in sizes and "a test has different bits on 2 threads than on one" in caplog.text
