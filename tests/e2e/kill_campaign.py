"""Kill a run with SIGKILL again and again: every restart goes on, and the end is bitwise that of an unbroken run.

    python tests/e2e/kill_campaign.py --kills 30        (make kill-test)

A launch is killed twice: first one rank, which its supervisor answers with a restart, then everything at once, which the
next launch of the same command answers. Each launch saves in step or beside the steps (--async_save), by turns. What a kill
has hit is read off the folder afterwards: a checkpoint that is not complete has been left, or none.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from e2e_kit import ROOT, Job, Site, cut_tokenizer, wait_until, write_model, write_rows

from mcore_qwen3.arch import read_model_shape
from mcore_qwen3.converters import OptimizerSource, TorchDistSource, WeightSource

MOMENTS = ("step", "save", "async save")
RANKS = 2
SAVE_INTERVAL = 2
SEEN = "seen"  # marks what an earlier kill has left: a new save of the same step begins with an empty folder
_INTO_A_SAVE = 0.05  # seconds; a save takes a little longer
_INTO_A_STEP = 0.3


@dataclass(frozen=True)
class Kill:
    """What a kill has hit."""

    moment: str  # one of MOMENTS
    victim: str  # "rank 0", "rank 1" or "all"
    complete: int  # the step that the tracker named then


@dataclass
class Campaign:
    """Runs of one command in one folder, each killed until it is complete.

    Args:
        site: where to work.
        load: the model.
        rows: chat rows.
        train_iters: steps of a run.
        seed: of all that is random here.
    """

    site: Site
    load: Path
    rows: Path
    train_iters: int
    seed: int
    kills: list[Kill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._launches = self._starts = 0
        self.completed = 0  # runs that have ended

    @property
    def save(self) -> Path:
        """The folder of the run that is being killed now."""
        return self.site.folder / f"killed-{self.completed}"

    @property
    def unbroken(self) -> Path:
        """The folder of the run that nobody disturbs."""
        return self.site.folder / "unbroken"

    @property
    def moments(self) -> Counter[str]:
        """How many kills have hit what."""
        return Counter(kill.moment for kill in self.kills)

    def run(self, kills: int, each: int) -> None:
        """Kill until there are so many kills, and so many of each moment; then let the last run end."""
        job = self._start(self.unbroken)
        assert job.end() == 0, job.screen
        while len(self.kills) < kills or min(self.moments[moment] for moment in MOMENTS) < each:
            self._launch()
        if self._starts:
            self._finish(self._start(self.save))
        for number in range(self.completed):
            assert_same_end(self.site.folder / f"killed-{number}", self.unbroken)

    def _start(self, save: Path, *more: object) -> Job:
        words = f"""sft --load {self.load} --dataset {self.rows} --expert_model_parallel_size 2 --max_length 128
            --global_batch_size 4 --lr 1e-3 --lr_warmup_iters 2 --moe_aux_loss_coeff 0.01 --num_workers 1
            --train_iters {self.train_iters} --save_interval {SAVE_INTERVAL} --save {save}"""
        return self.site.start(*words.split(), *more, NPROC_PER_NODE=str(RANKS))

    def _launch(self) -> None:
        """One launch: a rank is killed, then all are; unless the run ends before."""
        asynchronous = self._launches % 2 == 1
        self._launches += 1
        job = self._start(self.save, "--async_save", str(asynchronous).lower(), "--max_restarts", 1)
        for victim in (f"rank {self._random.randrange(RANKS)}", "all"):
            self._wait_for_steps(job, self._random.randrange(1, 4))
            if not self._kill(job, victim, in_save=asynchronous or self._random.random() < 0.5):
                self._finish(job)
                return
            moment = ("async save" if asynchronous else "save") if new_partials(self.save) else "step"
            self.kills.append(Kill(moment, victim, complete_step(self.save)))
            for partial in new_partials(self.save):
                (partial / SEEN).touch()
            print(
                f"kill {len(self.kills)}: {victim} in a {moment}; {self.save.name} has step {self.kills[-1].complete}",
                flush=True,
            )

    def _wait_for_steps(self, job: Job, number: int) -> None:
        """Until this start of the ranks has made so many steps, or the run has ended; it has continued where it should."""

        def enough() -> bool:
            events = starts(self.save)
            return ended(job) or (len(events) > self._starts and events[-1][1] >= number)

        wait_until(enough, lambda: f"no {number} steps:\n{job.screen}")
        ((restored, _),) = starts(self.save)[self._starts :]
        self._starts += 1
        # A run that only has to be ended saves nothing, so the tracker still tells where it began.
        assert restored == (self.kills[-1].complete if self._starts > 1 else 0), job.screen

    def _kill(self, job: Job, victim: str, *, in_save: bool) -> bool:
        """Kill at a random moment; False when the run has ended before."""
        try:
            victims = job.running() if victim == "all" else [job.rank(int(victim.removeprefix("rank ")))]
        except ValueError:  # it is ending
            return False
        self._random.shuffle(victims)
        if in_save:
            wait_until(lambda: new_partials(self.save) or ended(job), lambda: f"no save:\n{job.screen}", pause=0.0005)
        time.sleep(self._random.random() * (_INTO_A_SAVE if in_save else _INTO_A_STEP))
        if ended(job):
            return False
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if victim == "all":
            job.process.wait()
            job.assert_nothing_left()
            return True
        # The supervisor ends the other rank and starts both again, unless all had done their work.
        wait_until(lambda: "restart 1 of 1" in job.screen or ended(job), lambda: f"no restart:\n{job.screen}")
        return not ended(job)

    def _finish(self, job: Job) -> None:
        """Let a run end, and begin another one."""
        assert job.end() == 0, job.screen
        assert complete_step(self.save) == self.train_iters
        self.completed, self._starts = self.completed + 1, 0


def ended(job: Job) -> bool:
    """Whether the command has ended."""
    return job.process.poll() is not None


def new_partials(save: Path) -> list[Path]:
    """Checkpoints that are not complete, but those that an earlier kill has left."""
    return [path for path in save.glob(".iter_*.partial") if not (path / SEEN).exists()]


def records(save: Path) -> list[dict[str, Any]]:
    """The run's log without half records that kills have left."""
    found = []
    log = save / "train_log.jsonl"
    for line in log.read_text(encoding="utf-8").split("\n") if log.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def starts(save: Path) -> list[tuple[int, int]]:
    """For each start of the ranks so far: the step that it went on from, and how many it has made."""
    found: list[tuple[int, int]] = []
    for record in records(save):
        if record.get("event") == "start":
            found.append((record["iteration"], 0))
        elif "loss" in record:
            found[-1] = (found[-1][0], found[-1][1] + 1)
    return found


