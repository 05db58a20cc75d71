"""Published memory of real runs, and what the account's two fitted constants are fitted to.

Every entry is a run that somebody else published, with its source; none was measured by this project. Sources: repository and
file, or thread. Sizes in GiB are as printed there; where the text leaves open whether GB is 10^9 or 2^30 bytes, 2^30 is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_qwen3.arch import ModelShape, ParallelLayout, resolve_layout
from mcore_qwen3.planner.memory import CONTEXT_GIB, GIB, Account, communicators, heaviest_account
from mcore_qwen3.planner.settings import Settings

_COMMON: dict[str, Any] = {
    "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "initializer_range": 0.02, "torch_dtype": "bfloat16",
}  # fmt: skip
_MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 128, "moe_router_topk": 8, "norm_topk_prob": True}
_DENSE_14B: dict[str, Any] = {"hidden_size": 5120, "num_attention_heads": 40, "num_query_groups": 8}
SHAPES = {
    "Qwen3-30B-A3B": ModelShape(
        **_COMMON, **_MOE, num_layers=48, hidden_size=2048, num_attention_heads=32, num_query_groups=4,
        ffn_hidden_size=6144, moe_ffn_hidden_size=768,
    ),
    "Qwen3-235B-A22B": ModelShape(
        **_COMMON, **_MOE, num_layers=94, hidden_size=4096, num_attention_heads=64, num_query_groups=4,
        ffn_hidden_size=12288, moe_ffn_hidden_size=1536,
    ),
    "Qwen3-14B": ModelShape(
        **_COMMON, **_DENSE_14B, model_type="qwen3", num_layers=40, ffn_hidden_size=17408
    ),
    # Without its QKV biases, with query and key norms that it does not have: less than 0.01 % of its parameters.
    "Qwen2.5-14B": ModelShape(
        **_COMMON | {"vocab_size": 152064}, **_DENSE_14B, model_type="qwen3", num_layers=48, ffn_hidden_size=13824
    ),
}  # fmt: skip

FULL: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
# The recipes of the XTuner study and of the model zoo: norms recomputed with the experts' activation, or the whole layer.
NORM_ACT: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act")}
NORM_MOE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe")}
# bf16 gradients, and a master weight of the 16 bits that the bf16 weight lacks (transformer-engine 2.1 and later).
PRECISION_AWARE: dict[str, Any] = {"gradient_bytes": 2, "master_bytes": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One published run. `layout` are arguments of resolve_layout, `settings` fields of Settings.

    `gib` is what it reported; None where only `fits` is known: whether a GPU of 80 GB held it.
    """

    name: str
    model: str
    world: int
    layout: dict[str, Any]
    row_length: int
    global_batch_size: int
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    gib: float | None = None
    fits: bool | None = None

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return SHAPES[self.model]

    @property
    def resolved(self) -> ParallelLayout:
        """The layout."""
        return resolve_layout(self.world, shape=self.shape, **self.layout)

    def account(self) -> Account:
        """Its heaviest stage."""
        settings = Settings(
            row_length=self.row_length,
            effective_length=self.row_length,
            global_batch_size=self.global_batch_size,
            **self.settings,
        )
        return heaviest_account(self.shape, self.resolved, settings)


_SWIFT = "modelscope/ms-swift"
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge"
_XTUNER = "InternLM/xtuner docs/en/benchmark/megatron_moe_benchmark.md"

MEASURED = (
    Run(
        name="30B-A3B full, 16 x A800", model="Qwen3-30B-A3B", world=16, layout={"tensor": 2, "expert": 8},
        row_length=8192, global_batch_size=16, settings=FULL, gib=60, source="QwenLM/Qwen3 issue 1278",
    ),
    Run(
        name="30B-A3B full, 8 x 80 GB, capacity 2", model="Qwen3-30B-A3B", world=8,
        layout={"tensor": 4, "pipeline": 2, "expert": 4, "first_stage_layers": 25, "last_stage_layers": 23},
        row_length=8192, global_batch_size=4, settings=FULL | {"moe_expert_capacity_factor": 2.0}, gib=76,
        source=f"{_SWIFT} examples/megatron/mcore_bridge/full/moe.sh",
    ),
    Run(
        name="30B-A3B pretraining, 16 x H100, HybridEP and graphs", model="Qwen3-30B-A3B", world=16,
        layout={"expert": 16}, row_length=4096, global_batch_size=1024, settings=PRECISION_AWARE, gib=62.166,
        source=f"{_BRIDGE} examples/model_verification_cards/qwen3-30b-a3b/card.yaml",
    ),
    Run(
        name="30B-A3B pretraining, 16 x H100, alltoall", model="Qwen3-30B-A3B", world=16, layout={"expert": 16},
        row_length=4096, global_batch_size=1024, settings=PRECISION_AWARE, gib=61.351e9 / GIB,
        source=f"{_BRIDGE} skills/nemo-mbridge-perf-*/SKILL.md (smoke run, peak allocated)",
    ),
    Run(
        name="30B-A3B LoRA rank 8, 2 x 80 GB", model="Qwen3-30B-A3B", world=2, layout={"expert": 2},
        row_length=2048, global_batch_size=16,
        settings=FULL | {"train_type": "lora", "lora_rank": 8, "micro_batch_size": 8}, gib=62,
        source=f"{_SWIFT} examples/megatron/lora/moe.sh",
    ),
    Run(
        name="30B-A3B, Adam on CPU, 4 x 80 GB", model="Qwen3-30B-A3B", world=4, layout={"expert": 4},
        row_length=8192, global_batch_size=16, settings=FULL | {"optimizer_offload_fraction": 1.0}, gib=75,
        source=f"{_SWIFT} examples/megatron/moe/qwen3_moe_offload.sh",
    ),
    Run(
        name="30B-A3B, 16 x A100 (length and recompute assumed as in the first)", model="Qwen3-30B-A3B", world=16,
        layout={"tensor": 4, "expert": 4}, row_length=8192, global_batch_size=16, settings=FULL, gib=67,
        source=f"{_SWIFT} issue 8288",
    ),
    Run(
        name="Qwen2.5-14B full, 8 x A800", model="Qwen2.5-14B", world=8,
        layout={"tensor": 4, "sequence_parallel": True}, row_length=8192, global_batch_size=16,
        settings={"recompute_granularity": "selective"}, gib=64,
        source=f"{_SWIFT} docs/source_en/Megatron-SWIFT/Quick-start.md",
    ),
    Run(
        name="Qwen3-14B full, 8 x H20", model="Qwen3-14B", world=8,
        layout={"tensor": 4, "sequence_parallel": True}, row_length=8192, global_batch_size=16,
        settings={"recompute_granularity": "selective"}, gib=52, source=f"{_SWIFT} examples/megatron/fp8/benchmark.sh",
    ),
)  # fmt: skip

