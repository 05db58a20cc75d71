"""Writes docs/how-many-gpus.md: what `megatron plan` answers for the large Qwen3-MoE models on cards of 80, 96 and 141 GB.

python scripts/write_plans.py
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore_qwen3.cli.main import main as megatron

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-many-gpus.md"
MODELS = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-480B-A35B-Instruct")
CARDS = {"h100-80": "H100 80 GB", "h20-96": "H20 96 GB", "h200-141": "H200 141 GB"}
ROWS = ["--max_length", "8192", "--global_batch_size", "128"]

HEAD = """# How many GPUs, which layout

Full training of the large Qwen3-MoE models, as `megatron plan` answers: rows of 8,192 tokens, 128 rows (1,048,576 tokens) a
step, bf16 weights, fp32 gradients, fp32 master weights and moments shared out by the distributed optimizer,
transformer-engine modules, experts as uneven as in published runs. `python scripts/write_plans.py` writes the page, and a
test compares it with what the command prints now.

A machine has eight GPUs, and each card two numbers. *Fewest* is where the middle of the memory estimate fits: it may run out
of memory. *With room* is where the whole range fits, 0.80 to 1.25 times the middle: start there. Every number is an
estimate, and none was measured here; [planner](planner.md) says how far off published runs the estimates are.

Training adapters (LoRA) is not there yet: `--train_type lora` estimates its memory and time, and gives no command.

Columns: data-parallel size, micro-batch, what is computed again in the backward pass, GiB on the fullest rank (range) of what
one GPU has, seconds a step (range), tokens a second and GPU. A layout names the sizes above 1; `PP8x3` is eight stages of three
chunks, `L+2` counts the embedding and the loss as a layer each, `FIRST2` gives the first stage two layers.
"""
COLUMNS = ("card", "GPUs", "layout", "DP", "MBS", "recompute", "GiB of a GPU's", "s a step", "tokens/s/GPU")


def plan(*words: str) -> dict[str, Any]:
    """The answer of `megatron plan <words> --json true`."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = megatron(["plan", *words, "--json", "true"])
    if code:
        raise SystemExit(f"megatron plan {shlex.join(words)} ends with {code}")
    return json.loads(said.getvalue())


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for model in MODELS for line in section(model))])


def section(model: str) -> Iterator[str]:
    """One model: a table over the cards, and the command for 80 GB."""
    asked = ["--model", model, *ROWS]
    yield f"## {model}\n"
    yield "```bash\nmegatron plan " + shlex.join([*asked, "--gpu", "h100-80", "--min_gpus", "true"]) + "\n```\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield "| --- " * len(COLUMNS) + "|"
    roomy: dict[str, dict[str, Any]] = {}
    for card, name in CARDS.items():
        fewest = plan(*asked, "--gpu", card, "--min_gpus", "true")
        roomy[card] = plan(*asked, "--gpu", card, "--gpus", str(fewest["gpus_with_room"]))
        yield row(name, "fewest", fewest)
        yield row(name, "with room", roomy[card])
    yield f"\nWith room on {CARDS['h100-80']}, on every node:\n\n```bash\n{roomy['h100-80']['command']}\n```\n"


def row(card: str, kind: str, answer: dict[str, Any]) -> str:
    """The first plan of an answer as a line of the table."""
    best = answer["plans"][0]
    memory, seconds, flags = best["memory_gib"], best["step_seconds"], best["flags"]
    again = flags.get("recompute_granularity", "none")
    cells = (
        card,
        f"{answer['gpus']} ({kind})",
        best["layout"],
        best["data_parallel"],
        flags.get("micro_batch_size", 1),
        "+".join(flags["recompute_modules"]) if again == "selective" else again,
        f"{memory['total']:.1f} ({memory['low']:.1f} to {memory['high']:.1f}) of {memory['available']:.1f}",
        f"{seconds['middle']:.1f} ({seconds['low']:.1f} to {seconds['high']:.1f})",
        f"{best['tokens_per_second_per_gpu']:,.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
