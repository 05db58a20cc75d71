"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ranks

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption("--whole-matrix", action="store_true", help="every change of layout, not a covering part")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def material_dir() -> Path:
    """The folder that `make material` fills: `tokenizer*/`, `templates/`, `data/`. Missing is a failure, not a skip."""
    folder = ROOT / ".material"
    if not (folder / "data").is_dir():
        pytest.fail(f"{folder} is not complete: run `make material`")
    return folder


@pytest.fixture(scope="session")
def qwen3_tokenizer_dir(material_dir: Path) -> Path:
    """The official Qwen3 tokenizer: tokenizer.json, tokenizer_config.json, generation_config.json."""
    folder = material_dir / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        pytest.fail(f"{folder} is not complete: run `make material`")
    return folder


@pytest.fixture(scope="session", autouse=True)
def rank_pools() -> Iterator[None]:
    """Ends the pools of rank processes that tests have started."""
    yield
    ranks.stop_all()
