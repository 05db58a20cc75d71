"""The one table of other names for our flags: ms-swift v3 and v4, and Megatron where it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of the field ``field``; ``values`` translates true and false when the form differs too."""

    field: str
    values: Mapping[bool, str] | None = None


ALIASES: dict[str, Alias] = {
    "model": Alias("load"),  # ms-swift v3 and v4: Hugging Face weights
    "mcore_model": Alias("load"),  # ms-swift v4: torch_dist weights
    "use_flash_attn": Alias("attention_backend", {True: "flash", False: "auto"}),  # ms-swift v3, Megatron
    "moe_enable_deepep": Alias("moe_flex_dispatcher_backend", {True: "deepep", False: "none"}),  # ms-swift, Megatron
    "seq_length": Alias("max_length"),  # ms-swift v3, Megatron
    "dataloader_num_workers": Alias("num_workers"),  # ms-swift v4
    "num_virtual_stages_per_pipeline_rank": Alias("virtual_pipeline_model_parallel_size"),  # Megatron
    "eval_steps": Alias("eval_interval"),  # ms-swift v4
    "logging_steps": Alias("log_interval"),  # ms-swift v4
    "output_dir": Alias("save"),  # ms-swift v4
    "save_steps": Alias("save_interval"),  # ms-swift v4
    "save_safetensors": Alias("save_hf"),  # ms-swift v3 and v4
}

# `megatron data`: those of its flags that `megatron sft` has too.
DATA_ALIASES: dict[str, Alias] = {name: ALIASES[name] for name in ("model", "mcore_model", "seq_length")}

CONVERT_ALIASES: dict[str, Alias] = {
    "load": Alias("src"),  # ms-swift v3
    "model": Alias("src"),  # ms-swift v3 and v4: Hugging Face weights
    "mcore_model": Alias("src"),  # ms-swift v4: torch_dist weights
    "save": Alias("dst"),  # ms-swift v3
    "output_dir": Alias("dst"),  # ms-swift v4
    "exist_ok": Alias("overwrite"),  # ms-swift v4
}


def aliases_by_field(table: Mapping[str, Alias]) -> dict[str, tuple[str, ...]]:
    """Field name -> its other names."""
    grouped: dict[str, tuple[str, ...]] = {}
    for name, alias in table.items():
        grouped[alias.field] = (*grouped.get(alias.field, ()), name)
    return grouped
