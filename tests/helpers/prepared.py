"""A folder of prepared data, made of samples directly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore_qwen3.data.cache import open_or_build, write_places, write_rows, write_samples
from mcore_qwen3.data.pack import one_a_row, pack
from mcore_qwen3.data.prepare import Prepared, load_prepared
from mcore_qwen3.data.reader import Sample

PAD = 99
MAX_LENGTH = 16


def prepared_data(
    tmp_path: Path,
    samples: Sequence[Sample],
    *,
    packing: bool,
    row_multiple: int = 1,
    sample_multiple: int = 1,
    max_length: int = MAX_LENGTH,
) -> Prepared:
    """A cache folder with `samples` as the training and as the validation split."""
    lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
    trained = sum(int(mask.sum()) for _, mask in samples)

    def build(folder: Path) -> dict[str, object]:
        write_samples(folder, [ids for ids, _ in samples], [mask for _, mask in samples], [lengths])
        write_places(folder, [f"a.jsonl:{number}" for number in range(len(samples))])
        padded = -(-lengths // sample_multiple) * sample_multiple
        capacity = -(-max_length // sample_multiple) * sample_multiple
        order, starts = pack(padded, capacity) if packing else one_a_row(len(samples))
        splits = {}
        for name in ("train", "validation"):
            write_rows(folder, name, order, starts)
            splits[name] = {
                "name": name,
                "samples": len(samples),
                "rows": len(starts) - 1,
                "tokens": int(lengths.sum()),
                "trained_tokens": trained,
            }
        return {
            **splits,
            "packing": packing,
            "max_length": max_length,
            "row_multiple": row_multiple,
            "sample_multiple": sample_multiple,
            "pad_token_id": PAD,
            "largest_token_id": 10_000,
            "table": [],
            "report": [],
        }

    key = f"{packing}-{row_multiple}-{sample_multiple}-{len(samples)}"
    return load_prepared(open_or_build(tmp_path, key, build)[0])
