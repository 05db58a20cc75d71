"""Two hosts, each started by hand: the wire between them is cut and mended. And a host that has no network at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import Job, Site, steps_of, wait_until
from helpers.two_hosts import Host, host_without_network, two_hosts

pytestmark = pytest.mark.timeout(900)

NO_NAMES = {
    "RES_OPTIONS": "timeout:1 attempts:1"
}  # no name server can be reached, and torch asks one for each connection


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as pair:
        yield pair


def start_by_hand(
    site: Site, hosts: tuple[Host, Host], words: list[object], ranks: tuple[int, int] = (0, 1)
) -> list[Job]:
    return [
        site.start(
            *words,
            prefix=host.prefix,
            NNODES="2",
            NODE_RANK=str(rank),
            NPROC_PER_NODE="1",
            MASTER_ADDR=hosts[0].address,
            MASTER_PORT="29500",
            **NO_NAMES,
        )
        for host, rank in zip(hosts, ranks, strict=True)
    ]


def wait_for_all(jobs: list[Job], text: str) -> None:
    for job in jobs:
        wait_until(lambda job=job: text in job.screen or job.process.poll() is not None, lambda job=job: job.screen)
        assert text in job.screen, job.screen


def test_a_cut_wire_ends_both_sides_and_a_mended_one_lets_them_go_on(
    site: Site, hosts: tuple[Host, Host], small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """A cut wire says nothing: each side learns of it by its time-out. The other host is named by its own name."""
    save = site.folder / "cut"
    words = f"""sft --load {small_vocabulary_moe} --dataset {chat_rows} --max_length 128 --global_batch_size 4 --save cut
        --num_workers 1 --train_iters 100000 --save_interval 2 --save_total_limit 2 --max_restarts 1
        --distributed_timeout_minutes 0.25"""
    jobs = start_by_hand(site, hosts, [*words.split()])
    jobs[0].wait_for_step(save, 3)
    assert "2 ranks joined: rank 0 on host-a, rank 1 on host-b" in jobs[0].screen
    for job in jobs:  # no name leads anywhere here, so gloo would have taken the loopback
        assert "GLOO_SOCKET_IFNAME=wire (the way to the other nodes)" in job.screen

    hosts[1].wire("down")
    wait_for_all(jobs, "meeting the other nodes, for up to 75 s: rank ")
    saved = int((save / "latest_checkpointed_iteration.txt").read_text())
    before = len(steps_of(save))
    assert saved >= 2
    hosts[1].wire("up")
    wait_for_all(jobs, "restart 1 of 1 (max_restarts), from the last complete checkpoint")
    wait_until(lambda: len(steps_of(save)) > before, lambda: jobs[0].screen)
    records = [json.loads(line) for line in (save / "train_log.jsonl").read_text().splitlines()]
    (restart,) = [record for record in records if record.get("event") == "restart"]
    assert restart["iteration"] == saved and "failed first" in restart["reason"]

    hosts[0].wire("down")
    for job, me, other in ((jobs[0], "host-a", "node 1 on host-b"), (jobs[1], "host-b", "node 0 on host-a")):
        assert job.end() == 1, job.screen
        job.assert_nothing_left()
        assert f"rank {jobs.index(job)} on {me} failed first" in job.screen
        assert job.last_line.startswith(f"launcher: {other} did not come to the meeting after start 2"), job.screen
    assert "(10.211.7.1:29500: " in jobs[1].last_line
    hosts[0].wire("up")


def test_b89_two_hosts_that_both_take_themselves_for_node_0(
    site: Site, hosts: tuple[Host, Host], small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """Each could listen on its own port, and would wait for the other for half an hour."""
    words = ["sft", "--load", small_vocabulary_moe, "--dataset", chat_rows, "--train_iters", 4, "--save", "twins"]
    for job in start_by_hand(site, hosts, words, ranks=(0, 0)):
        assert job.end() == 2, job.screen
        job.assert_nothing_left()
        assert "seen: two launchers have node rank 0: one on host-" in job.last_line
        assert "host-a" in job.last_line and "host-b" in job.last_line
    assert not (site.folder / "twins").exists()


def test_torchrun_by_hand(site: Site, hosts: tuple[Host, Host], small_vocabulary_moe: Path, chat_rows: Path) -> None:
    """The ranks of another's torchrun; gloo has to be told its way, as no launcher of ours is there to do it."""
    words = f"""sft --load {small_vocabulary_moe} --dataset {chat_rows} --max_length 128 --global_batch_size 4
        --save torchrun --num_workers 1 --train_iters 2 --eval_iters 0 --max_restarts 1"""
    jobs = []
    for rank, host in enumerate(hosts):
        options = (
            f"--nnodes 2 --node_rank {rank} --nproc_per_node 1 --master_addr {hosts[0].address} --master_port 29500"
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split(), "--no-python"]
        jobs.append(site.start(*words.split(), prefix=[*host.prefix, *torchrun], GLOO_SOCKET_IFNAME="wire", **NO_NAMES))
    for job in jobs:
        assert job.end() == 0, job.screen
        job.assert_nothing_left()
    assert "2 ranks joined: rank 0 on host-a, rank 1 on host-b" in jobs[0].screen
    assert "--max_restarts has no effect in this run" in jobs[0].screen
    assert [record["iteration"] for record in steps_of(site.folder / "torchrun")] == [1, 2]


def test_b95_help_plan_and_conversion_without_network_and_gpu(site: Site, small_vocabulary_moe: Path) -> None:
    """Installed packages alone: nothing is fetched, and nothing looks for a GPU."""
    commands: list[list[object]] = [
        ["--help"],
        ["sft", "--help"],
        ["plan", "--load", small_vocabulary_moe, "--gpus", 4, "--gpu", "h100-80"],
        ["convert", "hf2mcore", small_vocabulary_moe, "offline-mcore"],
        ["convert", "mcore2hf", "offline-mcore", "offline-hf"],
    ]
    with host_without_network() as host:
        for words in commands:
            done = subprocess.run(
                [*host.prefix, *site._command(words)],
                cwd=site.folder,
                env={name: value for name, value in site.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    assert (site.folder / "offline-hf" / "model.safetensors").exists()
