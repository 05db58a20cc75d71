"""Prepare data once: files -> cache folder of samples and rows, or the folder that an earlier call made."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_qwen3.data.build import build as _build
from mcore_qwen3.data.cache import cache_key, file_digest, open_or_build, read_manifest
from mcore_qwen3.data.chat_files import read_chat_files, tokenizer_file
from mcore_qwen3.data.request import TRAIN, VALIDATION, Prepared, PrepareRequest, SplitInfo
from mcore_qwen3.data.sources import Source, find_sources
from mcore_qwen3.errors import DataError

__all__ = ["TRAIN", "VALIDATION", "PrepareRequest", "Prepared", "SplitInfo", "load_prepared", "prepare"]
_LOGGER = logging.getLogger(__name__)


def prepare(request: PrepareRequest) -> Prepared:
    """Read, render, encode, mark, cut and pack the data, unless a cache folder with just this is there already.

    Several processes may call it at once: one builds, the others take what it built.

    Raises:
        DataError: a file, row form, tokenizer or template that cannot be used; no trained token in the whole data;
            a cache folder that cannot be written.
    """
    _check(request)
    sources = {
        TRAIN: find_sources(request.dataset, request.use_hf),
        VALIDATION: find_sources(request.val_dataset, request.use_hf),
    }
    folder, built = open_or_build(
        request.cache_dir, cache_key(_key_facts(request, sources)), lambda folder: _build(folder, request, sources)
    )
    prepared = load_prepared(folder)
    origin = "built now" if built else "reused"
    return dataclasses.replace(prepared, report=(*prepared.report, f"prepared data: {folder} ({origin})"))


def load_prepared(folder: Path) -> Prepared:
    """The prepared data in `folder`, as `prepare` returned it (its `path`), without reading any data file.

    Raises:
        DataError: the folder is not complete.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError("prepared data has a manifest and all its files", seen=folder, fix="prepare it again")
    facts = {key: value for key, value in manifest.items() if key != "files"}
    splits = {name: SplitInfo(**facts[name]) if facts[name] else None for name in (TRAIN, VALIDATION)}
    for name in ("report", "dataset_samples"):
        facts[name] = tuple(facts.get(name, ()))
    return Prepared(**{**facts, **splits, "path": folder})


def _check(request: PrepareRequest) -> None:
    if not request.dataset:
        raise DataError("training needs data", seen="no --dataset", fix="name at least one file")
    if request.val_dataset and request.split_dataset_ratio:
        _LOGGER.info("split_dataset_ratio %s has no effect: --val_dataset is given", request.split_dataset_ratio)


def _key_facts(request: PrepareRequest, sources: dict[str, list[Source]]) -> dict[str, Any]:
    """All that decides what is in the folder. A seed that decides nothing is left out."""
    random = bool(request.interleave_prob) or any(one.number is not None for of in sources.values() for one in of)
    split = request.split_dataset_ratio if request.split_dataset_ratio and not request.val_dataset else None
    facts: dict[str, Any] = {
        "data": {name: [_source_facts(source) for source in of] for name, of in sources.items()},
        "tokenizer": file_digest(tokenizer_file(request.tokenizer_dir)),
        "columns": dict(request.columns),
        "interleave_prob": list(request.interleave_prob),
        "max_length": request.max_length,
        "truncation_strategy": request.truncation_strategy,
        "packing": request.packing_strategy if request.packing else None,
        "row_multiple": request.row_multiple,
        "sample_multiple": request.sample_multiple,
        "strict": request.strict,
        "split": split,
        "seed": request.seed if random or split else None,
    }
    if request.raw_text:
        return {**facts, "raw_text": True}
    chat = read_chat_files(request.tokenizer_dir)
    return {
        **facts,
        "template": [chat.template, chat.special_tokens],
        "rule": dataclasses.asdict(request.rule),
        "identity": dataclasses.asdict(request.identity),
    }


def _source_facts(source: Source) -> list[Any]:
    files: Sequence[Any] = [[file.path.suffix.lower(), file_digest(file.path)] for file in source.files]
    return [source.number, files]
