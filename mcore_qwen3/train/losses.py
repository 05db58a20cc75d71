"""What is minimised, as the (sum, count, metrics) that megatron's schedules divide themselves."""

from __future__ import annotations

import torch


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the trained tokens' losses and their number.

    The step's gradient is the gradient of (sum over the global batch) / (trained tokens of the global batch), whatever the
    cut into micro-batches and ranks; a micro-batch without trained tokens adds 0 to both.

    Args:
        loss_mask: float [1, T], 1 where the token is trained.
        losses: float [1, T], cross entropy of each position.

    Returns:
        Sum (0-d, fp32), count (0-d, int32), and {"loss": [sum, count]} detached, for the log.
    """
    trained = loss_mask.flatten() > 0
    # where, not a product: an untrained position can hold any value, and infinity times zero is not a number
    total = torch.where(trained, losses.flatten().float(), 0.0).sum()
    count = trained.sum()
    return total, count.to(torch.int32), {"loss": torch.stack([total.detach(), count.to(total.dtype)])}
