"""What resolve() fills in, says and refuses."""

import json
from pathlib import Path

import pytest
from conftest import model_config

from mcore_qwen3.cli.dry_run import dry_run_lines
from mcore_qwen3.cli.prepare import prepare_request
from mcore_qwen3.cli.resolve import ResolvedRun, resolve, resolve_device
from mcore_qwen3.config import parse_args, to_yaml
from mcore_qwen3.errors import ConfigError

CPU = {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": "/cache"}


def resolved(load: Path, *words: object, world_size: int = 1, environ: dict[str, str] = CPU) -> ResolvedRun:
    more = [part for word in words for part in str(word).split()]
    argv = ["--load", str(load), "--dataset", "a.jsonl", "--train_iters", "20", *more]
    return resolve(parse_args(argv, "sft"), world_size, environ)


def test_what_is_open_is_filled_in(moe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(moe_dir.parent)
    run = resolved(moe_dir, "--tensor_model_parallel_size", 2, "--save_interval", 7, world_size=4)
    config = run.config
    assert (config.launch.device, config.model.bf16, config.model.transformer_impl) == ("cpu", False, "auto")
    assert (config.parallel.expert_tensor_parallel_size, config.parallel.sequence_parallel) == (1, True)
    assert (config.data.max_length, config.data.data_cache_path) == (1024, "/cache/mcore_qwen3/data")
    assert (config.optim.lr_decay_iters, config.train.eval_interval) == (20, 7)
    assert config.checkpoint.save == "megatron_output/tiny-moe"
    assert (config.model.recompute_method, config.model.recompute_num_layers) == (None, None)
    assert (run.batch.data, run.batch.num_microbatches) == (2, 8)
    assert (run.resume, run.finished, run.hf_files) == (None, False, moe_dir)
    said = "\n".join(run.notes)
    for part in ("expert_tensor_parallel_size is not set: 1", "sequence_parallel is switched on", "save is not set"):
        assert said.count(part) == 1, said


def test_user_values_stay(moe_dir: Path) -> None:
    run = resolved(moe_dir, "--bf16 true --max_length 64 --eval_interval 3 --lr_decay_iters 9 --save out")
    config = run.config
    assert (config.model.bf16, config.data.max_length, config.train.eval_interval) == (True, 64, 3)
    assert (config.optim.lr_decay_iters, config.checkpoint.save) == (9, "out")


def test_relative_cache_home_is_ignored(moe_dir: Path) -> None:
    run = resolved(moe_dir, environ={"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": "relative"})
    assert run.config.data.data_cache_path == str(Path.home() / ".cache" / "mcore_qwen3" / "data")


def test_full_recompute_gets_method_and_layers_and_says_so(moe_dir: Path) -> None:
    run = resolved(moe_dir, "--recompute_granularity", "full", "--recompute_num_layers", "2")
    assert (run.config.model.recompute_method, run.config.model.recompute_num_layers) == ("uniform", 2)
    assert [note for note in run.notes if "recompute" in note] == ["recompute_method is not set: uniform is taken"]


@pytest.mark.parametrize(
    ("words", "ratio", "said"),
    [
        ("", 0.0, False),
        ("--eval_iters 5", 0.01, True),
        ("--eval_interval 5", 0.01, True),
        ("--eval_iters 0 --eval_interval 5", 0.0, False),
        ("--eval_iters 5 --split_dataset_ratio 0.2", 0.2, False),
        ("--eval_iters 5 --split_dataset_ratio 0", 0.0, False),
        ("--eval_iters 5 --val_dataset v", 0.0, False),
        ("--val_dataset v --split_dataset_ratio 0.2", 0.0, False),
    ],
)
def test_one_percent_is_split_off_when_evaluation_was_asked_for(
    moe_dir: Path, words: str, ratio: float, said: bool
) -> None:
    run = resolved(moe_dir, words)
    assert run.config.data.split_dataset_ratio == ratio
    assert any("split_dataset_ratio 0.01 is taken" in note for note in run.notes) is said


def test_flags_without_effect_are_said(dense_dir: Path) -> None:
    run = resolved(dense_dir, "--moe_aux_loss_coeff 0.01 --use_flash_attn true --sequence_parallel true")
    said = "\n".join(run.notes)
    assert "--moe_aux_loss_coeff has no effect in this run: the model is dense" in said
    assert "--attention_backend has no effect in this run: on CPU" in said
    assert said.count("sequence_parallel") == 1 and run.config.parallel.sequence_parallel is False
    assert "expert_tensor_parallel_size" not in said


def test_resolving_the_written_yaml_again_changes_nothing(moe_dir: Path, tmp_path: Path) -> None:
    first = resolved(moe_dir, "--tensor_model_parallel_size 2 --recompute_granularity full", world_size=2)
    (tmp_path / "run_config.yaml").write_text(to_yaml(first.config))
    again = resolve(parse_args(["--config", str(tmp_path / "run_config.yaml")], "sft"), 2, CPU)
    assert again.config == first.config


def test_data_request_of_a_layout(moe_dir: Path) -> None:
    words = "--tensor_model_parallel_size 2 --packing true --max_length 64 --seed 3 --eval_iters 2"
    request = prepare_request(resolved(moe_dir, words, world_size=2))
    assert (request.row_multiple, request.packing, request.max_length, request.seed) == (2, True, 64, 3)
    assert (request.split_dataset_ratio, request.dataset, request.val_dataset) == (0.01, ("a.jsonl",), ())
    assert (request.tokenizer_dir, request.cache_dir) == (moe_dir, Path("/cache/mcore_qwen3/data"))


def test_b60_layouts(moe_dir: Path) -> None:
    """Row B60 of known faults: expert-TP unset is 1; world 4, TP4, EP4, expert-TP 4 needs 16 ranks."""
    run = resolved(moe_dir, "--tensor_model_parallel_size 2 --expert_model_parallel_size 2", world_size=4)
    assert (run.layout.expert_tensor, run.layout.expert_data, run.layout.data) == (1, 2, 2)
    both = "--tensor_model_parallel_size 4 --expert_model_parallel_size 4 --expert_tensor_parallel_size"
    assert resolved(moe_dir, both, 1, world_size=4).layout.expert_data == 1
    with pytest.raises(ConfigError, match="16"):
        resolved(moe_dir, both, 4, world_size=4)


def test_b64_batch(moe_dir: Path) -> None:
    """Row B64 of known faults: global 16, micro 3, DP 2 is refused with the nearest legal values (12 and 18)."""
    with pytest.raises(ConfigError, match=r"micro_batch_size 3 x DP 2 = 6.*12 or 18"):
        resolved(moe_dir, "--micro_batch_size", 3, world_size=2)


def test_max_length_beyond_the_model(moe_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_position_embeddings, .*; seen: --max_length 1025.*1024.*1024 or less"):
        resolved(moe_dir, "--max_length", 1025)


def test_yarn_lengthens_what_fits_and_not_what_is_taken(moe_dir: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    (moe_dir / "config.json").write_text(json.dumps(model_config(rope_scaling=yarn)))
    assert resolved(moe_dir, "--max_length", 4096).config.data.max_length == 4096
    assert resolved(moe_dir).config.data.max_length == 1024
    with pytest.raises(ConfigError, match=r"YaRN reaches 4096.*4096 or less"):
        resolved(moe_dir, "--max_length", 4097)


def test_device(moe_dir: Path) -> None:
    config = parse_args(["--load", "m", "--dataset", "a", "--train_iters", "1", "--device", "cuda"], "sft").config
    with pytest.raises(ConfigError, match="--device cuda needs an NVIDIA GPU"):
        resolve_device(config, CPU)
    assert resolved(moe_dir, "--device", "cuda", "--dry_run").config.model.bf16 is True
    with pytest.raises(ConfigError, match="run on a GPU only"):
        resolved(moe_dir, "--transformer_impl", "transformer_engine")


def test_context_parallel_pads_every_sample(moe_dir: Path) -> None:
    """Row B34 of known faults: (CP, TP) = (2, 2) gives a multiple of 4; a plain run pads no sample."""
    words = "--context_parallel_size 2 --tensor_model_parallel_size 2 --expert_model_parallel_size 4"
    run = resolved(moe_dir, words, world_size=8)
    assert (run.layout.context, run.layout.data, run.layout.expert_data) == (2, 2, 2)
    request = prepare_request(run)
    assert (request.row_multiple, request.sample_multiple) == (4, 4)
    plain = prepare_request(resolved(moe_dir, "--tensor_model_parallel_size 2", world_size=2))
    assert (plain.row_multiple, plain.sample_multiple) == (2, 1)


def test_the_pipelines_cut_reaches_the_layout(moe_dir: Path) -> None:
    run = resolved(moe_dir, "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2", world_size=2)
    assert (run.layout.virtual_pipeline, run.layout.stages_text()) == (2, "1+1, 1+1")
    uneven = "--pipeline_model_parallel_size 3 --decoder_last_pipeline_num_layers 2"
    assert resolved(moe_dir, uneven, world_size=3).layout.stages_text() == "1, 1, 2"
    uneven = "--pipeline_model_parallel_size 3 --decoder_first_pipeline_num_layers 2"
    assert resolved(moe_dir, uneven, world_size=3).layout.stages_text() == "2, 1, 1"
    counted = "--pipeline_model_parallel_size 3 --account_for_embedding_in_pipeline_split"
    words = f"{counted} --account_for_loss_in_pipeline_split"
    assert resolved(moe_dir, words, world_size=3).layout.stages_text() == "1, 2, 1"
    with pytest.raises(ConfigError, match="multiple of PP"):
        resolved(moe_dir, counted, world_size=3)


def test_b97_the_dry_run_names_the_heaviest_stage(moe_dir: Path) -> None:
    """Row B97 of known faults: stages of 1 and 3 layers are not two of 2."""
    uneven = "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 1"
    lines = dry_run_lines(resolved(moe_dir, uneven, world_size=2), [])
    table, norms, experts = 128 * 32, 2 * 32 + 2 * 16, 8 * 3 * 32 * 16 + 8 * 32
    layer = (64 + 2 * 64) * 32 + 64 * 32 + norms + experts
    assert "  layers per stage: 1, 3" in lines
    assert any(line.startswith(f"  stage 0: 1 layers, {table + layer:,} parameters") for line in lines)
    assert any(line.startswith(f"  stage 1: 3 layers, {3 * layer + 32 + table:,} parameters") for line in lines)
    start = next(number for number, line in enumerate(lines) if line.startswith("memory of the fullest rank"))
    assert lines[start + 1].startswith("  stage 1: ")
    chunks = "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2"
    assert "  layers per stage: 1+1, 1+1" in dry_run_lines(resolved(moe_dir, chunks, world_size=2), [])
    assert not any("GiB of each stage" in line for line in dry_run_lines(resolved(moe_dir), []))


def test_interleaved_batches_come_in_groups_of_pp(moe_dir: Path) -> None:
    words = "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 --global_batch_size"
    assert resolved(moe_dir, words, 6, world_size=2).batch.num_microbatches == 6
    with pytest.raises(ConfigError, match=r"multiple of PP.*5 micro-batches.*--global_batch_size 4 or 6"):
        resolved(moe_dir, words, 5, world_size=2)


def test_b72_expert_bias(moe_dir: Path, dense_dir: Path) -> None:
    """Row B72 of known faults: softmax scores with an expert bias are refused at the argument check."""
    with pytest.raises(ConfigError, match=r"sigmoid router scores; Qwen3's are softmax.*--moe_aux_loss_coeff"):
        resolved(moe_dir, "--moe_router_enable_expert_bias true")
    said = resolved(dense_dir, "--moe_router_enable_expert_bias true").notes
    assert any("--moe_router_enable_expert_bias has no effect in this run: the model is dense" in note for note in said)


@pytest.mark.parametrize(
    ("words", "world_size", "fragment"),
    [
        ("--moe_token_dispatcher_type flex", 1, "runs on GPUs only, with DeepEP; seen: .*flex, device cpu"),
        ("--moe_token_dispatcher_type flex --device cuda", 1, "EP x expert-TP above 1"),
        (
            "--moe_token_dispatcher_type flex --device cuda --expert_model_parallel_size 2 --moe_router_dtype fp64",
            2, "needs a router in fp32",
        ),
        (
            "--moe_token_dispatcher_type flex --device cuda --expert_model_parallel_size 2"
            " --moe_expert_capacity_factor 2 --moe_pad_expert_input_to_capacity true",
            2, "cannot pad experts",
        ),
        (
            "--recompute_granularity selective --recompute_modules moe_act --moe_grouped_gemm false",
            1, "moe_act needs grouped experts",
        ),
    ],
)  # fmt: skip
def test_what_megatron_cannot_do_with_experts(moe_dir: Path, words: str, world_size: int, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        resolved(moe_dir, words, "--dry_run", world_size=world_size)


def test_flex_on_gpus_passes(moe_dir: Path) -> None:
    words = "--moe_token_dispatcher_type flex --device cuda --expert_model_parallel_size 2 --dry_run"
    assert resolved(moe_dir, words, world_size=2).config.model.moe_token_dispatcher_type == "flex"


def test_one_renormalised_expert_a_token(moe_dir: Path) -> None:
    """Its probability is softmax over one logit, 1 whatever the logit: megatron refuses it deep inside."""
    config = model_config(num_experts_per_tok=1)
    (moe_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="num_experts_per_tok 1, norm_topk_prob true; change: norm_topk_prob to false"
    ):
        resolved(moe_dir)
    (moe_dir / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    assert resolved(moe_dir).shape.moe_router_topk == 1
