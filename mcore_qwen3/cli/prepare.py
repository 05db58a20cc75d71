"""The data of a resolved run, prepared or reused. Called before the ranks start, and in each rank to find it again."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from mcore_qwen3.arch import row_multiple
from mcore_qwen3.cli.agreement import disagreement
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.config import DataFlags, renamed_columns
from mcore_qwen3.data.marks import TrainRule
from mcore_qwen3.data.placeholders import Identity
from mcore_qwen3.data.prepare import Prepared, PrepareRequest, load_prepared, prepare
from mcore_qwen3.errors import DataError

# The folder that the parent process prepared, for its ranks: they need not read and hash the files once more each.
PREPARED_VARIABLE = "MCORE_QWEN3_PREPARED_DATA"


def prepare_data(run: ResolvedRun, environ: Mapping[str, str] = os.environ) -> Prepared:
    """Prepare the run's data, or take what an earlier call with the same request, or the parent process, made.

    Raises:
        DataError: from ``prepare``, or tokens that the model has no embedding for.
    """
    given = environ.get(PREPARED_VARIABLE)
    prepared = load_prepared(Path(given)) if given else prepare(prepare_request(run))
    if prepared.largest_token_id >= run.shape.vocab_size:
        raise DataError(
            "every token id must be below the model's vocab_size",
            seen=f"token id {prepared.largest_token_id}, vocab_size {run.shape.vocab_size}",
            fix=f"the tokenizer files in {run.hf_files} belong to another model: take the model's own",
        )
    return prepared


def check_same_data(prepared: Prepared) -> None:
    """Collective over all ranks: every one has prepared data with the same content.

    Raises:
        DataError: on every rank, naming two that differ.
    """
    if seen := disagreement(prepared.digest, f"{prepared.path} on {socket.gethostname()} (sum {prepared.digest[:12]})"):
        raise DataError(
            "all ranks train on the same prepared data",
            seen=seen,
            fix="the same data files on every node, or one --data_cache_path that all nodes share",
        )


def prepare_request(run: ResolvedRun) -> PrepareRequest:
    """What ``data`` has to make for this run."""
    layout = run.layout
    multiple = row_multiple(layout.tensor, layout.sequence_parallel, layout.context)
    return request_of(
        run.config.data,
        raw_text=run.command == "pt",
        tokenizer_dir=run.hf_files,
        seed=run.config.train.seed,
        row_multiple=multiple,
        # Context parallel cuts every sample, not only every row, into equal parts.
        sample_multiple=multiple if layout.context > 1 else 1,
    )


def request_of(
    data: DataFlags, *, raw_text: bool, tokenizer_dir: Path, seed: int, row_multiple: int = 1, sample_multiple: int = 1
) -> PrepareRequest:
    """What ``data`` has to make for these flags; max_length and data_cache_path are filled in."""
    assert data.max_length is not None and data.data_cache_path is not None
    return PrepareRequest(
        dataset=data.dataset,
        val_dataset=data.val_dataset,
        split_dataset_ratio=data.split_dataset_ratio,
        interleave_prob=data.interleave_prob,
        use_hf=data.use_hf,
        columns=renamed_columns(data),
        strict=data.strict,
        raw_text=raw_text,
        rule=TrainRule(
            loss_scale=data.loss_scale,
            ignore_empty_think=data.ignore_empty_think,
            preserve_thinking=data.preserve_thinking,
            enable_thinking=data.enable_thinking,
            system=data.system,
        ),
        identity=Identity(data.model_name, data.model_author),
        max_length=data.max_length,
        packing=data.packing,
        packing_strategy=data.packing_strategy,
        truncation_strategy=data.truncation_strategy,
        dataset_num_proc=data.dataset_num_proc,
        tokenizer_dir=tokenizer_dir,
        cache_dir=Path(data.data_cache_path),
        seed=seed,
        row_multiple=row_multiple,
        sample_multiple=sample_multiple,
    )


def epoch_line(prepared: Prepared, global_batch_size: int) -> str:
    """How many steps an epoch has, and how many tokens a step: steps count rows, which are packs with packing."""
    rows, train = prepared.train.rows, prepared.train
    steps = rows / global_batch_size
    return (
        f"an epoch: {rows:,} rows / {global_batch_size} a step = {steps:,.2f} steps; "
        f"{math.floor(train.tokens / steps):,} tokens a step, {math.floor(train.trained_tokens / steps):,} of them trained"
    )