_ENDS = {"account_for_embedding": True, "account_for_loss": True}


def _large(name: str, layout: dict[str, Any], settings: dict[str, Any], fits: bool, source: str = _XTUNER) -> Run:
    """A 235B-A22B run of 256 GPUs with rows of 4,096 tokens."""
    return Run(
        name=name, model="Qwen3-235B-A22B", world=256, layout=layout, row_length=4096, global_batch_size=4096,
        settings=settings, fits=fits, source=source,
    )  # fmt: skip


_DEEP = {"pipeline": 32, "virtual_pipeline": 3, "expert": 8, **_ENDS}
FITS_OR_NOT = (
    _large("235B-A22B TP1 PP32x3, norm + act", _DEEP, NORM_ACT, fits=False),
    _large("235B-A22B TP1 PP32x3, norm + moe", _DEEP, NORM_MOE, fits=True),
    _large("235B-A22B TP2 PP32x3, norm + act", {"tensor": 2, **_DEEP}, NORM_ACT, fits=True),
    _large("235B-A22B TP2 PP8, norm + act", {"tensor": 2, "pipeline": 8, "expert": 8, **_ENDS}, NORM_ACT, fits=True),
    _large(
        "235B-A22B TP2 PP8x4, norm + act",
        {"tensor": 2, "pipeline": 8, "virtual_pipeline": 4, "expert": 8, **_ENDS},
        NORM_ACT,
        fits=False,
    ),
    _large(
        "235B-A22B TP4 PP8x4, none",
        {"tensor": 4, "pipeline": 8, "virtual_pipeline": 4, "expert": 8, **_ENDS},
        {},
        fits=True,
    ),
    _large("235B-A22B TP1 PP32x3, full, micro-batch 4", _DEEP, FULL | {"micro_batch_size": 4}, fits=True),
    _large("235B-A22B TP1 PP32x3, full, micro-batch 8", _DEEP, FULL | {"micro_batch_size": 8}, fits=True),
    _large(
        "235B-A22B TP2 PP8x4 EP32, norm + act",
        {"tensor": 2, "pipeline": 8, "virtual_pipeline": 4, "expert": 32, **_ENDS},
        NORM_ACT,
        fits=True,
        source="yanring/Megatron-MoE-ModelZoo best_practice/qwen3/readme.md",
    ),
    Run(
        name="235B-A22B TP4 PP2 EP8 on 64 (language part of a VL model)", model="Qwen3-235B-A22B", world=64,
        layout={"tensor": 4, "pipeline": 2, "expert": 8}, row_length=8192, global_batch_size=64, settings=FULL,
        fits=False, source=f"{_SWIFT} issue 6558",
    ),
    Run(
        name="30B-A3B EP8 on 8, none", model="Qwen3-30B-A3B", world=8, layout={"expert": 8}, row_length=4096,
        global_batch_size=256, fits=False, source="NVIDIA/Megatron-LM issue 2762",
    ),
)  # fmt: skip
USABLE_80GB_GIB = 79.1


@dataclass(frozen=True, slots=True)
class Fit:
    """The two constants of the account that no formula gives; see planner/memory.py."""

    fragmentation_share: float
    communicator_gib: float

    def gib(self, run: Run) -> float:
        """The account's total of a run with these constants."""
        return run.account().formula / GIB * (1 + self.fragmentation_share) + (
            communicators(run.resolved) * self.communicator_gib + CONTEXT_GIB
        )


def fit(runs: Sequence[Run]) -> Fit:
    """The constants, neither below 0, with the least sum of squares of (account / reported - 1) over the runs."""
    formula = [run.account().formula / GIB / run.gib for run in runs if run.gib]
    groups = [communicators(run.resolved) / run.gib for run in runs if run.gib]
    rest = [1 - f - CONTEXT_GIB / run.gib for f, run in zip(formula, runs, strict=True) if run.gib]
    ff, fg, gg = _dot(formula, formula), _dot(formula, groups), _dot(groups, groups)
    fr, gr = _dot(formula, rest), _dot(groups, rest)
    determinant = ff * gg - fg * fg
    share, size = (fr * gg - gr * fg) / determinant, (gr * ff - fr * fg) / determinant
    if size < 0:
        share, size = max(0.0, fr / ff), 0.0
    elif share < 0:
        share, size = 0.0, max(0.0, gr / gg)
    return Fit(share, size)


def left_out(runs: Sequence[Run]) -> list[float]:
    """Account / reported for each run, with constants fitted to the others: the error to expect of a new run."""
    return [fit([*runs[:at], *runs[at + 1 :]]).gib(run) / run.gib for at, run in enumerate(runs) if run.gib]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
