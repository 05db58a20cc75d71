"""The code base keeps its written rules, and every rule is able to fail."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import architecture as rules

Rule = Callable[[Path], list[str]]

# A tree that keeps every rule; each planted file below breaks exactly one.
CLEAN = {
    "mcore_qwen3/__init__.py": '"""A package."""\n',
    "mcore_qwen3/config/__init__.py": '"""Settings."""\n',
    "mcore_qwen3/config/run.py": (
        '"""Settings."""\n'
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Optim:\n"
        '    """Step size."""\n'
        "    lr: float = 1.0\n"
        "    load: str = ''\n"
        "    warmup: int = 0\n"
        "@dataclass\n"
        "class RunConfig:\n"
        '    """All."""\n'
        "    optim: Optim\n"
        "def warmup_iters(cfg: RunConfig) -> int:\n"
        '    """Warm-up."""\n'
        "    return cfg.optim.warmup\n"
        "def check(cfg: RunConfig) -> None:\n"
        '    """A check is no use of a setting."""\n'
        "    assert cfg.optim.lr\n"
    ),
    "mcore_qwen3/train/loop.py": (
        '"""Loop."""\n'
        "import torch\n"
        "from mcore_qwen3.config.run import RunConfig, warmup_iters\n"
        "def train(cfg: RunConfig) -> None:\n"
        '    """Train."""\n'
        "    print(cfg.optim.lr, cfg.optim.load, warmup_iters(cfg), torch.ones(1))\n"
    ),
    "mcore_qwen3/runtime/device.py": (
        '"""Device."""\n'
        "import torch\n"
        'DEVICE = torch.device("cuda", torch.cuda.device_count())\n'
        "def fast() -> object:\n"
        '    """Modules."""\n'
        "    import transformer_engine\n"
        "    return transformer_engine\n"
    ),
    "mcore_qwen3/cli/main.py": '"""Main."""\nfrom mcore_qwen3.launch import run\nCHOICES = dict(device=("cpu", "cuda"))\n',
    "README.md": "Read me: $HOME/root/ and /etc are fine.\n",
}

LOOP = "mcore_qwen3/train/loop.py"
PLANTED: list[tuple[Rule, str, str, str]] = [
    (
        rules.check_imports_between_packages,
        "mcore_qwen3/config/a.py",
        "import mcore_qwen3.arch.shape",
        "config must not import",
    ),
    (
        rules.check_imports_between_packages,
        "mcore_qwen3/data/a.py",
        "from mcore_qwen3.train import loop",
        "data must not import",
    ),
    (
        rules.check_imports_between_packages,
        "mcore_qwen3/train/a.py",
        "from mcore_qwen3 import launch",
        "train must not import",
    ),
    (rules.check_imports_between_packages, "mcore_qwen3/model/a.py", "from . import b", "a relative import"),
    (
        rules.check_imports_between_packages,
        "mcore_qwen3/model/a.py",
        "def f():\n    import mcore_qwen3.cli",
        "model must not import",
    ),
    (rules.check_libraries, "mcore_qwen3/config/a.py", "import torch", "config must not import torch"),
    (
        rules.check_libraries,
        "mcore_qwen3/launch/a.py",
        "def f():\n    from torch import nn",
        "launch must not import torch",
    ),
    (
        rules.check_libraries,
        "mcore_qwen3/converters/a.py",
        "import megatron.core",
        "converters must not import megatron",
    ),
    (rules.check_libraries, "mcore_qwen3/data/a.py", "import megatron.core", "data must not import megatron"),
    (rules.check_libraries, "mcore_qwen3/extras/a.py", "import json", "extras is no package of the design"),
    (
        rules.check_accelerators_are_lazy,
        "mcore_qwen3/model/a.py",
        "try:\n    import transformer_engine.pytorch as te\nexcept ImportError:\n    te = None",
        "transformer_engine.pytorch is imported at module level",
    ),
    (
        rules.check_device_names,
        "mcore_qwen3/model/a.py",
        "import torch\nX = torch.ones(1, device='cuda:0')",
        "'cuda:0'",
    ),
    (rules.check_device_names, "mcore_qwen3/train/a.py", "def f(x):\n    return x.to('cpu')", "'cpu'"),
    (rules.check_device_names, "mcore_qwen3/cli/a.py", "def f(start):\n    start(backend='gloo')", "'gloo'"),
    (
        rules.check_device_names,
        "mcore_qwen3/data/a.py",
        "import torch\nN = torch.cuda.device_count()",
        "a use of torch.cuda",
    ),
    (rules.check_device_names, "mcore_qwen3/data/a.py", "import torch\nN = torch.backends.cuda", "a use of torch.cuda"),
    (rules.check_device_names, "mcore_qwen3/data/a.py", "from torch import cuda", "an import of torch.cuda"),
    (rules.check_device_names, "mcore_qwen3/data/a.py", "def f(x):\n    return x.cuda()", "a call of .cuda()"),
    (rules.check_sizes, "tests/a.py", "x = 1\n" * 400, "400 lines"),
    (rules.check_sizes, "mcore_qwen3/model/a.py", "def long():\n" + "    x = 1\n" * 79, "long has 80 lines"),
    (rules.check_docstrings, "mcore_qwen3/model/a.py", "def f():\n    pass", "f has no docstring"),
    (rules.check_docstrings, "mcore_qwen3/model/a.py", "class C:\n    pass", "C has no docstring"),
    (rules.check_tracked_text, "README.md", "look into /" + "home/me/", "README.md:1"),
    (rules.check_tracked_text, "Makefile", "pip install -i https://pypi" + ".org/simple", "Makefile:1"),
    (rules.check_tracked_sizes, "big.bin", "x" * 200_001, "200001 bytes"),
]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule, repo_root: Path) -> None:
    assert rule(repo_root) == []


@pytest.fixture
def clean_tree(tmp_path: Path) -> Path:
    for name, text in CLEAN.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def test_a_clean_tree_breaks_no_rule(clean_tree: Path) -> None:
    assert [line for rule in rules.RULES for line in rule(clean_tree)] == []


@pytest.mark.parametrize(("rule", "name", "text", "report"), PLANTED)
def test_a_planted_violation_is_reported(rule: Rule, name: str, text: str, report: str, clean_tree: Path) -> None:
    write(clean_tree, name, '"""A file."""\n' + text if name.startswith("mcore_qwen3") else text)
    (line,) = rule(clean_tree)
    assert report in line
    assert line.startswith(name)


@pytest.mark.parametrize(
    ("before", "after", "unread"),
    [
        ("cfg.optim.lr, ", "", "optim.lr"),
        ("cfg.optim.load", "torch.load", "optim.load"),
        ("cfg.optim.load", "cfg.optim.load()", "optim.load"),
        ("warmup_iters(cfg)", "1", "optim.warmup"),
    ],
    ids=["only a check reads it", "a module's function of that name", "a method of that name", "helper is not used"],
)
def test_a_setting_that_nothing_reads_is_reported(before: str, after: str, unread: str, clean_tree: Path) -> None:
    text = CLEAN[LOOP].replace("RunConfig, warmup_iters", "RunConfig") if unread == "optim.warmup" else CLEAN[LOOP]
    write(clean_tree, LOOP, text.replace(before, after))
    assert rules.check_fields_are_read(clean_tree) == [f"mcore_qwen3/config: nothing reads {unread}"]


def test_a_setting_of_another_command_that_nothing_reads_is_reported(clean_tree: Path) -> None:
    text = (
        '"""Another command."""\n'
        "class WorkFlags:\n"
        '    """Work."""\n'
        "    workers: int = 1\n"
        "class ConvertConfig:\n"
        '    """All."""\n'
        "    work: WorkFlags\n"
    )
    write(clean_tree, "mcore_qwen3/config/convert.py", text)
    assert rules.check_fields_are_read(clean_tree) == ["mcore_qwen3/config: nothing reads work.workers"]
    write(
        clean_tree,
        "mcore_qwen3/cli/convert.py",
        '"""Convert."""\ndef run(config):\n    """Run."""\n    return config.work.workers\n',
    )
    assert rules.check_fields_are_read(clean_tree) == []


def test_a_file_git_ignores_is_not_the_projects(clean_tree: Path) -> None:
    write(clean_tree, ".gitignore", "ignored/\n")
    write(clean_tree, "ignored/a.py", "x = 1\n" * 400)
    write(clean_tree, "seen/a.py", "x = 1\n" * 400)
    subprocess.run(["git", "init", "--quiet"], cwd=clean_tree, check=True)
    assert [line.split(":")[0] for line in rules.check_sizes(clean_tree)] == ["seen/a.py"]


@pytest.mark.parametrize("module", ["config", "arch", "launch", "cli.main"])
def test_torch_is_not_loaded_with(module: str, repo_root: Path) -> None:
    """The syntax tree shows direct imports; this shows what really gets loaded."""
    code = f"import sys, mcore_qwen3.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root, timeout=50).returncode == 0


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config, repo_root: Path) -> None:
    """pytest leaves out folders of certain names, `dist` among them, without a word."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (repo_root / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not [name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in left_out)]
