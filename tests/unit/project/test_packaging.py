"""pyproject.toml, constraints.txt and the code agree about what the project needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Found at run time where they are installed, and named by the `gpu` extra or not at all.
ACCELERATORS = {"transformer_engine", "apex"}


@pytest.fixture(scope="module")
def project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins(repo_root: Path) -> dict[str, str]:
    """Package -> version of constraints.txt, whose every line is an exact pin."""
    lines = (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.+]+)", line) for line in lines if line and not line.startswith("#")]
    assert None not in pairs
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def imported_libraries(root: Path) -> set[str]:
    found = set()
    for path in (root / "mcore_qwen3").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"mcore_qwen3"} - ACCELERATORS


def test_what_is_imported_is_declared_and_the_other_way_round(project: dict[str, Any], repo_root: Path) -> None:
    distributions = packages_distributions()
    needed = {canonicalize_name(distributions[module][0]) for module in imported_libraries(repo_root)}
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    assert declared == needed


def test_every_direct_dependency_is_pinned_within_its_range(project: dict[str, Any], pins: dict[str, str]) -> None:
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, lines):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} does not admit the tested {pinned}"


def test_the_tests_run_with_the_pinned_versions(project: dict[str, Any], pins: dict[str, str]) -> None:
    names = [canonicalize_name(Requirement(line).name) for line in project["dependencies"]]
    assert {name: version(name).split("+")[0] for name in names} == {name: pins[name] for name in names}
