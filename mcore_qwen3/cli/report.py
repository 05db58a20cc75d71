"""``megatron report``: one HTML file with the curves, settings and events of one or several runs. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_qwen3.cli.report_page import page_text
from mcore_qwen3.cli.run_log import find_logs
from mcore_qwen3.config import REPORT, parse_command
from mcore_qwen3.errors import ConfigError


def run(argv: list[str]) -> int:
    """The words after ``megatron report`` -> 0 once the page is written."""
    flags = parse_command(argv, REPORT).config.page
    runs, target = find_logs(flags.runs), Path(flags.output)
    text = page_text(runs)
    _write(target, text)
    for each in runs:
        steps = len({record["iteration"] for record in each.records if "event" not in record})
        print(f"{each.name}: {steps:,} steps, {len(each.events)} events; {each.path}")
        for note in each.notes:
            print(f"  note: {note}")
    print(f"report: {target} ({len(text.encode()):,} bytes); open it in a browser, it needs no network", flush=True)
    return 0


def _write(target: Path, text: str) -> None:
    """The whole page, or the older one stays."""
    temporary = target.with_name(f".{target.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError("--output is a file that can be written", seen=error, fix="another path") from None
