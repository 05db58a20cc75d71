"""Which dtype a weight is written in."""

from __future__ import annotations

import torch

from mcore_qwen3.errors import ConversionError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPELLED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ROUTER = "decoder.layers.mlp.router.weight"


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16".

    Raises:
        ConversionError: weights are not written in that dtype.
    """
    if name not in DTYPES:
        raise ConversionError(f"the dtype of weights must be one of {', '.join(DTYPES)}", seen=name)
    return DTYPES[name]


def written_dtype(key: str, stored: torch.dtype, wanted: torch.dtype | None, *, keep_router: bool) -> torch.dtype:
    """The dtype of a key's values in the result.

    Args:
        key: torch_dist key.
        stored: its dtype in the source.
        wanted: the dtype asked for; None keeps what is stored.
        keep_router: a router stored in fp32 stays so: a choice of experts that was trained in fp32 changes in bf16.
    """
    if wanted is None or (keep_router and key == ROUTER and stored == torch.float32):
        return stored
    return wanted


def cast_notes(stored: dict[str, torch.dtype], written: dict[str, torch.dtype]) -> tuple[str, ...]:
    """A line for each change of dtype, and for a router that was left in fp32."""
    casts = sorted({(str(stored[key]), str(written[key])) for key in written if stored[key] != written[key]})
    lines = [f"weights cast from {old.removeprefix('torch.')} to {new.removeprefix('torch.')}" for old, new in casts]
    others = {dtype for key, dtype in written.items() if key != ROUTER}
    if written.get(ROUTER) == torch.float32 and torch.float32 not in others:
        lines.append("the router stays in float32, as it is in the source")
    return tuple(lines)


def check_finite(values: torch.Tensor, key: str) -> None:
    """Refuse a weight that is infinite or no number.

    Raises:
        ConversionError: with the key and the number of such values.
    """
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise ConversionError(
            "every weight must be a finite number",
            seen=f"{bad} of {values.numel()} values in {key} are not",
            fix="go back to an earlier checkpoint, or convert with --check_finite false",
        )
