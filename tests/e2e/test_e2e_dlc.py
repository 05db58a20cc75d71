"""The user's command on PAI-DLC: two nodes, here two launchers of one machine, with the variables that DLC sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_kit import Site, steps_of

from mcore_qwen3.launch.ports import free_port

pytestmark = pytest.mark.timeout(900)


def test_with_and_without_our_variables_it_is_one_job_of_four_ranks(
    site: Site, small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """B89, B93. Node 0 is started with NNODES=$WORLD_SIZE NODE_RANK=$RANK, node 1 without: both read the same."""
    words = f"""sft --load {small_vocabulary_moe} --dataset {chat_rows} --max_length 128 --global_batch_size 4 --save dlc
        --num_workers 1 --train_iters 2 --eval_iters 0 --tensor_model_parallel_size 2 --log_dir logs"""
    dlc = {"WORLD_SIZE": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    jobs = [
        site.start(*words.split(), RANK="0", NNODES="2", NODE_RANK="0", **dlc),
        site.start(*words.split(), RANK="1", **dlc),
    ]
    for node, job in enumerate(jobs):
        assert job.end() == 0, job.screen
        job.assert_nothing_left()
        first, *table = job.screen.splitlines()[:6]
        assert first == f"4 ranks expected; this is node {node} with ranks {2 * node}-{2 * node + 1}"
        assert [line.split()[:2] for line in table] == [
            ["platform", "dlc"],
            ["nnodes", "2"],
            ["node_rank", str(node)],
            ["nproc_per_node", "2"],
            ["master_addr", "localhost"],
        ]
    assert "\n4 ranks joined: ranks 0-3 on " in jobs[0].screen
    assert "TP 2 x CP 1 x DP 2" in jobs[1].screen
    assert [record["iteration"] for record in steps_of(site.folder / "dlc")] == [1, 2]
    start = json.loads((site.folder / "dlc" / "train_log.jsonl").read_text().splitlines()[0])
    assert start["event"] == "start"
    logs = {path.name: path.read_text() for path in (site.folder / "logs").iterdir()}
    assert sorted(logs) == [f"rank_{rank}.log" for rank in range(4)]
    for rank in range(4):
        assert logs[f"rank_{rank}.log"].startswith(f"---- rank {rank} on ")
    assert "4 ranks joined" in logs["rank_0.log"] and "4 ranks joined" not in logs["rank_1.log"]
