"""RMSNorm by its formula, and the router's probabilities by known numbers."""

from __future__ import annotations

import pytest
import torch
from helpers.model_checks import rms_norm, routing_weights
from helpers.ranks import pool


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float, sequence_parallel: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 3, 8, generator=generator), torch.rand(8, generator=generator) + 0.5
    args = {"hidden": hidden, "weight": weight, "eps": eps, "sequence_parallel": sequence_parallel}
    output, gradient, mark = pool(1).run(rms_norm, **args)[0]
    normed = hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(output.double(), normed * weight.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), normed.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert mark is sequence_parallel


@pytest.mark.parametrize(
    ("norm_topk_prob", "weights"), [(True, [0.731059, 0.268941]), (False, [0.643914, 0.236883])], ids=["norm", "plain"]
)
def test_expert_weights_follow_norm_topk_prob(norm_topk_prob: bool, weights: list[float]) -> None:
    # Known fault B13: softmax before or after top-k is norm_topk_prob's business, in both directions.
    args = {"norm_topk_prob": norm_topk_prob, "logits": [2.0, 1.0, 0.0, -1.0]}
    router, found = pool(1).run(routing_weights, **args)[0]
    assert router == "BalancedRouter"
    assert found == pytest.approx([*weights, 0, 0], abs=5e-7)
