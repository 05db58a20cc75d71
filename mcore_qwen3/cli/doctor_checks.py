"""What one process can find out about a machine without torch: each check returns what it found.

What cannot be known is said to be so, and is no failure.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3 import __version__
from mcore_qwen3.arch import count_parameters, read_model_shape
from mcore_qwen3.config import DoctorConfig
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import LaunchPlan, count_gpus
from mcore_qwen3.launch.network import interface_of
from mcore_qwen3.launch.ports import why_not_usable

DISTRIBUTION = "mcore-qwen3"
_GIB, _MIB = 2**30, 2**20
_SMI_SECONDS = 60
_FEW_SHARED_BYTES = 2**30
# Bytes of a checkpoint for each parameter: bf16 weight, fp32 master and Adam's two moments; on CPU fp32 weight and moments.
_SAVED_BYTES = {"cuda": 14, "cpu": 12}
_ACCELERATORS = {
    "transformer_engine": "a GPU run takes the portable modules: the same results, without its fused kernels",
    "apex": "megatron's gradient accumulation is not fused into the backward products, and Adam is torch's",
    "flash_attn": "transformer-engine then uses cuDNN's attention; the portable modules use torch's own flash kernel",
}
# The scripts of this package -> what else is installed under the name.
_COMMANDS = {"megatron": "ms-swift's", "convert": "ImageMagick's"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `level`: ok, note (a run works, but), unknown, or FAILS."""

    level: str
    topic: str
    text: str

    def lines(self) -> list[str]:
        """For the page; more lines of the text stand below its first one."""
        first, *more = self.text.splitlines() or [""]
        return [f"  {self.level:<7}  {self.topic:<18}  {first}", *(f"{'':<31}{line}" for line in more)]


def ok(topic: str, text: str) -> Finding:
    """As it should be."""
    return Finding("ok", topic, text)


def note(topic: str, text: str) -> Finding:
    """A run works, but slower, or otherwise than the user may think."""
    return Finding("note", topic, text)


def unknown(topic: str, text: str) -> Finding:
    """Cannot be found out here."""
    return Finding("unknown", topic, text)


def fails(topic: str, text: str) -> Finding:
    """A run would fail."""
    return Finding("FAILS", topic, text)


def versions() -> list[Finding]:
    """This package and what it requires, each with the range that it was declared with."""
    found = [ok("system", f"{platform.platform()}, Python {platform.python_version()} ({sys.executable})")]
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return [
            *found,
            unknown("versions", f"{DISTRIBUTION} {__version__} is not installed, so its ranges are not known"),
        ]
    return [*found, *check_requirements(required)]


def check_requirements(required: Sequence[str]) -> list[Finding]:
    """Compare what is installed with requirements as a package declares them; extras are left out."""
    from packaging.requirements import Requirement

    good, bad = [f"{DISTRIBUTION} {__version__}"], []
    for text in required:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            bad.append(fails("versions", f"{requirement.name}{requirement.specifier} is not installed"))
            continue
        if requirement.specifier.contains(version, prereleases=True):
            good.append(f"{requirement.name} {version}")
        else:
            bad.append(fails("versions", f"{requirement.name} {version} is not {requirement.specifier}"))
    return [ok("versions", ", ".join(good)), *bad]


def can_start_ranks(findings: Sequence[Finding]) -> bool:
    """Whether ranks can be started and could meet: they need torch, the device, and a way to node 0."""
    hopeless = any(each.level == "FAILS" and each.topic in ("network", "GPUs") for each in findings)
    return importlib.util.find_spec("torch") is not None and not hopeless


