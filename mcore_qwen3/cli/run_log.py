"""A run as its log tells of it, for `megatron report`. Any file is read: what is no record is counted, not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mcore_qwen3.errors import ConfigError

LOG_FILE, CONFIG_FILE = "train_log.jsonl", "run_config.yaml"
_NOT_DRAWN = ("iteration", "restart", "world_size")


@dataclass(slots=True)
class RunLog:
    """A run.

    Attributes:
        name: what the page calls it.
        path: the log.
        records: steps and evaluations that count, in the order of their steps.
        overruled: those past a checkpoint that the run went back to, one list for each time.
        events: (step, kind, what happened), in the order of the log.
        config: the resolved configuration of its newest checkpoint; None where there is none.
        notes: what a reader must know about the files.
        ended: why the run ended; "" where the log does not tell.
    """

    name: str
    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    overruled: list[list[dict[str, Any]]] = field(default_factory=list)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    config: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    ended: str = ""

    def series(self, key: str, records: Sequence[dict[str, Any]] | None = None) -> tuple[list[int], list[float]]:
        """(steps, values) of the records that have a finite number under `key`; `a.b` is b within a."""
        steps, values = [], []
        for record in self.records if records is None else records:
            value = _lookup(record, key)
            if is_number(value):
                steps.append(record["iteration"])
                values.append(float(value))
        return steps, values

    def nested_keys(self, key: str) -> list[str]:
        """The names below `key` in any record, in the order in which they come up."""
        found: dict[str, None] = {}
        for record in self.records:
            if isinstance(record.get(key), dict):
                found |= dict.fromkeys(map(str, record[key]))
        return list(found)


def is_number(value: object) -> bool:
    """A finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _lookup(record: dict[str, Any], key: str) -> Any:
    outer, _, inner = key.partition(".")
    value = record.get(outer)
    return value.get(inner) if inner and isinstance(value, dict) else None if inner else value


def find_logs(places: Sequence[str]) -> list[RunLog]:
    """The runs in these save folders or log files, each under a name of its own, read.

    Raises:
        ConfigError: there is no such log, or it cannot be read.
    """
    logs = []
    for place in places:
        path = Path(place)
        file = path / LOG_FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                "a run is its save folder, or the train_log.jsonl in it",
                seen=f"no file {file}",
                fix="the folder that the training command had as --save",
            )
        logs.append(file)
    names = _names([file.resolve() for file in logs])
    return [read_run(file, name) for file, name in zip(logs, names, strict=True)]


def _names(files: Sequence[Path]) -> list[str]:
    """Each run's folder, with as many folders above as tell it from the others; one that is named twice has a number."""
    stems = {file: file.parent if file.name == LOG_FILE else file.with_suffix("") for file in files}
    names = {file: stem.name or "run" for file, stem in stems.items()}
    for depth in range(2, 6):
        shared = [name for name in names.values() if list(names.values()).count(name) > 1]
        names |= {file: "/".join(stems[file].parts[-depth:]) for file, name in names.items() if name in shared}
    shown = [names[file] for file in files]
    return [name if shown.index(name) == at else f"{name} ({at + 1})" for at, name in enumerate(shown)]


