"""Frozen parameters: which ones they are, that they stay, that the others' gradients are right, and no state for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.option_checks import names_in_the_model, refusal, train_with, trained_gradients
from helpers.ranks import pool
from helpers.tiny import reference_step, samples, write_model
from helpers.training import Layout, assemble, read_all, reference_gradients

# The tiny model, from the embedding up: vocabulary 128, hidden 32, 4 heads and 2 groups of 16, 8 experts of width 16.
LAYER = {
    "mlp.experts.experts.linear_fc1.weight": 8 * 2 * 16 * 32,
    "mlp.experts.experts.linear_fc2.weight": 8 * 32 * 16,
    "mlp.router.weight": 8 * 32,
    "pre_mlp_layernorm.weight": 32,
    "self_attention.k_layernorm.weight": 16,
    "self_attention.linear_proj.weight": 32 * 64,
    "self_attention.linear_qkv.layer_norm_weight": 32,
    "self_attention.linear_qkv.weight": (64 + 2 * 32) * 32,
    "self_attention.q_layernorm.weight": 16,
}
SIZES = {
    "embedding.word_embeddings.weight": 128 * 32,
    **{f"decoder.layers.{layer}.{name}": size for layer in (0, 1) for name, size in LAYER.items()},
    "decoder.final_layernorm.weight": 32,
    "output_layer.weight": 128 * 32,
}
TOTAL = sum(SIZES.values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("moe")
    return str(directory), write_model(directory, moe=True)


LAYOUTS = [
    (Layout(), {}),
    (Layout(), {"moe_grouped_gemm": False}),
    (Layout(pipeline=2), {}),
    (Layout(data=2, expert=2), {"moe_grouped_gemm": False}),
    (Layout(tensor=2, expert_tensor=2), {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=[f"{layout} {options}" for layout, options in LAYOUTS])
def test_names_and_sizes_do_not_depend_on_the_layout(model: tuple[str, Any], layout: Layout, options: Any) -> None:
    ranks = pool(layout.world).run(names_in_the_model, model_dir=model[0], layout=layout, **options)
    assert {name: size for rank in ranks for name, size in rank.items()} == SIZES


WAYS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "beginnings": (
        {"freeze_parameters": ("embedding.", "decoder.layers.0.self_attention")},
        {"embedding.word_embeddings.weight", *(f"decoder.layers.0.{n}" for n in LAYER if n.startswith("self_att"))},
    ),
    "expression": (
        {"freeze_parameters_regex": r"layers\.\d+\.mlp\.(router|experts)"},
        {f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LAYER if name.startswith("mlp.")},
    ),
    "share": (
        {"freeze_parameters_ratio": (SIZES["embedding.word_embeddings.weight"] + sum(LAYER.values())) / TOTAL},
        {"embedding.word_embeddings.weight", *(f"decoder.layers.0.{name}" for name in LAYER)},
    ),
    "given back": (
        {
            "freeze_parameters": ("",),
            "trainable_parameters": ("output_layer",),
            "trainable_parameters_regex": r"1\.mlp\.router",
        },
        SIZES.keys() - {"output_layer.weight", "decoder.layers.1.mlp.router.weight"},
    ),
}


def by_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked tensors cut into layers, under the names in the model."""
    found = {}
    for key, value in tensors.items():
        if key.startswith("decoder.layers."):
            rest = key.removeprefix("decoder.layers.")
            found |= {f"decoder.layers.{layer}.{rest}": value[layer] for layer in range(2)}
        else:
            found[key] = value
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_is_frozen_stays_and_has_no_state(model: tuple[str, Any], way: str) -> None:
    frozen, names = WAYS[way]
    args = {"model_dir": model[0], "layout": Layout(), "batches": [samples(4)], "rates": [0.01]}
    found = pool(1).run(train_with, **args, frozen=frozen)[0]
    assert found["count"] == (sum(size for name, size in SIZES.items() if name not in names), TOTAL)
    weights = [part for part in found["gradients"] if not part[0].startswith("optimizer.")]
    after, before = by_name(assemble([{"gradients": weights}])), by_name(read_all(model[0]))
    assert {name for name in before if torch.equal(after[name], before[name])} == set(names)
    state = sum(part[3].numel() for part in found["gradients"] if part[0].startswith("optimizer."))
    assert state == 2 * found["count"][0], "two moments for each trained value, none for the others"


