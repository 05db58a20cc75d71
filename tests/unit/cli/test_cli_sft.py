"""``megatron sft`` before the ranks: one clear line and exit code 2, the dry run, and what is handed to the launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.cli import sft
from mcore_qwen3.cli.main import main
from mcore_qwen3.launch import Company, Limits, StopSignals

Megatron = Callable[..., "subprocess.CompletedProcess[str]"]
WriteCheckpoint = Callable[..., Path]
HEAVY = "{'torch', 'megatron', 'transformers', 'numpy', 'datasets'}"


@pytest.fixture
def trainable_dir(moe_dir: Path, qwen3_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny MoE config with the real tokenizer beside it; its weights, which are not there, pass for checked."""
    monkeypatch.setattr(sft, "check_weights", lambda run: None)
    config = json.loads((moe_dir / "config.json").read_text()) | {"vocab_size": 151936}
    (moe_dir / "config.json").write_text(json.dumps(config))
    for file in qwen3_tokenizer_dir.iterdir():
        if file.name != "config.json":
            (moe_dir / file.name).symlink_to(file)
    return moe_dir


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of stop signals back: after one has come, the command ignores more of them."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def refused(moe_dir: Path, rows_file: Path, megatron: Megatron) -> Callable[..., str]:
    """Run the command with some flags changed; returns its one line on stderr."""

    def run(*words: object, load: object = moe_dir, dataset: object = rows_file, **environ: str) -> str:
        done = megatron("sft", "--load", load, "--dataset", dataset, "--train_iters", 20, *words, **environ)
        assert done.returncode == 2, done.stderr + done.stdout
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("megatron sft: error: "), done.stderr
        assert "launcher:" not in done.stderr
        return done.stderr

    return run


def test_unknown_flags(refused: Callable[..., str]) -> None:
    line = refused("--save_intervall", "3", "--packingg")
    assert "--save_intervall, --packingg" in line and "--save_interval" in line and "--packing" in line


def test_missing_files(refused: Callable[..., str], tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} does not exist" in refused(load=tmp_path / "none")
    assert "no file other.jsonl" in refused(dataset="other.jsonl")
    assert "no file val.jsonl" in refused("--val_dataset", "val.jsonl")


def test_world_size_that_the_layout_does_not_divide(refused: Callable[..., str]) -> None:
    line = refused("--tensor_model_parallel_size", 2, NPROC_PER_NODE="3")
    assert "world size 3, TP 2" in line and "grid: world size 3, TP 2, CP 1, PP 1, EP 1, expert-TP 1" in line
    assert "(NNODES x NPROC_PER_NODE) of 2 or 4" in line


def test_b60_expert_grid(refused: Callable[..., str]) -> None:
    """Row B60: world 4, TP4, EP4, expert-TP 4 needs 16 ranks."""
    words = ("--tensor_model_parallel_size", 4, "--expert_model_parallel_size", 4, "--expert_tensor_parallel_size", 4)
    assert "expert-TP 4 x EP 4 x PP 1 = 16 (needs a multiple of 16)" in refused(*words, NPROC_PER_NODE="4")


def test_layers_not_divisible(refused: Callable[..., str]) -> None:
    line = refused("--pipeline_model_parallel_size", 3, NPROC_PER_NODE="3")
    assert "4 layers, PP 3" in line and "--pipeline_model_parallel_size" in line


def test_b64_batch_not_divisible(refused: Callable[..., str]) -> None:
    """Row B64: global 16, micro 3, DP 2."""
    line = refused("--micro_batch_size", 3, "--global_batch_size", 16, NPROC_PER_NODE="2")
    assert "global_batch_size 16, micro_batch_size 3 x DP 2 = 6" in line and "--global_batch_size 12 or 18" in line


def test_launch_environment(refused: Callable[..., str]) -> None:
    assert "MASTER_ADDR" in refused(NNODES="2", NODE_RANK="0")
    assert "NPROC_PER_NODE=two" in refused(NPROC_PER_NODE="two")


def test_no_gpu_for_cuda(refused: Callable[..., str]) -> None:
    assert "--device cuda needs an NVIDIA GPU" in refused("--device", "cuda")


