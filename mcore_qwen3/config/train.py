"""How long a run is and what happens along the way."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainFlags:
    """Training: batch, length of the run, evaluation, log, and how it stops."""

    micro_batch_size: int = flag(1, "rows a rank computes at once", at_least=1)
    global_batch_size: int = flag(16, "rows a step, over all ranks", at_least=1)
    train_iters: int | None = flag(None, "optimizer steps of the whole run; or give num_train_epochs", at_least=1)
    num_train_epochs: int | None = flag(
        None, "passes over the training rows, instead of train_iters; the steps come from the packed count", at_least=1
    )
    eval_iters: int = flag(
        -1, "global batches an evaluation reads; -1: all validation rows, 0: no evaluation", at_least=-1
    )
    eval_interval: int | None = flag(None, "steps between evaluations; unset: save_interval", at_least=1)
    eval_on_start: bool = flag(False, "evaluate before the first step too")
    max_skipped_iters: int = flag(
        3,
        "steps in a row that may be skipped, the next one stops the run: loss or gradient not finite, loss exactly 0, "
        "or no trained token",
        at_least=0,
    )
    log_interval: int = flag(5, "steps between log lines", at_least=1)
    seed: int = flag(42, "seed of the data order and of everything random", at_least=0)
    exit_grace: int = flag(900, "seconds the ranks get to save after a stop signal", at_least=0)
    exit_code_on_signal: int = flag(0, "exit code after a signal stopped and saved the run", at_least=0, at_most=255)
    exit_duration_in_mins: float = flag(
        0.0,
        "minutes after the start of the command at which the run saves and ends, with exit code 0; 0: no limit",
        at_least=0,
    )
