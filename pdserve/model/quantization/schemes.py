"""How checkpoints store the weight of one linear layer: FP8, int8, AWQ, GPTQ, compressed-tensors and MXFP4.

A `QuantMethod` is what `quantization_config` says of a layer, and the names of its tensors. `weight_sources` reads
them. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


class QuantMethod(Protocol):
    """How the weight of a layer is stored. The names of its tensors are that of the layer, and one of these endings."""

    @property
    def main(self) -> str:
        """Ending of the tensor that has the values."""
        ...

    @property
    def scales(self) -> tuple[str, ...]:
        """Endings of tensors that have scales. The weight is quantized if the checkpoint has one of them."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """Endings of all other tensors of a layer, those that are not used included."""
        ...

    @property
    def weight(self) -> str:
        """Ending of the name of the weight itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Float8:
    """`weight` in 8-bit floats, with one scale, one for each output, or one for each block of outputs and inputs.

    `block` is the size of a block; None: the checkpoint has no blocks.
    """

    block: tuple[int, int] | None = None
    main: str = ".weight"
    scales: tuple[str, ...] = (".weight_scale_inv", ".weight_scale")
    others: tuple[str, ...] = (".input_scale", ".activation_scale", ".weight_scale_ub")
    weight: str = ".weight"


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Integers of `bits` bits with a scale per output and group of inputs, of compressed-tensors.

    `group` is the number of inputs of a group; None: all. Values are packed into 32-bit words with `is_packed`, and
    int8 otherwise. `is_symmetric`: there are no zero points. `reorders`: inputs of a group are not neighbours.
    """

    bits: int
    group: int | None
    is_packed: bool
    is_symmetric: bool
    reorders: bool = False
    scales: tuple[str, ...] = (".weight_scale",)
    others: tuple[str, ...] = (".weight_zero_point", ".weight_g_idx", ".weight_shape", ".input_scale")
    weight: str = ".weight"

    @property
    def main(self) -> str:
        """See `QuantMethod.main`."""
        return ".weight_packed" if self.is_packed else ".weight"


@dataclasses.dataclass(frozen=True)
class Gptq:
    """GPTQ: words of values along the inputs. `group`: inputs of a group; None: all.

    `stores_zero_less_one`: the checkpoint has zero points less 1, as all but its version 2. `reorders`: groups follow
    `g_idx` (desc_act).
    """

    bits: int
    group: int | None
    is_symmetric: bool
    reorders: bool
    stores_zero_less_one: bool = True
    main: str = ".qweight"
    scales: tuple[str, ...] = (".scales",)
    others: tuple[str, ...] = (".qzeros", ".g_idx")
    weight: str = ".weight"


@dataclasses.dataclass(frozen=True)
class Awq:
    """AWQ, gemm packing: words of eight 4-bit values along the outputs. `group`: inputs of a group; None: all."""

    group: int | None
    main: str = ".qweight"
    scales: tuple[str, ...] = (".scales",)
    others: tuple[str, ...] = (".qzeros",)
    weight: str = ".weight"


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """MXFP4: codes of E2M1, with an exponent per output and 32 inputs.

    Of gpt-oss all experts of a layer are in one tensor; `MXFP4_MATRIX` is that of one layer in compressed-tensors.
    """

    main: str = "_blocks"
    scales: tuple[str, ...] = ("_scales",)
    others: tuple[str, ...] = ()
    weight: str = ""


MXFP4_MATRIX = Mxfp4(".weight_packed", (".weight_scale",), (".input_scale",), ".weight")
