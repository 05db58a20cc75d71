"""bf16 against transformers in bf16: close enough that a wrong head order or a missing norm is out of bounds.

Bound: |ours - theirs| / |theirs| over all logits (Euclidean) at most 0.05, with theirs = transformers in bf16. bf16 keeps 8
bits (4e-3), and a few dozen roundings on the way add up to one or two per cent; a wrong weight moves the logits by a half.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.ranks import pool
from helpers.tiny import GEOMETRY, samples, write_model
from helpers.training import logits_of
from safetensors.torch import load_file, save_file

BOUND = 0.05


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    a, b = torch.cat(ours).float(), torch.cat(theirs).float()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_logits_in_bf16(moe: bool, tmp_path: Path) -> None:
    reference = write_model(tmp_path, moe=moe).to(torch.bfloat16)
    rows = [sample.ids.tolist() for sample in samples(6)]
    with torch.no_grad():
        theirs = [reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in rows]
    ours = pool(1).run(logits_of, model_dir=str(tmp_path), sequences=rows, bf16=True)[0]
    assert distance(ours, theirs) <= BOUND

    weights = load_file(tmp_path / "model.safetensors")
    for fault in ("head order", "missing norm"):
        broken = dict(weights)
        for layer in range(GEOMETRY["num_hidden_layers"]):
            name = f"model.layers.{layer}.self_attn."
            if fault == "head order":
                heads = broken[name + "q_proj.weight"].unflatten(0, (GEOMETRY["num_attention_heads"], -1))
                broken[name + "q_proj.weight"] = heads[[1, 0, 3, 2]].flatten(0, 1).contiguous()
            else:
                broken[name + "q_norm.weight"] = torch.ones_like(broken[name + "q_norm.weight"])
        save_file(broken, tmp_path / "model.safetensors", metadata={"format": "pt"})
        wrong = pool(1).run(logits_of, model_dir=str(tmp_path), sequences=rows, bf16=True)[0]
        assert distance(wrong, theirs) > BOUND, fault
