"""Weights quantised to 8-bit floats in blocks, as the released FP8 models hold them.

A quantised `x.weight` stands beside `x.weight_scale_inv`, one fp32 factor for each 128 x 128 block; the last block of an
axis may be smaller. The weight is `quantised * factor`, computed in fp32.
"""

from __future__ import annotations

import torch

BLOCK = 128
DTYPE = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the factors of a weight (rows, columns)."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_slices(selection: tuple[slice, ...]) -> tuple[slice, ...]:
    """The factors that a rectangle of the weight needs."""
    return tuple(slice(piece.start // BLOCK, -(-piece.stop // BLOCK)) for piece in selection)


def dequantise(
    values: torch.Tensor, factors: torch.Tensor, selection: tuple[slice, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The weights of a rectangle.

    Args:
        values: the quantised rectangle [rows, columns].
        factors: those that `scale_slices` names.
        selection: where the rectangle lies in the whole weight.
        dtype: of the result.
    """
    rows, columns = (torch.arange(piece.start, piece.stop) // BLOCK - piece.start // BLOCK for piece in selection)
    spread = factors.float().index_select(0, rows).index_select(1, columns)
    return (values.float() * spread).to(dtype)
