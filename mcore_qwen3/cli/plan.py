"""``megatron plan``: which layout on how many GPUs, whether it fits, how fast it is. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_qwen3.arch import ModelShape, ParallelLayout, count_parameters, iteration_directory, resolve_layout
from mcore_qwen3.cli.estimate import expected_modules, not_counted
from mcore_qwen3.cli.plan_view import (
    command_text,
    explain_lines,
    host_lines,
    plan_record,
    run_flags,
    table_lines,
    yaml_text,
)
from mcore_qwen3.cli.resolve import layout_of
from mcore_qwen3.config import PLAN, Command, Parsed, PlanConfig, RunConfig, parse_command, to_flat_dict, with_values
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.calibration import Calibration, load_calibration
from mcore_qwen3.planner.gpus import Gpu, find_gpu
from mcore_qwen3.planner.layout_words import read_layout
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.optimizers import best_of, choices, fewest_of, lightest_of
from mcore_qwen3.planner.search import Search
from mcore_qwen3.planner.settings import Settings, settings_of

SHOWN = 10
MOST_GPUS = 4096
EXIT_NOTHING_FITS = 3
_RUN_CONFIG = Command(program="run_config.yaml", root=RunConfig, aliases={}, check=lambda config: None)


def run(argv: list[str]) -> int:
    """The words after ``megatron plan`` -> exit code: 3 where nothing fits."""
    parsed = parse_command(argv, PLAN)
    config = parsed.config
    searches = make_searches(parsed)
    search, question = searches[0], config.question
    if not question.json:
        _say([*parsed.notes, *head_lines(search), *not_counted(config)])
    if question.explain:
        return _explain(config, search)
    gpus, roomy = _fewest_gpus(config, searches) if question.min_gpus else (config.cluster.gpus, None)
    assert gpus is not None, "parsing has refused a plan without gpus and min_gpus"
    _check_whole_nodes(gpus, search.gpu)
    plans = best_of(searches, gpus, SHOWN)
    if not plans:
        return _nothing_fits(config, searches, gpus)
    flags, trainable = run_flags(parsed, plans[0]), search.settings.train_type == "full"
    command = command_text(flags, search.gpu, gpus) if trainable else None
    if question.output:
        _write(Path(question.output), yaml_text(flags, search, plans[0]))
    if question.json:
        record = {"gpus": gpus, "gpu": search.gpu.name, "command": command}
        record |= {"gpus_with_room": roomy} if question.min_gpus else {}
        _say([json.dumps(record | {"plans": [plan_record(plan, search.gpu) for plan in plans]}, indent=2)])
        return 0
    if question.min_gpus:
        room = f"{roomy} GPUs" if roomy else f"no number up to {config.cluster.gpus or MOST_GPUS} GPUs"
        _say([f"{gpus} GPUs are the fewest that fit; with the whole range of the estimate in memory: {room}", ""])
    _say([f"{gpus} GPUs, the fastest that fit, one line for each TP, CP, PP, EP and ETP:", ""])
    _say([*table_lines(plans, search.gpu), *host_lines(plans[0], search), ""])
    if command is None:
        _say(["no command: training adapters is not there yet"])
        return 0
    _say(["the first as a command, on every node:", "", command, ""])
    _say(["and as a file for --config:", "", yaml_text(flags, search, plans[0])])
    return 0


def _check_whole_nodes(gpus: int, gpu: Gpu) -> None:
    node = gpu.gpus_per_node
    if gpus > node and gpus % node:
        raise ConfigError(
            "more GPUs than a node has are whole nodes",
            seen=f"--gpus {gpus}, {node} GPUs a node",
            fix=f"--gpus {gpus // node * node} or {-(-gpus // node) * node}, or --gpus_per_node",
        )


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--output is a file that can be written", seen=error, fix="another path") from None


def make_searches(parsed: Parsed[PlanConfig]) -> list[Search]:
    """What is searched: the model, the GPU, and the flags that the user has fixed; one search for each optimizer."""
    config = parsed.config
    shape = find_model(str(config.model.load))
    cluster = config.cluster
    gpu = find_gpu(
        cluster.gpu,
        gpu_memory=cluster.gpu_memory,
        gpu_tflops=cluster.gpu_tflops,
        intra_bw=cluster.intra_bw,
        inter_bw=cluster.inter_bw,
        gpus_per_node=cluster.gpus_per_node,
    )
    calibration, flat = _calibration(config, shape, gpu), to_flat_dict(config)
    run, whole = planned_run(config, shape), resolve_layout(1, shape=shape)
    searches = [
        Search(
            shape=shape,
            gpu=gpu,
            settings=_settings(config, with_values(run, flags), whole, calibration),
            fixed={name: flat[name] for name in parsed.explicit},
            calibration=calibration,
            optimizer=(name, flags),
        )
        for name, flags in choices(flat, parsed.explicit)
    ]
    return searches if config.question.search_optimizer else searches[:1]


def _calibration(config: PlanConfig, shape: ModelShape, gpu: Gpu) -> Calibration:
    """The packaged one, or that moved to agree with the user's own run of the same model on the same kind of GPU."""
    if config.assumptions.calibrate is None:
        return load_calibration()
    from mcore_qwen3.planner.calibrate import calibrate, run_of_log, world_size  # with numpy, which nothing else needs

    log = Path(config.assumptions.calibrate)
    own = _own_run(log)
    layout = layout_of(own, world_size(log), shape)
    settings = settings_of(own, layout, modules=expected_modules(own), on_cuda=True)
    return calibrate([run_of_log(log, shape=shape, layout=layout, settings=settings, gpu=gpu)])


