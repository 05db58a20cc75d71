"""Writes mcore_qwen3/configs/*.yaml: for each Qwen3 model and task the layout that `megatron plan` puts first.

    python scripts/write_configs.py

A model's number of GPUs is the smallest of the list on which the whole range of the memory estimate fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mcore_qwen3.cli.plan_view import plan_flags
from mcore_qwen3.planner.calibration import load_calibration
from mcore_qwen3.planner.gpus import find_gpu
from mcore_qwen3.planner.memory import GIB
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.search import Plan, Search
from mcore_qwen3.planner.settings import Settings

CONFIGS = Path(__file__).resolve().parent.parent / "mcore_qwen3" / "configs"
GPU = "h100-80"
NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# File name -> model.
MODELS = {
    **{f"qwen3-{size.lower()}": f"Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{f"qwen3-{size.lower()}": f"Qwen3-{size}" for size in ("30B-A3B", "235B-A22B")},
    **{f"qwen3-{size.lower()}-2507": f"Qwen3-{size}-Instruct-2507" for size in ("4B", "30B-A3B", "235B-A22B")},
    **{f"qwen3-coder-{size.lower()}": f"Qwen3-Coder-{size}-Instruct" for size in ("30B-A3B", "480B-A35B")},
}
TASKS: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 8192, "global_batch_size": 64, "lr": 1e-5, "min_lr": 1e-6},
    "pt": {"max_length": 4096, "global_batch_size": 256, "lr": 2e-5, "min_lr": 2e-6},
}
LONG = 32768  # the length of fine-tuning for models that were trained for 262,144 tokens
COMMON = {"packing": True, "lr_warmup_fraction": 0.05, "weight_decay": 0.1, "clip_grad": 1.0}
BALANCED = {"moe_aux_loss_coeff": 0.001}


def main() -> None:
    """Write every file anew."""
    CONFIGS.mkdir(exist_ok=True)
    for file in CONFIGS.glob("qwen3-*.yaml"):
        file.unlink()
    for name, model in MODELS.items():
        for task, flags in TASKS.items():
            long = task == "sft" and (name.endswith("-2507") or "coder" in name)
            text = config_text(model, task, flags | ({"max_length": LONG} if long else {}))
            (CONFIGS / f"{name}-{task}.yaml").write_text(text, encoding="utf-8")


def config_text(model: str, task: str, flags: dict[str, Any]) -> str:
    """One file: what it is for and why, then its flags."""
    shape, gpu, calibration = find_model(model), find_gpu(GPU), load_calibration()
    settings = Settings(
        row_length=flags["max_length"],
        effective_length=float(flags["max_length"]),
        global_batch_size=flags["global_batch_size"],
        moe_imbalance=calibration.natural_imbalance,
    )
    search = Search(shape=shape, gpu=gpu, settings=settings, fixed={}, calibration=calibration)
    plan = next(plan for number in NUMBERS if (plan := _comfortable(search, number)) is not None)
    values = plan_flags(plan) | flags | COMMON | (BALANCED if shape.is_moe else {})
    account, step = plan.account, plan.step
    head = [
        f"# {model}, megatron {task}. GPUs: {plan.layout.world_size} x {GPU}.",
        "# Planned, not measured: the layout that `megatron plan` puts first on the fewest GPUs with room to spare.",
        f"# Fullest rank: {account.total / GIB:.1f} GiB ({account.low / GIB:.1f} to {account.high / GIB:.1f}) of "
        f"{gpu.memory_gib:g}. Step: {step.seconds:.1f} s ({step.low:.1f} to {step.high:.1f}),",
        f"# {step.tokens_per_second_per_gpu:,.0f} tokens/s/GPU with rows that are full. On other GPUs: megatron plan.",
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump(values, sort_keys=False)


def _comfortable(search: Search, gpus: int) -> Plan | None:
    plans = search.best(gpus, 1)
    return plans[0] if plans and not plans[0].at_the_edge(search.gpu) else None


if __name__ == "__main__":
    main()
