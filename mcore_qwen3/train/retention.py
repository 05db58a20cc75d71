"""Which checkpoints of a run stay on disk, and what killed runs left. Only rank 0 calls this."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_qwen3.train.checkpoint import iteration_name

_UNFINISHED = re.compile(r"\.(iter_\d{7,})(-hf)?\.(partial|replaced|deleted)")


def kept_iterations(written: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """The checkpoints that stay: `limit` in all, the newest and the best among them whatever the limit.

    Args:
        written: of this run, oldest first.
        limit: `--save_total_limit`; None keeps all.
        best: its iteration; None where no metric is compared.
    """
    if limit is None:
        return list(written)
    kept = {written[-1], best}
    for iteration in reversed(written):
        if len(kept & set(written)) < limit:
            kept.add(iteration)
    return [iteration for iteration in written if iteration in kept]


def delete_checkpoints(root: Path, iterations: Sequence[int], say: Callable[[str], None]) -> None:
    """Delete checkpoints and the `-hf` folders beside them. What cannot be deleted is said; it harms no checkpoint."""
    for iteration in iterations:
        for name in (iteration_name(iteration), f"{iteration_name(iteration)}-hf"):
            doomed = root / f".{name}.deleted"
            try:
                if (root / name).is_dir():
                    os.replace(root / name, doomed)  # half deleted it must not look like a checkpoint
                    shutil.rmtree(doomed)
            except OSError as error:
                say(f"could not delete {root / name}: {error}")


def clear_unfinished(root: Path) -> None:
    """Remove what killed runs were writing, replacing or deleting in a save directory; nothing that has another name."""
    for path in root.glob(".iter_*"):
        name = _UNFINISHED.fullmatch(path.name)
        if name and (name[3] != "replaced" or (root / name[1]).exists()):
            shutil.rmtree(path, ignore_errors=True)