def complete_step(save: Path) -> int:
    """The step that the tracker names, 0 without one; fails unless everything of that checkpoint can be read."""
    tracker = save / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    directory = save / f"iter_{step:07d}"
    for source in sources(directory):
        for key, entry in source.entries().items():
            source.read(key, tuple(slice(0, size) for size in entry.shape))
        source.close()
    assert json.loads((directory / "train_state.json").read_text())["iteration"] == step
    for name in ("common.pt", "metadata.json", "run_config.yaml", "hf/config.json", "hf/tokenizer.json"):
        assert (directory / name).stat().st_size, name
    return step


def sources(directory: Path) -> list[WeightSource]:
    """The weights and the optimizer's state of a checkpoint."""
    return [TorchDistSource(directory, read_model_shape(str(directory.parent))), OptimizerSource(directory)]


def assert_same_end(killed: Path, unbroken: Path) -> None:
    """The same loss at every step, and weights and moments with the same bits."""
    losses = [
        {record["iteration"]: (record["loss"], record["grad_norm"]) for record in records(save) if "loss" in record}
        for save in (killed, unbroken)
    ]
    assert losses[0] == losses[1]
    step = complete_step(unbroken)
    for one, other in zip(*(sources(save / f"iter_{step:07d}") for save in (killed, unbroken)), strict=True):
        assert one.entries() == other.entries() and one.entries()
        for key, entry in one.entries().items():
            everything = tuple(slice(0, size) for size in entry.shape)
            first, second = one.read(key, everything), other.read(key, everything)
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), key


def main() -> int:
    """Run a campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="at least so many kills")
    parser.add_argument("--each", type=int, default=5, help="at least so many in steps, in saves and in async saves")
    parser.add_argument("--train_iters", type=int, default=40, help="steps of a run")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; unset: another one each time")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_campaign_") as name:
        folder = Path(name)
        size = cut_tokenizer(ROOT / ".material" / "tokenizer", folder / "tokenizer", 3001)
        load = write_model(folder / "model", folder / "tokenizer", size)
        site = Site(folder)
        campaign = Campaign(site, load, write_rows(folder / "rows.jsonl", 160), args.train_iters, seed)
        try:
            campaign.run(args.kills, args.each)
        except AssertionError:
            print(f"failed after {len(campaign.kills)} kills, seed {seed}", file=sys.stderr)
            raise
        finally:
            for job in site.jobs:
                job.kill()
    victims = Counter("all processes" if kill.victim == "all" else "one rank" for kill in campaign.kills)
    print(f"0 failures of {len(campaign.kills)} kills in {time.monotonic() - began:.0f} s, seed {seed}")
    print("; ".join(f"{number} of {what}" for what, number in sorted(victims.items())))
    print("; ".join(f"{number} in {what}s" for what, number in sorted(campaign.moments.items())))
    print(f"{campaign.completed} runs ended with the bits of the unbroken one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
