"""`megatron compare`: 20 steps against a plain transformers loop, on every layout; planted faults are found and named.

Row B100 of the known faults: loss within 1e-4, gradient norm within 1e-3, for TP, PP, EP, CP, packing on and off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from helpers.comparing import LENGTH, compared, our_part, our_part_stopped_after, resolved, rows
from helpers.ranks import pool
from helpers.tiny import write_model

STEPS = 20
TP, CP = "--tensor_model_parallel_size 2 --sequence_parallel true", "--context_parallel_size 2"
PP, EP = "--pipeline_model_parallel_size 2", "--expert_model_parallel_size 2"
SCHEDULES = (
    "--optimizer sgd --lr 1e-2 --min_lr 1e-3 --lr_decay_style WSD --lr_wsd_decay_iters 6 --lr_warmup_iters 3 "
    "--weight_decay_incr_style linear --start_weight_decay 0.0 --end_weight_decay 0.5 --clip_grad 0.5"
)
# Model, ranks, flags. Two layers a stage, so that an interleaved pipeline has two chunks.
LAYOUTS = {
    "one": ("moe", 1, ""),
    "unpacked": ("moe", 1, "--packing false --micro_batch_size 2"),
    "full recompute": ("moe", 1, "--recompute_granularity full"),
    "DP2": ("moe", 2, ""),
    "TP2+SP": ("moe", 2, TP),
    "EP2": ("moe", 2, EP),
    "ETP2": ("moe", 2, f"{TP} --expert_tensor_parallel_size 2"),
    "PP2": ("moe", 2, PP),
    "PP2 interleaved": ("moe", 2, f"{PP} --virtual_pipeline_model_parallel_size 2"),
    "CP2": ("moe", 2, CP),
    "CP2xEP2": ("moe", 2, f"{CP} {EP}"),
    "TP2xEP2+SP": ("moe", 4, f"{TP} {EP}"),
    "PP2xEP2": ("moe", 4, f"{PP} {EP}"),
    "TP2xCP2+SP": ("moe", 4, f"{TP} {CP}"),
    "dense, SGD and schedules": ("dense", 1, SCHEDULES),
    "dense TP2+SP": ("dense", 2, TP),
    "dense tied PP2": ("tied", 2, PP),
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"moe": True, "num_hidden_layers": 4},
    "dense": {"moe": False},
    "tied": {"moe": False, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models by name, and the packs."""
    place = tmp_path_factory.mktemp("compare")
    for name, changes in MODELS.items():
        write_model(place / name, **changes)
    return place


def compare(
    folder: Path, model: str, world: int, words: str, *, steps: int = STEPS, fault: str = "", **shape: Any
) -> Any:
    """A whole comparison; `fault` is planted in this project's half, `shape` changes its model's settings."""
    packing = "--packing false" not in words
    given = f"--hf {folder / model} --steps {steps} --global_batch_size 4 --max_length {LENGTH} {words}"
    given += "" if "--lr " in words else " --lr 3e-4"
    flags, run = resolved(world, *given.split(), *(["--packing", "true"] if packing else []))
    prepared = rows(folder, packing=packing, multiple=8 if run.layout.context > 1 else run.layout.tensor)
    changed = dataclasses.replace(run, shape=dataclasses.replace(run.shape, **shape))
    ranks = pool(world).run(our_part, run=changed, prepared=prepared, steps=steps, fault=fault)
    return compared(flags, run, prepared, folder / model, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_agree(layout: str, folder: Path) -> None:
    found = compare(folder, *LAYOUTS[layout])
    report = "\n".join(found.lines())
    assert found.agree, report
    assert len(found.steps) == STEPS
    losses = [(ours.loss, theirs.loss) for ours, theirs in found.steps]
    norms = [(ours.grad_norm, theirs.grad_norm) for ours, theirs in found.steps]
    assert all(abs(a - b) <= 1e-4 * b for a, b in losses), report
    assert all(abs(a - b) <= 1e-3 * b for a, b in norms), report
    assert losses[0][1] > 2, "a model that has nothing to learn would agree whatever it does"
    weights, activations, gradients = found.groups
    assert weights.worst[0] == 0, "both sides start from the same bits"
    assert activations.worst[0] <= 1e-5
    assert gradients.worst[0] <= 2e-5
    layers = MODELS[LAYOUTS[layout][0]].get("num_hidden_layers", 2)
    assert activations.count == 3 + layers * (8 if "moe" in LAYOUTS[layout][0] else 7)


@pytest.mark.parametrize(
    ("fault", "world", "words", "first", "named"),
    [
        ("rope base", 2, TP, "model.layers.0.self_attn (query", "the rotary embedding: its base (rope_theta)"),
        ("head order", 1, "", "model.layers.0.self_attn.q_proj.weight", "head order: our heads of q_proj are transformers' q0 q2 q1 q3"),
        ("mask", 2, PP, "model.layers.0.self_attn (before o_proj)", "the mask: documents of a pack see each other"),
        ("heads of the result", 1, "", "model.layers.0.self_attn (before o_proj)", "head order: our heads of attention's result are transformers' heads [3, 0, 1, 2]"),
        ("no sum", 2, "", "model.embed_tokens.weight", "a sum over ranks that is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(
    fault: str, world: int, words: str, first: str, named: str, folder: Path
) -> None:
    theta = {"rope_theta": 1e4} if fault == "rope base" else {}
    found = compare(folder, "moe", world, words, steps=2, fault="" if theta else fault, **theta)
    assert not found.agree
    group = next(each for each in found.groups if each.first is not None)
    assert group.first.hf_name.startswith(first)
    assert named in group.fault
    verdict = list(found.lines())[-1]
    assert verdict.startswith(f"the two loops differ, first in {group.first.hf_name}: {group.fault}")


def test_a_fault_of_the_update_shows_in_later_steps(folder: Path) -> None:
    found = compare(folder, "dense", 1, "--lr 1e-2 --weight_decay 1.0", steps=4, fault="no decay")
    assert not found.agree
    assert all(group.first is None for group in found.groups), "the first step is the same"
    assert "first at step 2: the update: clipping, Adam, weight decay or its groups" in list(found.lines())[-1]


def test_a_stop_request_ends_it_on_all_ranks(folder: Path) -> None:
    words = f"--hf {folder / 'dense'} --steps 20 --global_batch_size 4 --max_length {LENGTH}"
    _, run = resolved(2, *words.split())
    assert pool(2).run(our_part_stopped_after, run=run, prepared=rows(folder, packing=False), steps=3) == [
        "SIGTERM",
        "SIGTERM",
    ]
