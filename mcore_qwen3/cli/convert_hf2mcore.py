"""``convert hf2mcore SRC DST``: Hugging Face weights -> a Megatron torch_dist directory, without a model or a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from mcore_qwen3 import __version__
from mcore_qwen3.arch import ModelShape, read_model_shape
from mcore_qwen3.cli.convert_job import DTYPES, say, working_team
from mcore_qwen3.cli.hub_model import NamedModel, find_model
from mcore_qwen3.config import HF2MCORE, Hf2McoreConfig, parse_command, to_yaml
from mcore_qwen3.errors import ConversionError


def run(argv: list[str]) -> int:
    """The words after ``convert hf2mcore`` -> exit code."""
    parsed = parse_command(argv, HF2MCORE)
    config = parsed.config
    say(parsed.notes)
    model = find_model(str(config.place.src), config.hub.use_hf)
    say(model.note)
    shape = read_model_shape(model.directory)
    if not (model.directory / "config.json").is_file():
        raise ConversionError(
            "hf2mcore reads a Hugging Face directory", seen=model.directory, fix="convert mcore2hf SRC DST"
        )
    if config.work.dry_run:
        say(_dry_run(config, model.directory, shape))
        return 0
    _convert(config, model.with_weights(), shape)
    return 0


def _convert(config: Hf2McoreConfig, model: NamedModel, shape: ModelShape) -> None:
    from mcore_qwen3.converters import HFSource, plan_mcore, write_mcore
    from mcore_qwen3.converters.dtypes import DTYPES as BY_NAME

    form, dtype = config.form, DTYPES[config.form.dtype]
    src, dst = model.directory, Path(str(config.place.dst))
    with HFSource(src, shape) as source:
        pieces = plan_mcore(
            source.entries(),
            shape,
            dtype=None if dtype is None else BY_NAME[dtype],
            keep_router=form.router_dtype == "keep",
            vocab_size=form.vocab_size,
        )
        with working_team(config.work.workers, sum(piece.nbytes for piece in pieces), "hf2mcore") as team:
            report = write_mcore(
                source,
                dst,
                src,
                shape,
                pieces,
                facts={
                    "written_by": f"mcore-qwen3 {__version__}",
                    "source": src.name if model.hub is None else model.name,
                },
                run_config=to_yaml(config),
                finite=config.work.check_finite,
                overwrite=config.place.overwrite,
                team=team,
            )
        if team.node_rank == 0:
            say(
                [
                    f"source tensors used: {report.num_source_tensors:,} of {len(source.all_tensors):,}",
                    f"targets written once: {report.num_keys} tensors in {report.num_chunks} chunks, "
                    f"{report.num_bytes:,} bytes",
                    *report.notes,
                    f"written: {report.path}",
                ]
            )


def _dry_run(config: Hf2McoreConfig, src: Path, shape: ModelShape) -> list[str]:
    """The plan, from config.json and the index alone."""
    from mcore_qwen3.converters import plan_hf, plan_mcore
    from mcore_qwen3.converters.dtypes import DTYPES as BY_NAME
    from mcore_qwen3.converters.source import Entry
    from mcore_qwen3.converters.table import name_table

    stored = BY_NAME[shape.torch_dtype]
    entries = {rule.key: Entry(rule.shape, stored) for rule in name_table(shape)}
    tensors = [t for shard in plan_hf(dict.fromkeys(entries, stored), shape, dtype=None).values() for t in shard]
    dtype = DTYPES[config.form.dtype]
    pieces = plan_mcore(
        entries,
        shape,
        dtype=None if dtype is None else BY_NAME[dtype],
        keep_router=config.form.router_dtype == "keep",
        vocab_size=config.form.vocab_size,
    )
    return [
        f"source: {src}: {len(tensors):,} tensors, {sum(t.nbytes for t in tensors):,} bytes ({shape.torch_dtype}, by config.json)",
        *_index_lines(src, {tensor.name for tensor in tensors}),
        f"target: {config.place.dst}: {len(entries)} tensors in {len(pieces):,} chunks of at most "
        f"{max(piece.nbytes for piece in pieces):,} bytes, {sum(piece.nbytes for piece in pieces):,} bytes",
        f"shards: {config.work.workers} a node, one for each worker",
        "nothing is written (--dry_run true)",
    ]


def _index_lines(src: Path, planned: set[str]) -> list[str]:
    """What the index, where there is one, says beside the plan."""
    from mcore_qwen3.converters.hf_reader import INDEX_FILE, read_weight_map
    from mcore_qwen3.converters.source import name_some

    weight_map = read_weight_map(src / INDEX_FILE) if (src / INDEX_FILE).is_file() else None
    if weight_map is None:
        return ["index: none"]
    size = json.loads((src / INDEX_FILE).read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
    lines = [f"index: {len(weight_map):,} tensors in {len(set(weight_map.values()))} files, total_size {size}"]
    differing = planned ^ weight_map.keys()
    return lines + ([f"index: {name_some(differing)} in the index or in the plan, not in both"] if differing else [])
