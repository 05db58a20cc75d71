"""The run's log: printed lines, `train_log.jsonl`, the loss curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.log_checks import log_records, plotted_lines, speed_records, write_log
from helpers.ranks import pool

PNG = b"\x89PNG\r\n\x1a\n"


def write(directory: Path, steps: list[dict[str, Any]], **options: Any) -> str:
    return pool(1).run(write_log, directory=str(directory), steps=steps, **options)[0]


def records(directory: Path) -> list[dict[str, Any]]:
    return pool(1).run(log_records, directory=str(directory))[0]


def log_lines(directory: Path) -> list[str]:
    return (directory / "train_log.jsonl").read_text().splitlines()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_lines(directory)]


def test_a_record_for_each_step(tmp_path: Path) -> None:
    write(tmp_path, [{"loss": 2.0, "balance_loss": 1.5}, {"loss": 1.0, "tokens": 300, "eval_loss": 0.75}])
    start, first, second, evaluation = lines_of(tmp_path)
    assert start == {"event": "start", "iteration": 0, "world_size": 2, "no_mfu": "the device is a CPU"}
    assert first.pop("seconds_left") >= 0
    assert first == {
        "iteration": 1,
        "loss": 2.0,
        "balance_loss": 1.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "epoch": 0.1,
        "consumed_samples": 4,
        "consumed_tokens": 100,
        "tokens": 100,
        "trained_tokens": 50,
        "packing_fill": 0.5,
        "effective_length": 100.0,
        "tokens_per_second": 200.0,
        "tokens_per_second_per_device": 100.0,
        "tflops_per_device": pytest.approx(gflop("30B", 100) * 100 / 1000, rel=1e-12),
        "step_seconds": 0.5,
        "data_wait_seconds": 0.1,
        "memory_gib": 1.25,
        "skipped_steps": 0,
    }
    progress = [(record["epoch"], record["consumed_samples"], record["consumed_tokens"]) for record in (first, second)]
    assert progress == [(0.1, 4, 100), (0.2, 8, 400)]
    assert (second["iteration"], second["tokens_per_second"]) == (2, 600.0)
    assert "balance_loss" not in second
    metrics = {"eval_loss": 0.75, "eval_ppl": 2.5, "eval_token_acc": 0.125}
    assert evaluation == {"event": "eval", "iteration": 2, **metrics, "trained_tokens": 7}


def gflop(model: str, length: float) -> float:
    """GFLOP a token, forward and backward, by the formula that Megatron-LM's published throughputs use.

    6 [L (h (q + 2 g) + q h + 3 h f K) + h V] + 6 L q length: L layers, hidden h, query width q, key width g, expert width f,
    K experts a token, vocabulary V.
    """
    L, h, q, g, f, K, V = {
        "30B": (48, 2048, 4096, 512, 768, 8, 151936),
        "235B": (94, 4096, 8192, 512, 1536, 8, 151936),
    }[model]
    return 6 * (L * (h * (q + 2 * g) + q * h + 3 * h * f * K) + h * V + L * q * length) / 1e9


@pytest.mark.parametrize(
    ("model", "name", "told"), [("30B", "Qwen3-30B-A3B", 23.01), ("235B", "Qwen3-235B-A22B", 148.0)]
)
def test_flops_and_mfu_are_those_of_published_runs(model: str, name: str, told: float, tmp_path: Path) -> None:
    assert gflop(model, 4096) == pytest.approx(told, rel=5e-4)
    options = {"model": name, "tokens": 4096, "peak_tflops": 989.0}
    full, packed = pool(1).run(speed_records, **options, squared_lengths=[4096**2, 4 * 1024**2])[0]
    # Two devices, half a second a step.
    assert full["tflops_per_device"] == pytest.approx(gflop(model, 4096) * 4096 / 1000, rel=1e-9)
    assert full["mfu"] == pytest.approx(gflop(model, 4096) * 4096 / 1000 / 989, rel=1e-9)
    assert packed["tflops_per_device"] == pytest.approx(gflop(model, 1024) * 4096 / 1000, rel=1e-9)
    assert (full["effective_length"], packed["effective_length"]) == (4096, 1024)


def test_a_line_tells_the_mfu_where_the_peak_is_known(tmp_path: Path) -> None:
    printed = write(tmp_path, [{"tokens": 100_000}, {"tokens": 100_000}], log_interval=1, peak_tflops=989.0)
    flops = gflop("30B", 100_000) * 100
    shown = [line.split(" | ")[-3] for line in printed.splitlines() if line.startswith("step")]
    assert shown == [f"{flops:,.1f} TFLOP/s a device, MFU {100 * flops / 989:.1f} %"] * 2
    assert lines_of(tmp_path)[0]["peak_tflops"] == 989.0 and "no_mfu" not in lines_of(tmp_path)[0]


def test_expert_loads_are_told_by_layer_with_experts(tmp_path: Path) -> None:
    # Layer 1 has no experts; of the others the busiest expert has 6 of 8 and 4 of 16 tokens, the means are 2 and 4.
    write(tmp_path, [{"expert_tokens": [[6, 1, 1, 0], [0, 0, 0, 0], [4, 4, 4, 4]]}])
    assert lines_of(tmp_path)[1]["expert_loads"] == [3.0, 1.0]


def test_the_loss_of_each_data_set_is_told(tmp_path: Path) -> None:
    by_dataset = {"a.jsonl": 1.5, "owner/b": 2.5}
    write(tmp_path, [{"dataset_losses": by_dataset}, {"dataset_losses": by_dataset, "skipped": "the loss is nan"}])
    _, first, second = lines_of(tmp_path)
    assert first["dataset_loss"] == by_dataset and "dataset_loss" not in second


def test_lines_are_means_since_the_last_one(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"loss": 9.0},
        {"loss": 1.0, "trained_tokens": 10},
        {"loss": 2.0, "trained_tokens": 10, "tokens": 500},
        {"loss": 4.0, "trained_tokens": 30},
        {"loss": 8.0, "balance_loss": 1.25},
    ]
    printed = write(tmp_path, steps, train_iters=5, log_interval=2).splitlines()
    shown = [line.split(" | ")[:-1] for line in printed if line.startswith("step")]
    rest = ["grad norm 0.500", "lr 1.000e-03"]
    assert shown == [
        ["step 1/5", "loss 9.0000", *rest, "200 tokens/s", "1.25 GiB"],
        ["step 2/5", "loss 1.0000", *rest, "200 tokens/s", "1.25 GiB"],
        ["step 4/5", "loss 3.5000", *rest, "600 tokens/s", "1.25 GiB"],
        ["step 5/5", "loss 8.0000", "balance 1.2500", *rest, "200 tokens/s", "1.25 GiB"],
    ]
    assert all(line.endswith(" left") for line in printed if line.startswith("step"))
    assert printed[-1] == f"log: {tmp_path}/train_log.jsonl; loss curve: {tmp_path}/loss.png"


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    printed = write(tmp_path, [{}, {"loss": 2.5, "eval_loss": 0.75}], train_iters=4, terminal=True)
    assert "2/4" in printed and "loss 2.5000" in printed
    assert "step 2/4 | eval loss 0.7500, perplexity 2.500, accuracy 12.50 % (7 tokens)" in printed


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    assert write(tmp_path / "save", [{"eval_loss": 1.0}], active=False) == ""
    assert not (tmp_path / "save").exists()


def test_a_skipped_step_has_no_loss(tmp_path: Path) -> None:
    # A loss of 0.0 in the log, or a dip of the curve to zero, would tell a lie (known fault B46).
    skipped: dict[str, Any] = {"loss": 0.0, "trained_tokens": 0, "grad_norm": None, "skipped": "no trained token"}
    printed = write(tmp_path, [skipped, {"loss": 2.0}, skipped], log_interval=1)
    shown = [line.split(" | ")[1:3] for line in printed.splitlines() if line.startswith("step")]
    nothing = ["loss none", "grad norm skipped: no trained token"]
    assert shown == [nothing, ["loss 2.0000", "grad norm 0.500"], nothing]
    _, first, second, third = lines_of(tmp_path)
    assert "loss" not in first and "loss" not in third and second["loss"] == 2.0
    assert [record["skipped_steps"] for record in (first, second, third)] == [1, 1, 2]
    assert first["trained_tokens"] == 0 and first["skipped"] == "no trained token"
    assert pool(1).run(plotted_lines, directory=str(tmp_path))[0] == (PNG, {"train": [[2], [2.0]]})


def test_a_step_that_is_no_number_leaves_the_log_readable(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"loss": math.nan, "grad_norm": math.inf, "skipped": "the loss is nan"}
    printed = write(tmp_path, [{"loss": 2.0}, bad, {"loss": 4.0}], log_interval=3, train_iters=3)
    assert "step 3/3 | loss 4.0000" in printed  # a mean with the bad one would be no number
    _, _, second, _ = [json.loads(line, parse_constant=float) for line in log_lines(tmp_path)]
    assert "NaN" not in log_lines(tmp_path)[2] and "Infinity" not in log_lines(tmp_path)[2]
    assert (second["skipped"], second["grad_norm"], "loss" in second) == ("the loss is nan", None, False)


def test_an_event_is_a_line_and_a_record(tmp_path: Path) -> None:
    printed = write(tmp_path, [{"event": "loss 9 is a spike"}], train_iters=4)
    assert "step 1/4 | loss 9 is a spike" in printed.splitlines()
    assert lines_of(tmp_path)[2] == {"event": "warning", "iteration": 1, "bound": 2.0}


def test_a_restart_overrules_what_it_does_again(tmp_path: Path) -> None:
    write(tmp_path, [{"loss": 5.0, "eval_loss": 4.5}, {"loss": 4.0}, {"loss": 3.0, "eval_loss": 2.5}])
    write(tmp_path, [{"loss": 3.25, "eval_loss": 2.75}], start=2)  # from the checkpoint of step 2
    seen = [(record["iteration"], record.get("loss", record.get("eval_loss"))) for record in records(tmp_path)]
    assert seen == [(1, 5.0), (1, 4.5), (2, 4.0), (3, 3.25), (3, 2.75)]
    curves = {"train": [[1, 2, 3], [5.0, 4.0, 3.25]], "eval": [[1, 3], [4.5, 2.75]]}
    assert pool(1).run(plotted_lines, directory=str(tmp_path))[0] == (PNG, curves)
    write(tmp_path, [{"loss": 6.0}], start=0)  # a run afresh in the same directory
    assert [(record["iteration"], record["loss"]) for record in records(tmp_path)] == [(1, 6.0)]


def test_a_line_cut_by_a_kill_is_no_record_and_harms_no_other(tmp_path: Path) -> None:
    write(tmp_path, [{"loss": 5.0}, {"loss": 4.0}, {"loss": 3.0}], close=False)
    log = tmp_path / "train_log.jsonl"
    log.write_bytes(log.read_bytes()[:-40])
    write(tmp_path, [{"loss": 4.5}], start=1)
    assert [(record["iteration"], record["loss"]) for record in records(tmp_path)] == [(1, 5.0), (2, 4.5)]


def test_the_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    write(tmp_path, [{"loss": 5.0}])
    assert (tmp_path / "loss.png").read_bytes()[:8] == PNG
    write(tmp_path / "nothing", [])  # stopped before the first step: an empty picture, and no failure
    assert (tmp_path / "nothing/loss.png").read_bytes()[:8] == PNG
