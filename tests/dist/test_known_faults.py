"""Numbers of known public faults that need ranks: B08, B48, B49, B50, B61, B65."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.fault_checks import norm_of_planted_gradients, own_logits, vocabulary_parallel_loss, weights_after
from helpers.ranks import pool
from helpers.tiny import samples, write_model
from helpers.training import Cut, Layout, assemble, relative_error, run_steps

BATCHES = [samples(4, seed=number) for number in range(3)]


@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (4, 4)])
def test_tied_copies_stay_bitwise_equal(layers: int, stages: int, tmp_path: Path) -> None:
    """B08: tied embeddings over 2 and 4 pipeline stages: one rank's losses, and both copies equal after each step."""
    write_model(tmp_path, moe=False, tie_word_embeddings=True, num_hidden_layers=layers)
    names = ("word_embeddings", "output_layer")
    one = pool(1).run(weights_after, model_dir=str(tmp_path), layout=Layout(), batches=BATCHES, names=names)[0]
    ranks = pool(stages).run(
        weights_after, model_dir=str(tmp_path), layout=Layout(pipeline=stages), batches=BATCHES, names=names
    )
    assert ranks[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    (first,), (last,) = ranks[0]["weights"].values(), ranks[-1]["weights"].values()
    assert torch.equal(first, last)


def test_each_parameter_counts_once_in_the_norm(tmp_path: Path) -> None:
    """B48: squares 20 and 100 in the experts of two ranks: sqrt(120) = 10.954452 on both; an average gives 7.236068."""
    write_model(tmp_path, moe=True)
    layout = Layout(data=2, expert=2)
    values = [[4.0, 2.0], [6.0, 8.0]]
    for norm in pool(2).run(norm_of_planted_gradients, model_dir=str(tmp_path), layout=layout, values=values):
        assert norm == pytest.approx(10.954452, abs=1e-5)


def test_expert_parallel_changes_no_expert_gradient(tmp_path: Path) -> None:
    """B49: the same four rows on two ranks, EP 1 against EP 2."""
    write_model(tmp_path, moe=True)
    found = [
        assemble(
            pool(2).run(run_steps, model_dir=str(tmp_path), layout=layout, batches=BATCHES[:1], cut=Cut()), atol=1e-7
        )
        for layout in (Layout(data=2), Layout(data=2, expert=2))
    ]
    for key, value in found[0].items():
        if "experts" in key:
            assert relative_error(found[1][key], value) <= 1e-6, key


def test_norms_stay_equal_on_tensor_parallel_ranks(tmp_path: Path) -> None:
    """B50: three Adam steps at TP 2 with sequence parallel: every norm bitwise equal on both ranks, and as at TP 1."""
    write_model(tmp_path, moe=False)
    one = pool(1).run(weights_after, model_dir=str(tmp_path), layout=Layout(), batches=BATCHES, names=("norm",))[0]
    ranks = pool(2).run(
        weights_after,
        model_dir=str(tmp_path),
        layout=Layout(tensor=2),
        batches=BATCHES,
        names=("norm",),
        sequence_parallel=True,
    )
    assert any("q_layernorm" in name for name in one["weights"])
    for name, value in one["weights"].items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]), name
        assert float((ranks[0]["weights"][name] - value).abs().max()) <= 1e-5, name


def test_loss_of_split_logits(tmp_path: Path) -> None:
    """B61: logits 0, 1, 2, 3 and label 3: 0.440190 at TP 1 and 2; replicated logits taken for shards give 1.133337."""
    write_model(tmp_path, moe=False, vocab_size=4)
    for layout in (Layout(), Layout(tensor=2)):
        for loss in pool(layout.world).run(
            vocabulary_parallel_loss, model_dir=str(tmp_path), layout=layout, logits=[0.0, 1, 2, 3], label=3
        ):
            assert loss == pytest.approx(0.440190, abs=1e-6)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_logits_do_not_depend_on_tensor_parallel(moe: bool, tmp_path: Path) -> None:
    """B65: logits at TP 1 and TP 2 within 1e-5 of transformers."""
    reference = write_model(tmp_path, moe=moe)
    ids = samples(1)[0].ids.tolist()
    ids = ids[: len(ids) // 2 * 2]
    with torch.no_grad():
        theirs = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for layout in (Layout(), Layout(tensor=2)):
        parts = pool(layout.world).run(
            own_logits, model_dir=str(tmp_path), layout=layout, ids=ids, sequence_parallel=layout.tensor > 1
        )
        assert float((torch.cat(parts, dim=1) - theirs).abs().max()) <= 1e-5
