"""The commands on the pages of SLURM and the doctor are read by the parsers that will read them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mcore_qwen3.cli.submit import split_words
from mcore_qwen3.config import DOCTOR, SUBMIT, find_command, parse_command

PAGES = ["docs/slurm.md", "docs/doctor.md"]


def commands(page: Path) -> list[list[str]]:
    """The words after `megatron` of every command in the blocks of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line.split("megatron ", 1)[1]) for line in lines if "megatron " in line]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_can_be_read(page: str, repo_root: Path) -> None:
    found = commands(repo_root / page)
    assert len(found) >= 2
    for words in found:
        if words[0] == "submit":
            own, words = split_words(words[1:])
            parse_command(own, SUBMIT)
        command, rest = find_command(words) or pytest.fail(f"{words} is no command")
        parse_command(rest, command)


@pytest.mark.parametrize(("page", "command"), [(PAGES[0], SUBMIT), (PAGES[1], DOCTOR)])
def test_flags_on_the_page_exist(page: str, command: object, repo_root: Path) -> None:
    """Those in backquotes are submit's, the doctor's, a training command's, or another program's."""
    text = (repo_root / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`--(\w+)", text))
    known = set(SUBMIT.flags()) | set(DOCTOR.flags()) | set(find_command(["sft"])[0].flags()) | {"config", "help"}
    dlc = {"name", "workers", "worker_gpu", "worker_image", "job_max_running_time_minutes", "envs"}
    assert named - known - dlc <= {"exclusive", "get"}