def gpus(device: str, environ: Mapping[str, str]) -> list[Finding]:
    """GPUs by the driver, and how they are linked."""
    number, visible = count_gpus(environ), environ.get("CUDA_VISIBLE_DEVICES")
    if number == 0:
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        if device == "cuda":
            return [fails("GPUs", f"--device cuda, and no NVIDIA GPU is seen{why}")]
        return [ok("GPUs", f"none is seen{why}: a run is on CPU")]
    found = [ok("GPUs", f"{number} to use" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"))]
    fields = "index,name,memory.total,memory.used,driver_version"
    rows = _smi("--query-gpu=" + fields, "--format=csv,noheader")
    if isinstance(rows, Finding):
        return [*found, rows]
    links = _smi("topo", "-m")
    return [*found, ok("GPUs", rows), links if isinstance(links, Finding) else ok("links", links)]


def _smi(*words: str) -> str | Finding:
    """What nvidia-smi prints; a driver that does not answer fails."""
    if shutil.which("nvidia-smi") is None:
        return unknown("GPUs", "no nvidia-smi on PATH: names, memory, driver and links are not known")
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fails("GPUs", f"nvidia-smi does not answer: {error}")
    if done.returncode != 0:
        return fails("GPUs", f"nvidia-smi {words[0]}: " + " ".join((done.stdout + done.stderr).split()))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # it underlines the table of links
    return plain.split("\n\n")[0].rstrip()


def accelerators(has_gpu: bool) -> list[Finding]:
    """Packages that a GPU run takes where they are installed."""
    found = []
    for name, cost in _ACCELERATORS.items():
        if importlib.util.find_spec(name) is not None:
            use = "" if has_gpu else "; used on a GPU only"
            found.append(ok(name, f"found, {_version_of(name)}{use}"))
        elif has_gpu:
            found.append(note(name, f"not found: {cost}; how much slower has not been measured"))
        else:
            found.append(ok(name, "not found, and not used on CPU"))
    return found


def _version_of(module: str) -> str:
    for distribution in importlib.metadata.packages_distributions().get(module, ()):
        return f"version {importlib.metadata.version(distribution)}"
    return "version not known"


def commands(environ: Mapping[str, str]) -> list[Finding]:
    """Which program the names of this package's scripts start."""
    found = []
    for name, other in _COMMANDS.items():
        first = shutil.which(name, path=environ.get("PATH", ""))
        if first is None:
            found.append(note(name, f"not on PATH; python -m mcore_qwen3 {'' if name == 'megatron' else name} works"))
        elif _is_ours(Path(first)):
            found.append(ok(name, first))
        else:
            ours = _later(name, environ)
            then = f"this package's is {ours}: put its folder first" if ours else "this package's is not on PATH"
            found.append(fails(name, f"{first} comes first on PATH and is another program (as {other}); {then}"))
    return found


def _is_ours(program: Path) -> bool:
    """Whether a script calls this package; a program that is no text does not."""
    with program.open("rb") as file:
        return b"mcore_qwen3" in file.read(4096)


def _later(name: str, environ: Mapping[str, str]) -> str | None:
    folders = environ.get("PATH", "").split(os.pathsep)
    programs = (shutil.which(name, path=folder) for folder in folders if folder)
    return next((program for program in programs if program and _is_ours(Path(program))), None)


def network(plan: LaunchPlan, environ: Mapping[str, str]) -> list[Finding]:
    """The way to node 0, and interfaces that variables name."""
    there = {name for _, name in socket.if_nameindex()}
    found = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        # NCCL's forms: ^ for all but these, = for exact names, else beginnings of names.
        wanted = environ.get(variable, "")
        names = [name for name in wanted.lstrip("^=").split(",") if name]
        exact = wanted.startswith("=") or variable.startswith("GLOO")
        matches = [
            name for name in names if any(have == name or (not exact and have.startswith(name)) for have in there)
        ]
        if names and not wanted.startswith("^") and not matches:
            found.append(fails("network", f"{variable}={wanted}: there is {', '.join(sorted(there))} alone"))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((plan.master_addr, plan.master_port))  # asks for the way; sends nothing
            address = probe.getsockname()[0]
    except OSError as error:
        return [*found, fails("network", f"no way to {plan.master_addr}: {error.strerror}")]
    if plan.node_rank == 0 and (reason := why_not_usable(plan.master_port)) is not None:
        return [*found, fails("network", f"MASTER_PORT={plan.master_port}, where node 0 has to listen: {reason}")]
    interface = interface_of(address) or "an interface whose name is not known"
    port = f"port {plan.master_port} is free here" if plan.node_rank == 0 else f"port {plan.master_port} is node 0's"
    return [*found, ok("network", f"{plan.master_addr} is reached from {address} by {interface}; {port}")]


def shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Ranks of a node and their data workers exchange through it; containers often have 64 MiB."""
    if not folder.is_dir():
        return [unknown("shared memory", f"no {folder}")]
    free = shutil.disk_usage(folder).free
    if free < _FEW_SHARED_BYTES:
        text = f"{free / _MIB:.0f} MiB free in {folder}: data workers and NCCL use it; give a container --shm-size"
        return [note("shared memory", text)]
    return [ok("shared memory", f"{free / _GIB:.1f} GiB free in {folder}")]


def save_folder(config: DoctorConfig) -> list[Finding]:
    """Whether --save can be written, how fast, and whether a checkpoint fits. Leaves nothing there."""
    folder = nearest_folder(Path(config.patient.save))
    if not folder.is_dir():
        return [fails("save", f"{folder} is no folder")]
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    try:
        written, read = _disk_rates(probe, config.trials.disk_mib)
    except OSError as error:
        return [fails("save", f"{folder} cannot be written: {error.strerror}")]
    finally:
        probe.unlink(missing_ok=True)
    rates = (
        f"{folder}: {written:.2f} GB/s written and flushed, {read:.2f} GB/s read back (from memory where it is cached)"
    )
    return [ok("save", rates), _room(config, shutil.disk_usage(folder).free)]


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _disk_rates(probe: Path, mib: int) -> tuple[float, float]:
    """(GB/s written, with the flush to the disk; GB/s read) of a file of random bytes, which no disk compresses."""
    block = os.urandom(_MIB)
    start = time.perf_counter()
    with probe.open("xb") as file:
        for _ in range(mib):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    middle = time.perf_counter()
    with probe.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(16 * _MIB):
            pass
    end = time.perf_counter()
    gigabytes = mib * _MIB / 1e9
    return gigabytes / (middle - start), gigabytes / (end - middle)


def _room(config: DoctorConfig, free: int) -> Finding:
    shown = f"{free / _GIB:.1f} GiB free"
    if config.patient.load is None:
        return unknown("save", f"{shown}; the size of a checkpoint is not known without --load")
    try:
        parameters = count_parameters(read_model_shape(Path(config.patient.load))).total
    except ConfigError as error:
        return fails("save", f"--load: {error}")
    on_gpu = config.patient.device != "cpu" and count_gpus(os.environ) > 0
    needed = parameters * _SAVED_BYTES["cuda" if on_gpu else "cpu"]
    text = f"{shown}; a checkpoint with optimizer state is {needed / _GIB:.2f} GiB ({parameters:,} parameters)"
    if free < needed:
        return fails("save", f"{text}: not one fits")
    # A new one is complete before an old one is deleted.
    return ok("save", text) if free >= 2 * needed else note("save", f"{text}: a second one does not fit")
