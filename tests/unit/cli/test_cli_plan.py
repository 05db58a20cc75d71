"""`megatron plan`: its answers, its command, its errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.hf_configs import hf_config
from helpers.scripts import load_script

from mcore_qwen3.arch.shape import TRACKER
from mcore_qwen3.cli.main import main
from mcore_qwen3.config import RunConfig, to_yaml, with_values
from mcore_qwen3.planner.models import find_model

ASKED = ["--model", "Qwen3-235B-A22B", "--gpus", "64", "--gpu", "h100-80"]
ASKED += ["--max_length", "8192", "--global_batch_size", "128"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_command_passes_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(find_model("Qwen3-235B-A22B"))))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = ["--model", str(tmp_path), *ASKED[2:], "--dataset", str(tmp_path / "rows.jsonl")]
    output = plan(capsys, *words)
    start = output.index("NNODES=8")
    environ, command = output[start : output.index("\n\n", start)].replace("\\\n", " ").split("megatron sft")
    for setting in environ.split():
        name, value = setting.split("=")
        if not value.startswith("$"):
            monkeypatch.setenv(name, value)
    assert main(["sft", *shlex.split(command), "--device", "cuda", "--dry_run", "true"]) == 0
    said = capsys.readouterr().out
    assert "world size 64" in said and "235,093,634,560 parameters" in said and "nothing was started" in said


def test_the_file_says_the_same_as_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    output = plan(capsys, *ASKED, "--output", str(file))
    assert file.read_text() in output
    for name, value in yaml.safe_load(file.read_text()).items():
        assert f"--{name} {str(value).lower() if isinstance(value, bool) else value}" in output


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(plan(capsys, *ASKED, "--json"))
    assert (answer["gpus"], answer["gpu"], len(answer["plans"])) == (64, "h100-80", 10)
    first = answer["plans"][0]
    parts = dict(first["memory_gib"])
    total = parts.pop("total")
    for name in ("low", "high", "available"):
        parts.pop(name)
    assert sum(parts.values()) == pytest.approx(total)
    assert first["step_seconds"]["high"] <= 1.51 * first["step_seconds"]["middle"]


def test_explain_shows_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, "--explain", "TP2 PP8x3 EP8 L+2 full"]) in (0, 3)
    output = capsys.readouterr().out
    for number in range(8):
        assert f"stage {number}:" in output
    for item in ("weights", "gradients", "master weights", "moments", "activations", "communicators", "EP messages"):
        assert item in output


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([*ASKED, "--explain", "TP8 PP8"], "the number of key-value heads must be a multiple of TP"),
        ([*ASKED, "--explain", "PP7"], "the world size must be a multiple of TP x CP x PP"),
        ([*ASKED, "--explain", "DP8"], "a layout is written in words"),
        (ASKED[2:], "megatron plan needs --model"),
        (ASKED[:2], "megatron plan needs a number of GPUs"),
        ([*ASKED, "--min_gpus", "--explain", "TP2"], "--explain has one layout"),
        ([*ASKED, "--search_optimizer", "--explain", "TP2"], "--explain has one optimizer"),
        (["--model", "Qwen3-999B", "--gpus", "8"], "a model is the name of a Qwen3 model"),
        (["--model", "Qwen3-8B", "--gpus", "8", "--gpu", "h1000"], "a GPU is one of the table"),
        (
            ["--model", "Qwen3-8B", "--gpus", "7", "--global_batch_size", "16", "--tensor_model_parallel_size", "3"],
            "no layout obeys",
        ),
        (["--model", "Qwen3-8B", "--gpus", "12"], "more GPUs than a node has are whole nodes"),
        ([*ASKED, "--bf16", "false"], "plans are for bf16 on GPUs"),
        ([*ASKED, "--device", "cpu"], "plans are for bf16 on GPUs"),
        ([*ASKED, "--train_type", "lora", "--output", "x"], "a plan for adapters gives no file"),
        ([*ASKED, "--output", "no/such/folder/plan.yaml"], "--output is a file that can be written"),
        ([*ASKED, "--explain", "TP2", "--tensor_model_parallel_size", "4"], "a size is given once"),
        (["--model", "Qwen3-8B", "--gpus", "8", "--calibrate", "nothing/train_log.jsonl"], "--calibrate needs the log"),
    ],
)
def test_refusals(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert rule in capsys.readouterr().err


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen3-235B-A22B", "--gpus", "8", "--max_length", "8192", "--global_batch_size", "16"]
    assert main(["plan", *words]) == 3
    assert "nothing fits on 8 x h100-80; the layout that needs least:" in capsys.readouterr().out


def test_fewest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen3-30B-A3B", "--min_gpus", "--max_length", "8192", "--global_batch_size", "16"]
    output = plan(capsys, *words)
    assert "8 GPUs are the fewest that fit; with the whole range of the estimate in memory: 16 GPUs" in output
    assert "8 GPUs, the fastest that fit" in output
    answer = json.loads(plan(capsys, *words, "--json"))
    assert (answer["gpus"], answer["gpus_with_room"]) == (8, 16)


def test_the_page_of_layouts_is_what_the_command_says_now(repo_root: Path) -> None:
    script = load_script(repo_root / "scripts" / "write_plans.py")
    page = script.page()
    assert page == (repo_root / "docs" / "how-many-gpus.md").read_text(encoding="utf-8"), (
        "python scripts/write_plans.py"
    )
    for model in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-480B-A35B-Instruct"):
        section = page.split(f"## {model}\n")[1].split("\n## ")[0]
        assert [section.count(f"| {card} GB | ") for card in ("H100 80", "H20 96", "H200 141")] == [2, 2, 2]


def test_a_custom_gpu_with_the_facts_of_a_known_one_gives_its_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen3-30B-A3B", "--gpus", "16", "--max_length", "8192", "--global_batch_size", "16", "--json"]
    known = json.loads(plan(capsys, *words, "--gpu", "h100-80"))["plans"]
    facts = [
        "--gpu",
        "custom",
        "--gpu_memory",
        "79.1",
        "--gpu_tflops",
        "989",
        "--intra_bw",
        "450",
        "--inter_bw",
        "50",
        "--gpus_per_node",
        "8",
    ]
    assert json.loads(plan(capsys, *words, *facts))["plans"] == known
    facts[facts.index("--gpu_tflops") + 1] = "100"
    slower = json.loads(plan(capsys, *words, *facts))["plans"]
    assert slower[0]["step_seconds"]["middle"] > 3 * known[0]["step_seconds"]["middle"]
    main(["plan", *words[:4], "--gpu", "custom", "--gpu_memory", "79.1"])
    assert "--gpu_tflops" in capsys.readouterr().err


HALF = [*ASKED[:3], "32", *ASKED[4:]]


def test_adam_in_host_memory_halves_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """32 GPUs hold weights and fp32 gradients of 235B-A22B: 6 bytes a parameter, 41 GiB each; the other 12 lie on 4 nodes."""
    assert main(["plan", *HALF]) == 3
    assert "nothing fits" in capsys.readouterr().out
    output = plan(capsys, *HALF, "--search_optimizer")
    assert "--optimizer_cpu_offload true" in output and "--no_save_optim true" in output
    assert "in host memory" in output.split("optimizer\n")[1].splitlines()[0]
    (line,) = [line for line in output.splitlines() if line.startswith("host memory: at least")]
    assert float(line.split()[4]) == pytest.approx(235.1e9 * 12 / 4 / 2**30, rel=0.05)


def test_fixed_optimizer_flags_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """SGD has no precision-aware form and is not moved: its own state alone is looked at."""
    words = [*ASKED, "--search_optimizer", "--json"]
    given = json.loads(plan(capsys, *words, "--optimizer", "sgd"))["plans"]
    assert {each["optimizer"] for each in given} == {"as given"}
    adam = json.loads(plan(capsys, *words))["plans"]
    moments = [
        each[0]["memory_gib"]["moments"] for each in (given, json.loads(plan(capsys, *ASKED, "--json"))["plans"])
    ]
    assert moments[0] < moments[1]
    assert "bf16 gradients, moments" in {each["optimizer"] for each in adam}
    for each in adam:
        if each["optimizer"] == "bf16 gradients, moments":
            assert each["flags"]["main_grads_dtype"] == each["flags"]["exp_avg_dtype"] == "bf16"
    kept = json.loads(plan(capsys, *words, "--exp_avg_dtype", "fp32"))["plans"]
    assert "bf16 gradients, moments" not in {each["optimizer"] for each in kept}


def test_lora_needs_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "Qwen3-30B-A3B", "--min_gpus", "--max_length", "2048", "--global_batch_size", "16"]
    answer = json.loads(plan(capsys, *words, "--train_type", "lora", "--json"))
    assert answer["gpus"] == 1
    assert answer["command"] is None  # a command would train all weights
    output = plan(capsys, *words, "--train_type", "lora")
    assert "training adapters is not there yet" in output and "megatron sft" not in output


def test_what_the_user_gave_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are planned rounded up, for TP 4 to 8,192 tokens."""
    words = [*ASKED[:6], "--max_length", "8190", "--global_batch_size", "128", "--tensor_model_parallel_size", "4"]
    output = plan(capsys, *words, "--lr", "3e-5")
    assert "--max_length 8190" in output and "--lr 3e-05" in output
    assert "--load Qwen/Qwen3-235B-A22B" in output  # what a hub calls it, so that the command runs
    explained = ["--explain", "PP16x6 EP4 L+2 full", "--tensor_model_parallel_size", "4"]
    assert main(["plan", *ASKED, *explained]) in (0, 3)
    assert "TP 4 x CP 1 x DP 1 x PP 16" in capsys.readouterr().out


def test_own_runs_move_the_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that took twice the seconds of its plan: the plan of the same layout becomes about twice as long."""
    words = ["--model", "Qwen3-8B", "--gpus", "8", "--max_length", "4096", "--global_batch_size", "64"]
    words += ["--json", "--explain", "TP2"]
    seconds = json.loads(plan(capsys, *words))["step_seconds"]["middle"]
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / TRACKER).write_text("10")
    run = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "max_length": 4096, "global_batch_size": 64}
    (tmp_path / "iter_0000010" / "run_config.yaml").write_text(to_yaml(with_values(RunConfig(), run | {"bf16": True})))
    records = [{"event": "start", "iteration": 0, "world_size": 8}]
    records += [{"iteration": n, "step_seconds": 2 * seconds, "data_wait_seconds": 0.0} for n in range(1, 11)]
    log = tmp_path / "train_log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    moved = json.loads(plan(capsys, *words, "--calibrate", str(log)))["step_seconds"]["middle"]
    assert moved == pytest.approx(2 * seconds, rel=0.1)


def test_no_torch_and_no_numpy() -> None:
    program = "import sys; from mcore_qwen3.cli.main import main; main(sys.argv[1:])\n"
    program += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program, "plan", *ASKED], check=True, capture_output=True)
