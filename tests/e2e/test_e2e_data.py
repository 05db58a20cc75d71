"""Raw text by `megatron pt`, epochs, and the data of a run, as real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from e2e_kit import Site, steps_of

pytestmark = pytest.mark.timeout(900)


def test_pt_trains_on_raw_text_for_whole_epochs(site: Site, small_vocabulary_moe: Path) -> None:
    text = site.folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"line {n} " + "of the text " * (n % 9) + "\n" for n in range(20)))
    (text / "b.jsonl").write_text("".join(json.dumps({"text": f"row {n} " * 30}) + "\n" for n in range(10)))
    words = f"""pt --load {small_vocabulary_moe} --dataset {text} --max_length 32 --packing true
        --truncation_strategy split --num_train_epochs 2 --global_batch_size 8 --lr 1e-3 --save out
        --no_save_optim true --device cpu --freeze_parameters embedding. --log_loss_per_dataset true
        --report_to tensorboard --profile_step_start 2 --profile_ranks 0 1""".split()
    done = site.run(*words, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "raw text and the end-of-text token behind it; no chat template" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("an epoch: "))
    rows = int(line.split()[2])
    records = steps_of(site.folder / "out")
    assert len(records) == -(-rows * 2 // 8) and f"steps: {len(records)}" in done.stdout
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["lr"] < 1e-4  # the schedule ends with the epochs
    save = site.folder / "out"
    assert records[-1]["epoch"] == pytest.approx(len(records) * 8 / rows)
    assert all(record["dataset_loss"] == {str(text): pytest.approx(record["loss"], rel=1e-6)} for record in records)
    config = json.loads((small_vocabulary_moe / "config.json").read_text())
    embedding = config["vocab_size"] * config["hidden_size"]
    trained, total = re.findall(r"; ([\d,]+) of ([\d,]+) parameters are trained", done.stdout)[0]
    assert int(total.replace(",", "")) - int(trained.replace(",", "")) == embedding
    assert "MFU is not counted: the device is a CPU" in done.stdout
    assert {path.name for path in (save / "profile").iterdir()} == {"rank_0.json.gz", "rank_1.json.gz"}
    assert any((save / "runs").iterdir())


def test_sft_takes_the_folder_that_data_wrote(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    ready = site.folder / "ready"
    flags = ["--load", small_vocabulary_moe, "--dataset", f"{chat_rows}#40", "--max_length", 128, "--packing", "true"]
    shown = site.run("data", *flags, "--show", 1, "--output", ready)
    assert shown.returncode == 0, shown.stderr
    folder = next(line for line in shown.stdout.splitlines() if line.startswith("prepared data: ")).split()[2]
    end = f"--data_cache_path {ready} --train_iters 2 --save out2 --device cpu".split()
    done = site.run("sft", *flags, *end, NPROC_PER_NODE="1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"prepared data: {folder} (reused)" in done.stdout
