"""The balance loss: its gradient is coefficient x the mean over micro-batches of the sum over layers of E * sum f_e P_e.

The reference is that formula under autograd on the transformers model (not transformers' own balance loss: it joins the
layers and its shares sum to k, known faults B69-B71). f_e: share of the routed (token, choice) pairs that went to expert
e; P_e: mean probability of e; padding is in neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import pool
from helpers.tiny import EXPERTS, Sample, samples, write_model
from helpers.training import Cut, Layout, assemble, reference_gradients, relative_error, run_steps

COEFFICIENT = 0.5  # large, so that its gradient is not lost beside the rounding of the main loss


def routed(model: torch.nn.Module, sample: Sample) -> list[torch.Tensor]:
    """Router logits [tokens, experts] of each layer, with their graph."""
    caught: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda gate, inputs, _: caught.append(inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.T)
        )
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    model(input_ids=torch.from_numpy(sample.ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return caught


def expected_balance(model: torch.nn.Module, rows: list[Sample], micro_batch: int) -> torch.Tensor:
    """Mean over micro-batches of the sum over layers."""
    groups = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
    total = torch.zeros(())
    for group in groups:
        for logits in (torch.cat(parts) for parts in zip(*(routed(model, sample) for sample in group), strict=True)):
            probs = logits.softmax(-1)
            chosen = torch.zeros_like(probs).scatter(1, logits.topk(EXPERTS["num_experts_per_tok"]).indices, 1.0)
            shares = chosen.sum(0) / chosen.sum()
            total = total + EXPERTS["num_experts"] * (shares.detach() * probs.mean(0)).sum()
    return total / len(groups)


def with_trained_share(rows: list[Sample], share: float) -> list[Sample]:
    """The same ids with the last part of each row trained."""
    changed = []
    for sample in rows:
        mask = np.zeros_like(sample.mask)
        mask[-max(1, round(share * len(mask))) :] = 1
        changed.append(Sample(sample.ids, mask))
    return changed


def balance_gradient(directory: Path, layout: Layout, rows: list[Sample], cut: Cut) -> tuple[dict[str, Any], float]:
    """(gradient with the coefficient minus gradient without, logged balance loss)."""
    found = []
    for coefficient in (COEFFICIENT, 0.0):
        ranks = pool(layout.world).run(
            run_steps,
            model_dir=str(directory),
            layout=layout,
            batches=[rows],
            cut=cut,
            sequence_parallel=layout.tensor > 1,
            moe_aux_loss_coeff=coefficient,
        )
        found.append(assemble(ranks, atol=1e-6))
        logged = ranks[0]["router"][0]["balance_loss"] if coefficient else logged
    return {key: found[0][key] - found[1][key] for key in found[0]}, logged


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("moe")
    return directory, write_model(directory, moe=True)


def expected_kind(model: torch.nn.Module, rows: list[Sample], kind: str) -> torch.Tensor:
    """The loss of each kind for micro-batches of two rows, summed over layers, by its definition.

    seq_aux_loss: each row alone, mean over rows. global_aux_loss on one rank: shares of all micro-batches of the step so
    far. z_loss: mean over a micro-batch's tokens of logsumexp squared.
    """
    if kind == "seq_aux_loss":
        return expected_balance(model, rows, 1)
    groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    total, counts = torch.zeros(()), [torch.zeros(EXPERTS["num_experts"]) for _ in range(2)]
    for group in groups:
        layers = [torch.cat(parts) for parts in zip(*(routed(model, sample) for sample in group), strict=True)]
        for layer, logits in enumerate(layers):
            if kind == "z_loss":
                total = total + logits.logsumexp(-1).square().mean()
                continue
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(EXPERTS["num_experts_per_tok"]).indices, 1.0)
            counts[layer] = counts[layer] + chosen.sum(0).detach()
            shares = counts[layer] / counts[layer].sum()
            total = total + EXPERTS["num_experts"] * (shares * logits.softmax(-1).mean(0)).sum()
    return total / len(groups)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(context=2), Layout(pipeline=2)], ids=str)
@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss", "z_loss"])
def test_other_kinds(model: tuple[Path, torch.nn.Module], kind: str, layout: Layout, tmp_path: Path) -> None:
    directory, reference = model
    rows = with_trained_share(samples(8), 0.2)
    expected = expected_kind(reference, rows, kind)
    reference.zero_grad()
    (COEFFICIENT * expected).backward()
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    wanted = reference_gradients(reference, tmp_path)["decoder.layers.mlp.router.weight"]
    flags = (
        {"moe_z_loss_coeff": COEFFICIENT}
        if kind == "z_loss"
        else {"moe_aux_loss_coeff": COEFFICIENT, "moe_router_load_balancing_type": kind}
    )
    found = []
    for options in (flags, {}):
        ranks = pool(layout.world).run(
            run_steps,
            model_dir=str(directory),
            layout=layout,
            batches=[rows],
            cut=Cut(micro_batch=2),
            sequence_parallel=layout.tensor > 1,
            **options,
        )
        found.append(assemble(ranks, atol=1e-6)["decoder.layers.mlp.router.weight"])
        if options:
            name = "z_loss" if kind == "z_loss" else "balance_loss"
            assert ranks[0]["router"][0][name] == pytest.approx(float(expected.detach()) / 2, rel=1e-4)
    assert relative_error(found[0] - found[1], wanted) <= 1e-4


def test_row_loss_does_not_depend_on_the_micro_batch(model: tuple[Path, torch.nn.Module]) -> None:
    """B66: with seq_aux_loss the router's gradient is the same for micro-batches of 1, 2 and 4 rows, and for two ranks."""
    directory, _ = model
    rows = with_trained_share(samples(8), 0.1)

    def router_gradient(layout: Layout, micro_batch: int, coefficient: float) -> torch.Tensor:
        ranks = pool(layout.world).run(
            run_steps,
            model_dir=str(directory),
            layout=layout,
            batches=[rows],
            cut=Cut(micro_batch=micro_batch),
            moe_aux_loss_coeff=coefficient,
            moe_router_load_balancing_type="seq_aux_loss",
        )
        return assemble(ranks, atol=1e-6)["decoder.layers.mlp.router.weight"]

    plain = router_gradient(Layout(), 1, 0.0)
    one = router_gradient(Layout(), 1, COEFFICIENT) - plain
    assert float(one.abs().max()) > 1e-4
    for layout, micro_batch in ((Layout(), 2), (Layout(), 4), (Layout(data=2), 2), (Layout(data=2), 4)):
        other = router_gradient(layout, micro_batch, COEFFICIENT) - plain
        assert relative_error(other, one) <= 1e-4, (layout, micro_batch)


