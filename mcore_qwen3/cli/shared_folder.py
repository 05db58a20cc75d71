"""Whether all ranks see the same folder: asked before step 1, not found out at the first save."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from mcore_qwen3.errors import ConfigError

_PATIENCE = 10.0  # seconds; a network file system may show a new file late


def check_shared_folder(folder: Path) -> None:
    """Rank 0 writes a file into `folder`, and every rank has to read it. Collective over all ranks.

    Raises:
        ConfigError: on every rank: rank 0 cannot write there, or some ranks do not see the file; they are named with
            their hosts.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    probe, refused = f".shared-{uuid.uuid4().hex}", ""
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / probe).write_text(probe)
        except OSError as error:
            refused = str(error)
    told = [probe, refused]
    dist.broadcast_object_list(told)
    probe, refused = told
    if refused:
        raise ConfigError("rank 0 must be able to write to --save", seen=refused, fix="another --save, or its rights")
    mine = None if _reads(folder / probe) else f"rank {rank} on {socket.gethostname()} ({folder.absolute()})"
    blind: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(blind, mine)
    if rank == 0:
        (folder / probe).unlink()
    names = [name for name in blind if name is not None]
    if names:
        raise ConfigError(
            "--save must be one folder that all ranks share",
            seen=f"what rank 0 wrote is not seen by {', '.join(names)}",
            fix="a --save on a file system that all nodes mount, with the same path on each",
        )


def _reads(probe: Path) -> bool:
    end = time.monotonic() + _PATIENCE
    while True:
        with suppress(OSError):
            if probe.read_text() == probe.name:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
