"""AdamW, SGD, decay groups and learning rates by pattern, against their formulas on transformers' gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.option_checks import refusal, train_with
from helpers.ranks import pool
from helpers.tiny import reference_step, samples, write_model
from helpers.training import Layout, assemble, read_all, relative_error

RATES, DECAYS = [0.01, 0.03, 0.02], [0.1, 0.2, 0.3]
CLIP = 0.5
# Patterns over this project's names, and the part of transformers' names that they mean.
FACTORS = {"*.router.weight": (0.1, ".mlp.gate."), "decoder.layers.1.*norm_weight": (2.0, ".layers.1.input_layernorm.")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    directory = tmp_path_factory.mktemp("moe")
    return str(directory), write_model(directory, moe=True)


def factor_of(name: str) -> float:
    return next((factor for factor, part in FACTORS.values() if part in name), 1.0)


class Rule:
    """What an optimizer does with one parameter, written out."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def adam(self, w: torch.Tensor, g: torch.Tensor, lr: float, decay: float, step: int) -> torch.Tensor:
        m = 0.9 * self.state.get("m", 0.0) + 0.1 * g
        v = 0.95 * self.state.get("v", 0.0) + 0.05 * g * g
        self.state = {"m": m, "v": v}
        corrected = (v / (1 - 0.95**step)).sqrt() + 1e-8
        return w - lr * decay * w - lr * (m / (1 - 0.9**step)) / corrected

    def sgd(self, w: torch.Tensor, g: torch.Tensor, lr: float, decay: float, step: int) -> torch.Tensor:
        self.state["buffer"] = 0.8 * self.state.get("buffer", 0.0) + g + decay * w
        return w - lr * self.state["buffer"]


def wanted_weights(
    model: Any, batches: list[Any], optimizer: str, directory: Path
) -> tuple[dict[str, Any], list[float]]:
    """Weights after the steps and each step's gradient norm; the model is put back."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rules = {name: Rule() for name in before}
    norms = []
    for step, rows in enumerate(batches, 1):
        reference_step(model, rows)
        gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        norms.append(norm)
        for name, parameter in model.named_parameters():
            clipped = gradients[name] * min(1.0, CLIP / norm)
            decay = DECAYS[step - 1] if parameter.dim() > 1 else 0.0
            rate = RATES[step - 1] * factor_of(name)
            new = getattr(rules[name], optimizer)(parameter.detach().double(), clipped, rate, decay, step)
            parameter.data.copy_(new)
    model.save_pretrained(directory)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(before[name])
    return read_all(directory), norms


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_are_those_of_the_formula(model: tuple[str, Any], optimizer: str, tmp_path: Path) -> None:
    directory, reference = model
    batches = [samples(4, seed=seed) for seed in range(3)]
    wanted, norms = wanted_weights(reference, batches, optimizer, tmp_path)
    settings = {
        "optimizer": optimizer,
        "sgd_momentum": 0.8,
        "clip_grad": CLIP,
        "lr_mult": {pattern: factor for pattern, (factor, _) in FACTORS.items()},
    }
    args = {"model_dir": directory, "layout": Layout(), "batches": batches, "rates": RATES, "decays": DECAYS}
    found = pool(1).run(train_with, **args, settings=settings)[0]
    assert found["grad_norms"] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > CLIP, "or clipping would not be seen"
    before = read_all(directory)
    weights = {key: value for key, value in assemble([found]).items() if not key.startswith("optimizer.")}
    assert weights.keys() == wanted.keys()
    # Of the way that each tensor went; Adam's first steps have the size of the rate whatever the gradient's size.
    for key in wanted:
        error = relative_error(weights[key] - before[key], wanted[key] - before[key])
        assert error < (2e-2 if optimizer == "adam" else 1e-3), (key, error)


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({}, {"exp_avg", "exp_avg_sq"}),
        ({"optimizer": "sgd"}, {"momentum_buffer"}),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, set()),
    ],
    ids=["adam", "sgd", "sgd without momentum"],
)
def test_a_run_continues_bitwise(
    model: tuple[str, Any], settings: dict[str, Any], keys: set[str], tmp_path: Path
) -> None:
    batches = [samples(4, seed=seed) for seed in range(4)]
    settings = settings | {"lr_mult": {"*.router.weight": 0.1}}
    args = {"model_dir": model[0], "layout": Layout(), "rates": [0.01, 0.02, 0.03, 0.01], "settings": settings}
    args["decays"] = [0.1, 0.2, 0.3, 0.4]
    whole = pool(1).run(train_with, **args, batches=batches)[0]
    save = str(tmp_path / "save")
    first = pool(1).run(train_with, **args, batches=batches[:2], save=save)[0]
    found = {key.split(".")[2] for key, *_ in first["gradients"] if key.startswith("optimizer.")}
    assert found == keys
    rest = pool(1).run(train_with, **args, batches=batches, skip=2, resume=f"{save}/iter_0000002")[0]
    assert rest["losses"] == whole["losses"][2:]
    pairs = zip(rest["gradients"], whole["gradients"], strict=True)
    assert all(ours[0] == theirs[0] and torch.equal(ours[3], theirs[3]) for ours, theirs in pairs)


def test_patterns_that_cannot_be_meant_are_refused(model: tuple[str, Any]) -> None:
    text = pool(1).run(refusal, model_dir=model[0], factors={"*.gate.weight": 0.1})[0]
    assert "what lr_mult names must be a parameter of the model; seen: *.gate.weight" in text
    assert "decoder.layers.0.mlp.router.weight" in text or "embedding.word_embeddings.weight" in text
    text = pool(1).run(refusal, model_dir=model[0], factors={"*.router.*": 0.1, "decoder.*": 0.5})[0]
    assert (
        "a parameter has one learning rate; seen: --lr_mult *.router.*=0.1 and decoder.*=0.5 for decoder.layers.0"
        in text
    )
    assert pool(1).run(refusal, model_dir=model[0], factors={"*.router.*": 0.1, "decoder.layers.0.*": 0.1})[0] == ""
