"""Which rows are read and how they become fixed-length token rows."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFlags:
    """Data: which rows are read and how they become token rows."""

    dataset: tuple[str, ...] = flag((), "training files (jsonl, json, parquet), several allowed")
    val_dataset: tuple[str, ...] = flag((), "validation files; given: nothing is split off the training rows")
    split_dataset_ratio: float = flag(0.0, "share of the training rows split off for validation", at_least=0, below=1)
    max_length: int | None = flag(None, "tokens a row may have; unset: the model's max_position_embeddings", at_least=1)
    packing: bool = flag(False, "lay several samples in one row of max_length; they do not see each other")
    truncation_strategy: str = flag(
        "delete",
        "samples longer than max_length: delete them, or cut them at the right or left",
        choices=("delete", "right", "left"),
    )
    num_workers: int = flag(4, "processes a rank that read batches ahead; 0: read in the rank itself", at_least=0)
    dataset_num_proc: int = flag(1, "processes that render and encode the rows before the start", at_least=1)
    data_cache_path: str | None = flag(
        None, "folder of prepared data; unset: mcore_qwen3/data under $XDG_CACHE_HOME or ~/.cache"
    )
