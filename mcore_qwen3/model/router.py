"""The router, with a balance loss whose weight does not depend on how many tokens are trained."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from mcore_qwen3.runtime.device import current_device


class BalancedRouter(TopKRouter):
    """Megatron's top-k router with one number changed: the scale of the balance loss under per-token loss.

    Megatron divides every gradient of a step by the step's trained tokens. To undo that for the balance loss it multiplies
    the loss by the micro-batch's routed positions, so masking prompts (or padding) changes the coefficient: with 10 % of the
    tokens trained it is ten times too strong. The exact factor is trained tokens / (micro-batches x data-parallel ranks), the
    same for every micro-batch; then the gradient is coefficient x the mean loss over the step's micro-batches.
    """

    step_scale: torch.Tensor | None = None

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        reduce_group: torch.distributed.ProcessGroup,
        needs_dp_avg: bool = True,
        valid_token_count: Any = None,
    ) -> torch.Tensor:
        """As megatron's, with the count replaced so that its product with the group size is `step_scale`."""
        assert BalancedRouter.step_scale is not None, "set_step_scale was not called before the forward pass"
        count = BalancedRouter.step_scale / self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, aux_loss_name, reduce_group, needs_dp_avg, count
        )


def set_step_scale(trained_tokens: int, num_microbatches: int, data_parallel_size: int) -> None:
    """Tell the routers the coming step's factor.

    Args:
        trained_tokens: tokens with a loss in the global batch.
        num_microbatches: micro-batches of one rank in the step.
        data_parallel_size: ranks that see different micro-batches.
    """
    value = trained_tokens / (num_microbatches * data_parallel_size)
    BalancedRouter.step_scale = torch.tensor(value, device=current_device())
