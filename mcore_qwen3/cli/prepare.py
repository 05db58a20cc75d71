"""The data of a resolved run, prepared or reused. Called before the ranks start, and in each rank to find it again."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch import row_multiple
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.data.prepare import Prepared, PrepareRequest, prepare
from mcore_qwen3.errors import DataError


def prepare_data(run: ResolvedRun) -> Prepared:
    """Prepare the run's data, or take what an earlier call with the same request made.

    Raises:
        DataError: from ``prepare``, or tokens that the model has no embedding for.
    """
    prepared = prepare(prepare_request(run))
    if prepared.largest_token_id >= run.shape.vocab_size:
        raise DataError(
            "every token id must be below the model's vocab_size",
            seen=f"token id {prepared.largest_token_id}, vocab_size {run.shape.vocab_size}",
            fix=f"the tokenizer files in {run.hf_files} belong to another model: take the model's own",
        )
    return prepared


def prepare_request(run: ResolvedRun) -> PrepareRequest:
    """What ``data`` has to make for this run."""
    data, layout = run.config.data, run.layout
    assert data.max_length is not None and data.data_cache_path is not None, "resolve() fills both in"
    multiple = row_multiple(layout.tensor, layout.sequence_parallel, layout.context)
    return PrepareRequest(
        dataset=data.dataset,
        val_dataset=data.val_dataset,
        split_dataset_ratio=data.split_dataset_ratio,
        max_length=data.max_length,
        packing=data.packing,
        truncation_strategy=data.truncation_strategy,
        dataset_num_proc=data.dataset_num_proc,
        tokenizer_dir=run.hf_files,
        cache_dir=Path(data.data_cache_path),
        seed=run.config.train.seed,
        row_multiple=multiple,
        # Context parallel cuts every sample, not only every row, into equal parts.
        sample_multiple=multiple if layout.context > 1 else 1,
    )