def test_mean_is_over_moe_layers_alone(tmp_path: Path) -> None:
    """B73: four layers of which one has experts: the logged mean is that layer's value."""
    reference = write_model(tmp_path, moe=True, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    rows = samples(4)
    expected = float(expected_balance(reference, rows, 1).detach())
    for layout in (Layout(), Layout(pipeline=2)):
        ranks = pool(layout.world).run(
            run_steps, model_dir=str(tmp_path), layout=layout, batches=[rows], cut=Cut(), moe_aux_loss_coeff=0.01
        )
        assert ranks[0]["router"][0]["balance_loss"] == pytest.approx(expected, rel=1e-4)


LAYOUTS = [
    (Layout(), 1.0),
    (Layout(), 0.1),
    (Layout(data=2), 0.1),
    (Layout(tensor=2), 0.1),
    (Layout(data=2, expert=2), 1.0),
    (Layout(pipeline=2), 0.1),
    (Layout(tensor=2, expert=2, data=2), 0.1),
]


@pytest.mark.parametrize(("layout", "share"), LAYOUTS, ids=[f"{layout}-{share}" for layout, share in LAYOUTS])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_gradient_and_logged_value(
    model: tuple[Path, torch.nn.Module], layout: Layout, share: float, micro_batch: int, tmp_path: Path
) -> None:
    directory, reference = model
    rows = with_trained_share(samples(8), share)
    expected = expected_balance(reference, rows, micro_batch)
    reference.zero_grad()
    (COEFFICIENT * expected).backward()
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    wanted = reference_gradients(reference, tmp_path)
    found, logged = balance_gradient(directory, layout, rows, Cut(micro_batch=micro_batch))
    assert logged == pytest.approx(float(expected.detach()) / 2, rel=1e-4), "the log shows the mean over the two layers"
    router = relative_error(found["decoder.layers.mlp.router.weight"], wanted["decoder.layers.mlp.router.weight"])
    assert router <= 1e-4
    scale = max(float(value.abs().max()) for value in wanted.values())
    for key, value in wanted.items():
        assert float((found[key][: value.shape[0]] - value).abs().max()) <= 1e-4 * scale, key

