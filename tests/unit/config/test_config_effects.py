"""Each flag that does nothing in a run is said once, and only if the user set it."""

import dataclasses

import pytest

from mcore_qwen3.config import Facts, flags_without_effect, iter_flags, parse_args
from mcore_qwen3.config.effects import _TABLE

MOE_GPU = Facts(is_moe=True, has_mlp=False, device="cuda", resumes=True, reads_load=True, evaluates=True)
BASE = ["--load", "m", "--dataset", "a", "--train_iters", "20"]


def lines(words: str, facts: Facts = MOE_GPU) -> list[str]:
    parsed = parse_args([*BASE, *words.split()], "sft")
    return flags_without_effect(parsed.config, parsed.explicit, facts)


@pytest.mark.parametrize(
    ("words", "changes", "flag", "because"),
    [
        ("--moe_shared_expert_overlap true", {}, "moe_shared_expert_overlap", "no shared expert"),
        ("--moe_aux_loss_coeff 0.01", {"is_moe": False}, "moe_aux_loss_coeff", "dense"),
        ("--moe_grouped_gemm true", {"is_moe": False}, "moe_grouped_gemm", "dense"),
        ("--expert_tensor_parallel_size 1", {"is_moe": False}, "expert_tensor_parallel_size", "dense"),
        ("--attention_backend flash", {"device": "cpu"}, "attention_backend", "on CPU"),
        ("--recompute_num_layers 2", {}, "recompute_num_layers", "recompute_granularity is not full"),
        (
            "--recompute_num_layers 2 --recompute_granularity selective", {},
            "recompute_num_layers", "recompute_granularity is not full",
        ),
        (
            "--recompute_modules moe --recompute_granularity full", {},
            "recompute_modules", "recompute_granularity is not selective",
        ),
        ("--moe_router_dtype fp64", {"is_moe": False}, "moe_router_dtype", "dense"),
        ("--moe_token_dispatcher_type flex", {"is_moe": False}, "moe_token_dispatcher_type", "dense"),
        (
            "--moe_aux_loss_coeff 0.1 --moe_router_load_balancing_type none", {},
            "moe_aux_loss_coeff", "moe_router_load_balancing_type is none",
        ),
        (
            "--moe_router_load_balancing_type global_aux_loss", {},
            "moe_router_load_balancing_type", "moe_aux_loss_coeff is 0",
        ),
        ("--moe_token_drop_policy position", {}, "moe_token_drop_policy", "no token is dropped"),
        ("--min_lr 1e-6 --lr_decay_style constant", {}, "min_lr", "constant"),
        ("--val_dataset v --split_dataset_ratio 0.1", {}, "split_dataset_ratio", "val_dataset"),
        ("--eval_interval 5 --eval_iters 0", {}, "eval_interval", "eval_iters is 0"),
        ("--no_load_optim true", {"resumes": False}, "no_load_optim", "no earlier run"),
        (
            "--use_checkpoint_opt_param_scheduler true", {"resumes": False},
            "use_checkpoint_opt_param_scheduler", "no earlier run",
        ),
        ("--finetune true", {"reads_load": False}, "finetune", "--load is not read"),
        ("--eval_iters 5", {"evaluates": False}, "eval_iters", "no validation data"),
        ("--metric_for_best_model loss", {"evaluates": False}, "metric_for_best_model", "no validation data"),
        ("--greater_is_better true", {}, "greater_is_better", "metric_for_best_model is unset"),
        ("--packing_strategy sequential", {}, "packing_strategy", "packing is off"),
        ("--optimizer sgd --adam_beta1 0.5", {}, "adam_beta1", "optimizer is sgd"),
        ("--sgd_momentum 0.5", {}, "sgd_momentum", "optimizer is adam"),
        ("--lr_warmup_init 1e-6", {}, "lr_warmup_init", "no warm-up"),
        ("--lr_wsd_decay_style linear", {}, "lr_wsd_decay_style", "lr_decay_style is not WSD"),
        (
            "--weight_decay 0.2 --weight_decay_incr_style linear --start_weight_decay 0 --end_weight_decay 1", {},
            "weight_decay", "start_weight_decay and end_weight_decay are used",
        ),
        ("--trainable_parameters decoder", {}, "trainable_parameters", "nothing is frozen"),
        ("--optimizer_offload_fraction 0.5", {}, "optimizer_offload_fraction", "optimizer_cpu_offload is false"),
        ("--fp8_recipe mxfp8", {}, "fp8_recipe", "fp8_format is unset"),
        (
            "--cross_entropy_fusion_impl te --cross_entropy_loss_fusion false", {},
            "cross_entropy_fusion_impl", "cross_entropy_loss_fusion is false",
        ),
        ("--moe_flex_dispatcher_backend hybridep", {}, "moe_flex_dispatcher_backend", "is not flex"),
        ("--moe_permute_fusion true", {"is_moe": False}, "moe_permute_fusion", "dense"),
        (
            "--overlap_moe_expert_parallel_comm true", {"is_moe": False},
            "overlap_moe_expert_parallel_comm", "dense",
        ),
        ("--tensorboard_dir x", {}, "tensorboard_dir", "does not name tensorboard"),
        ("--wandb_project x", {}, "wandb_project", "does not name wandb"),
        ("--swanlab_exp_name x --report_to wandb", {}, "swanlab_exp_name", "does not name swanlab"),
        ("--profile_ranks 1", {}, "profile_ranks", "profile_step_start is unset"),
        ("--loss_scale all", {"raw_text": True}, "loss_scale", "raw text"),
        ("--enable_thinking false --ignore_empty_think true", {}, "ignore_empty_think", "enable_thinking is false"),
    ],
)  # fmt: skip
def test_said_once_with_the_reason(words: str, changes: dict, flag: str, because: str) -> None:
    (line,) = lines(words, dataclasses.replace(MOE_GPU, **changes))
    assert line.startswith(f"--{flag} has no effect in this run: ") and because in line


