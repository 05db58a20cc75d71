"""The numbers of a fixed evaluation set.

Shapes: T tokens of a micro-batch; the batch axis is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mcore_qwen3.data.batches import MicroBatch, StepBatch
from mcore_qwen3.model.build import Qwen3Model, unwrapped
from mcore_qwen3.train.losses import token_loss
from mcore_qwen3.train.memory import names_what_to_lower
from mcore_qwen3.train.optimizer import Chunks
from mcore_qwen3.train.step import model_inputs, run_schedule, sum_over_ranks


@dataclass(frozen=True, slots=True)
class EvalSums:
    """Sums over evaluation batches, over all ranks.

    Attributes:
        loss: of the token losses.
        trained_tokens: tokens with a loss.
        correct: those of them that the model finds most likely; of tokens with equal logits the lowest counts.
    """

    loss: float = 0.0
    trained_tokens: int = 0
    correct: int = 0

    def __add__(self, other: EvalSums) -> EvalSums:
        return EvalSums(
            self.loss + other.loss, self.trained_tokens + other.trained_tokens, self.correct + other.correct
        )

    def metrics(self) -> dict[str, float]:
        """eval_loss (nats a trained token), eval_ppl = exp(eval_loss), eval_token_acc (share of the trained tokens)."""
        loss = self.loss / self.trained_tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) is past the largest float
        return {"eval_loss": loss, "eval_ppl": perplexity, "eval_token_acc": self.correct / self.trained_tokens}


@torch.no_grad()
def evaluate_step(chunks: Chunks, batch: StepBatch) -> EvalSums:
    """The sums of one evaluation batch; no gradients, no balance loss. Collective."""
    for chunk in chunks:
        chunk.eval()
    with names_what_to_lower(batch, chunks[0].config.recompute_granularity):
        results = run_schedule(chunks, batch.micro_batches, _forward_step, forward_only=True)
    loss, trained, correct = sum_over_ranks(results, 3)
    return EvalSums(loss, round(trained), round(correct))


def _forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    arguments, labels, loss_mask = model_inputs(next(batches), model)
    return model(**arguments, labels=None), partial(_sums, unwrapped(model), labels, loss_mask)


def _sums(
    model: Qwen3Model, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As `token_loss`, from the last stage's logits [1, T, vocabulary / TP], with the number of right tokens added."""
    logits_T1V = logits.transpose(0, 1)
    right = (model.most_likely_tokens(logits_T1V) == labels) & (loss_mask > 0)
    # Behind the search for the largest: megatron's cross entropy overwrites fp32 logits.
    losses = model.compute_language_model_loss(labels, logits_T1V)
    total, count, reported = token_loss(loss_mask, losses)
    return total, count, {"loss": torch.cat([reported["loss"], right.sum().to(total.dtype)[None]])}
