"""Models, rows and a place to run commands, made once for all process tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e_kit import Site, cut_tokenizer, write_model, write_rows
from helpers.slurm_cluster import Cluster, running_cluster, why_not_here


@pytest.fixture(scope="session")
def e2e_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models, rows and caches are."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def tiny_moe(e2e_folder: Path, qwen3_tokenizer_dir: Path) -> Path:
    """A Qwen3-MoE of 10 M parameters with the real tokenizer: nearly all of them are its vocabulary."""
    return write_model(e2e_folder / "tiny-moe", qwen3_tokenizer_dir, 151936)


@pytest.fixture(scope="session")
def small_vocabulary_moe(e2e_folder: Path, qwen3_tokenizer_dir: Path) -> Path:
    """The same with few tokens, an odd number of them: TP 2 has to pad the vocabulary."""
    size = cut_tokenizer(qwen3_tokenizer_dir, e2e_folder / "cut-tokenizer", 3001)
    assert size % 2 == 1
    return write_model(e2e_folder / "small-vocabulary-moe", e2e_folder / "cut-tokenizer", size)


@pytest.fixture(scope="session")
def chat_rows(e2e_folder: Path) -> Path:
    """160 rows to train on."""
    return write_rows(e2e_folder / "rows.jsonl", 160)


@pytest.fixture(scope="module")
def site(e2e_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A folder of the module's own; what its commands left running after a failed test is killed."""
    place = Site(tmp_path_factory.mktemp("site"))
    place.environ["XDG_CACHE_HOME"] = str(e2e_folder / "cache")
    yield place
    for job in place.jobs:
        job.kill()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM of two nodes. Where it cannot be had the test skips; in CI, where `make test` installs it, it fails."""
    installable = os.geteuid() == 0 and shutil.which("apt-get")
    give_up = pytest.fail if os.environ.get("CI") and installable else pytest.skip
    reason = why_not_here()
    if reason is not None:
        give_up(f"no SLURM: {reason}")
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(running_cluster(tmp_path_factory.mktemp("slurm")))
        except RuntimeError as error:  # another SLURM, which may not allow two daemons on a machine
            give_up(f"SLURM does not start: {error}")
        yield cluster
