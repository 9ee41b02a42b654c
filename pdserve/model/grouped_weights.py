"""Weights of 4 or 8 bits with a scale per output and group of inputs: integers, FP8 and MXFP4, as kernels keep them.

`quantize` rounds a weight to such a format. Checkpoints are read as `QuantizedWeight` (`quantization/`), and `stacked`
brings several to a common format without a change of any value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.errors import ModelError

MIN_GROUP = 32
"""Inputs of the smallest group: the kernels quantize 32 inputs together."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor((*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)))
"""The floats of 4 bits of MXFP4, by their codes."""
_MX_EXPONENTS = 125
"""Largest magnitude of an exponent of MXFP4 whose weights are all normal numbers of bfloat16."""
_FOUR_BIT_LEVELS = (-8.0, -8.5, -9.0, -9.5, -10.0, 7.0, 7.5)
"""What the largest magnitude of a group is divided by for a scale of 4-bit values, -8 to 7."""
_STEP_VALUES = 4 << 20
"""Most weights that `dequantize_into` has in float32."""


@dataclasses.dataclass(frozen=True)
class GroupFormat:
    """Values of `bits` bits (4 or 8), and a scale per output and `group` inputs.

    `group` is a power of two, at least 32; a group may be larger than a row. With `has_mins` a weight is scale * value
    + minimum, otherwise scale * (value - 2^(bits - 1)).

    With `is_float` values are codes of floats: E4M3 (FP8) with 8 bits, and E2M1 (MXFP4) with 4 bits, whose groups have
    32 inputs and whose scales are powers of two. A weight is scale * float.
    """

    bits: int
    group: int
    has_mins: bool = False
    is_float: bool = False

    def __str__(self) -> str:
        """Return how a log names it."""
        kind = ("MXFP4" if self.bits == 4 else "FP8") if self.is_float else f"{self.bits} bits"
        return f"{kind} in groups of {self.group}"


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[out, in]`: uint8 `values` of `bits` bits; float32 `scale` and `mins` `[out, groups]`, or no `mins`.

    Input i belongs to group `group_of[i]` (int64 `[in]`). See `GroupFormat` for the value of a weight, and for
    `is_float`.
    """

    values: Tensor
    scale: Tensor
    mins: Tensor | None
    group_of: Tensor
    bits: int
    is_float: bool = False

    def dequantized(self) -> Tensor:
        """Return the weight in float32."""
        if self.is_float:
            four = self.bits == 4
            wide = E2M1[self.values.int()] if four else self.values.view(torch.float8_e4m3fn).float()
        else:
            wide = self.values.float()
            if self.mins is None:
                wide -= 1 << (self.bits - 1)
        wide *= self.scale[:, self.group_of]
        if self.mins is not None:
            wide += self.mins[:, self.group_of]
        return wide

    def dequantize_into(self, target: Tensor) -> None:
        """Write the weight to `target` `[out, in]` in its dtype, a few outputs at a time: float32 takes more memory."""
        step = max(1, _STEP_VALUES // max(1, self.values.shape[1]))
        for first in range(0, len(target), step):
            part = slice(first, first + step)
            target[part].copy_(self.rows(part).dequantized())

    def rows(self, index: Tensor | slice) -> QuantizedWeight:
        """Return the outputs `index`, int64 `[n]` or a slice."""
        mins = None if self.mins is None else self.mins[index]
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index], mins=mins)

    def to(self, format: GroupFormat) -> QuantizedWeight:
        """Return the same weight in `format`, which `common_format` gave for this weight's own and others."""
        values, scale, mins = self.values, self.scale, self.mins
        shift = (1 << (format.bits - 1)) - (1 << (self.bits - 1))
        if format.has_mins and mins is None:
            mins = scale * -float(1 << (self.bits - 1))
        elif mins is None and shift:
            values = values + shift
        assert format.has_mins == (mins is not None) and shift >= 0, (format, self.bits)
        assert format.is_float == self.is_float and not (shift and self.is_float), (format, self.bits)
        count = values.shape[1]
        first = self.group_of[:: format.group]
        assert torch.equal(first.repeat_interleave(format.group)[:count], self.group_of), "the groups differ"
        group_of = torch.arange(count) // format.group
        mins = None if mins is None else mins[:, first]
        return QuantizedWeight(values, scale[:, first], mins, group_of, format.bits, self.is_float)


def mxfp4_scale(name: str, codes: Tensor, exponent: Tensor) -> Tensor:
    """Return the scales of blocks of MXFP4, float32 `[..., blocks]`; a block of zeros has the scale 1.

    `codes` is uint8 `[..., blocks, 32]`, `exponent` int32 `[..., blocks]`.

    Raises:
        ModelError: the tensor `name` has exponents that the kernels do not have.
    """
    exponent = exponent.masked_fill((codes & 7).amax(-1) == 0, 0)
    if int(exponent.abs().max()) > _MX_EXPONENTS:
        raise ModelError(f"tensor {name} has exponents beyond 2^{_MX_EXPONENTS} or 2^-{_MX_EXPONENTS}")
    return torch.ldexp(torch.ones(exponent.shape), exponent)


def common_format(formats: Sequence[GroupFormat]) -> GroupFormat | None:
    """Return the smallest format that holds weights of all `formats` exactly; None: floats have none beside others."""
    bits, group = max(each.bits for each in formats), min(each.group for each in formats)
    is_float = formats[0].is_float
    if any(each.is_float != is_float or (is_float and each.bits != bits) for each in formats):
        return None
    return GroupFormat(bits, group, any(each.has_mins for each in formats), is_float)


def stacked(weights: Sequence[QuantizedWeight], format: GroupFormat) -> QuantizedWeight:
    """Return the outputs of all `weights`, one after the other, in `format`."""
    return concatenated([weight.to(format) for weight in weights])


def concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the outputs of all `weights`, which have the same groups and bits, one after the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    mins = [weight.mins for weight in weights if weight.mins is not None]
    values, scale = torch.cat([each.values for each in weights]), torch.cat([each.scale for each in weights])
    return dataclasses.replace(first, values=values, scale=scale, mins=torch.cat(mins) if mins else None)


def within(format: GroupFormat, inputs: range) -> GroupFormat | None:
    """Return the format of some of a weight's inputs; None where 32 of them, taken in order, lie in two groups."""
    group = format.group
    while inputs.start % group and inputs.stop > group >= MIN_GROUP:
        group //= 2
    return dataclasses.replace(format, group=group) if group >= MIN_GROUP else None


def power_of_two(group: int) -> int | None:
    """Return `group` if it is a power of two and at least 32; None otherwise."""
    return group if group >= MIN_GROUP and group & (group - 1) == 0 else None


def whole_row(num_in: int) -> int:
    """Return the size of one group for all of `num_in` inputs."""
    return max(MIN_GROUP, 1 << (num_in - 1).bit_length())


def quantize(weight: Tensor, format: GroupFormat) -> QuantizedWeight:
    """Round a weight `[out, in]` to `format`, integers without minima. Zero stays zero.

    The largest magnitude of a group becomes 127 or -127 with 8 bits. With 4 bits it becomes one of `_FOUR_BIT_LEVELS`,
    whichever leaves the least squared error in the group; values beyond -8 and 7 are cut off.
    """
    assert not (format.has_mins or format.is_float), format
    num_out, num_in = weight.shape
    group = min(format.group, -(-num_in // MIN_GROUP) * MIN_GROUP)
    wide = torch.nn.functional.pad(weight.float(), (0, -num_in % group)).view(num_out, -1, group)
    largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
    half = 1 << (format.bits - 1)
    scale, found, least = largest.abs() / 127, torch.empty(0), torch.empty(0)
    for level in _FOUR_BIT_LEVELS if format.bits == 4 else (127.0,):
        tried = largest / level if format.bits == 4 else scale
        rounded = (wide / tried.masked_fill(tried == 0, 1.0)).round_().clamp_(-half, half - 1)
        error = (rounded * tried - wide).square_().sum(2, keepdim=True)
        better = error < least if least.numel() else torch.ones_like(error, dtype=torch.bool)
        scale = torch.where(better, tried, scale)
        found = torch.where(better, rounded, found) if found.numel() else rounded
        least = torch.where(better, error, least) if least.numel() else error
    values = found.add_(half).to(torch.uint8).view(num_out, -1)[:, :num_in].contiguous()
    return QuantizedWeight(values, scale[..., 0], None, torch.arange(num_in) // group, format.bits)
