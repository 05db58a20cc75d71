"""What the estimates must know about a run beside its model and its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_qwen3.arch import ParallelLayout, row_multiple
from mcore_qwen3.config import RunConfig
from mcore_qwen3.planner.calibration import load_calibration


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Names and values as the flags, where there is one.

    Attributes:
        modules: "torch" or "transformer_engine".
        on_cuda: on a GPU; False: on CPU, where attention and SwiGLU run unfused.
        bf16: weights and activations in bf16; False: fp32.
        row_length: tokens of a row, padding included, over all ranks that share it.
        effective_length: sum(Li^2) / sum(Li) over the samples Li of the rows: the length that attention costs and, under
            context parallel on CPU, masks grow with. A row of one sample: row_length.
        moe_imbalance: with EP above 1, tokens that the experts of the heaviest rank receive, as a multiple of an even share;
            1: even.
        gradient_bytes: bytes a parameter of the gradient buffer: 4, or 2.
        master_bytes: bytes a parameter of the optimizer's own copy of the weights: 4, 2 where only the 16 bits that the
            bf16 weight lacks are kept, 0 where the optimizer works on the weights (fp32).
        moment_bytes: bytes a parameter of Adam's two moments together: 8, or 4 in bf16.
        optimizer_offload_fraction: share of master weights and moments that lies in host memory.
        train_type: "full", or "lora": adapters of rank lora_rank beside every linear layer but router and output, the rest
            frozen.
    """

    modules: str = "transformer_engine"
    on_cuda: bool = True
    bf16: bool = True
    row_length: int
    effective_length: float
    micro_batch_size: int = 1
    global_batch_size: int = 1
    recompute_granularity: str = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    cross_entropy_loss_fusion: bool = True
    moe_grouped_gemm: bool = True
    moe_router_dtype: str = "fp32"
    moe_token_dispatcher_type: str = "alltoall"
    moe_imbalance: float = 1.0
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    gradient_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 8
    optimizer_offload_fraction: float = 0.0
    train_type: str = "full"
    lora_rank: int = 8

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or activation."""
        return 2 if self.bf16 else 4

    def expert_load(self, layout: ParallelLayout) -> float:
        """Tokens that the busiest rank's experts receive, as a multiple of an even share: exactly 1 at EP 1, where every rank
        has all experts."""
        return self.within_capacity(self.moe_imbalance if layout.expert > 1 else 1.0)

    def within_capacity(self, load: float) -> float:
        """What a capacity leaves of a load: it bounds it, and is the load where experts are padded to it."""
        factor = self.moe_expert_capacity_factor
        if factor is None:
            return load
        return factor if self.moe_pad_expert_input_to_capacity else min(load, factor)


def settings_of(config: RunConfig, layout: ParallelLayout, *, modules: str, on_cuda: bool) -> Settings:
    """The settings of a run. Rows are taken to be full, and of one sample each; experts to be as uneven as in published runs.

    Args:
        config: a resolved run: `max_length` and `bf16` are filled in.
        layout: its layout, which the length of a row is rounded up for.
        modules: "torch" or "transformer_engine", as chosen for the run.
        on_cuda: whether it runs on GPUs.
    """
    model, train = config.model, config.train
    assert config.data.max_length is not None and model.bf16 is not None, "the run is not resolved"
    multiple = row_multiple(layout.tensor, layout.sequence_parallel, layout.context)
    row = -(-config.data.max_length // multiple) * multiple
    return Settings(
        modules=modules,
        on_cuda=on_cuda,
        bf16=model.bf16,
        row_length=row,
        effective_length=float(row),
        micro_batch_size=train.micro_batch_size,
        global_batch_size=train.global_batch_size,
        recompute_granularity=model.recompute_granularity,
        recompute_modules=model.recompute_modules,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        cross_entropy_loss_fusion=model.cross_entropy_loss_fusion,
        moe_grouped_gemm=model.moe_grouped_gemm,
        moe_router_dtype=model.moe_router_dtype,
        moe_token_dispatcher_type=model.moe_token_dispatcher_type,
        moe_expert_capacity_factor=model.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=model.moe_pad_expert_input_to_capacity,
        moe_imbalance=load_calibration().natural_imbalance,
        moe_aux_loss_coeff=0.0 if model.moe_router_load_balancing_type == "none" else model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        **optimizer_bytes(config),
    )


_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def optimizer_bytes(config: RunConfig) -> dict[str, Any]:
    """The settings that tell what the optimizer keeps, by its flags.

    The precision-aware optimizer keeps 16 bits of a master weight: the half that the bf16 weight lacks (megatron-core 0.19.2,
    `store_param_remainders`), or fp16. SGD has one buffer, none without momentum.
    """
    optim, numerics = config.optim, config.numerics
    moments = _WIDTH[numerics.exp_avg_dtype] + _WIDTH[numerics.exp_avg_sq_dtype]
    if optim.optimizer == "sgd":
        moments = 4 if optim.sgd_momentum else 0
    master = 2 if numerics.use_precision_aware_optimizer else 4
    return {
        "gradient_bytes": _WIDTH[numerics.main_grads_dtype],
        "master_bytes": master if config.model.bf16 else 0,
        "moment_bytes": moments,
        "optimizer_offload_fraction": numerics.optimizer_offload_fraction if numerics.optimizer_cpu_offload else 0.0,
    }
