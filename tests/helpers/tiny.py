"""Tiny models written by transformers, and rows with uneven numbers of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 128

GEOMETRY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # on purpose not hidden / heads
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@dataclass(frozen=True)
class Sample:
    """Token ids of one conversation and which of them are trained."""

    ids: np.ndarray
    mask: np.ndarray = field(repr=False)


def hf_model(*, moe: bool, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random transformers model in fp32; norm weights are random too, or a swapped norm could not be seen."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    if moe:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**GEOMETRY, **EXPERTS, **changes}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**GEOMETRY, **changes}))
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4.0)  # sharper logits and routing than the start values give
    return model


def write_model(directory: Path, *, moe: bool, **changes: Any) -> torch.nn.Module:
    """Write the model where the trainer reads it; returns the transformers model."""
    model = hf_model(moe=moe, **changes)
    model.save_pretrained(directory)
    return model


def samples(number: int, *, seed: int = 0, longest: int = 40, vocabulary: int = VOCABULARY) -> list[Sample]:
    """Random rows of different lengths; each has its own number of trained tokens, some very few."""
    generator = np.random.default_rng(seed)
    made = []
    for index in range(number):
        length = int(generator.integers(6, longest))
        mask = np.zeros(length, dtype=np.uint8)
        trained = 1 + (index * 5) % (length - 2)
        mask[length - trained :] = 1
        made.append(Sample(generator.integers(2, vocabulary, length).astype(np.int64), mask))
    return made


def token_losses(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Cross entropy of the trained targets of one sample, by transformers' logits."""
    ids = torch.from_numpy(sample.ids)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return losses[torch.from_numpy(sample.mask[1:]).bool()]


def reference_step(model: torch.nn.Module, rows: list[Sample]) -> float:
    """Loss over the whole batch (sum / trained tokens), its gradients left in the model."""
    count = sum(int(sample.mask[1:].sum()) for sample in rows)
    model.zero_grad()
    total = 0.0
    for sample in rows:
        loss = token_losses(model, sample).sum() / count
        loss.backward()
        total += float(loss.detach())
    return total