def test_dense_model_hides_the_second_reason() -> None:
    found = lines("--moe_shared_expert_overlap true", dataclasses.replace(MOE_GPU, is_moe=False))
    assert found == ["--moe_shared_expert_overlap has no effect in this run: the model is dense"]


@pytest.mark.parametrize(
    ("modules", "is_moe", "line"),
    [
        (
            "core_attn moe_act moe",
            False,
            "--recompute_modules moe_act moe has no effect in this run: the model is dense",
        ),
        ("mlp layernorm", True, "--recompute_modules mlp has no effect in this run: every layer has experts"),
        ("mlp layernorm", False, None),
        ("moe core_attn", True, None),
    ],
)
def test_modules_to_recompute_that_the_model_does_not_have(modules: str, is_moe: bool, line: str | None) -> None:
    words = f"--recompute_granularity selective --recompute_modules {modules}"
    found = lines(words, dataclasses.replace(MOE_GPU, is_moe=is_moe, has_mlp=not is_moe))
    assert found == ([] if line is None else [line])


def test_a_mixed_model_recomputes_both_kinds_of_layers() -> None:
    words = "--recompute_granularity selective --recompute_modules moe mlp"
    assert lines(words, dataclasses.replace(MOE_GPU, has_mlp=True)) == []


def test_nothing_is_said_of_flags_that_work_or_were_not_set() -> None:
    assert lines("--sequence_parallel true --tensor_model_parallel_size 2 --moe_aux_loss_coeff 0.01") == []
    working = "--moe_aux_loss_coeff 0.01 --moe_router_load_balancing_type seq_aux_loss --moe_z_loss_coeff 0.001"
    assert lines(f"{working} --moe_expert_capacity_factor 2 --moe_token_drop_policy position") == []
    assert (
        lines("", Facts(is_moe=False, has_mlp=True, device="cpu", resumes=False, reads_load=False, evaluates=False))
        == []
    )


def test_the_table_names_flags_only() -> None:
    names = {flag.name for flag in iter_flags()}
    assert [name for effect in _TABLE for name in effect.flags if name not in names] == []
