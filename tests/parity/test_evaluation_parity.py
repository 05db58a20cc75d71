"""Evaluation against transformers in fp32, and the same at every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.guard_checks import evaluated, expert_tokens, likely_tokens
from helpers.ranks import pool
from helpers.tiny import Sample, samples, token_losses, write_model
from helpers.training import Layout

VOCABULARY = 101  # odd: TP 2 pads it
BATCHES = [samples(4, seed=seed, vocabulary=VOCABULARY) for seed in range(3)]


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("model")
    return str(directory), write_model(directory, moe=request.param, vocab_size=VOCABULARY, num_hidden_layers=4)


@torch.no_grad()
def trained_accuracy(reference: torch.nn.Module, rows: list[Sample]) -> tuple[int, int]:
    """(trained tokens that transformers finds most likely, trained tokens)."""
    right, count = 0, 0
    for row in rows:
        logits = reference(input_ids=torch.from_numpy(row.ids)[None], use_cache=False).logits[0, :-1]
        hits = logits.argmax(dim=-1).numpy() == row.ids[1:]
        right += int((hits & (row.mask[1:] > 0)).sum())
        count += int((row.mask[1:] > 0).sum())
    return right, count


def likely_rows(reference: torch.nn.Module, rows: list[Sample]) -> list[Sample]:
    """The rows with every third trained token replaced by what transformers expects: a random model is never right."""
    made = []
    for row in rows:
        ids = row.ids.copy()
        for place in range(1, len(ids)):
            if row.mask[place] and place % 3 == 0:
                with torch.no_grad():
                    logits = reference(input_ids=torch.from_numpy(ids[:place])[None], use_cache=False).logits[0, -1]
                ids[place] = int(logits.argmax())
        made.append(Sample(ids, row.mask))
    return made


LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, virtual=2),
    Layout(context=2),
    Layout(data=2),
]


def test_metrics(model: tuple[str, torch.nn.Module]) -> None:
    directory, reference = model
    batches = [likely_rows(reference, rows) for rows in BATCHES]
    rows = [row for batch in batches for row in batch]
    with torch.no_grad():
        losses = torch.cat([token_losses(reference, row) for row in rows]).double()
    right, count = trained_accuracy(reference, rows)
    assert 0.2 < right / count < 0.8
    for layout in LAYOUTS:
        options: dict[str, Any] = {"sequence_parallel": True} if layout.tensor > 1 else {}
        for found in pool(layout.world).run(evaluated, model_dir=directory, layout=layout, batches=batches, **options):
            assert found["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-6), layout
            assert found["eval_ppl"] == pytest.approx(math.exp(float(losses.mean())), rel=1e-5), layout
            assert found["eval_token_acc"] == right / count, layout


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_ties_padding_and_numbers_that_are_none(layout: Layout, tmp_path: Path) -> None:
    """Five tokens, at TP 2 padded to six: of equal logits the lowest token wins on whatever rank, the pad row never."""
    write_model(tmp_path, moe=False, vocab_size=5)
    logits = [
        [0.0, 1.0, 0.0, 1.0, 0.0, 0.0],  # 1 and 3 lie on different ranks
        [0.0, 0.0, 0.0, 2.0, 2.0, 9.0],  # the last one is padding
        [-3.0, -2.0, -4.0, -5.0, -6.0, 0.0],
        [0.0, 0.0, 3.0, 0.0, 0.0, 0.0],
        [0.0, math.nan, 0.0, 1.0, 0.0, 0.0],
    ]
    if layout.tensor == 1:
        logits = [row[:5] for row in logits]
    for found in pool(layout.world).run(likely_tokens, model_dir=str(tmp_path), layout=layout, logits=logits):
        assert found == [1, 3, 1, 2, 5]


EXPERT_LAYOUTS: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(), {}),
    (Layout(), {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    (Layout(data=2, expert=2), {}),
    (Layout(tensor=2), {"sequence_parallel": True}),
    (Layout(pipeline=2), {}),
    (Layout(context=2), {}),
    (Layout(tensor=2, expert_tensor=2), {"sequence_parallel": True}),
]


def test_tokens_of_each_expert(tmp_path: Path) -> None:
    """Each token is counted once at every layout, as transformers routes it; padding never."""
    reference = write_model(tmp_path, moe=True, num_hidden_layers=2)
    rows = samples(4, seed=5)
    wanted = torch.zeros(2, 8, dtype=torch.int64)
    for row in rows:
        with torch.no_grad():
            output = reference(input_ids=torch.from_numpy(row.ids)[None], output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(output.router_logits):
            wanted[layer] += torch.bincount(logits.topk(2, dim=-1).indices.flatten(), minlength=8)
    load = float((wanted.amax(dim=1) / wanted.double().mean(dim=1)).max())
    for layout, options in EXPERT_LAYOUTS:
        for tokens, largest in pool(layout.world).run(
            expert_tokens, model_dir=str(tmp_path), layout=layout, rows=rows, **options
        ):
            assert tokens == wanted.tolist(), (layout, options)
            assert largest == pytest.approx(load)
