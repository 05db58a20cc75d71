"""AdamW and the schedule of its learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimFlags:
    """Optimizer: AdamW and the schedule of its learning rate."""

    lr: float = flag(1e-5, "highest learning rate", at_least=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0)
    lr_decay_style: str = flag(
        "cosine", "form of the decay after the warm-up", choices=("cosine", "linear", "constant")
    )
    lr_decay_iters: int | None = flag(None, "step at which min_lr is reached; unset: train_iters", at_least=1)
    lr_warmup_iters: int = flag(0, "steps over which lr rises from 0", at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a share of lr_decay_iters, instead of lr_warmup_iters", at_least=0, below=1
    )
    weight_decay: float = flag(0.1, "decoupled weight decay of matrices", at_least=0)
    adam_beta1: float = flag(0.9, "decay of the first moment", at_least=0, below=1)
    adam_beta2: float = flag(0.95, "decay of the second moment", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "added to the root of the second moment", at_least=0)
    clip_grad: float = flag(1.0, "largest gradient norm; 0: no clipping", at_least=0)
