"""A plain training loop of transformers and torch alone: what `megatron compare` holds this project's loop against.

Nothing of this project computes here: the data's batches are read, and the model, its gradients, clipping and AdamW are
transformers' and torch's. The learning rate is worked out again from the flags' definitions.

Shapes: T tokens of a micro-batch (its rows laid end to end), N heads, D head_dim, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mcore_qwen3.data.batches import StepBatch
from mcore_qwen3.data.micro_batch import MicroBatch

_ATTENTION = "sdpa_recorded"  # torch's attention, as transformers calls it, with a look at what goes in and comes out


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainSettings:
    """Names as the flags; the warm-up and the decay in steps."""

    steps: int
    optimizer: str
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_iters: int
    lr_wsd_decay_iters: int
    lr_wsd_decay_style: str
    weight_decay: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    train_iters: int
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    sgd_momentum: float
    clip_grad: float


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Loss (sum over trained tokens / their number), gradient norm before clipping, learning rate."""

    loss: float
    grad_norm: float
    lr: float


Activations = dict[tuple[str, int], torch.Tensor]
"""(kind, layer) -> fp32 [T, ...] of the first micro-batch; kinds and layers as `train.first_step.Activation` has them."""


def load_plain_model(directory: Path, device: torch.device) -> torch.nn.Module:
    """The model in fp32 with the attention that transformers takes by itself (torch's)."""
    AttentionInterface.register(_ATTENTION, _recorded_attention)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=_ATTENTION)
    return model.to(device).train()


def plain_loop(
    model: torch.nn.Module,
    ranks: Sequence[Iterator[StepBatch]],
    settings: PlainSettings,
    after_first_backward: Callable[[Activations], None],
) -> Iterator[PlainStep]:
    """Train, a step each time it is asked.

    Args:
        model: from `load_plain_model`.
        ranks: the steps of each data-parallel rank: their micro-batches together are the step's.
        settings: what to do.
        after_first_backward: called once, when the gradients of the first step are complete and nothing is updated.
    """
    optimizer = _optimizer(model, settings)
    for step in range(settings.steps):
        parts = [next(batches) for batches in ranks]
        trained = parts[0].global_trained_tokens
        optimizer.zero_grad()
        recorder = _Recorder(model) if step == 0 else None
        total = 0.0
        for batch in [batch for part in parts for batch in part.micro_batches]:
            losses_T = token_losses(model, batch)
            if recorder is not None:
                recorder.finish(losses_T)
            loss = losses_T[batch.loss_mask[0].to(losses_T.device) > 0].sum() / max(trained, 1)
            loss.backward()
            total += float(loss.detach())
        if recorder is not None:
            after_first_backward(recorder.activations)
        rate, decay = learning_rate(settings, step), weight_decay(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = decay if group["decayed"] else 0.0
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad or math.inf))
        if trained:
            optimizer.step()
        yield PlainStep(total, norm, rate)


def _optimizer(model: torch.nn.Module, settings: PlainSettings) -> torch.optim.Optimizer:
    """Matrices have weight decay, vectors (norms) have none."""
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() > 1) == decayed], "decayed": decayed}
        for decayed in (True, False)
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.sgd_momentum)
    return torch.optim.AdamW(groups, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)


def token_losses(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Cross entropy of each place's label, [T]; every segment has its own positions and sees itself alone."""
    device = next(model.parameters()).device
    segment_T = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.diff())
    sees_TT = (segment_T[:, None] == segment_T).tril()
    logits_1TV = model(
        input_ids=batch.tokens.to(device),
        position_ids=batch.position_ids.to(device),
        attention_mask=sees_TT[None, None].to(device),
        use_cache=False,
    ).logits
    return torch.nn.functional.cross_entropy(logits_1TV[0].float(), batch.labels[0].to(device), reduction="none")


