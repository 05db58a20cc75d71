"""The configurations that come with the package: each parses, is legal on its GPUs, fits, and says what it always said.

`UPDATE_CONFIGS=1` writes the golden texts anew, after `python scripts/write_configs.py`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.hf_configs import hf_config
from helpers.scripts import load_script

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.main import main
from mcore_qwen3.cli.resolve import layout_of
from mcore_qwen3.config import RunConfig, parse_args, with_values
from mcore_qwen3.config.yaml_file import CONFIGS, find_config
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.gpus import find_gpu
from mcore_qwen3.planner.memory import GIB, heaviest_account
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.settings import settings_of

FILES = sorted(CONFIGS.glob("qwen3-*.yaml"))
TINY = sorted(CONFIGS.glob("tiny-*.yaml"))
GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "configs"
HEAD = re.compile(r"# (\S+), megatron (sft|pt)\. GPUs: (\d+) x (\S+)\.\n")


def test_every_model_has_both_tasks() -> None:
    names = {file.stem for file in CONFIGS.iterdir()} - {file.stem for file in TINY}
    sizes = ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b", "4b-2507", "30b-a3b-2507")
    sizes += ("235b-a22b-2507", "coder-30b-a3b", "coder-480b-a35b")
    assert names == {f"qwen3-{size}-{task}" for size in sizes for task in ("sft", "pt")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_dry_run_and_memory(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = HEAD.match(file.read_text())
    assert found is not None, "the first line says what the file is for"
    model, task, gpus, gpu = found[1], found[2], int(found[3]), find_gpu(found[4])
    shape = find_model(model)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(hf_config(shape)))
    Path("rows.jsonl").write_text("{}\n")
    words = ["--config", file.stem, "--load", "model", "--dataset", "rows.jsonl", "--train_iters", "2000"]

    config: RunConfig = parse_args(words, task).config
    config = with_values(config, {"bf16": True})
    settings = settings_of(config, layout_of(config, gpus, shape), modules="transformer_engine", on_cuda=True)
    account = heaviest_account(shape, layout_of(config, gpus, shape), settings)
    assert account.high <= gpu.memory_gib * GIB

    per_node = min(gpus, gpu.gpus_per_node)
    monkeypatch.setenv("NNODES", str(gpus // per_node))
    monkeypatch.setenv("NPROC_PER_NODE", str(per_node))
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert main([task, *words, "--device", "cuda", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert f"  stage {account.stage}: {account.total / GIB:.1f} GiB (" in said
    compare(said, file.stem)


def compare(said: str, name: str) -> None:
    """What a dry run said against its golden text."""
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_CONFIGS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(said)
    assert said == golden.read_text()


@pytest.mark.parametrize("file", TINY, ids=lambda file: file.stem)
def test_dry_run_of_a_tiny_model_on_cpu(
    file: Path, tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.match(r"# A tiny Qwen3\S*.*, megatron (sft|pt)\. CPU ranks: (\d+)\.\n", file.read_text())
    assert found is not None, "the first line says what the file is for"
    task, ranks = found[1], found[2]
    quickstart = load_script(repo_root / "examples" / "quickstart.py")
    moe = ModelShape.from_hf_config(quickstart.SHAPE)
    dense = replace(moe, model_type="qwen3", num_experts=0, moe_router_topk=0, moe_ffn_hidden_size=0, moe_layers=())
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(hf_config(moe if "moe" in file.stem else dense)))
    Path("rows.jsonl").write_text("{}\n")
    monkeypatch.setenv("NPROC_PER_NODE", ranks)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    words = ["--config", file.stem, "--load", "model", "--dataset", "rows.jsonl", "--train_iters", "100"]
    assert main([task, *words, "--dry_run"]) == 0
    said = capsys.readouterr().out
    state = sum(float(size) for size in re.findall(r"sum .* = (\S+) GiB", said))
    assert "device cpu, fp32" in said and 0 < state < 1  # any machine holds it
    compare(said, file.stem)


def test_the_tiny_ones_are_those_of_the_docs() -> None:
    assert [file.stem for file in TINY] == ["tiny-dense-pt", "tiny-dense-sft", "tiny-moe-pt", "tiny-moe-sft"]


def test_a_name_is_a_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config("qwen3-8b-sft") == CONFIGS / "qwen3-8b-sft.yaml"
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b-sft").write_text("lr: 1.0e-4\n")
    assert find_config("qwen3-8b-sft") == Path("qwen3-8b-sft")
    with pytest.raises(ConfigError, match="qwen3-30b-a3b-sft"):
        find_config("qwen3-30b-a3b-stf")