def test_checkpoint_without_optimizer_state(
    refused: Callable[..., str], write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "out", 8, has_optimizer=False)
    line = refused("--save", "out")
    for way in ("iter_0000008", "--no_load_optim true", "--resume never", "another --save"):
        assert way in line


# ---- runs that have nothing to start


def test_finished_run_says_how_to_go_on(
    megatron: Megatron, write_checkpoint: WriteCheckpoint, moe_dir: Path, rows_file: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "out", 20, has_optimizer=False)
    command = ("sft", "--load", moe_dir, "--dataset", rows_file, "--save", "out", "--train_iters")
    done = megatron(*command, 20)
    assert (done.returncode, done.stderr) == (0, "")
    last = done.stdout.splitlines()[-1]
    for part in ("iter_0000020 has 20 of 20 steps", "larger --train_iters", "--no_load_optim true", "--resume never"):
        assert part in last
    assert "--no_load_optim true" in megatron(*command, 21).stderr  # not finished: it would have to continue


def test_dry_run_prints_the_plan_without_torch(dense_dir: Path, rows_file: Path, repo_root: Path) -> None:
    words = ["sft", "--load", dense_dir, "--dataset", rows_file, "--train_iters", 20, "--dry_run", "--packing"]
    words += ["--tensor_model_parallel_size", 2, "--pipeline_model_parallel_size", 2, "--max_length", 128]
    code = (
        f"import sys\nfrom mcore_qwen3.cli.main import main\nassert main({list(map(str, words))!r}) == 0\n"
        f"print(sorted({HEAVY} & {{name.partition('.')[0] for name in sys.modules}}))"
    )
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NNODES": "2", "NPROC_PER_NODE": "4"}
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.splitlines()[-1] == "[]"
    sizes = {name: int(size) for name, size in re.findall(r"^  ([\w-]+) +(\d+)$", text, flags=re.MULTILINE)}
    assert sizes == {"DP": 2, "CP": 1, "TP": 2, "PP": 2, "EP": 1, "expert-TP": 1, "expert-DP": 4}
    assert (
        "16 rows a step = micro-batch 1 x DP 2 x 8 micro-batches; packed rows of 128 tokens; 2,048 tokens a step"
        in text
    )
    assert "layers per stage: 2, 2" in text
    # Stage 0 by hand: half of 128 x 32 embedding rows; 2 layers of (qkv 192 x 32 + out 32 x 64 + mlp 3 x 32 x 64) / 2,
    # two norms of 32 and q/k norms of 16.
    parameters = 128 * 32 // 2 + 2 * ((192 * 32 + 32 * 64 + 3 * 32 * 64) // 2 + 2 * 32 + 2 * 16)
    assert f"stage 0: 2 layers, {parameters:,} parameters ({parameters:,} dense, 0 in experts)" in text
    padded = parameters + 2 * (2 * (64 - 32) + 2 * (64 - 16))  # each norm takes 64 elements of its buffer
    for name, factor in (("weights", 4), ("gradients", 4), ("moments", 4), ("sum", 12)):  # fp32, moments over DP 2
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name] and "bytes" in line][:1]
        assert f" {padded * factor:,} bytes" in line
    assert "    activations " in text and f"  {rows_file}" in text
    assert "  tensor_model_parallel_size: 2" in text and "  lr: " not in text


def test_b96_state_of_30b_on_16_ranks(moe_dir: Path, rows_file: Path, megatron: Megatron) -> None:
    """Row B96 of known faults: Qwen3-30B-A3B, 16 ranks, TP2, EP8, bf16: 45.93 GiB a rank before activations."""
    config = json.loads((moe_dir / "config.json").read_text()) | {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 32768,
    }  # fmt: skip
    (moe_dir / "config.json").write_text(json.dumps(config))
    words = ["sft", "--load", moe_dir, "--dataset", rows_file, "--train_iters", 1, "--dry_run", "--bf16", "true"]
    words += ["--tensor_model_parallel_size", 2, "--expert_model_parallel_size", 8]
    done = megatron(*words, NNODES="2", NPROC_PER_NODE="8")
    assert done.returncode == 0, done.stderr
    assert "30,532,122,624 parameters" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["sum"]]
    assert line.endswith("= 45.93 GiB")


