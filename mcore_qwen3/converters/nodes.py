"""One conversion on several nodes that share nothing but a disk: they meet, split the parts, and node 0 completes it.

Files beside the target and in its staging directory are the only channel. A node that joins writes a fresh token; node 0
writes the tokens of all nodes into its new staging directory, so that what a killed run left is never mistaken for this
one. Every message is a JSON file that appears by a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_qwen3.converters.parts import Report, Task, Team, run_parts
from mcore_qwen3.converters.staging import staged_directory, staging_path
from mcore_qwen3.errors import ConversionError

_POLL_S = 0.5
# A node that shows no sign of life for so long is taken for dead; shared disks show changes late.
SILENCE_S = 600.0
_SIGN_S = 5.0
_FOLDER = ".nodes"


@contextmanager
def shared_staging(target: Path, team: Team, *, overwrite: bool) -> Iterator[Path]:
    """`staged_directory` for a team of nodes. Node 0 makes, completes and renames the directory; the others join it.

    Raises:
        ConversionError: as `staged_directory`, or a node stayed away.
    """
    if team.node_rank == 0:
        with staged_directory(target, overwrite=overwrite) as staging:
            if team.nodes > 1:
                _gather_nodes(target, staging, team)
            yield staging
            shutil.rmtree(staging / _FOLDER, ignore_errors=True)
        return
    staging = _join(target, team)
    identity = staging.stat().st_ino
    try:
        yield staging
    except OSError as error:
        raise ConversionError("the output must be writable and have room", seen=error, fix="look at node 0") from error
    _await(lambda: not staging.exists() or staging.stat().st_ino != identity, "node 0 to complete the directory", None)
    if not target.is_dir() or target.stat().st_ino != identity:
        raise ConversionError("every node must finish", seen="node 0 failed", fix="read its error, then start again")


def run_team(
    task: Task, payloads: list[Any], staging: Path, team: Team, plan: object
) -> tuple[list[dict[str, Any]], bool]:
    """Run this node's parts; on node 0, wait for those of the others.

    Args:
        task: as for `run_parts`.
        payloads: one for each part of the whole work.
        staging: the shared staging directory.
        team: who works.
        plan: whatever decides what the parts are; its text must be the same on all nodes.

    Returns:
        The results of all parts, and whether this node has to complete the directory (node 0).

    Raises:
        ConversionError, OSError: a part failed, here or on another node.
    """
    own = [payloads[part] for part in team.own_parts]
    if team.nodes == 1:
        return run_parts(task, own, team.report), True
    folder = staging / _FOLDER
    digest = hashlib.sha256(repr(plan).encode()).hexdigest()
    try:
        results = run_parts(task, own, _with_signs(team.report, folder / f"sign_{team.node_rank}.json"))
    except BaseException as error:
        if team.node_rank and folder.exists():
            _write(folder / f"failed_{team.node_rank}.json", str(error))
        raise
    if team.node_rank:
        _write(folder / f"done_{team.node_rank}.json", {"plan": digest, "results": results})
        return results, False
    for rank in range(1, team.nodes):
        results += _results_of(folder, rank, digest)
    return results, True


def _results_of(folder: Path, rank: int, digest: str) -> list[dict[str, Any]]:
    done, failed = folder / f"done_{rank}.json", folder / f"failed_{rank}.json"
    _await(lambda: done.exists() or failed.exists(), f"node {rank}", folder / f"sign_{rank}.json")
    if failed.exists():
        raise ConversionError(f"node {rank} failed", seen=_read(failed), fix="mend it there, then start again on all")
    found = _read(done)
    if found["plan"] != digest:
        raise ConversionError(
            "all nodes must run the same command on the same files", seen=f"node {rank} planned something else"
        )
    return found["results"]


def _gather_nodes(target: Path, staging: Path, team: Team) -> None:
    """Node 0: wait until every node has seen its own token in this staging directory."""
    folder = staging / _FOLDER
    folder.mkdir()

    def complete() -> bool:
        cards = [_card(target, rank) for rank in range(1, team.nodes)]
        tokens = [_read(card) for card in cards if card.exists()]
        if not (folder / "tokens.json").exists() or _read(folder / "tokens.json") != tokens:
            _write(folder / "tokens.json", tokens)
        return len(tokens) == len(cards) and all((folder / f"here_{token}").exists() for token in tokens)

    _await(complete, f"all {team.nodes} nodes to start", None)
    for rank in range(1, team.nodes):
        _card(target, rank).unlink(missing_ok=True)


def _join(target: Path, team: Team) -> Path:
    """Another node: announce a fresh token and wait until node 0's staging directory holds it."""
    token = uuid.uuid4().hex
    folder = staging_path(target) / _FOLDER
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(_card(target, team.node_rank), token)

    def called() -> bool:
        try:
            return token in _read(folder / "tokens.json")
        except FileNotFoundError:
            return False

    _await(called, "node 0 to start", None)
    (folder / f"here_{token}").touch()
    return folder.parent


def _card(target: Path, rank: int) -> Path:
    return target.with_name(f".{target.name}.node_{rank}.json")


def _with_signs(report: Report, path: Path) -> Report:
    """A report that also leaves a sign of life, every few seconds."""
    last = [0.0]

    def both(nbytes: int) -> None:
        report(nbytes)
        if time.monotonic() - last[0] > _SIGN_S:
            last[0] = time.monotonic()
            _write(path, time.time())

    return both


def _await(condition: Callable[[], bool], what: str, sign: Path | None) -> None:
    """Poll a condition; a changing sign of life resets the limit."""
    since, seen = time.monotonic(), None
    while not condition():
        current = _read(sign) if sign is not None and sign.exists() else None
        if current != seen:
            since, seen = time.monotonic(), current
        if time.monotonic() - since > SILENCE_S:
            raise ConversionError(
                "all nodes must take part", seen=f"waited {SILENCE_S:.0f} s for {what}", fix="start all again"
            )
        time.sleep(_POLL_S)


def _write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
