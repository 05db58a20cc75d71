"""How many NVIDIA GPUs a process can see, without importing torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_SMI_SECONDS = 30.0  # without persistence mode the driver starts anew for each call, GPU by GPU


def visible_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """The NVIDIA GPUs that a process with this environment can use, by names that are theirs on this machine.

    CUDA_VISIBLE_DEVICES narrows the machine's as CUDA does: the list ends at the first entry that names no device; entries
    GPU-... are taken as given. With MIG-... entries a process gets one device, the first, however many there are (NVIDIA's
    MIG user guide, on CUDA's device enumeration).

    Args:
        environ: the environment of the process.
        root: the folder that holds dev and proc.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return ()
    devices = _devices(environ, root)
    if visible is None or not devices:
        return devices
    found: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            return tuple(found) or (entry,)
        if entry.startswith("GPU-"):
            found.append(entry)
        elif entry.isdecimal() and int(entry) < len(devices):
            found.append(devices[int(entry)])
        else:
            break
    return tuple(found)


def count_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Number of `visible_gpus`."""
    return len(visible_gpus(environ, root))


def _devices(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """GPUs of this machine, or of this container: by device files, else by the driver's list, else by nvidia-smi.

    A container has the device files of its own GPUs alone, but the driver lists all. Device files are missing until something
    uses the GPU first (bare machines), and nvidia-smi alone knows of GPUs that have neither (WSL).
    """
    files = [entry for entry in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", entry.name)]
    if files:
        return tuple(sorted((entry.name for entry in files), key=lambda name: int(name.removeprefix("nvidia"))))
    if listed := sorted(entry.name for entry in (root / "proc/driver/nvidia/gpus").glob("*")):
        return tuple(listed)
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ()
    try:
        shown = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(re.findall(r"^GPU [0-9]+(?=:)", shown, flags=re.MULTILINE))