def learning_rate(settings: PlainSettings, finished: int) -> float:
    """The rate of the step after `finished` finished ones, by the definitions of Megatron's flags."""
    warmup, decay, style = settings.lr_warmup_iters, settings.lr_decay_iters, settings.lr_decay_style
    if finished < warmup:
        start = settings.lr_warmup_init
        return start + (settings.lr - start) * finished / warmup
    if style == "constant":
        return settings.lr
    if finished > decay:
        return settings.min_lr
    if style == "inverse-square-root":
        return max(settings.min_lr, settings.lr * (max(warmup, 1) / max(finished, 1)) ** 0.5)
    if style == "WSD":
        style, begin = settings.lr_wsd_decay_style, decay - settings.lr_wsd_decay_iters
        done = max(0, finished - begin) / settings.lr_wsd_decay_iters
    else:
        done = (finished - warmup) / (decay - warmup)
    left = {
        "linear": 1 - done,
        "cosine": math.cos(math.pi * done / 2) ** 2,
        "exponential": 2 ** (1 - done) - 1,
        "minus_sqrt": 1 - done**0.5,
    }[style]
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def weight_decay(settings: PlainSettings, finished: int) -> float:
    """The weight decay of that step, likewise."""
    if settings.weight_decay_incr_style == "constant":
        return settings.weight_decay
    done = min(1.0, finished / settings.train_iters)
    share = done if settings.weight_decay_incr_style == "linear" else math.sin(math.pi * done / 2) ** 2
    return settings.start_weight_decay + (settings.end_weight_decay - settings.start_weight_decay) * share


_attention_seen: Callable[[int, dict[str, torch.Tensor]], None] | None = None


def _recorded_attention(
    module: Any, query_1NTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTD: torch.Tensor, *args: Any, **named: Any
) -> Any:
    output = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query_1NTD, key_1GTD, value_1GTD, *args, **named)
    if _attention_seen is not None:
        taken = {"query": query_1NTD, "key": key_1GTD, "value": value_1GTD}
        seen = {kind: tensor[0].transpose(0, 1) for kind, tensor in taken.items()}
        _attention_seen(module.layer_idx, seen | {"context": output[0][0]})
    return output


class _Recorder:
    """Hooks that keep what the modules give for the first micro-batch."""

    def __init__(self, model: Any) -> None:
        global _attention_seen
        self.activations: Activations = {}
        self._handles = [
            model.model.embed_tokens.register_forward_hook(self._rows("embedding")),
            model.model.norm.register_forward_hook(self._rows("final_norm")),
        ]
        for number, layer in enumerate(model.model.layers):
            named = {"attention": layer.self_attn, "mlp": layer.mlp, "layer": layer}
            self._handles += [module.register_forward_hook(self._rows(kind, number)) for kind, module in named.items()]
            if hasattr(layer.mlp, "gate"):
                self._handles.append(layer.mlp.gate.register_forward_hook(self._router(number)))
        _attention_seen = self._attention

    def finish(self, losses_T: torch.Tensor) -> None:
        """Take the losses, and look no more; the second call does nothing."""
        global _attention_seen
        if self._handles:
            self._keep("loss", -1, losses_T)
        for handle in self._handles:
            handle.remove()
        self._handles, _attention_seen = [], None

    def _keep(self, kind: str, layer: int, values: torch.Tensor) -> None:
        self.activations[kind, layer] = values.detach().float().cpu().clone()

    def _rows(self, kind: str, layer: int = -1) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self._keep(kind, layer, first.reshape(-1, first.shape[-1]))

        return hook

    def _router(self, layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
            logits_TE, weights_TK, experts_TK = output
            chosen_TE = torch.zeros_like(logits_TE, dtype=weights_TK.dtype)
            self._keep("router", layer, chosen_TE.scatter(1, experts_TK, weights_TK))

        return hook

    def _attention(self, layer: int, seen: dict[str, torch.Tensor]) -> None:
        for kind, values in seen.items():
            self._keep(kind, layer, values)
