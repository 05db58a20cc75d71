"""Functions that run inside a rank: the router alone, on given logits."""

from __future__ import annotations

from typing import Any

import torch


def route(
    micro_batches: list[list[list[float]]],
    *,
    topk: int,
    kind: str = "aux_loss",
    padded: list[int] | None = None,
    capacity: float | None = None,
) -> dict[str, Any]:
    """Route micro-batches of one step through one layer's router.

    Args:
        micro_batches: logits [tokens][experts] of each.
        topk: experts a token.
        kind: of the balance loss.
        padded: number of padding tokens at the end of each micro-batch; None = no mask is given.
        capacity: expert capacity factor.

    Returns:
        The router's metrics, and the gradient of the balance loss at each logit.
    """
    from helpers.model_checks import new_config
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mcore_qwen3.model.router import BalancedRouter, Step, reduce_metrics, start_step

    experts = len(micro_batches[0][0])
    *_, config = new_config(
        {"num_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": 8, "norm_topk_prob": topk > 1},
        moe_aux_loss_coeff=1.0,
        moe_router_load_balancing_type=kind,
        moe_expert_capacity_factor=capacity,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    router = BalancedRouter(config, groups)
    router.set_layer_number(1)
    start_step(Step(scale=1.0 / len(micro_batches), replicas=1, row_length=len(micro_batches[0]), rows=1))
    gradients = []
    for number, rows in enumerate(micro_batches):
        logits = torch.tensor(rows)[:, None].requires_grad_()
        mask = None
        if padded is not None:
            mask = torch.zeros(len(rows), 1, dtype=torch.bool)
            mask[len(rows) - padded[number] :] = padded[number] > 0
        probs, _ = router.routing(logits, padding_mask=mask)
        (probs * 0).sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad[:, 0].tolist())
    return {**reduce_metrics(len(micro_batches), 1), "gradients": gradients}


def context_parallel_loss(losses: list[float], trained: list[int], ranks: int) -> tuple[float, int]:
    """(sum, count) over the ranks of a context-parallel group for one segment, by the trainer's own cut and loss."""
    from mcore_qwen3.model.context_parallel import own_tokens
    from mcore_qwen3.train.losses import token_loss

    ends = torch.tensor([0, len(losses)], dtype=torch.int32)
    mask = torch.zeros(1, len(losses))
    mask[0, trained] = 1
    total, count = 0.0, 0
    for rank in range(ranks):
        own = own_tokens(ends, ranks, rank)
        part, number, _ = token_loss(mask[:, own], torch.tensor([losses])[:, own])
        total, count = total + float(part), count + int(number)
    return total, count
