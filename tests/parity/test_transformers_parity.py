"""One rank against transformers in fp32, on files that transformers wrote: logits, loss, every gradient, 20 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import pool
from helpers.tiny import reference_step, samples, write_model
from helpers.training import (
    Cut,
    Layout,
    assemble,
    logits_of,
    reference_gradients,
    relative_error,
    run_steps,
)

MODELS: dict[str, dict[str, Any]] = {
    "dense_untied": {"moe": False},
    "dense_tied": {"moe": False, "tie_word_embeddings": True},
    "moe_renormalised": {"moe": True, "norm_topk_prob": True},
    "moe_plain_softmax": {"moe": True, "norm_topk_prob": False},
    "dense_yarn": {
        "moe": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_theta": 1e4,
        },
    },
    "moe_mixed": {"moe": True, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "one_group_of_keys": {"moe": False, "num_key_value_heads": 1, "head_dim": 8},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """(directory that transformers wrote, the transformers model)."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_model(directory, **MODELS[request.param])


def test_logits(model: tuple[Path, torch.nn.Module]) -> None:
    directory, reference = model
    rows = [sample.ids.tolist() for sample in samples(5)]
    ours = pool(1).run(logits_of, model_dir=str(directory), sequences=rows)[0]
    with torch.no_grad():
        for ids, logits in zip(rows, ours, strict=True):
            theirs = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            assert float((logits - theirs).abs().max()) <= 1e-5
            assert float(theirs.abs().max()) > 0.5, "logits near zero would agree whatever the model does"


@pytest.mark.parametrize("cut", [Cut(), Cut(micro_batch=2), Cut(pack=2), Cut(micro_batch=8)], ids=str)
def test_loss_and_gradients(model: tuple[Path, torch.nn.Module], cut: Cut, tmp_path: Path) -> None:
    directory, reference = model
    rows = samples(8)
    loss = reference_step(reference, rows)
    gradients = reference_gradients(reference, tmp_path)
    result = pool(1).run(run_steps, model_dir=str(directory), layout=Layout(), batches=[rows], cut=cut)
    assert result[0]["losses"][0] == pytest.approx(loss, rel=1e-6)
    ours = assemble(result)
    assert ours.keys() == gradients.keys()
    errors = {key: relative_error(ours[key], gradients[key]) for key in gradients}
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("kind", ["dense_tied", "moe_renormalised"])
def test_twenty_steps_against_a_plain_loop(kind: str, tmp_path: Path) -> None:
    steps, rows = 20, samples(16, seed=3)
    batches = [rows[i : i + 4] for i in range(0, len(rows), 4)] * 5
    losses, norms = plain_loop(write_model(tmp_path, **MODELS[kind]), batches, lr=1e-3)
    result = pool(1).run(
        run_steps, model_dir=str(tmp_path), layout=Layout(), batches=batches, cut=Cut(pack=2), gradients=False
    )[0]
    assert len(result["losses"]) == steps
    assert result["losses"] == pytest.approx(losses, rel=1e-4)
    assert result["grad_norms"] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < losses[0] - 0.1, "the loop must learn something, or it compares nothing"


def plain_loop(model: torch.nn.Module, batches: list, *, lr: float) -> tuple[list[float], list[float]]:
    """What a user would write with transformers and torch alone: AdamW, no decay on vectors, clipping to 1."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for rows in batches:
        losses.append(reference_step(model, rows))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return losses, norms