def read_run(file: Path, name: str) -> RunLog:
    """Read a log and the configuration beside it.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError("a log must be readable", seen=f"{file}: {error.strerror}") from None
    run = RunLog(name, file)
    _read_lines(run, text)
    if not run.records:
        run.notes.append("the log has no finished step")
    elif not run.ended:
        run.notes.append("the log does not tell of an end: the run goes on, was killed, or ended with an error")
    _read_config(run)
    return run


def _read_lines(run: RunLog, text: str) -> None:
    lines = text.split("\n")
    bad = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is not None:
            _take(run, record)
        elif number == len(lines):
            run.notes.append("the last line is cut off: the run was killed, or is writing it")
        else:
            bad.append(number)
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        run.notes.append(
            f"{len(bad)} line(s) that are no record were left out: {shown} (a killed run leaves half of one)"
        )


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("iteration")
    return record if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _take(run: RunLog, record: dict[str, Any]) -> None:
    step, kind = record["iteration"], record.get("event")
    if kind is None:
        run.records.append(record)
        return
    run.ended = str(record.get("reason", "")) if kind == "stop" else run.ended
    if kind == "start":
        _start(run, record)
    elif kind == "eval":
        run.records.append(record)
    elif kind != "dead_experts" or isinstance(record.get("experts"), list):
        run.events.append((step, str(kind), event_text(record)))


def _start(run: RunLog, record: dict[str, Any]) -> None:
    """What lies past the step that the run starts from is overruled."""
    step = record["iteration"]
    run.ended = ""
    lost = [each for each in run.records if each["iteration"] > step]
    if lost:
        run.records = [each for each in run.records if each["iteration"] <= step]
        run.overruled.append(lost)
    facts = f" on {record['world_size']} ranks" if is_number(record.get("world_size")) else ""
    if isinstance(record.get("no_mfu"), str):
        facts += f"; no MFU: {record['no_mfu']}"
    if not run.records and not lost:
        run.events.append((step, "start", f"started{facts}"))
        return
    count = len({each["iteration"] for each in lost})
    again = f"; {count} step(s) past it overruled" if count else ""
    run.events.append((step, "resume", f"continued from step {step}{facts}{again}"))


def event_text(record: dict[str, Any]) -> str:
    """An event in words; of a kind that this version does not know, its facts."""
    kind, reason = record["event"], record.get("reason", "")
    if kind == "save":
        return "checkpoint written"
    if kind == "restart":
        return f"all ranks were started again, time {record.get('restart')}: {reason}"
    if kind == "skipped":
        return f"no weight was changed: {reason}"
    if kind == "stop":
        return "all steps are done" if reason == "end" else f"stopped by {reason}, saved"
    if kind == "memory":
        return (
            f"peak memory {record.get('peak_gib')} GiB on the fullest rank, estimated {record.get('estimated_gib')} GiB"
        )
    if kind == "loss_spike":
        return f"loss {record.get('value')} above {record.get('bound')}, by the steps before"
    if kind == "dead_experts":
        experts = record["experts"]
        return f"{len(experts)} expert(s) without a token for long (layer, expert): {str(experts[:8]).strip('[]')}"
    return ", ".join(f"{key} {value}" for key, value in record.items() if key not in ("event", "iteration"))


def _read_config(run: RunLog) -> None:
    """Of the newest checkpoint beside the log."""
    files = sorted(run.path.parent.glob(f"iter_*/{CONFIG_FILE}"))
    if not files:
        run.notes.append(f"no {CONFIG_FILE}: no checkpoint lies beside the log")
        return
    try:
        content = yaml.safe_load(files[-1].read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        run.notes.append(f"{files[-1]} cannot be read: {str(error).splitlines()[0]}")
        return
    if not isinstance(content, dict):
        run.notes.append(f"{files[-1]} is no list of settings")
        return
    run.config = {str(key): value for key, value in content.items()}


def differing_settings(runs: Sequence[RunLog], defaults: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """(setting, its value in each run as text) where runs differ; of one run alone, where it is not the default."""
    configs = [run.config for run in runs if run.config is not None]
    compared = [*configs, defaults] if len(configs) == 1 else configs
    for name in dict.fromkeys(key for config in configs for key in config):
        values = [_value(config.get(name)) for config in compared]
        if len(set(values)) > 1:
            yield name, ["no configuration" if run.config is None else _value(run.config.get(name)) for run in runs]


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)


def thinned(steps: list[int], values: list[float], most: int) -> tuple[list[int], list[float]]:
    """At most `most` points: of each stretch of steps the smallest and the largest value, so that no spike is lost."""
    if len(steps) <= most:
        return steps, values
    size = math.ceil(2 * len(steps) / most)
    kept: list[int] = []
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    return [steps[at] for at in kept], [values[at] for at in kept]
