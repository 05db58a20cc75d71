"""Tiny checkpoints that transformers wrote: the source that owes nothing to this project."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from converter_kit import KINDS, build_model, expected_mcore, load_all


@pytest.fixture(scope="session")
def hf_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory for each kind of model."""
    root = tmp_path_factory.mktemp("hf")
    for kind in KINDS:
        build_model(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of model in turn."""
    return request.param


@pytest.fixture
def hf_dir(hf_dirs: dict[str, Path], kind: str) -> Path:
    """The directory of one kind of model; not to be written to."""
    return hf_dirs[kind]


@pytest.fixture(scope="session")
def mcore_tensors(hf_dirs: dict[str, Path]) -> dict[str, dict]:
    """For each kind, its torch_dist tensors laid out by hand."""
    return {kind: expected_mcore(load_all(directory), kind) for kind, directory in hf_dirs.items()}


@pytest.fixture
def copy_of(hf_dirs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a model directory to spoil."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(hf_dirs[kind], tmp_path / f"copy_{kind}"))

    return copy
