"""One rank's part of ``megatron doctor``: meet the others, send something, compare."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_qwen3.cli.doctor import EXIT_RANKS_FOUND
from mcore_qwen3.cli.doctor_checks import Finding, fails, nearest_folder, note, ok
from mcore_qwen3.cli.shared_folder import check_shared_folder
from mcore_qwen3.config import DoctorConfig
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import code_facts, count_gpus, on_stop_request, rank_main, table_of_differences
from mcore_qwen3.runtime.device import Device, choose_device, device_name, synchronize
from mcore_qwen3.runtime.groups import start_process_group, stop_process_group

_MEASURED_BYTES = {"gloo": 16 * 2**20, "nccl": 256 * 2**20}
_ROUNDS = 5


def run_rank(config: DoctorConfig) -> int:
    """Look at this rank's part; rank 0 prints. Returns the process's exit code."""
    return rank_main(lambda: _run(config))


def _run(config: DoctorConfig) -> int:
    on_stop_request(_give_up)
    device = choose_device(config.patient.device, int(os.environ["LOCAL_RANK"]))
    start_process_group(device, config.trials.meeting_seconds)
    everyone = gathered(about_this_rank(device))
    findings = [*compare(everyone), *collectives(device), *_shared(config, everyone)]
    if dist.get_rank() == 0:
        print("\n".join(["all ranks together", *(line for each in findings for line in each.lines())]), flush=True)
    stop_process_group()
    return EXIT_RANKS_FOUND if any(each.level == "FAILS" for each in findings) else 0


def _give_up(signum: int) -> None:
    """The parent's time is over; a rank that waits in a collective cannot be asked to stop in order."""
    os._exit(1)


def gathered(mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What every rank has, by rank. Collective."""
    everyone: list[Mapping[str, Any]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def about_this_rank(device: Device) -> dict[str, Any]:
    """Where this rank is, and what has to be the same on every rank."""
    first = os.environ["LOCAL_RANK"] == "0"
    return {
        "place": f"node {os.environ.get('GROUP_RANK', '0')} on {socket.gethostname()}",
        "gpus_by_driver": count_gpus(os.environ),
        "broken": broken_accelerators() if device.is_cuda and first else [],
        "gpu": device_name(device),
        "code": code_facts() | {"CUDA of torch": str(torch.version.cuda)},
    }


def broken_accelerators(names: Sequence[str] = ("transformer_engine.pytorch",)) -> list[str]:
    """Why installed packages that a GPU run would take cannot be imported, as where they were built for another torch."""
    broken = []
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever its import does
            broken.append(f"{name} is installed and cannot be imported: {type(error).__name__}: {error}")
    return broken


def compare(everyone: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Where the ranks are, and what differs between them."""
    places: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        places.setdefault(each["place"], []).append(rank)
    lines = [f"{place}: {len(ranks)} ranks from {ranks[0]}" for place, ranks in places.items()]
    findings = [ok("ranks", "\n".join([f"{len(everyone)} joined", *lines]))]
    for rank, each in enumerate(everyone):
        findings += [fails("packages", f"{text} (rank {rank}, {each['place']})") for text in each["broken"]]
        if each["gpus_by_driver"] and each["gpu"] == "none":
            seen = f"{each['gpus_by_driver']} GPUs by the machine's device files, none by torch"
            findings.append(fails("GPUs", f"rank {rank}, {each['place']}: {seen}; a torch build or a driver that fit"))
    code = table_of_differences({f"rank {rank}": each["code"] for rank, each in enumerate(everyone)})
    kinds = table_of_differences({f"rank {rank}": {"GPU": each["gpu"]} for rank, each in enumerate(everyone)})
    if code:
        findings.append(fails("same code", f"the ranks differ:\n{code}"))
    if kinds:
        findings.append(note("GPUs", f"the ranks differ, and the slowest sets the pace:\n{kinds}"))
    return findings


def collectives(device: Device) -> list[Finding]:
    """Whether what is sent arrives, checked by arithmetic, and how fast a sum over all ranks is. Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    place = device.torch_device
    total = torch.full((1000,), float(rank + 1), device=place)
    dist.all_reduce(total)
    parts = [torch.empty(3, device=place) for _ in range(world)]
    dist.all_gather(parts, torch.full((3,), float(rank), device=place))
    told = torch.tensor([float(rank + 7)], device=place)
    dist.broadcast(told, src=world - 1)
    right = bool(
        (total == world * (world + 1) / 2).all()
        and all((part == number).all() for number, part in enumerate(parts))
        and told.item() == world + 6
    )
    wrong = [number for number, each in enumerate(gathered({"right": right})) if not each["right"]]
    if wrong:
        return [fails("collectives", f"{device.backend}: wrong numbers arrive on rank {' '.join(map(str, wrong))}")]
    if world == 1:
        return [ok("collectives", f"{device.backend}: right, with one rank, so that nothing was sent")]
    return [ok("collectives", f"{device.backend}: sums, gathers and broadcasts are right; {_speed(device)}")]


def _speed(device: Device) -> str:
    """Bus bandwidth as nccl-tests defines it: bytes / time x 2 (n - 1) / n."""
    world, size = dist.get_world_size(), _MEASURED_BYTES[device.backend]
    values = torch.zeros(size // 4, device=device.torch_device)
    dist.all_reduce(values)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(values)
    synchronize(device)
    seconds = (time.perf_counter() - start) / _ROUNDS
    return f"{size / seconds * 2 * (world - 1) / world / 1e9:.2f} GB/s a rank in sums of {size // 2**20} MiB"


def _shared(config: DoctorConfig, everyone: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether the nodes share the save folder. Collective. It is asked of the nearest folder that exists: none is made."""
    if len({each["place"] for each in everyone}) == 1:
        return []
    folder = nearest_folder(Path(config.patient.save))
    places = {each["folder"] for each in gathered({"folder": str(folder)})}
    if len(places) > 1:
        text = f"--save {config.patient.save} is not on one file system: folders that exist are {', '.join(sorted(places))}"
        return [fails("save", text)]
    try:
        check_shared_folder(folder)
    except ConfigError as error:
        return [fails("save", str(error))]
    return [ok("save", f"all ranks share {folder}")]
