"""Rules between the options of numerics and memory, the device, and what else a run does. No torch."""

from __future__ import annotations

import importlib.util

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.config import RunConfig, freezes, needs_transformer_engine
from mcore_qwen3.errors import ConfigError

# transformer-engine's fp8 products take rows in multiples of it.
FP8_MULTIPLE = 16


def check_numerics_device(config: RunConfig, shape: ModelShape, layout: ParallelLayout, device: str) -> None:
    """Refuse options that this device, these modules or another option of the run cannot go with.

    Raises:
        ConfigError: a rule is broken.
    """
    _check_modules(config, device)
    flags = config.numerics
    bf16 = device == "cuda" if config.model.bf16 is None else config.model.bf16
    if flags.overlap_moe_expert_parallel_comm and shape.is_moe:
        _check_expert_overlap(config, layout, bf16=bf16)
    if not bf16 and (flags.use_precision_aware_optimizer or flags.fp8_format):
        raise ConfigError(
            "the precision-aware optimizer and fp8 are for bf16 runs",
            seen="bf16 false",
            fix="--bf16 true, or neither of the two",
        )
    if flags.use_precision_aware_optimizer and not config.checkpoint.no_save_optim:
        raise ConfigError(
            "the state of the precision-aware optimizer cannot be saved here: it is not kept where the others' is",
            seen="--use_precision_aware_optimizer true, --no_save_optim false",
            fix="--no_save_optim true (the run then continues with moments at zero), or drop the optimizer's option",
        )
    if flags.tp_comm_overlap and not (layout.tensor > 1 and layout.sequence_parallel and config.data.packing):
        on = {True: "on", False: "off"}
        raise ConfigError(
            "tp_comm_overlap needs TP above 1, sequence parallel, and packed rows, which all have one size",
            seen=f"TP {layout.tensor}, sequence parallel {on[layout.sequence_parallel]}, packing {on[config.data.packing]}",
            fix="--sequence_parallel true --packing true with TP above 1, or --tp_comm_overlap false",
        )
    if flags.fp8_format:
        _check_fp8(config, layout)


def _check_modules(config: RunConfig, device: str) -> None:
    asked = list(needs_transformer_engine(config.numerics))
    if not asked:
        return
    # A dry run may be for machines that have it.
    installed = config.launch.dry_run or importlib.util.find_spec("transformer_engine") is not None
    if device != "cuda" or config.model.transformer_impl == "torch" or not installed:
        raise ConfigError(
            "some options are transformer-engine's own, which runs on GPUs only",
            seen=f"{', '.join(asked)}; device {device}, --transformer_impl {config.model.transformer_impl}, "
            f"package {'found' if installed else 'not found'}",
            fix="drop them, or pip install 'mcore-qwen3[gpu]' on GPU nodes and --transformer_impl transformer_engine",
        )


def _check_expert_overlap(config: RunConfig, layout: ParallelLayout, *, bf16: bool) -> None:
    """Megatron's own conditions (TransformerConfig), and that nothing is frozen: its parts of a layer are not made for it."""
    model = config.model
    selective = model.recompute_modules if model.recompute_granularity == "selective" else ()
    rules = (
        (layout.expert > 1, "EP above 1", f"EP {layout.expert}"),
        (bf16, "bf16", "fp32"),
        (
            layout.pipeline == 1 or layout.virtual_pipeline > 1,
            "virtual stages where PP is above 1",
            "no virtual stages",
        ),
        (model.moe_token_dispatcher_type != "allgather", "the alltoall or the flex dispatcher", "allgather"),
        (model.recompute_granularity != "full", "no full recompute", "--recompute_granularity full"),
        ("moe" not in selective, "no recompute of moe", "--recompute_modules moe"),
        (not freezes(config.optim), "no frozen parameters", "frozen parameters"),
    )
    for holds, rule, seen in rules:
        if not holds:
            raise ConfigError(
                f"overlap_moe_expert_parallel_comm needs {rule}",
                seen=f"--overlap_moe_expert_parallel_comm true, {seen}",
                fix=f"{rule}, or --overlap_moe_expert_parallel_comm false",
            )


def _check_fp8(config: RunConfig, layout: ParallelLayout) -> None:
    multiple = FP8_MULTIPLE * layout.tensor * layout.context
    length = config.data.max_length
    if not config.data.packing or length is None or length % multiple:
        raise ConfigError(
            f"fp8 needs packed rows whose length is a multiple of {FP8_MULTIPLE} x TP x CP = {multiple}",
            seen=f"--packing {str(config.data.packing).lower()}, --max_length {length or 'unset'}",
            fix=f"--packing true --max_length {max(1, (length or 8192) // multiple) * multiple}",
        )
    again = [name for name in ("moe_act", "layernorm") if name in config.model.recompute_modules]
    selective = config.model.recompute_granularity == "selective"
    if config.numerics.fp8_recipe == "delayed" and selective and again:
        raise ConfigError(
            "delayed fp8 scaling cannot recompute moe_act and layernorm",
            seen=f"--fp8_recipe delayed --recompute_modules {' '.join(again)}",
            fix="another --fp8_recipe, or other modules",
        )
