"""The wheel is whole: it is built, installed outside the checkout, and its commands run from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from helpers.scripts import load_script

import mcore_qwen3

BUILD_INPUTS = ["pyproject.toml", "README.md", "LICENSE", "mcore_qwen3"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The wheel, built without network from a copy: setuptools leaves build/ and egg-info beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in BUILD_INPUTS:
        if (repo_root / name).is_dir():
            shutil.copytree(repo_root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(repo_root / name, source / name)
    pip("wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder / "dist"))
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", str(wheel), "--no-deps", "--no-index", "--no-compile", "--target", str(folder))
    return folder


def pip(*arguments: str) -> None:
    """Run pip; its output is shown when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=55)
    assert done.returncode == 0, done.stdout


def run_installed(site: Path, cwd: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command that can import the wheel and the libraries, and cannot import the checkout.

    `-S` and `-P` keep the editable install's path hook and the current folder out of sys.path.
    """
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "120", **environ}
    full = [sys.executable, "-S", "-P", *command]
    return subprocess.run(full, cwd=cwd, env=environment, capture_output=True, text=True, timeout=55)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    info = f"mcore_qwen3-{mcore_qwen3.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"mcore_qwen3", info}
    assert f"{info}/licenses/LICENSE" in names
    files = (
        path for kind in ("*.py", "*.json", "*.yaml", "page/*") for path in (repo_root / "mcore_qwen3").rglob(kind)
    )
    sources = {str(path.relative_to(repo_root)) for path in files}
    assert {name for name in names if name.startswith("mcore_qwen3/")} == sources


def test_every_package_of_the_checkout_can_be_found(repo_root: Path) -> None:
    """A folder without __init__.py would be left out of the wheel in silence."""
    folders = {path.parent for path in (repo_root / "mcore_qwen3").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_module_runs_outside_the_checkout(site: Path, tmp_path: Path, repo_root: Path) -> None:
    where = run_installed(site, tmp_path, "-c", "import mcore_qwen3; print(mcore_qwen3.__file__)")
    assert where.stdout.strip() == str(site / "mcore_qwen3" / "__init__.py"), where.stderr
    assert not Path(where.stdout.strip()).is_relative_to(repo_root)
    done = run_installed(site, tmp_path, "-m", "mcore_qwen3", "--version")
    assert done.returncode == 0, done.stderr
    assert mcore_qwen3.__version__ in done.stdout


def test_the_megatron_script_runs_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    script = site / "bin" / "megatron"
    done = run_installed(site, tmp_path, str(script), "sft", "--help")
    assert done.returncode == 0, done.stderr
    assert "--tensor_model_parallel_size" in done.stdout


def test_a_configuration_by_name_outside_the_checkout(site: Path, tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "model").mkdir()
    shape = load_script(repo_root / "examples" / "quickstart.py").SHAPE
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = ["sft", "--config", "tiny-moe-sft", "--load", "model", "--dataset", "rows.jsonl", "--train_iters", "2"]
    done = run_installed(site, tmp_path, "-m", "mcore_qwen3", *words, "--dry_run", NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert "expert_model_parallel_size: 2" in done.stdout and "nothing was started" in done.stdout
