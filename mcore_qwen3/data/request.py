"""What is asked of `prepare`, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest:
    """What to prepare. Fields are named as the flags are.

    `raw_text`: the rows are texts for continued pre-training; else they are conversations, rendered and marked by
    `rule`. `columns` renames columns of the rows (old name -> new). `strict`: a row that cannot be used is an error.
    `interleave_prob`: how often each entry of `dataset` is drawn from; empty: they follow each other.
    `row_multiple`: every row that is given to the model is a multiple of it (1 without sequence parallel).
    `sample_multiple`: so is every sample in a row, by padding of its own (1 without context parallel).
    `seed` decides which rows are sampled, interleaved and split off, nothing else.
    """

    dataset: tuple[str, ...]
    val_dataset: tuple[str, ...] = ()
    split_dataset_ratio: float = 0.0
    interleave_prob: tuple[float, ...] = ()
    use_hf: bool | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    raw_text: bool = False
    rule: TrainRule = TrainRule()  # noqa: RUF009 (frozen)
    identity: Identity = Identity()  # noqa: RUF009 (frozen)
    max_length: int
    packing: bool = False
    packing_strategy: str = "binpack"
    truncation_strategy: str = "delete"
    dataset_num_proc: int = 1
    tokenizer_dir: Path
    cache_dir: Path
    seed: int = 42
    row_multiple: int = 1
    sample_multiple: int = 1

    @property
    def row_length(self) -> int:
        """Tokens of a packed row."""
        return full_row_length(self.max_length, self.row_multiple, self.sample_multiple)


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """The size of a split. A row is a pack, or one sample without packing; steps count rows."""

    name: str
    samples: int
    rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared data: the cache folder (`data/cache.py` says what is in it) and its facts.

    `report` is for people, one line each. `table` counts the rows of each file: name, form, rows, kept, cut, and the
    reasons for which others were dropped. `largest_token_id` has to be below the model's vocabulary size. `digest` is
    the sum over the folder's files. `dataset_samples`: samples of each entry of `dataset`, in order; samples are numbered
    over all entries.
    """

    path: Path
    train: SplitInfo
    validation: SplitInfo | None
    packing: bool
    max_length: int
    row_multiple: int
    sample_multiple: int
    pad_token_id: int
    largest_token_id: int
    table: list[dict[str, Any]]
    report: tuple[str, ...]
    digest: str
    dataset_samples: tuple[int, ...] = ()

    @property
    def full_row_length(self) -> int:
        """Tokens of a packed row, padding included: max_length rounded up to both multiples."""
        return full_row_length(self.max_length, self.row_multiple, self.sample_multiple)


def full_row_length(max_length: int, row_multiple: int, sample_multiple: int) -> int:
    """max_length, rounded up to a multiple of both."""
    return rounded_up(max_length, math.lcm(row_multiple, sample_multiple))


def rounded_up(number: Any, multiple: int) -> Any:
    """An int, or an integer array, rounded up to a multiple."""
    return -(-number // multiple) * multiple
