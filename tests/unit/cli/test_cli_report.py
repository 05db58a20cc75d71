"""`megatron report` without a browser: what is read of a log, what the page's data holds, what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3.cli.main import main
from mcore_qwen3.cli.report_page import page_data, page_text
from mcore_qwen3.cli.run_log import find_logs, read_run, thinned
from mcore_qwen3.config import RunConfig, to_yaml, with_values

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def step(number: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"iteration": number, "loss": loss, "grad_norm": 2.0, "lr": 1e-3, "tokens": 100, **more}


def start(number: int, ranks: int = 2) -> dict[str, Any]:
    return {"event": "start", "iteration": number, "world_size": ranks}


def write(folder: Path, *records: Any, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records)
    (folder / "train_log.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def embedded(page: str) -> Any:
    """The data that the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_steps_past_the_restored_one_are_overruled(tmp_path: Path) -> None:
    first = [step(n, loss=10 - n) for n in range(1, 8)]
    again = [step(n, loss=20 - n) for n in range(5, 9)]
    restart = {"event": "restart", "iteration": 4, "restart": 1, "reason": "rank 1 was killed"}
    folder = write(
        tmp_path / "a",
        start(0),
        *first,
        {"event": "save", "iteration": 4},
        {"event": "memory", "iteration": 4, "peak_gib": 1.25, "estimated_gib": 1.5, "stage": 0},
        start(4, 4) | {"no_mfu": "fp32"},
        restart,
        *again,
    )
    (run,) = find_logs([str(folder)])
    assert run.series("loss") == ([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 15, 14, 13, 12])
    assert [run.series("loss", part) for part in run.overruled] == [([5, 6, 7], [5, 4, 3])]
    assert run.events == [
        (0, "start", "started on 2 ranks"),
        (4, "save", "checkpoint written"),
        (4, "memory", "peak memory 1.25 GiB on the fullest rank, estimated 1.5 GiB"),
        (4, "resume", "continued from step 4 on 4 ranks; no MFU: fp32; 3 step(s) past it overruled"),
        (4, "restart", "all ranks were started again, time 1: rank 1 was killed"),
    ]


def test_the_same_records_count_as_in_the_trainer(tmp_path: Path) -> None:
    """`train.log.read_log` is what loss.png is drawn from."""
    from mcore_qwen3.train.log import read_log

    evaluation = {"event": "eval", "iteration": 2, "eval_loss": 3.0}
    records = [start(0), step(1), step(2), evaluation, step(3), start(2), step(3, 5.0), start(1), step(2, 6.0)]
    folder = write(tmp_path / "a", *records, tail='{"iteration": 9, "lo')
    run = read_run(folder / "train_log.jsonl", "a")
    counted = [each for each in read_log(folder / "train_log.jsonl") if each.get("event") in (None, "eval")]
    assert run.records == counted == [step(1), step(2, 6.0)]
    assert [len(part) for part in run.overruled] == [1, 3]