# ---- what the parent does around the ranks


def test_data_is_prepared_before_the_ranks_start(
    trainable_dir: Path, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    calls: list[Any] = []

    def launched(
        plan: Any, argv: list[str], limits: Limits, signals: StopSignals, extra_env: dict[str, str], company: Company
    ) -> int:
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher takes it from here on
        assert [signum for signum, _ in signals.take()] == [signal.SIGTERM]
        calls.append((plan, argv, limits, extra_env, list((tmp_path / "cache").iterdir())))
        return 7

    monkeypatch.setattr(sft, "run_ranks", launched)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["--load", trainable_dir, "--dataset", rows_file, "--train_iters", 2, "--device", "cpu"]
    words += ["--data_cache_path", tmp_path / "cache", "--exit_grace", 5, "--exit_code_on_signal", 143]
    words += ["--max_restarts", 3, "--step_timeout", 60, "--distributed_timeout_minutes", 10]
    words += ["--save", tmp_path / "out"]
    began = time.monotonic()
    argv = list(map(str, words))
    assert main(["sft", *argv]) == 7
    ((plan, module_argv, limits, environ, cached),) = calls
    assert (plan.world_size, module_argv) == (2, ["-m", "mcore_qwen3", "sft", *argv])
    (folder,) = (path for path in cached if path.is_dir())
    # The ranks find the folders by these: they read and hash no data file again, and ask no hub.
    assert began <= float(environ.pop("MCORE_QWEN3_STARTED")) <= time.monotonic()
    assert environ == {
        "MCORE_QWEN3_PREPARED_DATA": str(folder),
        "MCORE_QWEN3_MODEL": str(trainable_dir),
        "MCORE_QWEN3_TRACKER_BEFORE": "",
    }
    assert limits == Limits(
        exit_grace=5, exit_code_on_signal=143, step_timeout=60, max_restarts=3, meeting_seconds=10 * 60 + 60
    )
    assert cached != []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # --device cpu hides the GPUs


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_before_the_ranks(signum: signal.Signals, moe_dir: Path, rows_file: Path, tmp_path: Path) -> None:
    """It comes in the middle of the preparation, in a process of its own."""
    code = (
        "import os, sys; from mcore_qwen3.cli import main, sft; "
        "sft.check_weights = lambda run: os.kill(os.getpid(), int(sys.argv[1])); "
        "sys.exit(main.main(sys.argv[2:]))"
    )
    words = ["sft", "--load", moe_dir, "--dataset", rows_file, "--train_iters", 2, "--exit_code_on_signal", 143]
    command = [sys.executable, "-c", code, str(int(signum)), *map(str, words), "--data_cache_path", str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (143, f"{signum.name} before any rank had started: stopped\n")
    assert not (tmp_path / "c").exists()


def test_restarts_need_what_they_continue_from(refused: Callable[..., str]) -> None:
    line = refused("--max_restarts", 2, "--no_save_optim", "true")
    assert "a restart continues from a checkpoint, which needs the optimizer state" in line
    assert "--max_restarts 2 --no_save_optim true" in line


def test_tokens_beyond_the_vocabulary(
    trainable_dir: Path, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((trainable_dir / "config.json").read_text()) | {"vocab_size": 1000}
    (trainable_dir / "config.json").write_text(json.dumps(config))
    words = ["--load", trainable_dir, "--dataset", rows_file, "--train_iters", 2, "--data_cache_path", tmp_path / "c"]
    assert main(["sft", *map(str, words)]) == 2
    assert "vocab_size 1000" in capsys.readouterr().err


def test_a_rank_does_not_launch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    rank = types.ModuleType("mcore_qwen3.cli.sft_rank")
    rank.run_rank = lambda parsed: seen.append(parsed) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mcore_qwen3.cli.sft_rank", rank)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    assert main(["sft", "--load", "m", "--dataset", "a", "--train_iters", "4"]) == 3
    assert seen[0].config.train.train_iters == 4
