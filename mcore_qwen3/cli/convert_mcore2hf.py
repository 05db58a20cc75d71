"""``convert mcore2hf SRC DST``: any torch_dist checkpoint of Qwen3 -> Hugging Face files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.convert_job import DTYPES, read_reference, say, working_team
from mcore_qwen3.config import MCORE2HF, Command, Mcore2HfConfig, parse_command, shard_bytes


def run(argv: list[str], command: Command[Mcore2HfConfig] = MCORE2HF) -> int:
    """The words after the subcommand -> exit code."""
    parsed = parse_command(argv, command)
    config = parsed.config
    say(parsed.notes)
    sides, shape = read_reference(Path(str(config.place.src)), config.reference.hf_config, config.hub.use_hf)
    if config.form.vocab_size is not None:
        shape = dataclasses.replace(shape, vocab_size=config.form.vocab_size)
    _convert(config, sides, shape)
    return 0


def _convert(config: Mcore2HfConfig, sides: Path, shape: ModelShape) -> None:
    from mcore_qwen3.converters import TorchDistSource, check_data_only, plan_hf, resolve_iteration_dir, write_hf
    from mcore_qwen3.converters.dtypes import dtype_named

    iteration = resolve_iteration_dir(str(config.place.src))
    check_data_only(iteration)
    dtype = DTYPES[config.form.dtype] or shape.torch_dtype
    keep_router = config.form.router_dtype == "keep"
    limit = shard_bytes(config.shards.max_shard_size)
    with TorchDistSource(iteration, shape) as source:
        stored = {key: entry.dtype for key, entry in source.entries().items()}
        shards = plan_hf(stored, shape, dtype=dtype_named(dtype), keep_router=keep_router, max_shard_bytes=limit)
        tensors = [tensor for shard in shards.values() for tensor in shard]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if config.work.dry_run:
            say(
                [
                    f"source: {iteration}: {len(stored)} tensors",
                    f"target: {config.place.dst}: {len(tensors):,} tensors in {len(shards)} files, {nbytes:,} bytes",
                    *(
                        f"  {file}: {len(shard):,} tensors, {sum(t.nbytes for t in shard):,} bytes"
                        for file, shard in shards.items()
                    ),
                    "nothing is written (--dry_run true)",
                ]
            )
            return
        with working_team(config.work.workers, nbytes, "mcore2hf") as team:
            report = write_hf(
                source,
                str(config.place.dst),
                sides,
                shape,
                dtype=dtype,
                keep_router=keep_router,
                max_shard_bytes=limit,
                end_token_id=chat_end_token(iteration, sides),
                finite=config.work.check_finite,
                overwrite=config.place.overwrite,
                team=team,
            )
        if team.node_rank == 0:
            say(
                [
                    f"source tensors used: {len(source.all_tensors)} of {len(source.all_tensors)}",
                    f"targets written once: {report.num_tensors:,} tensors in {len(report.weight_files)} files, "
                    f"{report.num_bytes:,} bytes",
                    *report.changes,
                    f"written: {report.path}",
                ]
            )


def chat_end_token(iteration: Path, sides: Path) -> int | None:
    """The chat template's end token where this project trained the checkpoint on chats; None for any other.

    A Base model that learned chats never stops without it.
    """
    if not (iteration / "train_state.json").is_file() or not (sides / "tokenizer.json").is_file():
        return None
    from mcore_qwen3.data.template import load_tokenizer

    return load_tokenizer(sides).end_token_id
