"""Functions that run inside ranks: megatron's own loader on a converted directory."""

from __future__ import annotations

from typing import Any

import torch
from helpers.training import Layout, build


def load_by_megatron(model_dir: str, checkpoint: str, layout: Layout, **options: Any) -> dict[str, Any]:
    """Fill a model from a torch_dist directory by `dist_checkpointing.load` alone.

    Returns:
        the number of parameters, and the names of those that are not the bits that `model_dir` gives this rank.
    """
    from megatron.core import dist_checkpointing

    _, models = build(model_dir, layout, **options)
    wrong, number = [], 0
    for model in models:
        wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        # Empty objects of megatron's own linear layers; a converted directory holds weights alone.
        asked = {key: entry for key, entry in model.sharded_state_dict().items() if not key.endswith("_extra_state")}
        # One chunk of an interleaved pipeline asks for part of the layers, so what nobody asks for is not an error.
        loaded = dist_checkpointing.load({"model": asked}, checkpoint, validate_access_integrity=len(models) == 1)
        result = model.load_state_dict(loaded["model"], strict=False)
        assert all(key.endswith("_extra_state") for key in [*result.missing_keys, *result.unexpected_keys])
        wrong += [name for name, parameter in model.named_parameters() if not torch.equal(parameter, wanted[name])]
        number += len(wanted)
    return {"parameters": number, "wrong": wrong, "iteration": loaded["iteration"]}
