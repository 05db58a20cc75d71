"""Ready-made Megatron data sets (.bin and .idx): documents of token ids. The one data file that imports megatron."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mcore_qwen3.data.encode import Encoded, LengthRule, fit
from mcore_qwen3.errors import DataError


def read_documents(bin_file: Path, rule: LengthRule) -> tuple[Encoded, int]:
    """The documents of a data set as samples, every token trained, and their number.

    The ids are taken as they are: an end-of-text token is there if the tool that wrote them put one. A document's
    sequences are joined.

    Raises:
        DataError: the files cannot be read, or are not what they should be.
    """
    try:
        dataset = IndexedDataset(str(bin_file.with_suffix("")))
    except Exception as error:  # megatron asserts, numpy and struct raise kinds of their own
        raise DataError(
            "a ready-made data set is a .bin and an .idx file that Megatron wrote",
            seen=f"{bin_file}: {type(error).__name__}: {error}",
            fix="write it again with Megatron's preprocess_data.py",
        ) from None
    encoded = Encoded()
    borders = np.asarray(dataset.document_indices)
    documents = 0
    for number, (first, last) in enumerate(itertools.pairwise(borders.tolist()), start=1):
        if first == last:
            continue
        documents += 1
        ids = np.concatenate([dataset[sequence] for sequence in range(first, last)]).astype(np.int32)
        fitted = fit(ids, np.ones(len(ids), np.uint8), rule)
        if isinstance(fitted, str):
            encoded.dropped.add(fitted, f"{bin_file}:document {number}")
            continue
        encoded.cut += len(fitted) > 1 or len(fitted[0][0]) < len(ids)
        for part, mask in fitted:
            encoded.ids.append(part)
            encoded.mask.append(mask)
            encoded.lengths.append(np.array([len(part)], np.int64))
            encoded.places.append(f"{bin_file}:document {number}")
    return encoded, documents
