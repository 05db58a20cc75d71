"""Flags and YAML -> RunConfig: forms, precedence, and one clear error for whatever cannot be read."""

from pathlib import Path

import pytest

from mcore_qwen3.config import ParsedRun, greater_is_better, parse_args, with_values
from mcore_qwen3.errors import ConfigError

BASE = ["--load", "m", "--dataset", "a.jsonl", "--train_iters", "20"]


def parse(*words: str) -> ParsedRun:
    return parse_args([*BASE, *words], "sft")


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    return str(caught.value)


def test_underscore_and_dash_are_alike() -> None:
    assert parse("--micro-batch-size", "4", "--global_batch-size=8").config == (
        parse("--micro_batch_size", "4", "--global_batch_size", "8").config
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [(("--packing",), True), (("--packing", "TRUE"), True), (("--packing", "False"), False), ((), False)],
)
def test_boolean_forms(words: tuple[str, ...], value: bool) -> None:
    assert parse(*words).config.data.packing is value


def test_bare_boolean_before_another_flag() -> None:
    config = parse("--packing", "--lr", "0.5").config
    assert (config.data.packing, config.optim.lr) == (True, 0.5)


def test_lists_are_space_separated() -> None:
    parsed = parse_args(["--train_iters", "2", "--dataset", "a", "b c", "--load", "m", "--val_dataset=v"], "sft")
    assert parsed.config.data.dataset == ("a", "b c")
    assert parsed.config.data.val_dataset == ("v",)


def test_a_list_may_have_choices(tmp_path: Path) -> None:
    words = ("--recompute_granularity", "selective", "--recompute_modules")
    assert parse(*words, "layernorm", "mlp").config.model.recompute_modules == ("layernorm", "mlp")
    for wrong in (("layernorm", "mla"), ("moe,mlp",)):
        seen = message(*words, *wrong)
        assert "--recompute_modules needs one or more of core_attn, moe_act, layernorm, moe, mlp" in seen
        assert repr(list(wrong)) in seen
    assert "needs a module" in message(*words[:2], "--config", write(tmp_path / "a.yaml", "recompute_modules: []\n"))


def test_negative_numbers_are_values() -> None:
    assert parse("--eval_iters", "-1").config.train.eval_iters == -1
    assert "at least 0" in message("--min_lr", "-1e-6")


def test_explicit_holds_what_was_set_only() -> None:
    assert parse("--lr", "1e-5").explicit == {"load", "dataset", "train_iters", "lr"}


def test_user_command_of_the_design() -> None:
    text = """--load Qwen3-30B-A3B-Base-mcore --dataset liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT
        --tensor_model_parallel_size 2 --expert_model_parallel_size 8
        --moe_grouped_gemm true --moe_shared_expert_overlap true --moe_aux_loss_coeff 0.01
        --micro_batch_size 1 --global_batch_size 16 --packing true
        --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
        --train_iters 2000 --eval_iters 50 --finetune true --cross_entropy_loss_fusion true
        --lr 1e-5 --lr_warmup_iters 100 --min_lr 1e-6 --save megatron_output/Qwen3-30B-A3B-Base
        --eval_interval 200 --save_interval 200 --max_length 8192 --num_workers 8 --dataset_num_proc 8
        --no_save_optim true --no_save_rng true --sequence_parallel true --use_flash_attn true"""
    parsed = parse_args(text.split(), "sft")
    config = parsed.config
    assert (config.parallel.tensor_model_parallel_size, config.parallel.expert_model_parallel_size) == (2, 8)
    assert (config.model.moe_aux_loss_coeff, config.model.attention_backend) == (0.01, "flash")
    assert (config.model.recompute_granularity, config.model.recompute_num_layers) == ("full", 1)
    assert (config.optim.lr, config.optim.min_lr, config.optim.lr_warmup_iters) == (1e-5, 1e-6, 100)
    assert (config.train.eval_iters, config.train.eval_interval, config.checkpoint.save_interval) == (50, 200, 200)
    assert (config.data.max_length, config.data.num_workers, config.data.dataset_num_proc) == (8192, 8, 8)
    assert config.checkpoint.no_save_optim and config.checkpoint.no_save_rng and config.parallel.sequence_parallel
    assert len(parsed.explicit) == 30  # every flag of the command arrived
    assert parsed.notes == ("--use_flash_attn true is read as --attention_backend flash",)


# ---- other names


def test_ms_swift_4_names() -> None:
    text = """--mcore_model m --dataset a --train_iters 9 --output_dir o --save_steps 3 --eval_steps 2
        --logging_steps 1 --dataloader_num_workers 0 --save_safetensors true"""
    parsed = parse_args(text.split(), "sft")
    config = parsed.config
    assert (config.model.load, config.checkpoint.save, config.checkpoint.save_interval) == ("m", "o", 3)
    assert (config.train.eval_interval, config.train.log_interval, config.data.num_workers) == (2, 1, 0)
    assert config.checkpoint.save_hf is True
    assert "save_interval" in parsed.explicit and "save_steps" not in parsed.explicit
    assert "--output_dir is read as --save" in parsed.notes
    assert len(parsed.notes) == 7


