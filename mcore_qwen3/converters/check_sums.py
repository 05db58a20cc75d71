"""Compares what was read with the check sums that `torch.save` stored beside it; `torch.load` itself does not."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import IO, cast

import torch

from mcore_qwen3.converters.files import bytes_of
from mcore_qwen3.errors import ConversionError


def verify_tensor(tensor: torch.Tensor, stream: io.BufferedIOBase, place: str) -> None:
    """Refuse a tensor whose bytes changed on disk. Its values are not read a second time.

    Args:
        tensor: what `torch.load` made of the stream.
        stream: a zip archive of this one tensor, as `torch.save` writes it.
        place: file and entry, for messages.

    Raises:
        ConversionError: a check sum differs.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], stream)) as archive:
            for record in archive.infolist():
                if record.CRC == 0:  # torch's mark for "not computed" (`torch.serialization.set_crc32_options`)
                    continue
                if record.filename.endswith("/data.pkl"):
                    archive.read(record)  # compares by itself
                elif record.filename.endswith("/data/0") and _check_sum(tensor) != record.CRC:
                    raise zipfile.BadZipFile(f"Bad CRC-32 for file {record.filename!r}")
    except zipfile.BadZipFile as error:
        raise ConversionError(
            "stored values must be the ones that were saved: their check sum has to fit",
            seen=f"{place}: {error}",
            fix="copy this file again, or use another checkpoint",
        ) from error


def _check_sum(tensor: torch.Tensor) -> int:
    """CRC-32 of the storage, which may be larger than the tensor."""
    return zlib.crc32(bytes_of(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())))
