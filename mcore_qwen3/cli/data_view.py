"""Prepared data for the eye: samples with trained tokens in colour, a table of the rows, a histogram of lengths."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from mcore_qwen3.data.chat_files import tokenizer_file
from mcore_qwen3.data.prepare import TRAIN, Prepared
from mcore_qwen3.data.reader import Sample, SplitReader

TRAINED, UNTRAINED = "bold green", "dim"
LEGEND = "trained tokens are green and bold, the others dim"


def show_samples(prepared: Prepared, tokenizer_dir: Path, number: int, *, with_ids: bool) -> None:
    """Print the first `number` training samples, as the model reads them."""
    if not number:
        return
    console = Console(highlight=False)
    backend = Tokenizer.from_file(str(tokenizer_file(tokenizer_dir)))
    console.print(Text(LEGEND))
    reader = SplitReader(prepared.path, TRAIN)
    samples = (sample for row in range(len(reader)) for sample in reader.samples(row))
    for shown, sample in zip(range(1, number + 1), samples, strict=False):
        ids, mask = sample
        console.rule(f"sample {shown}: {len(ids)} tokens, {int(mask.sum())} trained", align="left")
        console.print(coloured(backend, sample), soft_wrap=True)
        if with_ids:
            styles = [TRAINED if trained else UNTRAINED for trained in mask.tolist()]
            ids_text = Text(" ").join(Text(str(one), style) for one, style in zip(ids.tolist(), styles, strict=True))
            console.print(ids_text, soft_wrap=True)
    console.rule()


def coloured(backend: Tokenizer, sample: Sample) -> Text:
    """The text of a sample; runs of trained and of untrained tokens decoded whole, so that no character is cut."""
    ids, mask = sample
    text = Text()
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(borders):
        run = backend.decode(ids[start:end].tolist(), skip_special_tokens=False)
        text.append(run, TRAINED if mask[start] else UNTRAINED)
    return text


def show_table(prepared: Prepared) -> None:
    """Print the rows of each file, kept and dropped by reason, and the lengths of the samples kept."""
    Console(highlight=False, soft_wrap=True).print(rows_table(prepared))
    lengths = sample_lengths(prepared)
    middle, high = np.percentile(lengths, [50, 95])
    print(f"tokens a sample: p50 {middle:.0f}, p95 {high:.0f}, max {lengths.max():,}")


def rows_table(prepared: Prepared) -> Table:
    """One line a file, and one below it for each reason to drop rows."""
    table = Table()
    for name in ("file", "form", "rows", "kept", "cut", "dropped"):
        table.add_column(name, justify="left" if name in ("file", "form") else "right", overflow="fold")
    for entry in prepared.table:
        dropped = sum(int(one["rows"]) for one in entry["dropped"])
        numbers = [f"{value:,}" for value in (entry["rows"], entry["kept"], entry["cut"], dropped)]
        table.add_row(Path(entry["name"]).name, entry["form"], *numbers)
        for one in entry["dropped"]:
            table.add_row("", Text(f"{one['reason']} (first at {one['first']})"), "", "", "", f"{one['rows']:,}")
    return table


def sample_lengths(prepared: Prepared) -> np.ndarray:
    """Tokens of every sample, training and validation: int64."""
    return np.diff(np.load(prepared.path / "offsets.npy"))


def draw_histogram(prepared: Prepared, file: Path) -> None:
    """Write a PNG: how many samples have which length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sample_lengths(prepared)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.hist(lengths, bins=min(60, max(10, len(lengths) // 20)))
    axes.axvline(prepared.max_length, color="grey", linestyle=":")
    axes.set(xlabel="tokens", ylabel="samples", title=f"{len(lengths):,} samples, limit {prepared.max_length:,} tokens")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.getvalue())
