"""A layout in short words, as people write it: TP2 PP8x3 EP8 MBS1 full."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mcore_qwen3.arch import ParallelLayout
from mcore_qwen3.errors import ConfigError

_FLAGS = {
    "TP": "tensor_model_parallel_size",
    "CP": "context_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "FIRST": "decoder_first_pipeline_num_layers",
    "LAST": "decoder_last_pipeline_num_layers",
    "MBS": "micro_batch_size",
}
_RECOMPUTE = ("none", "selective", "full")
_SIZE = re.compile(r"([A-Z]+)(\d+)(?:X(\d+))?")


def read_layout(words: Iterable[str]) -> dict[str, Any]:
    """The flags that the words stand for; sizes that are not named are 1.

    Args:
        words: TP, CP, PP, EP, ETP, MBS with a size, PP8x3 for 8 stages of 3 chunks, FIRST and LAST with a number of
            layers, L+2 where the embedding and the loss count as layers, and none, selective or full for recompute; several may
            stand in one text, with blanks or commas between.

    Raises:
        ConfigError: a word is none of them, or stands twice.
    """
    flags: dict[str, Any] = {}
    for word in re.split(r"[\s,/]+", " ".join(words).strip()):
        for name, value in _flags_of(word).items():
            if name in flags:
                raise ConfigError("a layout names each size once", seen=word, fix="drop one")
            flags[name] = value
    return flags


def _flags_of(word: str) -> dict[str, Any]:
    if word.lower() in _RECOMPUTE:
        return {"recompute_granularity": word.lower()}
    if word == "L+2":
        return {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    match = _SIZE.fullmatch(word.upper())
    if match is None or match[1] not in _FLAGS or (match[3] and match[1] != "PP"):
        raise ConfigError(
            "a layout is written in words such as TP2 PP8 EP8 MBS1 full",
            seen=repr(word),
            fix=f"{', '.join(_FLAGS)} with a size, PP8x3 for virtual stages, L+2, or {', '.join(_RECOMPUTE)}",
        )
    found = {_FLAGS[match[1]]: int(match[2])}
    return found | ({"virtual_pipeline_model_parallel_size": int(match[3])} if match[3] else {})


def layout_words(layout: ParallelLayout) -> str:
    """The sizes of a layout that are above 1, in the words of `read_layout`; DP after them."""
    pipeline = f"{layout.pipeline}" + (f"x{layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else "")
    sizes = [
        ("TP", layout.tensor, str(layout.tensor)),
        ("CP", layout.context, str(layout.context)),
        ("PP", layout.pipeline, pipeline),
        ("EP", layout.expert, str(layout.expert)),
        ("ETP", layout.expert_tensor, str(layout.expert_tensor)),
        ("FIRST", layout.first_stage_layers or 1, str(layout.first_stage_layers)),
        ("LAST", layout.last_stage_layers or 1, str(layout.last_stage_layers)),
    ]
    words = [name + text for name, size, text in sizes if size > 1]
    return " ".join(words + (["L+2"] if layout.account_for_embedding else [])) or "TP1"
