"""`megatron submit` on a real SLURM of two nodes: a job runs to its end, and one that is interrupted twice ends alike."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_kit import Site, steps_of, wait_until
from helpers.slurm_cluster import Cluster
from kill_campaign import assert_same_end, starts

pytestmark = pytest.mark.timeout(900)

STEPS = 40  # enough to be interrupted twice on a fast machine
NASTY = 'it\'s $(touch planted) "a" %j\n `id`'  # quotes, a command, a pattern of sbatch's, a new line


@dataclass(frozen=True)
class Queue:
    """Jobs of one folder on the cluster."""

    site: Site
    cluster: Cluster

    def submit(self, load: Path, rows: Path, save: str, *more: object, **environ: str) -> tuple[int, Path]:
        """Submit a training run of 2 nodes x 2 ranks; returns (job id, log), as the command prints them."""
        asked = f"submit --nodes 2 --gpus_per_node 0 --nproc_per_node 2 --time 30 --output {save}.job"
        words = f"""sft --load {load} --dataset {rows} --expert_model_parallel_size 2 --max_length 128
            --global_batch_size 4 --lr 1e-3 --lr_warmup_iters 2 --moe_aux_loss_coeff 0.01 --num_workers 1
            --train_iters {STEPS} --save_interval 100 --save {save}"""
        done = self.site.run(*asked.split(), *words.split(), *more, **self.environ, **environ)
        assert done.returncode == 0, done.stderr + done.stdout
        printed = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
        return int(printed["submitted"].removeprefix("job ")), Path(printed["log"])

    @property
    def environ(self) -> dict[str, str]:
        """What makes sbatch talk to this cluster."""
        return {name: self.cluster.environ[name] for name in ("SLURM_CONF", "PATH")}

    def wait_for(self, job: int, log: Path, **fields: str) -> None:
        """Until `scontrol show job` has these fields."""

        def there() -> bool:
            now = self.cluster.job(job)
            assert now["JobState"] not in ("FAILED", "CANCELLED", "NODE_FAIL"), text()
            return all(now[name] == value for name, value in fields.items())

        def text() -> str:
            said = log.read_text() if log.exists() else "no log"
            return f"{self.cluster.job(job)}\n{said}\n{self.cluster.logs()}"

        wait_until(there, text, pause=0.2)


@pytest.fixture(scope="module")
def queue(site: Site, slurm: Cluster) -> Queue:
    return Queue(site, slurm)


@pytest.fixture(scope="module")
def unbroken(queue: Queue, small_vocabulary_moe: Path, chat_rows: Path) -> tuple[int, Path, Path]:
    """(job, log, save folder) of a run that nobody disturbs."""
    job, log = queue.submit(small_vocabulary_moe, chat_rows, "unbroken", SECRET="hunter2")
    queue.wait_for(job, log, JobState="COMPLETED")
    return job, log, queue.site.folder / "unbroken"


def test_a_job_of_two_nodes_runs_to_its_end(queue: Queue, unbroken: tuple[int, Path, Path]) -> None:
    job, log, save = unbroken
    said = log.read_text()
    assert queue.cluster.job(job)["ExitCode"] == "0:0" and queue.cluster.job(job)["NodeList"] == "n[1-2]"
    assert re.search(r"^4 ranks joined", said, re.MULTILINE), said
    assert [record["iteration"] for record in steps_of(save)] == list(range(1, STEPS + 1))
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    # Not every traceback is a fault: torchrun of node 1 logs one when node 0's has left their exit barrier before it.
    assert "queued again" not in said and not re.search(r"^launcher: rank \d+ failed", said, re.MULTILINE), said


def test_one_that_is_warned_and_requeued_ends_with_the_same_bits(
    queue: Queue, unbroken: tuple[int, Path, Path], small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """First the warning before the time limit, which the script answers; then SLURM's own requeue, as pre-emption does."""
    save = queue.site.folder / "broken"
    job, log = queue.submit(small_vocabulary_moe, chat_rows, "broken")
    for number, words in enumerate((["scancel", "--batch", "--signal=USR1"], ["scontrol", "requeue"]), start=1):
        wait_for_steps(save, log, start=number, steps=3)
        queue.cluster.call(*words, str(job))
        queue.wait_for(job, log, Restarts=str(number))
    queue.wait_for(job, log, JobState="COMPLETED")
    said = log.read_text()
    first, warned, requeued = (restored for restored, _ in starts(save))
    assert first == 0 and 3 <= warned <= requeued - 3 and requeued < STEPS
    for name, step in (("SIGUSR1", warned), ("SIGTERM", requeued)):
        assert f"stopped by {name} after step {step};" in said
    assert said.count(": queued again") == 1  # the second time SLURM did it
    assert_same_end(save, unbroken[2])


def wait_for_steps(save: Path, log: Path, *, start: int, steps: int) -> None:
    """Until the ranks, started for the so-manieth time, have made so many steps."""
    wait_until(
        lambda: len(starts(save)) >= start and starts(save)[start - 1][1] >= steps,
        lambda: log.read_text() if log.exists() else "no log",
    )


def test_words_and_folders_with_every_sign_arrive_as_they_are(
    queue: Queue, tmp_path: Path, small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """The folder of the job, of its log, and a word of the command; none is taken for a command on the way."""
    place = Site(tmp_path / NASTY.replace("\n", " ").replace("/", ""))
    place.folder.mkdir()
    shutil.copy(chat_rows, place.folder / f"{NASTY}.jsonl")
    folder = "l'o g\" %j"
    data = f"data --load {small_vocabulary_moe} --max_length 128 --data_cache_path cache --dataset".split()
    done = place.run("submit", "--gpus_per_node", 0, "--output", folder, *data, f"{NASTY}.jsonl", **queue.environ)
    assert done.returncode == 0, done.stderr
    job = int(re.search(r"^submitted: job (\d+)$", done.stdout, re.MULTILINE)[1])
    log = place.folder / folder / f"slurm-{job}.out"
    queue.wait_for(job, log, JobState="COMPLETED")
    assert "160 rows" in log.read_text()
    assert not list(place.folder.rglob("planted"))


def test_the_doctor_looks_at_all_ranks_of_a_job(queue: Queue) -> None:
    words = "submit --nodes 2 --gpus_per_node 0 --output doctor.job doctor --device cpu --disk_mib 1"
    done = queue.site.run(*words.split(), "--save", "of/doctor", **queue.environ)
    assert done.returncode == 0, done.stderr + done.stdout
    job = int(re.search(r"^submitted: job (\d+)$", done.stdout, re.MULTILINE)[1])
    log = queue.site.folder / "doctor.job" / f"slurm-{job}.out"
    wait_until(
        lambda: queue.cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), lambda: log.read_text()
    )
    said = log.read_text()
    assert "2 joined" in said and "gloo: sums, gathers and broadcasts are right" in said, said
    assert re.search(r"ok +save +all ranks share", said), said
    assert not re.search(r"^  FAILS  (?! +(megatron|convert) )", said, re.MULTILINE), said
    found = "FAILS" in said  # the machine of the test may have another convert first on its PATH
    assert queue.cluster.job(job)["ExitCode"] == ("2:0" if found else "0:0")
