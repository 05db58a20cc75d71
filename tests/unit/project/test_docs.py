"""The pages for people say what the code does: links, files, targets, flags and defaults are looked up."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mcore_qwen3.config import iter_flags, parse_args
from mcore_qwen3.config.aliases import ALIASES

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/checkpoints.md",
    "docs/compare.md",
    "docs/convert.md",
    "docs/layouts.md",
    "docs/data.md",
    "docs/doctor.md",
    "docs/gpu-flags.md",
    "docs/guards.md",
    "docs/how-many-gpus.md",
    "docs/log.md",
    "docs/optimizers.md",
    "docs/differences-from-ms-swift.md",
    "docs/dlc.md",
    "docs/kubernetes.md",
    "docs/laptop.md",
    "docs/numbers.md",
    "docs/planner.md",
    "docs/slurm.md",
    "docs/report.md",
    "docs/stops-and-restarts.md",
    "docs/two-nodes.md",
]
DIFFERENCES = "docs/differences-from-ms-swift.md"


def read(root: Path, page: str) -> str:
    return (root / page).read_text(encoding="utf-8")


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head, backquotes removed."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def spelled(value: object) -> str:
    """A default as the page spells it."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str, repo_root: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", read(repo_root, page))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not ((repo_root / page).parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str, repo_root: Path) -> None:
    paths = re.findall(r"`((?:mcore_qwen3|tests|scripts|docs|examples|benchmarks)/[\w./-]+)`", read(repo_root, page))
    assert [path for path in paths if not (repo_root / path).exists()] == []


def test_every_page_is_checked(repo_root: Path) -> None:
    found = {str(path.relative_to(repo_root)) for path in [*repo_root.glob("*.md"), *repo_root.glob("docs/**/*.md")]}
    assert found == set(PAGES)


def test_the_file_map_names_every_package(repo_root: Path) -> None:
    block = read(repo_root, "README.md").split("## Where things are")[1].split("```")[1]
    named = set(re.findall(r"^  ([\w]+)/", block, flags=re.MULTILINE))
    assert named == {path.parent.name for path in (repo_root / "mcore_qwen3").glob("*/__init__.py")}


@pytest.mark.parametrize("page", ["docs/gpu-flags.md", "docs/log.md", "docs/optimizers.md"])
def test_flags_that_are_named_are_flags(page: str, repo_root: Path) -> None:
    """Those of our command line stand in backquotes with their dashes."""
    named = set(re.findall(r"--(\w+)", " ".join(re.findall(r"`([^`]+)`", read(repo_root, page)))))
    assert len(named) >= 10
    assert named - {flag.name for flag in iter_flags()} - ALIASES.keys() == set()


def test_words_for_published_runs_parse(repo_root: Path) -> None:
    """A cell of the column `here` that is nothing but flags is what a command line takes."""
    rows = table(read(repo_root, "docs/gpu-flags.md"), "Published runs")
    cells = [cell for row in rows for cell in row[3].split(", or ") if cell.startswith("--") and " " in cell]
    assert len(cells) >= 10
    for cell in cells:
        parse_args([*["--load", "m", "--dataset", "a", "--train_iters", "10"], *cell.split()], "sft")


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_that_are_named_exist(page: str, repo_root: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", read(repo_root, "Makefile"), flags=re.MULTILINE))
    named = {
        word
        for words in re.findall(r"(?:^|`)make ([\w -]+)", read(repo_root, page), re.MULTILINE)
        for word in words.split("  ")[0].split()
    }
    assert named - targets == set()


def test_the_commands_of_the_readme_parse(repo_root: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", read(repo_root, "README.md"), flags=re.DOTALL)
    (command,) = [block for block in blocks if "megatron sft" in block]
    words = shlex.split(command.replace("\\\n", " "))
    config = parse_args(words[words.index("sft") + 1 :], "sft").config
    assert config.parallel.expert_model_parallel_size == 8
    assert config.checkpoint.save_hf


def test_differing_defaults_are_told_as_they_are(repo_root: Path) -> None:
    defaults = {flag.name: spelled(flag.default) for flag in iter_flags()}
    rows = table(read(repo_root, DIFFERENCES), "Defaults that differ")
    assert len(rows) >= 10
    assert {row[0]: row[1] for row in rows} == {row[0]: defaults[row[0]] for row in rows}


def test_other_names_are_told_in_full(repo_root: Path) -> None:
    rows = table(read(repo_root, DIFFERENCES), "Other names")
    assert {row[0]: row[1].split(":")[0] for row in rows} == {name: alias.field for name, alias in ALIASES.items()}
    told = {row[0]: row[1].partition(": ")[2] for row in rows if ":" in row[1]}
    values = {name: alias.values for name, alias in ALIASES.items() if alias.values}
    assert told == {
        name: ", ".join(f"{spelled(key)} means {value}" for key, value in mapping.items())
        for name, mapping in values.items()
    }
