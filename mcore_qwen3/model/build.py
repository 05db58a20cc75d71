"""Build the model of this rank: the one file that constructs megatron's GPTModel."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_qwen3.arch.layout import ParallelLayout
from mcore_qwen3.arch.rope import RopeScaling
from mcore_qwen3.arch.rows import padded_vocab_size
from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.model.config import ModelOptions, transformer_config
from mcore_qwen3.model.provider import spec_provider
from mcore_qwen3.model.spec import block_spec


class Qwen3Model(GPTModel):
    """GPTModel whose vocabulary padding never enters the softmax.

    The embedding and the output layer are padded to a multiple of tensor parallel; the pad rows' logits are set to minus
    infinity before the cross entropy, so that the loss does not depend on tensor parallel.
    """

    true_vocab_size: int
    moe_layers: int  # of the whole model
    partly_frozen: bool = False  # some parameter of the whole model is not trained

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy per token, [1, T] from logits [T, 1, vocabulary / TP]."""
        _, own_valid = self._own_vocabulary(logits)
        if own_valid < logits.shape[-1]:
            pad = torch.arange(logits.shape[-1], device=logits.device) >= own_valid
            logits = logits.masked_fill(pad, float("-inf"))
        return super().compute_language_model_loss(labels, logits)

    def most_likely_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """The token with the largest logit at each position, the lowest of equal ones; pad rows never are one.

        Holds nothing of the size of the logits. Collective over the tensor-parallel ranks.

        Args:
            logits: [T, 1, vocabulary / TP], this rank's part.

        Returns:
            int64 [1, T]; `true_vocab_size`, which is no token, where a logit is not a number.
        """
        first, own_valid = self._own_vocabulary(logits)
        group = parallel_state.get_tensor_model_parallel_group()
        largest_T1 = logits.new_full(logits.shape[:2], float("-inf"))
        token_T1 = torch.full(logits.shape[:2], self.true_vocab_size, device=logits.device)
        if own_valid:
            largest_T1, token_T1 = logits[..., :own_valid].max(dim=-1)
            bad_T1 = largest_T1.isnan()  # made the largest of all, since a maximum over ranks may lose it
            largest_T1 = largest_T1.masked_fill(bad_T1, float("inf"))
            token_T1 = (token_T1 + first).masked_fill(bad_T1, self.true_vocab_size)
        over_all_T1 = largest_T1.clone()
        dist.all_reduce(over_all_T1, op=dist.ReduceOp.MAX, group=group)
        token_T1 = token_T1.masked_fill(largest_T1 != over_all_T1, self.true_vocab_size)
        dist.all_reduce(token_T1, op=dist.ReduceOp.MIN, group=group)
        return token_T1.transpose(0, 1)

    def _own_vocabulary(self, logits: torch.Tensor) -> tuple[int, int]:
        """(first token of this rank's part of the vocabulary, how many of its rows are tokens and not padding)."""
        rows = logits.shape[-1]
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        return first, min(rows, max(0, self.true_vocab_size - first))


def build_model(
    shape: ModelShape, layout: ParallelLayout, options: ModelOptions, chunk: int | None = None
) -> Qwen3Model:
    """Construct a part of the model with unset parameters; the groups must exist.

    Args:
        shape: the model.
        layout: sizes of the groups.
        options: the run's choices.
        chunk: which of this rank's parts, under an interleaved pipeline.

    Returns:
        The model in training mode, on the rank's device, with `true_vocab_size` set. Read a checkpoint into it before use.
    """
    config = transformer_config(shape, layout, options)
    if shape.rope_scaling is not None:
        _set_yarn(config, shape.rope_scaling)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # GPTModel's deprecation notice
    model = Qwen3Model(
        config=config,
        transformer_layer_spec=block_spec(config, spec_provider(options.modules), shape.moe_layers, chunk),
        vocab_size=padded_vocab_size(shape.vocab_size, layout.tensor),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="yarn" if shape.rope_scaling else "rope",
        rotary_base=shape.rope_theta,
        vp_stage=chunk,
    )
    model.true_vocab_size = shape.vocab_size
    model.moe_layers = sum(shape.moe_layers)
    if shape.rope_scaling is not None:
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module._yarn_concentration_factor = shape.rope_scaling.attention_scale
    return model


def _set_yarn(config: TransformerConfig, scaling: RopeScaling) -> None:
    """Give megatron's YaRN embedding its terms, which it looks for on the configuration."""
    config.yarn_rotary_scaling_factor = scaling.factor
    config.yarn_original_max_position_embeddings = scaling.original_max_position_embeddings
    config.yarn_beta_fast, config.yarn_beta_slow = scaling.beta_fast, scaling.beta_slow
    config.yarn_mscale = config.yarn_mscale_all_dim = None
    config.yarn_correction_range_round_to_int = scaling.truncate
    config.apply_rope_fusion = False  # transformer-engine's fused form for packed rows leaves the scale out


def build_chunks(shape: ModelShape, layout: ParallelLayout, options: ModelOptions) -> list[Qwen3Model]:
    """This rank's parts of the model: one, or `virtual_pipeline` of them under an interleaved pipeline."""
    if layout.virtual_pipeline == 1:
        return [build_model(shape, layout, options)]
    return [build_model(shape, layout, options, chunk) for chunk in range(layout.virtual_pipeline)]


def unwrapped(model: torch.nn.Module) -> Qwen3Model:
    """The model inside the data-parallel and half-precision wrappers."""
    while not isinstance(model, Qwen3Model):
        inner = model.module
        assert isinstance(inner, torch.nn.Module)
        model = inner
    return model
