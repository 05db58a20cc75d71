"""Which rows are read and how they become fixed-length token rows."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFlags:
    """Data: which rows are read and how they become token rows."""

    dataset: tuple[str, ...] = flag(
        (), "[hf::|ms::]NAME[:subset][#N], several allowed: files, folders, hub data sets; #N takes N rows"
    )
    val_dataset: tuple[str, ...] = flag(
        (), "validation rows, named alike; given: nothing is split off the training rows"
    )
    split_dataset_ratio: float = flag(0.0, "share of the training rows split off for validation", at_least=0, below=1)
    interleave_prob: tuple[float, ...] = flag(
        (), "share of each dataset, in order, until one is used up; unset: one after the other, all rows"
    )
    use_hf: bool | None = flag(
        None, "hub of names without prefix, --load too: true Hugging Face, false ModelScope; unset: one, then the other"
    )
    columns: str | None = flag(None, 'renames columns, as JSON: {"question": "query", "reply": "response"}')
    strict: bool = flag(False, "stop at rows that cannot be used; false: they are dropped, counted and named")
    system: str | None = flag(None, "system text of rows that have none")
    loss_scale: str = flag(
        "default",
        "what is trained: default every assistant turn, last_round those after the last user message, all every token",
        choices=("default", "last_round", "all"),
    )
    ignore_empty_think: bool = flag(
        True, "leave an empty think block untrained: it is part of the prompt where thinking is switched off"
    )
    preserve_thinking: bool = flag(False, "keep the thinking of earlier turns, which the chat template drops")
    enable_thinking: bool = flag(True, "false: remove all thinking from the rows, as for prompts without thinking")
    model_name: tuple[str, ...] = flag(
        (), "what {{NAME}} in the rows stands for: one name, or a Chinese and an English"
    )
    model_author: tuple[str, ...] = flag((), "what {{AUTHOR}} in the rows stands for, likewise")
    max_length: int | None = flag(None, "tokens a row may have; unset: the model's max_position_embeddings", at_least=1)
    packing: bool = flag(False, "lay several samples in one row of max_length; they do not see each other")
    packing_strategy: str = flag(
        "binpack",
        "binpack: fewest rows, by best-fit-decreasing over all samples; sequential: samples in data order",
        choices=("binpack", "sequential"),
    )
    truncation_strategy: str = flag(
        "delete",
        "samples longer than max_length: delete them, cut them at the right or left, or split them (pt only)",
        choices=("delete", "right", "left", "split"),
    )
    num_workers: int = flag(4, "threads a rank that build batches ahead; 0: build each when it is needed", at_least=0)
    dataset_num_proc: int = flag(1, "processes that render and encode the rows before the start", at_least=1)
    data_cache_path: str | None = flag(
        None, "folder of prepared data; unset: mcore_qwen3/data under $XDG_CACHE_HOME or ~/.cache"
    )


def renamed_columns(data: DataFlags) -> dict[str, str]:
    """Old name -> new name of the columns that `columns` renames.

    Raises:
        ConfigError: not a JSON object of texts.
    """
    try:
        names = json.loads(data.columns or "{}")
    except ValueError:
        names = None
    if not isinstance(names, dict) or not all(isinstance(new, str) for new in names.values()):
        raise ConfigError(
            "columns is a JSON object of old and new names",
            seen=data.columns,
            fix='--columns \'{"question": "query"}\'',
        )
    if len(set(names.values())) < len(names):
        raise ConfigError("columns gives each column a name of its own", seen=data.columns, fix="different new names")
    return names


def check_data(data: DataFlags, *, raw_text: bool) -> None:
    """Raise ConfigError for rules between data flags; `raw_text`: the command is pt."""
    renamed_columns(data)
    if data.truncation_strategy == "split" and not raw_text:
        raise ConfigError(
            "truncation_strategy split is for megatron pt: the parts of a cut conversation are no conversations",
            seen="--truncation_strategy split",
            fix="delete, right or left",
        )
    shares = data.interleave_prob
    if shares and (len(shares) != len(data.dataset) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
        raise ConfigError(
            "interleave_prob has one share above 0 for each dataset, and they sum to 1",
            seen=f"--interleave_prob {' '.join(map(str, shares))} for {len(data.dataset)} datasets",
            fix="give one share a dataset",
        )
    for name, values in (("model_name", data.model_name), ("model_author", data.model_author)):
        if len(values) > 2:
            raise ConfigError(
                f"{name} is one text, or a Chinese and an English one",
                seen=" ".join(values),
                fix="quote texts with spaces",
            )
    if not data.enable_thinking and data.preserve_thinking:
        raise ConfigError(
            "thinking is either removed or kept",
            seen="--enable_thinking false --preserve_thinking true",
            fix="drop one",
        )
