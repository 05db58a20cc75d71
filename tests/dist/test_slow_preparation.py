"""Known fault B37: preparing takes longer than a collective may, and no rank fails."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mcore_qwen3.launch.ports import free_port

PREPARATION_S = 4.0
COLLECTIVE_S = 2.0


def _rank(rank: int, port: int, request: Any) -> tuple[float, str, int]:
    """Prepare as a rank does, then join: (seconds of preparing, folder, sum over the ranks)."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import torch.distributed as dist

    from mcore_qwen3.cli.prepare import check_same_data
    from mcore_qwen3.data import prepare as prepare_module
    from mcore_qwen3.runtime import groups
    from mcore_qwen3.runtime.device import choose_device

    device = choose_device("cpu")
    groups.prepare_megatron(device)  # what it imports takes seconds; only preparing may differ between the ranks
    original = prepare_module._build

    def slow(*arguments: Any) -> dict[str, Any]:
        time.sleep(PREPARATION_S)
        return original(*arguments)

    prepare_module._build = slow
    start = time.monotonic()
    prepared = prepare_module.prepare(request)
    seconds = time.monotonic() - start
    groups.start_process_group(device, timeout_s=COLLECTIVE_S)
    check_same_data(prepared)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return seconds, str(prepared.path), int(total)


@pytest.mark.timeout(120)
def test_two_ranks_with_a_preparation_longer_than_the_collective_limit(
    tmp_path: Path, qwen3_tokenizer_dir: Path
) -> None:
    from mcore_qwen3.data.prepare import PrepareRequest

    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "q", "response": "a"}) + "\n")
    request = PrepareRequest(
        dataset=(str(tmp_path / "a.jsonl"),),
        max_length=64,
        tokenizer_dir=qwen3_tokenizer_dir,
        cache_dir=tmp_path / "cache",
    )
    port = free_port()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_rank, (0, 1), (port, port), (request, request)))
    # The second waited for the first at the folder's lock, not in a collective.
    assert max(seconds for seconds, _, _ in results) > PREPARATION_S > COLLECTIVE_S
    assert len({folder for _, folder, _ in results}) == 1 and [total for *_, total in results] == [2, 2]