def _own_run(log: Path) -> RunConfig:
    """The settings of a run, as its newest checkpoint beside the log holds them."""
    try:
        file = iteration_directory(log.parent) / "run_config.yaml"
        return parse_command(["--config", str(file)], _RUN_CONFIG).config
    except (OSError, ConfigError) as error:
        raise ConfigError(
            "--calibrate needs the log of a run in its --save folder, with a checkpoint beside it",
            seen=f"{log}: {error}",
            fix="the train_log.jsonl of a run that has saved",
        ) from None


def planned_run(config: PlanConfig, shape: ModelShape) -> RunConfig:
    """The run that is planned, its rows as long as the model's positions reach where the user says nothing."""
    length = config.data.max_length or shape.max_position_embeddings
    return with_values(config.run_config(), {"max_length": length, "bf16": True})


def _settings(config: PlanConfig, run: RunConfig, layout: ParallelLayout, calibration: Calibration) -> Settings:
    assumed, settings = config.assumptions, settings_of(run, layout, modules=expected_modules(run), on_cuda=True)
    return replace(
        settings,
        effective_length=float(assumed.effective_length or settings.effective_length),
        moe_imbalance=assumed.moe_imbalance or calibration.natural_imbalance,
        train_type=assumed.train_type,
        lora_rank=assumed.lora_rank,
    )


def head_lines(search: Search) -> list[str]:
    """What is planned, and what is assumed."""
    count, settings, gpu = count_parameters(search.shape), search.settings, search.gpu
    active = f", {count.active:,} of them active" if search.shape.is_moe else ""
    imbalance = f", busiest experts at {settings.moe_imbalance:.2f} of an even share" if search.shape.is_moe else ""
    return [
        f"model: {search.shape.model_type}, {count.total:,} parameters{active}; {settings.train_type} training in bf16",
        f"rows: {settings.global_batch_size} a step of {settings.row_length:,} tokens{imbalance}; "
        f"{settings.modules} modules",
        f"GPU: {gpu.name}, {gpu.memory_gib:g} GiB, {gpu.bf16_tflops:g} TFLOP/s, {gpu.intra_bw:g} GB/s inside and "
        f"{gpu.inter_bw:g} GB/s between nodes of {gpu.gpus_per_node}",
    ]


def _fewest_gpus(config: PlanConfig, searches: Sequence[Search]) -> tuple[int, int | None]:
    """The fewest GPUs whose memory the middle of an estimate fits, and the fewest that hold its whole range."""
    limit = config.cluster.gpus or MOST_GPUS
    gpus = fewest_of(searches, limit)
    if gpus is None:
        raise ConfigError(
            "no number of GPUs up to the limit holds the model with these flags",
            seen=f"{limit} x {searches[0].gpu.name}",
            fix="a GPU with more memory, a smaller --max_length, or fewer fixed flags",
        )
    return gpus, fewest_of(searches, limit, at_the_edge=False)


def _nothing_fits(config: PlanConfig, searches: Sequence[Search], gpus: int) -> int:
    search, lightest = searches[0], lightest_of(searches, gpus)
    if lightest is None:
        raise ConfigError(
            "no layout obeys all rules with these flags",
            seen=f"{gpus} GPUs, global_batch_size {search.settings.global_batch_size}",
            fix="another number of GPUs, another --global_batch_size, or fewer fixed flags; --explain LAYOUT names a rule",
        )
    if config.question.json:
        _say([json.dumps({"gpus": gpus, "plans": [], "lightest": plan_record(lightest, search.gpu)}, indent=2)])
        return EXIT_NOTHING_FITS
    _say([f"nothing fits on {gpus} x {search.gpu.name}; the layout that needs least:", ""])
    _say([*table_lines([lightest], search.gpu), "", "--min_gpus true finds how many are needed"])
    return EXIT_NOTHING_FITS


def _explain(config: PlanConfig, search: Search) -> int:
    """The account of the layout that words and flags name; a rule that it breaks is the ConfigError of a training run."""
    assert config.cluster.gpus is not None, "parsing has refused --explain without --gpus"
    named = read_layout(config.question.explain)
    twice = [name for name, value in named.items() if search.fixed.get(name, value) != value]
    if twice:
        raise ConfigError("a size is given once", seen=f"--explain and --{twice[0]} differ", fix="drop one of the two")
    sequence_parallel = search.fixed.get("sequence_parallel", True)
    run = with_values(planned_run(config, search.shape), {"sequence_parallel": sequence_parallel, **named})
    layout = layout_of(run, config.cluster.gpus, search.shape)
    plan = search.one(layout, _settings(config, run, layout, search.calibration))
    if config.question.json:
        _say([json.dumps(plan_record(plan, search.gpu), indent=2)])
    else:
        _say(explain_lines(plan, search))
    return 0 if plan.fits(search.gpu) else EXIT_NOTHING_FITS


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)
