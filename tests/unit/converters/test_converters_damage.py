"""Files of a torch_dist directory that changed after they were written are refused by name, wherever they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converter_kit import tiny_shape, write_torch_dist
from torch.distributed.checkpoint import FileSystemReader

from mcore_qwen3.converters import TorchDistSource
from mcore_qwen3.errors import ConversionError

EMBEDDING = "embedding.word_embeddings.weight"


def place_of(directory: Path, key: str) -> tuple[Path, int, int]:
    """(file, first byte, bytes) of a tensor that was written in one chunk."""
    metadata = FileSystemReader(directory).read_metadata()
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    return directory / info.relative_path, info.offset, info.length


def read_embedding(directory: Path) -> torch.Tensor:
    with TorchDistSource(directory, tiny_shape("moe")) as source:
        return source.read(EMBEDDING, (slice(0, 3), slice(None)))


def flip(file: Path, position: int, bit: int = 1) -> None:
    """Change one bit; size and times of the file stay."""
    data = bytearray(file.read_bytes())
    data[position] ^= bit
    file.write_bytes(data)


def test_a_flipped_bit_in_the_values_is_refused(mcore_tensors: dict, tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], {})
    file, first, length = place_of(directory, EMBEDDING)
    before = read_embedding(directory)
    flip(file, first + length // 2)
    with pytest.raises(ConversionError) as caught:
        read_embedding(directory)
    assert f"{file} at byte {first}: Bad CRC-32" in str(caught.value)
    flip(file, first + length // 2)
    assert torch.equal(read_embedding(directory), before)


def test_a_flipped_bit_in_the_form_is_refused(mcore_tensors: dict, tmp_path: Path) -> None:
    """The strides of a stored tensor are in no other file."""
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], {})
    file, first, _ = place_of(directory, EMBEDDING)
    entry = file.read_bytes()[first:]
    columns = mcore_tensors["moe"][EMBEDDING].shape[1]
    strides = b"K" + bytes([columns]) + b"K\x01\x86"  # (columns, 1) in the pickle
    assert entry.count(strides, 0, 1000) == 1
    flip(file, first + entry.index(strides) + 1, columns & -columns)  # smaller strides: torch.load sees nothing wrong
    with pytest.raises(ConversionError, match="must be the ones that were saved"):
        read_embedding(directory)


@pytest.mark.parametrize(("damage", "said"), [("cut", "must be whole"), ("gone", "must be readable")])
def test_a_file_that_is_cut_or_gone_is_named(mcore_tensors: dict, tmp_path: Path, damage: str, said: str) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], {})
    file, _, _ = place_of(directory, EMBEDDING)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    with (
        pytest.raises(ConversionError, match=said) as caught,
        TorchDistSource(directory, tiny_shape("moe")) as source,
    ):
        for key, entry in source.entries().items():
            source.read(key, (slice(None),) * len(entry.shape))
    assert str(file) in str(caught.value)


def test_values_without_check_sums_are_taken(mcore_tensors: dict, tmp_path: Path) -> None:
    """Somebody who switched torch's check sums off can still be read."""
    torch.serialization.set_crc32_options(False)
    try:
        directory = write_torch_dist(tmp_path, mcore_tensors["moe"], {})
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_embedding(directory), mcore_tensors["moe"][EMBEDDING][:3])