@pytest.mark.parametrize(
    ("records", "tail", "note"),
    [
        ([start(0), step(1)], '{"iteration": 2, "los', "the last line is cut off"),
        ([start(0), step(1), '{"iteration": 2, "lo', start(1), step(2)], "", "1 line(s) that are no record were left out: 3"),
        ([start(0), "[1, 2]", '{"iteration": -1}', '{"iteration": true}', "[" * 100_000, step(1)], "", "4 line(s)"),
        ([start(0), step(1)], "", "does not tell of an end"),
        ([], "", "the log has no finished step"),
        ([], "\n\n", "the log has no finished step"),
        ([start(0), step(1)], "", "no run_config.yaml"),
    ],
    ids=["cut", "cut and continued", "no records", "killed", "empty", "blank", "no configuration"],
)  # fmt: skip
def test_what_is_wrong_with_a_log_is_said(records: list[Any], tail: str, note: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", *records, tail=tail)
    (run,) = find_logs([str(folder)])
    assert any(note in each for each in run.notes), run.notes
    (shown,) = embedded(page_text([run]))["runs"]
    assert shown["notes"] == run.notes


def test_a_finished_run_with_a_configuration_has_no_notes(tmp_path: Path) -> None:
    stop = {"event": "stop", "iteration": 1, "reason": "end"}
    folder = write(tmp_path / "a", start(0), step(1), stop)
    config(folder, "iter_0000001", lr=1e-3)
    (run,) = find_logs([str(folder)])
    assert (run.notes, run.ended) == ([], "end")


def config(folder: Path, iteration: str, **values: Any) -> None:
    (folder / iteration).mkdir(parents=True)
    (folder / iteration / "run_config.yaml").write_text(to_yaml(with_values(RunConfig(), values)), encoding="utf-8")


def test_settings_that_differ(tmp_path: Path) -> None:
    """Of several runs what they do not share, of the newest checkpoint; of one run what is not the default."""
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        config(write(tmp_path / name, start(0), step(1)), "iter_0000010", lr=lr, packing=True, dataset=("x.jsonl", "y"))
        config(tmp_path / name, "iter_0000002", lr=5.0)
    write(tmp_path / "c", start(0), step(1))
    runs = find_logs([str(tmp_path / name) for name in "abc"])
    data = page_data(runs)
    assert data["settings"] == [("lr", ["0.001", "0.002", "no configuration"])]
    assert data["settings_title"] == "Resolved settings that differ between the runs."
    alone = page_data(runs[:1])
    assert sorted(alone["settings"]) == [("dataset", ["x.jsonl y"]), ("lr", ["0.001"]), ("packing", ["true"])]
    same = page_data([runs[0], runs[0]])
    assert (same["settings"], same["settings_title"]) == ([], "All resolved settings are the same.")


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "!!python/object/apply:os.system ['false']\n", "\ufeff\x00"])
def test_a_configuration_that_cannot_be_read_is_a_note(text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", start(0), step(1))
    (folder / "iter_0000001").mkdir()
    (folder / "iter_0000001" / "run_config.yaml").write_text(text)
    (run,) = find_logs([str(folder)])
    assert run.config is None
    assert any("run_config.yaml" in note for note in run.notes)


def test_values_that_are_no_numbers_are_not_drawn(tmp_path: Path) -> None:
    odd = ["NaN", "Infinity", "1e999", '"5"', "true", "null", "[1]", "{}", str(10**400)]
    lines = [f'{{"iteration": {n}, "loss": {value}, "expert_loads": [{value}]}}' for n, value in enumerate(odd, 1)]
    folder = write(tmp_path / "a", *lines, step(50, expert_loads=[1.5, 2.0]))
    (run,) = find_logs([str(folder)])
    assert run.series("loss") == ([50], [1.0])
    (shown,) = embedded(page_text([run]))["runs"]
    assert shown["series"]["loss"] == [[50], [1.0]]
    assert shown["loads"] == {"steps": [50], "loads": [[1.5, 2.0]]}


def test_nothing_of_a_log_becomes_markup(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "_")
    folder = write(
        tmp_path / name,
        start(0),
        step(1, dataset_loss={HOSTILE: 2.0}),
        {"event": "skipped", "iteration": 1, "reason": HOSTILE},
        {"event": HOSTILE, "iteration": 1, HOSTILE: "/*JS*/ /*DATA*/ /*CSS*/ \u2028"},
    )
    config(folder, "iter_0000001", system=HOSTILE)
    page = page_text(find_logs([str(folder)]))
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and "onerror=alert(2)>" in page
    data = embedded(page)
    (run,) = data["runs"]
    assert run["name"] == name
    assert [HOSTILE in event[2] or HOSTILE in event[1] for event in run["events"][1:]] == [True, True]
    assert ["system", [HOSTILE]] in data["settings"]
    assert f"dataset_loss.{HOSTILE}" in run["series"]


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_text(find_logs([str(write(tmp_path / "a", start(0), step(1)))]))
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of a namespace, never fetched"
    assert not re.search(r"\b(src|href)=\"(?!data:)", page)


def test_the_summary(tmp_path: Path) -> None:
    steps = [
        step(n, loss=10 / n, consumed_tokens=100 * n, tokens_per_second=10.0 + n, memory_gib=n / 10)
        for n in range(1, 12)
    ]
    evals = [{"event": "eval", "iteration": n, "eval_loss": loss} for n, loss in ((5, 2.0), (10, 2.5))]
    tail = [{"event": "save", "iteration": 10}, {"event": "stop", "iteration": 11, "reason": "SIGTERM"}]
    folder = write(tmp_path / "a", start(0), *steps, *evals, *tail)
    old = write(tmp_path / "b", start(0), step(1), step(2))
    titles = dict(page_data(find_logs([str(folder), str(old)]))["summary"])
    assert titles["steps"] == [11, 2]
    assert titles["last loss"] == [10 / 11, 1.0]
    assert titles["best eval loss"] == [2.0, None]
    assert titles["tokens"] == [1100, 200], "an older log has no consumed_tokens"
    assert titles["tokens/s"] == [18.5, None], "the median of steps 6 to 11"
    assert titles["GiB"] == [1.1, None]
    assert titles["saves"] == [1, 0]
    assert titles["ended"] == ["SIGTERM", "not told"]


def test_a_long_run_keeps_its_spikes() -> None:
    steps = list(range(100_000))
    values = [math.sin(n / 50) for n in steps]
    values[77_777], values[12_345] = 99.0, -99.0
    few, kept = thinned(steps, values, 4000)
    assert len(few) <= 4000
    assert few == sorted(set(few))
    assert kept[few.index(77_777)] == 99.0 and kept[few.index(12_345)] == -99.0
    assert all(values[at] == value for at, value in zip(few, kept, strict=True))


def test_long_runs_make_a_page_of_a_few_megabytes(tmp_path: Path) -> None:
    loads = [1.5] * 48
    lines = [json.dumps(step(n, loss=1 + n % 7, expert_loads=loads)) for n in range(1, 12_001)]
    saves = [{"event": "save", "iteration": n} for n in range(1, 1001)]
    (run,) = find_logs([str(write(tmp_path / "a", *lines, *saves))])
    page = page_text([run])
    assert len(page) < 2_000_000
    (shown,) = embedded(page)["runs"]
    assert len(shown["series"]["loss"][0]) <= 4000
    assert len(shown["loads"]["steps"]) <= 500
    assert (len(shown["events"]), shown["events_left_out"]) == (400, 600)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write(tmp_path / part / "out", start(0), step(1)) for part in ("x", "y")]
    single = write(tmp_path / "z", start(0), step(1)) / "train_log.jsonl"
    names = [run.name for run in find_logs([*map(str, folders), str(single), str(folders[0])])]
    assert names == ["x/out", "y/out", "z", "x/out (4)"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", start(0), step(1))
    write(tmp_path / "b", start(0))
    assert main(["report", "a", "b/train_log.jsonl", "--output", "both.html"]) == 0
    printed = capsys.readouterr().out
    assert "a: 1 steps, 1 events; a/train_log.jsonl" in printed
    assert "note: the log has no finished step" in printed
    assert [run["name"] for run in embedded((tmp_path / "both.html").read_text())["runs"]] == ["a", "b"]
    assert main(["report", "--runs", "a"]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "megatron report needs at least one run"),
        (["nowhere"], "seen: no file nowhere"),
        (["a", "--output", "no/such/folder.html"], "--output is a file that can be written"),
        (["a", "--run", "b"], "nearest to run: --runs"),
    ],
)
def test_refusals(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", start(0), step(1))
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
