"""Raw text by `megatron pt`, epochs, and the data of a run, as real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_kit import Site, steps_of

pytestmark = pytest.mark.timeout(900)


def test_pt_trains_on_raw_text_for_whole_epochs(site: Site, small_vocabulary_moe: Path) -> None:
    text = site.folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"line {n} " + "of the text " * (n % 9) + "\n" for n in range(20)))
    (text / "b.jsonl").write_text("".join(json.dumps({"text": f"row {n} " * 30}) + "\n" for n in range(10)))
    words = f"""pt --config tiny-moe-pt --load {small_vocabulary_moe} --dataset {text} --max_length 32
        --num_train_epochs 2 --save out --no_save_optim true""".split()
    done = site.run(*words, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "raw text and the end-of-text token behind it; no chat template" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("an epoch: "))
    rows = int(line.split()[2])
    records = steps_of(site.folder / "out")
    assert len(records) == -(-rows * 2 // 8) and f"steps: {len(records)}" in done.stdout
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["lr"] < 4e-4  # the schedule ends with the epochs


def test_sft_takes_the_folder_that_data_wrote(site: Site, small_vocabulary_moe: Path, chat_rows: Path) -> None:
    ready = site.folder / "ready"
    flags = ["--load", small_vocabulary_moe, "--dataset", f"{chat_rows}#40", "--max_length", 128, "--packing", "true"]
    shown = site.run("data", *flags, "--show", 1, "--output", ready)
    assert shown.returncode == 0, shown.stderr
    folder = next(line for line in shown.stdout.splitlines() if line.startswith("prepared data: ")).split()[2]
    end = f"--config tiny-moe-sft --data_cache_path {ready} --train_iters 2 --save out2".split()
    done = site.run("sft", *flags, *end, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"prepared data: {folder} (reused)" in done.stdout
