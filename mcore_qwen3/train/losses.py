"""What is minimised, as the (sum, count, metrics) that megatron's schedules divide themselves."""

from __future__ import annotations

import torch


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor, datasets: torch.Tensor | None = None, num_datasets: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the trained tokens' losses and their number.

    The step's gradient is the gradient of (sum over the global batch) / (trained tokens of the global batch), whatever the
    cut into micro-batches and ranks; a micro-batch without trained tokens adds 0 to both.

    Args:
        loss_mask: float [1, T], 1 where the token is trained.
        losses: float [1, T], cross entropy of each position.
        datasets: int64 [1, T], the data set of each position; None: not asked for.
        num_datasets: how many there are.

    Returns:
        Sum (0-d, fp32), count (0-d, int32), and {"loss": [sum, count]} detached, for the log; behind them, where asked
        for, the sum of each data set and then the count of each.
    """
    trained = loss_mask.flatten() > 0
    # where, not a product: an untrained position can hold any value, and infinity times zero is not a number
    each = torch.where(trained, losses.flatten().float(), 0.0)
    total, count = each.sum(), trained.sum()
    told = torch.stack([total.detach(), count.to(total.dtype)])
    if datasets is not None:
        parts = each.new_zeros(2, num_datasets)
        parts.index_add_(1, datasets.flatten(), torch.stack([each.detach(), trained.to(each.dtype)]))
        told = torch.cat([told, parts.flatten()])
    return total, count.to(torch.int32), {"loss": told}
