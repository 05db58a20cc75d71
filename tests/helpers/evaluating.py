"""Functions that run inside the ranks of a pool: losses without training."""

from __future__ import annotations

from typing import Any

from helpers.tiny import Sample
from helpers.training import Cut, Layout, build, step_batch


def loss_sum(model_dir: str, layout: Layout, samples: list[Sample], cut: Cut, **options: Any) -> tuple[float, int]:
    """(sum of token losses, trained tokens) of the samples, cut and packed as told."""
    from megatron.core import parallel_state

    from mcore_qwen3.train.evaluation import evaluate_step
    from mcore_qwen3.train.optimizer import wrap_for_data_parallel

    resolved, models = build(model_dir, layout, **options)
    rank = parallel_state.get_data_parallel_rank()
    batch = step_batch(samples, cut, resolved.data, rank, resolved.context, resolved.tensor)
    sums = evaluate_step(wrap_for_data_parallel(models), batch)
    return sums.loss, sums.trained_tokens


def evaluation_mean(model_dir: str, layout: Layout, prepared: Any, micro_batch: int, global_batch: int) -> float:
    """Mean loss of the trained tokens of a whole validation set, by the trainer's own batches."""
    from megatron.core import parallel_state

    from mcore_qwen3.arch import resolve_batch
    from mcore_qwen3.data.batches import eval_batches
    from mcore_qwen3.train.evaluation import EvalSums, evaluate_step
    from mcore_qwen3.train.optimizer import wrap_for_data_parallel

    resolved, models = build(model_dir, layout)
    chunks = wrap_for_data_parallel(models)
    plan = resolve_batch(micro_batch, global_batch, resolved.data)
    batches = eval_batches(prepared, plan, dp_rank=parallel_state.get_data_parallel_rank(), eval_iters=-1)
    return sum((evaluate_step(chunks, batch) for batch in batches), start=EvalSums()).metrics()["eval_loss"]
