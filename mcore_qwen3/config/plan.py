"""Settings of `megatron plan`, which looks for a layout and starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from mcore_qwen3.config.checks import check_schedule
from mcore_qwen3.config.flags import flag
from mcore_qwen3.config.run import RunConfig
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFlags:
    """Cluster: the GPUs that the plan is for."""

    gpus: int | None = flag(None, "GPUs of the job; with min_gpus: the most to look at (unset: 4096)", at_least=1)
    gpu: str = flag("h100-80", "kind of GPU: a name such as h100-80, or custom with the flags below")
    gpus_per_node: int | None = flag(None, "GPUs that share the fast links; unset: as the kind has", at_least=1)
    gpu_memory: float | None = flag(None, "GiB of one GPU; unset: as the kind has", at_least=1)
    gpu_tflops: float | None = flag(None, "dense bf16 peak of one GPU in TFLOP/s; unset: as the kind has", at_least=1)
    intra_bw: float | None = flag(None, "GB/s a GPU sends inside a node; unset: as the kind has", at_least=0.1)
    inter_bw: float | None = flag(None, "GB/s a GPU sends between nodes; unset: as the kind has", at_least=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumptionFlags:
    """Assumptions: what the flags of a run do not tell."""

    train_type: str = flag("full", "full, or lora (memory and time alone)", choices=("full", "lora"))
    lora_rank: int = flag(8, "with lora: rank of the adapters on all linear layers", at_least=1)
    moe_imbalance: float | None = flag(
        None, "tokens of the busiest rank's experts / an even share; unset: as published runs had", at_least=1
    )
    effective_length: int | None = flag(
        None, "packed rows: sum of squared sample lengths / sum of lengths; unset: one sample a row", at_least=1
    )
    calibrate: str | None = flag(None, "train_log.jsonl of your own run on this GPU: its speed replaces the table's")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionFlags:
    """Question: what is answered, and how."""

    min_gpus: bool = flag(False, "find the fewest GPUs that fit instead")
    search_optimizer: bool = flag(
        False, "look at bf16 gradients and moments and at Adam in host memory too, whose state cannot be saved"
    )
    explain: tuple[str, ...] = flag((), "the whole account of one layout, such as TP2 PP8 EP8 MBS1 full")
    json: bool = flag(False, "print JSON")
    output: str | None = flag(None, "write the YAML of the best layout to this file")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(RunConfig):
    """Settings of `megatron plan`: all of a run, of which each that is given is fixed, and its own."""

    cluster: ClusterFlags = field(default_factory=ClusterFlags)
    assumptions: AssumptionFlags = field(default_factory=AssumptionFlags)
    question: QuestionFlags = field(default_factory=QuestionFlags)

    def run_config(self) -> RunConfig:
        """The settings of the run that is planned."""
        return RunConfig(**{section.name: getattr(self, section.name) for section in fields(RunConfig)})


def check_plan(config: PlanConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    question = config.question
    if not config.model.load:
        raise ConfigError("megatron plan needs --model", fix="--model Qwen3-30B-A3B, a config.json or a checkpoint")
    if config.cluster.gpus is None and not question.min_gpus:
        raise ConfigError("megatron plan needs a number of GPUs, or has to find it", fix="--gpus N, or --min_gpus true")
    if question.explain and question.min_gpus:
        raise ConfigError("--explain has one layout on --gpus", seen="--min_gpus true", fix="drop one of the two")
    if question.explain and question.search_optimizer:
        raise ConfigError("--explain has one optimizer", seen="--search_optimizer true", fix="drop one of the two")
    if config.model.bf16 is False or config.launch.device == "cpu":
        seen = "--bf16 false" if config.model.bf16 is False else "--device cpu"
        raise ConfigError("plans are for bf16 on GPUs", seen=seen, fix="drop it; --dry_run true counts any run's state")
    if config.parallel.pipeline_model_parallel_layout:
        raise ConfigError(
            "megatron plan looks for cuts by the other flags",
            seen=f"--pipeline_model_parallel_layout {config.parallel.pipeline_model_parallel_layout}",
            fix="drop it; --dry_run true counts the state of a run with it",
        )
    if config.assumptions.train_type == "lora" and question.output:
        raise ConfigError(
            "a plan for adapters gives no file: training them is not there yet",
            seen=f"--train_type lora --output {question.output}",
            fix="drop --output",
        )
    check_schedule(config)
