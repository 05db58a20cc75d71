"""What flags there are, their defaults, other names, help, and the way to YAML and back."""

import subprocess
import sys
from dataclasses import fields

import pytest
import yaml

from mcore_qwen3.config import (
    RunConfig,
    decay_iters,
    iter_flags,
    parse_args,
    to_flat_dict,
    to_yaml,
    warmup_iters,
    with_values,
)
from mcore_qwen3.config.aliases import ALIASES

# name: (our default, ms-swift 4's default where it differs, why). Same defaults carry no second and third entry.
DEFAULTS: dict[str, tuple[object, ...]] = {
    "load": (None,),
    "transformer_impl": ("auto", "transformer_engine", "runs without transformer-engine too"),
    "attention_backend": ("auto", "flash", "no flash kernel on CPU; on a GPU auto finds it"),
    "bf16": (None,),
    "moe_grouped_gemm": (True,),
    "moe_shared_expert_overlap": (False,),
    "moe_aux_loss_coeff": (0.0,),
    "moe_router_load_balancing_type": ("aux_loss", None, "ms-swift takes it from config.json, which has none"),
    "moe_z_loss_coeff": (None,),
    "moe_router_dtype": ("fp32",),
    "moe_router_enable_expert_bias": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_token_drop_policy": ("probs",),
    "moe_token_dispatcher_type": ("alltoall",),
    "cross_entropy_loss_fusion": (True,),
    "recompute_granularity": ("none", "selective", "nothing is computed twice unless asked for"),
    "recompute_modules": (("core_attn",),),
    "recompute_method": (None,),
    "recompute_num_layers": (None,),
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "virtual_pipeline_model_parallel_size": (None,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "pipeline_model_parallel_layout": (None,),
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (None, 1, "unset is resolved to 1, and said, since Megatron would take TP"),
    "sequence_parallel": (False,),
    "dataset": ((),),
    "val_dataset": ((),),
    "split_dataset_ratio": (0.0,),
    "interleave_prob": ((),),
    "use_hf": (None, False, "Hugging Face first, then ModelScope; the source is printed"),
    "columns": (None,),
    "strict": (False,),
    "system": (None,),
    "loss_scale": ("default",),
    "ignore_empty_think": (True, "for hybrid models", "one switch for every model"),
    "preserve_thinking": (False, True, "the model's own chat template drops the thinking of earlier turns"),
    "enable_thinking": (True,),
    "model_name": ((),),
    "model_author": ((),),
    "max_length": (None,),
    "packing": (False,),
    "packing_strategy": ("binpack",),
    "truncation_strategy": ("delete",),
    "num_workers": (4,),
    "dataset_num_proc": (1,),
    "data_cache_path": (None,),
    "micro_batch_size": (1,),
    "global_batch_size": (16,),
    "train_iters": (None,),
    "num_train_epochs": (None,),
    "eval_iters": (-1,),
    "eval_interval": (None,),
    "eval_on_start": (False,),
    "max_skipped_iters": (3, "no such flag", "Megatron stops at the first; a bad batch need not end a run"),
    "log_interval": (5,),
    "seed": (42,),
    "exit_grace": (900, "no such flag", "a stop signal saves first"),
    "exit_code_on_signal": (0, "no such flag", "a stop signal saves first"),
    "exit_duration_in_mins": (0.0, "no such flag", "Megatron's; unset there"),
    "optimizer": ("adam",),
    "lr": (1e-5,),
    "min_lr": (0.0,),
    "lr_decay_style": ("cosine",),
    "lr_decay_iters": (None,),
    "lr_warmup_iters": (0,),
    "lr_warmup_fraction": (None,),
    "lr_warmup_init": (0.0,),
    "lr_wsd_decay_iters": (None,),
    "lr_wsd_decay_style": ("exponential",),
    "lr_mult": ((), "no such flag", "rates by pattern; Megatron's parameter groups have an lr_mult"),
    "weight_decay": (0.1,),
    "start_weight_decay": (None,),
    "end_weight_decay": (None,),
    "weight_decay_incr_style": ("constant",),
    "adam_beta1": (0.9,),
    "adam_beta2": (0.95,),
    "adam_eps": (1e-8,),
    "sgd_momentum": (0.9,),
    "clip_grad": (1.0,),
    "freeze_parameters": ((),),
    "freeze_parameters_regex": (None,),
    "freeze_parameters_ratio": (0.0,),
    "trainable_parameters": ((),),
    "trainable_parameters_regex": (None,),
    "overlap_grad_reduce": (False,),
    "overlap_param_gather": (False,),
    "overlap_moe_expert_parallel_comm": (False, "no such flag", "Megatron's; unset there"),
    "tp_comm_overlap": (False,),
    "use_precision_aware_optimizer": (False,),
    "main_grads_dtype": ("fp32",),
    "main_params_dtype": ("fp32",),
    "exp_avg_dtype": ("fp32",),
    "exp_avg_sq_dtype": ("fp32",),
    "optimizer_cpu_offload": (False,),
    "optimizer_offload_fraction": (1.0,),
    "fp8_format": (None,),
    "fp8_recipe": ("delayed",),
    "cross_entropy_fusion_impl": ("native",),
    "moe_flex_dispatcher_backend": ("deepep", "no such flag", "Megatron's; ms-swift has moe_enable_deepep"),
    "moe_permute_fusion": (False,),
    "log_loss_per_dataset": (False, "no such flag", "enable_channel_loss splits by a column of the rows"),
    "report_to": ((), ("tensorboard",), "train_log.jsonl has it all; the package is not required"),
    "tensorboard_dir": (None,),
    "wandb_project": ("mcore-qwen3", "megatron-swift", "the project's own name"),
    "wandb_exp_name": (None,),
    "swanlab_project": ("mcore-qwen3", "megatron-swift", "the project's own name"),
    "swanlab_exp_name": (None,),
    "profile_step_start": (None, "no such flag", "Megatron's; there 10, with --profile"),
    "profile_step_end": (None, "no such flag", "Megatron's; there 12, with --profile"),
    "profile_ranks": ((0,), "no such flag", "Megatron's"),
    "save": (None,),
    "save_interval": (500,),
    "save_hf": (False, True, "a checkpoint is one torch_dist folder; convert writes the other form at any time"),
    "async_save": (False,),
    "save_total_limit": (None,),
    "metric_for_best_model": (None,),
    "greater_is_better": (None,),
    "no_save_optim": (False,),
    "no_save_rng": (False,),
    "no_load_optim": (False,),
    "no_load_rng": (False,),
    "use_checkpoint_opt_param_scheduler": (False, "no such flag", "Megatron's name; unset, this run's flags are used"),
    "finetune": (True,),
    "resume": ("auto", "no such flag", "the same command continues a run"),
    "device": ("auto", "no such flag", "runs on CPU too"),
    "dry_run": (False, "no such flag", "prints the plan"),
    "max_restarts": (0, "no such flag", "torchrun's own restarts are not used"),
    "step_timeout": (0.0, "no such flag", "what is too long depends on the model"),
    "distributed_timeout_minutes": (30.0, 300000, "ms-swift's ddp_timeout, in seconds, is for ever"),
}


def test_defaults_are_pinned() -> None:
    assert {flag.name: flag.default for flag in iter_flags()} == {name: row[0] for name, row in DEFAULTS.items()}
    assert [name for name, row in DEFAULTS.items() if len(row) not in (1, 3)] == []


def test_names_are_unique_and_documented() -> None:
    names = [flag.name for flag in iter_flags()]
    assert len(names) == len(set(names))
    assert [flag.name for flag in iter_flags() if len(flag.help) < 10] == []
    assert [flag.section for flag in iter_flags() if flag.section not in {f.name for f in fields(RunConfig)}] == []


def test_every_alias_names_a_flag_and_is_none() -> None:
    names = {flag.name for flag in iter_flags()}
    assert {alias.field for alias in ALIASES.values()} <= names
    assert set(ALIASES) & names == set()
    assert dict.fromkeys(("model", "mcore_model")) == dict.fromkeys(
        next(flag for flag in iter_flags() if flag.name == "load").aliases
    )


def test_sections_cannot_get_a_phantom_field() -> None:
    config = RunConfig()
    with pytest.raises(AttributeError):
        object.__setattr__(config.optim, "learning_rate", 1.0)
    with pytest.raises(TypeError):
        type(config.optim)(1e-5)  # keyword only


def test_yaml_reads_back_to_an_equal_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = with_values(
        RunConfig(),
        {
            "load": "模型 dir: #1",
            "dataset": ("a b.jsonl", "true"),
            "train_iters": 7,
            "lr": 3.3e-5,
            "adam_eps": 1e-12,
            "packing": True,
            "bf16": False,
            "lr_warmup_fraction": 0.1,
            "save": "1e-5",
            "resume": "null",
            "recompute_modules": ("layernorm", "mlp"),
            "virtual_pipeline_model_parallel_size": 2,
        },
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse_args(["--config", str(file)], "sft").config == config
    assert yaml.safe_load(to_yaml(config)) == to_flat_dict(config)


def test_with_values_refuses_a_name_that_is_no_flag() -> None:
    with pytest.raises(KeyError, match="learning_rate"):
        with_values(RunConfig(), {"learning_rate": 1.0})


def test_warm_up_in_steps() -> None:
    config = with_values(RunConfig(), {"train_iters": 100, "lr_warmup_fraction": 0.25})
    assert (decay_iters(config), warmup_iters(config)) == (100, 25)
    config = with_values(config, {"lr_decay_iters": 10})
    assert (decay_iters(config), warmup_iters(config)) == (10, 2)
    config = with_values(config, {"lr_warmup_fraction": None, "lr_warmup_iters": 3})
    assert warmup_iters(config) == 3


def test_help_is_grouped_and_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"], "sft")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert [flag.name for flag in iter_flags() if f"--{flag.name} " not in text] == []
    for heading in ("Model:", "Layout:", "Data:", "Training:", "Optimizer:", "Checkpoints:", "Start:"):
        assert heading in text
    assert "also --output_dir" in text


def test_config_imports_no_heavy_library() -> None:
    code = (
        "import sys, mcore_qwen3.config; "
        "print(sorted({'torch', 'megatron', 'transformers', 'numpy'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