MORE = [
    (Layout(), {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    (Layout(pipeline=2), {}),  # stage 0 has nothing to train
    (Layout(data=2, expert=2), {}),
    (Layout(tensor=2), {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("layout", "options"), MORE, ids=[str(layout) for layout, _ in MORE])
def test_gradients_of_the_rest_are_right(model: tuple[str, Any], layout: Layout, options: Any, tmp_path: Path) -> None:
    directory, reference = model
    rows = samples(4)
    reference_step(reference, rows)
    wanted = by_name(reference_gradients(reference, tmp_path))
    frozen = {"freeze_parameters": ("embedding.", "decoder.layers.0.")}
    args = {"model_dir": directory, "layout": layout, "rows": rows, "frozen": frozen}
    ranks = pool(layout.world).run(trained_gradients, **args, **options)
    seen = set()
    for key, _, starts, values in [part for rank in ranks for part in rank["gradients"]]:
        stacked = key.startswith("decoder.layers.")
        name = f"decoder.layers.{starts[0]}.{key.removeprefix('decoder.layers.')}" if stacked else key
        place = tuple(slice(a, a + n) for a, n in zip(starts[stacked:], values.shape[stacked:], strict=True))
        whole = wanted[name]
        ours, theirs = values[0] if stacked else values, whole[place]
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(whole.abs().max()), name
        seen.add(name)
    assert seen == {name for name in SIZES if not name.startswith(("embedding.", "decoder.layers.0."))}


@pytest.mark.parametrize("layout", [Layout(), Layout(pipeline=2), Layout(data=2, expert=2)], ids=str)
def test_a_run_with_frozen_parameters_continues_bitwise(model: tuple[str, Any], layout: Layout, tmp_path: Path) -> None:
    batches = [samples(4, seed=seed) for seed in range(4)]
    frozen = {"freeze_parameters": ("embedding.", "decoder.layers.0.")}
    args = {"model_dir": model[0], "layout": layout, "rates": [0.01] * 4, "frozen": frozen}
    ranks = pool(layout.world)
    whole = ranks.run(train_with, **args, batches=batches)
    save = str(tmp_path / "save")
    ranks.run(train_with, **args, batches=batches[:2], save=save)
    rest = ranks.run(train_with, **args, batches=batches, skip=2, resume=f"{save}/iter_0000002")
    for ours, theirs in zip(rest, whole, strict=True):
        assert ours["losses"] == theirs["losses"][2:]
        pairs = zip(ours["gradients"], theirs["gradients"], strict=True)
        assert all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in pairs)


def test_a_tied_model_freezes_both_ends(tmp_path: Path) -> None:
    write_model(tmp_path, moe=False, tie_word_embeddings=True)
    frozen = {"freeze_parameters": ("embedding.",)}
    args = {"model_dir": str(tmp_path), "batches": [samples(4)], "rates": [0.01], "frozen": frozen}
    found = pool(2).run(train_with, **args, layout=Layout(pipeline=2))
    alone = pool(1).run(train_with, **args, layout=Layout())[0]
    assert [rank["losses"] for rank in found] == [pytest.approx(alone["losses"], rel=1e-6)] * 2
    assert [rank["grad_norms"] for rank in found] == [pytest.approx(alone["grad_norms"], rel=1e-5)] * 2
    before = read_all(tmp_path)["embedding.word_embeddings.weight"]
    for rank in found:
        kept = [values for key, _, _, values in rank["gradients"] if key == "embedding.word_embeddings.weight"]
        assert kept and all(torch.equal(values, before) for values in kept)


def test_what_cannot_be_meant_is_refused(model: tuple[str, Any]) -> None:
    def refused(**frozen: Any) -> str:
        return pool(1).run(refusal, model_dir=model[0], frozen=frozen)[0]

    assert "what freeze_parameters names must be a parameter of the model; seen: model.layers" in refused(
        freeze_parameters=("model.layers",)
    )
    assert "what trainable_parameters_regex names" in refused(
        freeze_parameters=("embedding",), trainable_parameters_regex="lora"
    )
    assert "some parameter must be trained; seen: all are frozen" in refused(freeze_parameters_regex=".")
    assert refused(freeze_parameters_ratio=0.5) == ""


def test_state_of_a_run_that_trained_all_serves_one_that_freezes_some(model: tuple[str, Any], tmp_path: Path) -> None:
    args = {"model_dir": model[0], "layout": Layout(), "batches": [samples(4)], "rates": [0.01]}
    frozen = {"freeze_parameters": ("embedding.", "decoder.layers.0.")}
    whole = pool(1).run(train_with, **args, save=str(tmp_path / "all"))[0]
    resume = {"skip": 1, "resume": f"{tmp_path}/all/iter_0000001"}
    part = pool(1).run(train_with, **args, **resume, frozen=frozen, save=str(tmp_path / "some"))[0]
    of_all = {(key, starts): values for key, _, starts, values in whole["gradients"]}
    moments = [each for each in part["gradients"] if each[0].startswith("optimizer.") and ".layers." in each[0]]
    assert {key.split(".layers.")[1] for key, *_ in moments} == {f"1.{name}" for name in LAYER}
    for key, _, starts, values in moments:
        stacked = key.replace("decoder.layers.1.", "decoder.layers.")
        torch.testing.assert_close(values[None], of_all[stacked, (1, *starts)], rtol=0, atol=0)
    with pytest.raises(AssertionError, match="lacks optimizer state of a weight that is trained"):
        pool(1).run(train_with, **args, skip=1, resume=f"{tmp_path}/some/iter_0000001")
