"""Each option of optimizer, numerics and memory: it reaches megatron, and where it cannot go the run is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from conftest import model_config
from helpers.flag_checks import megatron_fields, names_of_datasets, userbuffers_asked_for
from helpers.ranks import pool

from mcore_qwen3.cli.estimate import memory_lines
from mcore_qwen3.cli.resolve import resolve
from mcore_qwen3.config import parse_args
from mcore_qwen3.errors import ConfigError

MODEL, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"
PRECISE = "--use_precision_aware_optimizer true"
FLEX = "--moe_token_dispatcher_type flex"
# Words of the command line -> what the named fields are then; without the words each is something else.
REACHES: dict[str, dict[str, Any]] = {
    "--overlap_grad_reduce true": {f"{DDP}.overlap_grad_reduce": True},
    "--overlap_grad_reduce true --overlap_param_gather true": {f"{DDP}.overlap_param_gather": True},
    "--expert_model_parallel_size 2 --overlap_moe_expert_parallel_comm true": {
        f"{MODEL}.overlap_moe_expert_parallel_comm": True
    },
    "--tp_comm_overlap true": {f"{MODEL}.tp_comm_overlap": True},
    PRECISE: {f"{OPTIMIZER}.use_precision_aware_optimizer": True},
    f"{PRECISE} --main_grads_dtype bf16": {
        f"{OPTIMIZER}.main_grads_dtype": "torch.bfloat16",
        f"{DDP}.grad_reduce_in_fp32": False,
    },
    f"{PRECISE} --main_params_dtype fp16": {f"{OPTIMIZER}.main_params_dtype": "torch.float16"},
    f"{PRECISE} --exp_avg_dtype bf16": {f"{OPTIMIZER}.exp_avg_dtype": "torch.bfloat16"},
    f"{PRECISE} --exp_avg_sq_dtype fp8": {f"{OPTIMIZER}.exp_avg_sq_dtype": "torch.uint8"},
    f"{PRECISE} --optimizer_cpu_offload true": {
        f"{OPTIMIZER}.optimizer_cpu_offload": True,
        f"{OPTIMIZER}.optimizer_offload_fraction": 1.0,
    },
    f"{PRECISE} --optimizer_cpu_offload true --optimizer_offload_fraction 0.5": {f"{OPTIMIZER}.optimizer_offload_fraction": 0.5},
    "--fp8_format hybrid": {f"{MODEL}.fp8": "hybrid"},
    "--fp8_format e4m3 --fp8_recipe blockwise": {
        f"{MODEL}.fp8_recipe": "blockwise",
        f"{OPTIMIZER}.fp8_recipe": "blockwise",
    },
    "--attention_backend flash": {f"{MODEL}.attention_backend": "AttnBackend.flash"},
    "--cross_entropy_loss_fusion false": {f"{MODEL}.cross_entropy_loss_fusion": False},
    "--cross_entropy_fusion_impl te": {f"{MODEL}.cross_entropy_fusion_impl": "te"},
    FLEX: {f"{MODEL}.moe_token_dispatcher_type": "flex"},
    f"{FLEX} --moe_flex_dispatcher_backend hybridep": {f"{MODEL}.moe_flex_dispatcher_backend": "hybridep"},
    "--moe_permute_fusion true": {f"{MODEL}.moe_permute_fusion": True},
    "--pipeline_model_parallel_size 2 --pipeline_model_parallel_layout Et|t|t|tL": {
        f"{MODEL}.pipeline_model_parallel_layout": "Et|t|t|tL",
        f"{MODEL}.virtual_pipeline_model_parallel_size": 2,
    },
    "--optimizer sgd": {f"{OPTIMIZER}.optimizer": "sgd"},
    "--sgd_momentum 0.5": {f"{OPTIMIZER}.sgd_momentum": 0.5},
    "--adam_beta1 0.5": {f"{OPTIMIZER}.adam_beta1": 0.5},
    "--adam_beta2 0.5": {f"{OPTIMIZER}.adam_beta2": 0.5},
    "--adam_eps 0.5": {f"{OPTIMIZER}.adam_eps": 0.5},
    "--clip_grad 0.5": {f"{OPTIMIZER}.clip_grad": 0.5},
    "--weight_decay 0.5": {"WeightDecay.start": 0.5, "WeightDecay.end": 0.5, f"{OPTIMIZER}.weight_decay": 0.5},
    "--weight_decay_incr_style cosine --start_weight_decay 0.2 --end_weight_decay 0.4": {
        "WeightDecay.style": "cosine", "WeightDecay.start": 0.2, "WeightDecay.end": 0.4, "WeightDecay.iters": 10,
    },
    "--lr 0.5": {"LearningRate.lr": 0.5},
    "--min_lr 1e-6": {"LearningRate.min_lr": 1e-6},
    "--lr_decay_style inverse-square-root": {"LearningRate.style": "inverse-square-root"},
    "--lr_decay_iters 5": {"LearningRate.decay_iters": 5},
    "--lr_warmup_iters 2 --lr_warmup_init 1e-6": {"LearningRate.warmup_iters": 2, "LearningRate.warmup_init": 1e-6},
    "--lr_warmup_fraction 0.3": {"LearningRate.warmup_iters": 3},
    "--lr_decay_style WSD --lr_wsd_decay_iters 3 --lr_wsd_decay_style linear": {
        "LearningRate.style": "WSD", "LearningRate.wsd_decay_iters": 3, "LearningRate.wsd_decay_style": "linear",
    },
    "--freeze_parameters embedding. decoder.": {"Freezing.freeze_parameters": ("embedding.", "decoder.")},
    "--freeze_parameters_regex x": {"Freezing.freeze_parameters_regex": "x"},
    "--freeze_parameters_ratio 0.5": {"Freezing.freeze_parameters_ratio": 0.5},
    "--trainable_parameters output_layer": {"Freezing.trainable_parameters": ("output_layer",)},
    "--trainable_parameters_regex x": {"Freezing.trainable_parameters_regex": "x"},
}  # fmt: skip


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(json.dumps(model_config()))
    return folder


@pytest.mark.parametrize("words", REACHES)
def test_an_option_reaches_megatron(words: str, moe: Path) -> None:
    def fields(text: str) -> dict[str, Any]:
        world = 2 if "parallel_size 2" in text else 1
        made: dict[str, Any] = pool(1).run(megatron_fields, model_dir=str(moe), words=text.split(), world_size=world)[0]
        return {name: made[name] for name in REACHES[words]}

    assert fields(words) == REACHES[words]
    before = fields("")
    assert [name for name, value in REACHES[words].items() if before[name] == value] == []


def test_userbuffers_have_the_size_of_a_micro_batch(moe: Path) -> None:
    words = "--tp_comm_overlap true --packing true --max_length 102 --micro_batch_size 3 --fp8_format hybrid"
    layout = "--tensor_model_parallel_size 2 --context_parallel_size 2"
    told = pool(1).run(userbuffers_asked_for, model_dir=str(moe), words=f"{words} {layout}".split(), world_size=4)[0]
    # 102 tokens become 104, a multiple of CP x TP; each context-parallel rank has half of the three rows.
    assert told == {"shape": [156, 32], "tp_size": 2, "quantization_modes": ["fp8"], "bootstrap_backend": "nccl"}


def test_data_sets_are_told_apart_by_names_of_their_own() -> None:
    words = ["--dataset", "a", "b", "a", "--log_loss_per_dataset"]
    assert pool(1).run(names_of_datasets, words=words)[0] == ("a", "b", "a (2)")
    assert pool(1).run(names_of_datasets, words=words[:-1])[0] == ()


def refused(moe: Path, words: str, *, world_size: int = 2, device: str = "cuda", dry: str = "true") -> str:
    argv = ["--load", str(moe), "--dataset", "a.jsonl", "--train_iters", "10", "--dry_run", dry]
    with pytest.raises(ConfigError) as caught:
        parsed = parse_args([*argv, "--device", device, *words.split()], "sft")
        resolve(parsed, world_size, {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": "/cache"})
    return str(caught.value)


# By values alone, with what is refused and a part of what is said.
BY_VALUE = {
    "--overlap_param_gather true": "overlap_param_gather goes with overlap_grad_reduce",
    "--main_grads_dtype bf16": "need the precision-aware optimizer; seen: --main_grads_dtype bf16",
    "--exp_avg_dtype bf16 --exp_avg_sq_dtype fp8": "seen: --exp_avg_dtype bf16 --exp_avg_sq_dtype fp8",
    "--optimizer_cpu_offload true": "the offload is a part of the precision-aware optimizer",
    f"{PRECISE} --optimizer sgd": "the precision-aware optimizer is Adam",
    "--lr_decay_style WSD": "WSD needs the number of steps",
    "--lr_decay_style WSD --lr_wsd_decay_iters 9 --lr_warmup_iters 2": "no longer than what the warm-up leaves",
    "--lr 1e-5 --lr_warmup_init 1e-4 --lr_warmup_iters 2": "lr must not be below min_lr or lr_warmup_init",
    "--start_weight_decay 0.1": "belong to a weight decay that changes",
    "--weight_decay_incr_style linear --start_weight_decay 0.1": "needs a start and an end",
    "--weight_decay_incr_style linear --start_weight_decay 0.2 --end_weight_decay 0.1": "an end that is not lower",
    "--lr_mult router": "lr_mult is PATTERN=FACTOR",
    "--lr_mult a=-1": "lr_mult is PATTERN=FACTOR",
    "--lr_mult a=nan": "lr_mult is PATTERN=FACTOR",
    "--lr_mult a=1 a=2": "each pattern once",
    "--freeze_parameters_regex (": "freeze_parameters_regex is a regular expression",
    "--trainable_parameters_regex (": "trainable_parameters_regex is a regular expression",
    "--profile_step_end 3": "a trace goes from profile_step_start",
    "--profile_step_start 5 --profile_step_end 3": "a trace goes from profile_step_start to a later step",
    "--profile_step_start 5 --profile_ranks 0 2": "profile_ranks are ranks of the run; seen: --profile_ranks 2, 2 ranks",
}


@pytest.mark.parametrize("words", BY_VALUE)
def test_values_that_cannot_go_together_are_refused(words: str, moe: Path) -> None:
    assert BY_VALUE[words] in refused(moe, words, device="cpu")


ON_CPU = {
    f"{PRECISE} --no_save_optim true": "--use_precision_aware_optimizer true; device cpu",
    "--fp8_format hybrid": "--fp8_format hybrid; device cpu",
    "--tp_comm_overlap true": "--tp_comm_overlap true; device cpu",
    "--cross_entropy_fusion_impl te": "--cross_entropy_fusion_impl te; device cpu",
    "--moe_permute_fusion true": "--moe_permute_fusion true; device cpu",
    FLEX: "the token dispatcher flex runs on GPUs only",
}


@pytest.mark.parametrize("words", ON_CPU)
def test_what_needs_a_gpu_is_refused_on_cpu(words: str, moe: Path) -> None:
    assert ON_CPU[words] in refused(moe, words, device="cpu")


WITH_TE = {
    "--fp8_format hybrid --transformer_impl torch": "some options are transformer-engine's own",
    "--fp8_format hybrid --bf16 false": "are for bf16 runs",
    f"{FLEX} --expert_model_parallel_size 2 --moe_enable_deepep false": "the token dispatcher flex needs a library",
    "--tp_comm_overlap true --packing true": "seen: TP 1, sequence parallel off, packing on",
    "--tp_comm_overlap true --tensor_model_parallel_size 2": "seen: TP 2, sequence parallel on, packing off",
    f"{PRECISE} --bf16 false": "are for bf16 runs",
    PRECISE: "the state of the precision-aware optimizer cannot be saved here",
    "--fp8_format hybrid --max_length 64": "packed rows whose length is a multiple of 16 x TP x CP = 16",
    "--fp8_format hybrid --packing true --max_length 40": "--packing true --max_length 32",
    "--fp8_format hybrid --packing true --max_length 48 --context_parallel_size 2": "16 x TP x CP = 32",
    "--fp8_format hybrid --packing true --max_length 64 --recompute_granularity selective --recompute_modules moe_act": (
        "delayed fp8 scaling cannot recompute"
    ),
}


OVERLAP = "--overlap_moe_expert_parallel_comm true --bf16 true"
EP2 = "--expert_model_parallel_size 2"
EXPERT_OVERLAP = {
    f"{OVERLAP}": "needs EP above 1",
    f"{EP2} --overlap_moe_expert_parallel_comm true": "needs bf16",
    f"{OVERLAP} {EP2} --pipeline_model_parallel_size 2": "needs virtual stages where PP is above 1",
    f"{OVERLAP} {EP2} --moe_token_dispatcher_type allgather": "needs the alltoall or the flex dispatcher",
    f"{OVERLAP} {EP2} --recompute_granularity full": "needs no full recompute",
    f"{OVERLAP} {EP2} --recompute_granularity selective --recompute_modules moe": "needs no recompute of moe",
    f"{OVERLAP} {EP2} --freeze_parameters embedding.": "needs no frozen parameters",
}


@pytest.mark.parametrize("words", EXPERT_OVERLAP)
def test_expert_messages_beside_computation_have_conditions(words: str, moe: Path) -> None:
    assert EXPERT_OVERLAP[words] in refused(moe, words, world_size=4, device="cpu")


@pytest.mark.parametrize("words", WITH_TE)
def test_combinations_on_gpus_are_refused(words: str, moe: Path) -> None:
    assert WITH_TE[words] in refused(moe, words)


def test_what_transformer_engine_must_do_is_refused_where_it_is_not_installed(
    moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("mcore_qwen3.cli.resolve.count_gpus", lambda environ: 2)
    assert "package not found" in refused(moe, "--moe_permute_fusion true", dry="false")
    argv = ["--load", str(moe), "--dataset", "a.jsonl", "--train_iters", "10", "--dry_run", "--device", "cuda"]
    resolve(parse_args([*argv, "--moe_permute_fusion", "true"], "sft"), 2, {"XDG_CACHE_HOME": "/cache"})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab"])
def test_a_tracker_without_its_package_is_refused_by_name(
    name: str, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else object())
    text = refused(moe, "--report_to tensorboard wandb swanlab", device="cpu")
    assert f"what report_to names must be installed; seen: no package {name}; change: pip install {name}" in text


def test_a_dry_run_says_what_its_account_leaves_out(moe: Path) -> None:
    def notes(*words: str) -> list[str]:
        argv = ["--load", str(moe), "--dataset", "a.jsonl", "--train_iters", "10", "--dry_run", *words]
        run = resolve(parse_args(argv, "sft"), 1, {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": "/cache"})
        return [line for line in memory_lines(run) if line.startswith("note: ")]

    assert notes() == []
    assert notes("--freeze_parameters_ratio", "0.5") == ["note: frozen parameters are counted as trained"]
    assert "each bucket" in notes("--overlap_grad_reduce")[0]
