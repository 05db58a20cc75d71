"""What is written, and what an earlier run left to continue from."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag

METRICS = ("loss", "ppl", "token_acc")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFlags:
    """Checkpoints: what is written, and what is continued."""

    save: str | None = flag(None, "folder to write to; unset: megatron_output/<name of load>")
    save_interval: int = flag(500, "steps between checkpoints; the last step is always saved", at_least=1)
    async_save: bool = flag(
        False, "train on while a checkpoint is written; takes host memory for a copy of what each rank writes"
    )
    save_total_limit: int | None = flag(
        None, "checkpoints to keep, the best one among them; older ones go when a new one is complete", at_least=1
    )
    metric_for_best_model: str | None = flag(
        None,
        "what checkpoints are compared by, in the evaluation at their step; the best one is kept",
        choices=METRICS,
    )
    greater_is_better: bool | None = flag(None, "how the metric is compared; unset: true for token_acc alone")
    save_hf: bool = flag(False, "write a Hugging Face folder beside every checkpoint")
    no_save_optim: bool = flag(False, "leave the optimizer state out: smaller, but it cannot be continued exactly")
    no_save_rng: bool = flag(False, "leave the random states out")
    no_load_optim: bool = flag(False, "continue without the saved optimizer state: moments start at zero")
    no_load_rng: bool = flag(False, "continue without the saved random states")
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "continue with the learning rate, schedule and weight decay of the checkpoint's run, not with the flags"
    )
    finetune: bool = flag(True, "how --load is read: true: weights only, step 0; false: step and state as well")
    resume: str = flag("auto", "auto: continue a complete checkpoint in save; never; or the checkpoint's path")