def test_alias_with_another_form() -> None:
    assert parse("--use_flash_attn").config.model.attention_backend == "flash"
    assert parse("--use_flash_attn", "false").config.model.attention_backend == "auto"
    assert "--use_flash_attn needs true or false; seen: 'flash'" in message("--use_flash_attn", "flash")


def test_two_names_of_one_field() -> None:
    assert parse("--save", "x", "--output_dir", "x").config.checkpoint.save == "x"
    text = message("--save", "x", "--output_dir", "y")
    assert "save is given twice with different values" in text
    assert "--save x and --output_dir y" in text


# ---- one clear error


def test_every_unknown_flag_is_named_with_its_neighbours() -> None:
    text = message("--save_intervall", "3", "--xyzzy", "--micro-batchsize=2")
    assert "unknown flags; seen: --save_intervall, --xyzzy, --micro_batchsize" in text
    assert "nearest to save_intervall: --save_interval" in text
    assert "nearest to micro_batchsize: --micro_batch_size" in text
    assert "nothing is near xyzzy" in text


def test_no_abbreviation() -> None:
    assert "unknown flag; seen: --micro_batch" in message("--micro_batch", "2")


def test_alias_is_offered_as_a_neighbour() -> None:
    assert "--output_dir" in message("--output_dirr", "o")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--train_iters", "1.5"), ("--train_iters", "a whole number of at least 1", "'1.5'")),
        (("--lr", "fast"), ("--lr", "a finite number of at least 0", "'fast'")),
        (("--lr", "nan"), ("--lr", "finite", "'nan'")),
        (("--clip_grad", "inf"), ("--clip_grad", "finite", "'inf'")),
        (("--packing", "yes"), ("--packing", "true or false", "'yes'")),
        (("--micro_batch_size", "0"), ("--micro_batch_size", "at least 1", "'0'")),
        (("--save_interval", "0"), ("--save_interval", "at least 1")),
        (("--eval_interval", "0"), ("--eval_interval", "at least 1")),
        (("--split_dataset_ratio", "1"), ("--split_dataset_ratio", "at least 0 and below 1")),
        (("--exit_code_on_signal", "256"), ("--exit_code_on_signal", "at most 255")),
        (("--lr_decay_style", "cosin"), ("--lr_decay_style", "cosine, linear, constant", "'cosin'")),
        (("--device", "CPU"), ("--device", "auto, cpu, cuda", "'CPU'")),
        (("--recompute_granularity", "partial"), ("--recompute_granularity", "none, selective, full", "'partial'")),
        (("--save", ""), ("--save", "''")),
        (("--lr",), ("--lr", "expected one argument")),
        (("--dataset",), ("--dataset", "at least one argument")),
        (("--lr", "1", "2"), ("belongs to no flag", "seen: 2")),
        (("run.yaml",), ("belongs to no flag", "seen: run.yaml")),
        (("-lr", "1"), ("unknown flag", "-lr", "nearest to lr: --lr")),
        (("--lr", "1e-5", "--lr", "2e-5"), ("lr is given twice", "--lr 1e-5 and --lr 2e-5")),
        (("--dataset", "b.jsonl"), ("dataset is given twice", "write --dataset a b")),
    ],
)
def test_refused(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    text = message(*words)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("flag", ["load", "dataset", "train_iters"])
def test_required(flag: str) -> None:
    words = {"load": "m", "dataset": "a", "train_iters": "1"}
    del words[flag]
    with pytest.raises(ConfigError, match=f"megatron sft needs --{flag}"):
        parse_args([word for name, value in words.items() for word in (f"--{name}", value)], "sft")


# ---- YAML


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", "lr: 1e-4\nmin-lr: 1.0e-6\nseed: 7\nclip_grad: null\nval_dataset: v.jsonl\n")
    parsed = parse("--seed", "8", "--config", file)
    assert parsed.config.optim.lr == 1e-4  # YAML 1.1 reads 1e-4 as a text
    assert parsed.config.optim.min_lr == 1e-6
    assert parsed.config.train.seed == 8
    assert parsed.config.optim.clip_grad == 1.0
    assert parsed.config.data.val_dataset == ("v.jsonl",)
    assert "clip_grad" not in parsed.explicit and {"lr", "seed"} <= parsed.explicit
    assert parse_args(["--config", file, *BASE, "--seed", "8"], "sft").config == parsed.config


def test_alias_in_a_file(tmp_path: Path) -> None:
    parsed = parse("--config", write(tmp_path / "run.yaml", "output_dir: o\nuse_flash_attn: true\n"))
    assert (parsed.config.checkpoint.save, parsed.config.model.attention_backend) == ("o", "flash")
    assert parsed.notes == (
        "--output_dir is read as --save",
        "--use_flash_attn true is read as --attention_backend flash",
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("save_intervall: 3\nfoo: 1\n", ("unknown flags", "save_intervall in ", "--save_interval", "foo in ")),
        ("lr: true\n", ("lr in ", "a finite number", "True")),
        ("micro_batch_size: 1.0\n", ("micro_batch_size in ", "a whole number", "1.0")),
        ("micro_batch_size: true\n", ("micro_batch_size in ", "a whole number", "True")),
        ("lr: .nan\n", ("lr in ", "finite", "nan")),
        ("packing: 1\n", ("packing in ", "true or false", "1")),
        ("val_dataset: [1, 2]\n", ("val_dataset in ", "one or more texts", "[1, 2]")),
        ("save: [a]\n", ("save in ", "a text", "['a']")),
        ("device: 3\n", ("device in ", "one of auto, cpu, cuda")),
        ("save: a\noutput_dir: b\n", ("save is given twice", "output_dir in ")),
        ("lr: 1\nlr: 2\n", ("a key stands twice", "lr in ")),
        ("- lr\n", ("must be a list of 'name: value' lines",)),
        ("lr: [1\n", ("is no YAML",)),
    ],
)
def test_refused_file(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    seen = message("--config", write(tmp_path / "run.yaml", text))
    assert "\n" not in seen and "run.yaml" in seen
    assert [part for part in parts if part not in seen] == [], seen


def test_missing_and_repeated_file(tmp_path: Path) -> None:
    assert "none.yaml" in message("--config", str(tmp_path / "none.yaml"))
    file = write(tmp_path / "run.yaml", "")
    assert "--config is given more than once" in message("--config", file, "--config", file)


# ---- rules between flags


def test_b53_warm_up_must_be_shorter_than_the_decay() -> None:
    """Row B53 of known faults: 10 steps, warm-up 2000 is refused with both numbers."""
    words = ["--load", "m", "--dataset", "a", "--train_iters", "10", "--lr_warmup_iters", "2000"]
    with pytest.raises(ConfigError, match=r"warm-up must be shorter.*2000.*train_iters 10.*9 or less"):
        parse_args(words, "sft")
    assert "lr_decay_iters 5" in message("--lr_warmup_iters", "5", "--lr_decay_iters", "5")
    assert parse("--lr_warmup_iters", "19").config.optim.lr_warmup_iters == 19


def test_rules_of_the_schedule() -> None:
    assert "lr must not be below min_lr" in message("--lr", "1e-6", "--min_lr", "1e-5")
    assert "either in steps or as a fraction" in message("--lr_warmup_iters", "1", "--lr_warmup_fraction", "0.1")


def test_checkpoints_are_compared_by_an_evaluation_of_their_own() -> None:
    compared = ("--metric_for_best_model", "loss", "--save_interval", "100")
    assert "--save_interval 100, --eval_interval 40" in message(*compared, "--eval_interval", "40")
    for words in ((*compared, "--eval_interval", "50"), compared, ("--save_interval", "100", "--eval_interval", "40")):
        assert parse(*words).config.checkpoint.save_interval == 100
    expected = {"loss": False, "ppl": False, "token_acc": True}
    for metric, upwards in expected.items():
        config = parse("--metric_for_best_model", metric).config
        assert greater_is_better(config) is upwards
        assert greater_is_better(with_values(config, {"greater_is_better": not upwards})) is not upwards


def test_megatrons_other_name_of_virtual_stages() -> None:
    parsed = parse("--num_virtual_stages_per_pipeline_rank", "2")
    assert parsed.config.parallel.virtual_pipeline_model_parallel_size == 2


def test_rules_of_the_experts_capacity() -> None:
    assert "needs a capacity" in message("--moe_pad_expert_input_to_capacity")
    for factor in ("0", "-1"):
        assert f"must be above 0; seen: --moe_expert_capacity_factor {float(factor)}" in message(
            "--moe_expert_capacity_factor", factor
        )
    model = parse("--moe_pad_expert_input_to_capacity", "--moe_expert_capacity_factor", "1.25").config.model
    assert (model.moe_pad_expert_input_to_capacity, model.moe_expert_capacity_factor) == (True, 1.25)


def test_a_list_of_whole_numbers(tmp_path: Path) -> None:
    def ranks(*words: str) -> tuple[int, ...]:
        return parse(*words).config.tracking.profile_ranks

    assert (ranks(), ranks("--profile_ranks", "0", "3"), ranks("--profile_ranks=2")) == ((0,), (0, 3), (2,))
    assert ranks("--config", write(tmp_path / "list.yaml", "profile_ranks: [1, 2]")) == (1, 2)
    assert ranks("--config", write(tmp_path / "one.yaml", "profile_ranks: 4")) == (4,)
    form = "--profile_ranks needs one or more whole numbers of at least 0, separated by spaces"
    for wrong in ("x", "1.5", "-1"):
        assert form in message("--profile_ranks", wrong)
    assert "needs one or more whole numbers" in message("--config", write(tmp_path / "x.yaml", "profile_ranks: [true]"))
