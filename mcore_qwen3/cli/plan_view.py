"""What ``megatron plan`` prints: the table, the whole account of a layout, the command and the YAML file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from mcore_qwen3.cli.estimate import account_lines
from mcore_qwen3.config import Parsed, PlanConfig, RunConfig, to_flat_dict
from mcore_qwen3.planner.gpus import Gpu
from mcore_qwen3.planner.layout_words import layout_words
from mcore_qwen3.planner.memory import GIB, stage_account
from mcore_qwen3.planner.models import load_name
from mcore_qwen3.planner.search import Plan, Search
from mcore_qwen3.planner.state import state_bytes
from mcore_qwen3.planner.step_time import StepTime

_STATE = ("weights", "gradients", "master weights", "moments")
_KEPT = ("activations",)
_COLUMNS = (
    "#", "layout", "DP", "MBS", "recompute", "GiB", "range", "state", "activations", "rest", "free",
    "s/step", "range", "tokens/s/GPU", "TFLOP/s", "bubble", "exposed",
)  # fmt: skip
_EXPOSED = ("tp_s", "ep_s", "cp_s", "pp_s", "dp_s")


def table_lines(plans: Sequence[Plan], gpu: Gpu) -> list[str]:
    """One line a plan, under a heading, in columns; the optimizer's where they differ in it."""
    rows: list[tuple[str, ...]] = [_COLUMNS, *(_row(number, plan, gpu) for number, plan in enumerate(plans, 1))]
    if any(plan.optimizer[1] for plan in plans):
        rows = [(*row, name) for row, name in zip(rows, ("optimizer", *(p.optimizer[0] for p in plans)), strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(plan.at_the_edge(gpu) for plan in plans):
        lines.append(f"! the upper end of the range is above the {gpu.memory_gib:g} GiB of the GPU")
    return lines


def _row(number: int, plan: Plan, gpu: Gpu) -> tuple[str, ...]:
    account, step = plan.account, plan.step
    state, kept = (sum(item.bytes for item in account.items if item.name in names) for names in (_STATE, _KEPT))
    return (
        str(number),
        layout_words(plan.layout),
        str(plan.layout.data),
        str(plan.settings.micro_batch_size),
        recompute_words(plan),
        _gib(account.total),
        f"{_gib(account.low)}-{_gib(account.high)}" + ("!" if plan.at_the_edge(gpu) else ""),
        _gib(state),
        _gib(kept),
        _gib(account.total - state - kept),
        f"{gpu.memory_gib - account.total / GIB:.1f}",
        _seconds(step.seconds),
        f"{_seconds(step.low)}-{_seconds(step.high)}",
        f"{step.tokens_per_second_per_gpu:,.0f}",
        f"{step.tflops_per_gpu:.0f}",
        f"{step.bubble_share:.0%}",
        f"{sum(getattr(step, name) for name in _EXPOSED) / step.seconds:.0%}",
    )


def recompute_words(plan: Plan) -> str:
    """What is computed again in backward, as short as can be."""
    settings = plan.settings
    if settings.recompute_granularity == "selective":
        return "+".join(settings.recompute_modules)
    return settings.recompute_granularity


def explain_lines(plan: Plan, search: Search) -> list[str]:
    """The whole account: memory stage by stage and part by part, then the seconds of a step."""
    layout = plan.layout
    lines = [f"layout: {layout.grid_text()}", f"layers per stage: {layout.stages_text()}", *layout.notes]
    lines.append(f"recompute: {recompute_words(plan)}; micro-batch {plan.settings.micro_batch_size}")
    accounts = [stage_account(search.shape, layout, plan.settings, stage) for stage in range(layout.pipeline)]
    for account in accounts:
        mark = "  <- heaviest" if account.stage == plan.account.stage else ""
        lines += ["", f"stage {account.stage}: {_gib(account.total)} GiB{mark}"]
        lines += [f"  {line}" for line in account_lines(account)]
    free = search.gpu.memory_gib - plan.account.total / GIB
    verdict = f"fits with {free:.1f} GiB free" if plan.fits(search.gpu) else f"does not fit: {-free:.1f} GiB too much"
    bounds = f"{_gib(plan.account.low)} to {_gib(plan.account.high)}"
    lines += ["", f"{search.gpu.name}: {verdict}; {bounds} GiB of {search.gpu.memory_gib:g} expected"]
    lines += host_lines(plan, search)
    return [*lines, "", *_step_lines(plan.step)]


def host_lines(plan: Plan, search: Search) -> list[str]:
    """What the optimizer of a plan takes of a node's memory, where it lies there."""
    stages = range(plan.layout.pipeline)
    largest = max(state_bytes(search.shape, plan.layout, plan.settings, stage).on_host for stage in stages)
    if not largest:
        return []
    ranks = min(search.gpu.gpus_per_node, plan.layout.world_size)
    return [f"host memory: at least {_gib(ranks * largest)} GiB a node for the optimizer, and as much again in copies"]


def _step_lines(step: StepTime) -> Iterable[str]:
    yield f"step: {_seconds(step.seconds)} s ({_seconds(step.low)} to {_seconds(step.high)}), slowest stage {step.stage}"
    parts = (
        ("compute", step.compute_s), ("TP messages", step.tp_s), ("EP messages", step.ep_s),
        ("CP messages", step.cp_s), ("PP messages", step.pp_s), ("waiting for the host", step.host_s),
        ("pipeline bubble", step.bubble_s), ("DP messages", step.dp_s), ("optimizer", step.optimizer_s),
    )  # fmt: skip
    for name, seconds in parts:
        yield f"  {name:<20} {_seconds(seconds):>8} s  {seconds / step.seconds:>4.0%}"
    yield f"tokens/s/GPU: {step.tokens_per_second_per_gpu:,.0f}; TFLOP/s/GPU: {step.tflops_per_gpu:.1f}"


def plan_record(plan: Plan, gpu: Gpu) -> dict[str, Any]:
    """A plan for ``--json true``: plain numbers with their units in the names."""
    account, step = plan.account, plan.step
    return {
        "layout": layout_words(plan.layout),
        "flags": plan_flags(plan),
        "optimizer": plan.optimizer[0],
        "data_parallel": plan.layout.data,
        "stage": account.stage,
        "memory_gib": {
            "total": account.total / GIB,
            "low": account.low / GIB,
            "high": account.high / GIB,
            "available": gpu.memory_gib,
            **{item.name: item.bytes / GIB for item in (*account.items, *account.fitted)},
        },
        "fits": plan.fits(gpu),
        "step_seconds": {"middle": step.seconds, "low": step.low, "high": step.high},
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "tflops_per_gpu": step.tflops_per_gpu,
        "bubble_share": step.bubble_share,
    }


def plan_flags(plan: Plan) -> dict[str, Any]:
    """The flags of a training run that make this plan."""
    layout, settings = plan.layout, plan.settings
    flags: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": settings.micro_batch_size,
        "recompute_granularity": settings.recompute_granularity,
    }
    if layout.is_moe:
        flags |= {"expert_model_parallel_size": layout.expert, "expert_tensor_parallel_size": layout.expert_tensor}
    if settings.recompute_granularity == "selective":
        flags["recompute_modules"] = list(settings.recompute_modules)
    if settings.recompute_granularity == "full":
        flags |= {
            "recompute_method": settings.recompute_method or "uniform",
            "recompute_num_layers": settings.recompute_num_layers or 1,
        }
    flags |= plan.optimizer[1]
    defaults = to_flat_dict(RunConfig())
    return {name: value for name, value in flags.items() if value != defaults[name]}


def run_flags(parsed: Parsed[PlanConfig], plan: Plan) -> dict[str, Any]:
    """The flags of the whole run: the user's own, then the plan's."""
    given = to_flat_dict(parsed.config.run_config())
    flags = {name: given[name] for name in given if name in parsed.explicit}
    flags |= {"load": load_name(given["load"]), "max_length": given["max_length"] or plan.settings.row_length}
    flags |= {"global_batch_size": plan.settings.global_batch_size}
    return flags | plan_flags(plan)


_NEEDED = {"dataset": ["my_rows.jsonl"], "train_iters": 2000}


def command_text(flags: Mapping[str, Any], gpu: Gpu, gpus: int) -> str:
    """The command line of the run, one flag a line; what the plan cannot know stands as an example."""
    per_node = min(gpu.gpus_per_node, gpus)
    nodes = -(-gpus // per_node)
    head = f"NPROC_PER_NODE={per_node}"
    if nodes > 1:
        head = f"NNODES={nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR MASTER_PORT=29500 {head}"
    needed = {name: value for name, value in _NEEDED.items() if name not in flags}
    if "num_train_epochs" in flags:
        needed.pop("train_iters", None)
    lines = [f"{head} megatron sft"]
    lines += [f"    --{name} {_word(value)}" for name, value in {**flags, **needed}.items()]
    return " \\\n".join(lines)


def yaml_text(flags: Mapping[str, Any], search: Search, plan: Plan) -> str:
    """The flags as a file that ``--config`` reads, with what was planned on top."""
    account, step = plan.account, plan.step
    head = [
        f"# {plan.layout.world_size} x {search.gpu.name}, planned: {_gib(account.total)} GiB on the fullest rank "
        f"({_gib(account.low)} to {_gib(account.high)} of {search.gpu.memory_gib:g}),",
        f"# {_seconds(step.seconds)} s a step ({_seconds(step.low)} to {_seconds(step.high)}), "
        f"{step.tokens_per_second_per_gpu:,.0f} tokens/s/GPU.",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(dict(flags), sort_keys=False, allow_unicode=True)


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_word, value))
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}"
