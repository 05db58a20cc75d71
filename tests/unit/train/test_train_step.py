"""One step: the same loss and gradient however the batch is cut, skipped when nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.ranks import pool
from helpers.tiny import Sample, reference_step, samples, write_model
from helpers.train_checks import bad_step, steps_with_cuts
from helpers.training import Cut


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("dense")
    return str(directory), write_model(directory, moe=False)


def untrained(sample: Sample) -> Sample:
    return replace(sample, mask=np.zeros_like(sample.mask))


def test_cut_into_micro_batches_changes_nothing(model: tuple[str, Any]) -> None:
    # Known fault B45: one normalisation for gradient, log and evaluation. B46: an empty micro-batch adds nothing.
    directory, reference = model
    rows = samples(4)
    rows[1] = untrained(rows[1])
    loss = reference_step(reference, rows)
    norm = float(sum(p.grad.double().square().sum() for p in reference.parameters()) ** 0.5)
    cuts = [Cut(micro_batch=4), Cut(micro_batch=1), Cut(micro_batch=2), Cut(micro_batch=1, pack=2)]
    trained = sum(int(row.mask[1:].sum()) for row in rows)
    wanted = {"eval": loss, "loss": loss, "grad_norm": norm, "trained": trained}
    results = pool(1).run(steps_with_cuts, model_dir=directory, rows=rows, cuts=cuts)[0]
    for cut, found in zip(cuts, results, strict=True):
        assert found == pytest.approx(wanted, rel=2e-6), cut


def test_a_step_without_trained_tokens_is_skipped(model: tuple[str, Any]) -> None:
    rows = [untrained(row) for row in samples(2)]
    found = pool(1).run(bad_step, model_dir=model[0], rows=rows, fault="nothing trained")[0]
    assert (found["error"], found["changed"]) == ("", [])
    nothing = {"loss": 0.0, "trained_tokens": 0, "router": {}, "grad_norm": None, "expert_tokens": None}
    assert found["result"] == {**nothing, "skipped": "no trained token", "dataset_losses": {}}


def test_tokens_lost_on_the_way_are_seen(model: tuple[str, Any]) -> None:
    rows = samples(2)
    trained = sum(int(row.mask[1:].sum()) for row in rows)
    found = pool(1).run(bad_step, model_dir=model[0], rows=rows, fault="wrong count")[0]
    assert found["error"] == f"RuntimeError: the ranks trained {trained} tokens, the data holds {trained + 1}"
    assert found["changed"] == []
