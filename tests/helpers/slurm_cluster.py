"""A real SLURM of two nodes on this machine: one controller, two node daemons, and a munge of its own.

Nothing of a SLURM that the machine may have is used or changed: settings, key, socket, ports, spool and logs are in one
folder, and the commands are told by SLURM_CONF. `scripts/setup_slurm.sh` installs the packages.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
NODES = ("n1", "n2")
CPUS = 2  # of each node; more than the machine may have, which SLURM allows
_SECONDS = 30.0  # for a daemon to start or to end, and for jobs to end

Daemon = subprocess.Popen[bytes]

SETTINGS = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits as long as a credential lives: 120 s by default, 5 s at least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0
ReturnToService=2
KillWait=60
MpiDefault=none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=2000
PartitionName=tests Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not_here() -> str | None:
    """Why this machine cannot run the cluster, or None where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (scripts/setup_slurm.sh, as root, where there is apt)"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root"


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up. `environ` makes SLURM's commands, and those that call them, use it."""

    folder: Path
    environ: dict[str, str]

    def call(self, *words: str) -> str:
        """What a SLURM command prints; fails with its message."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """The fields of `scontrol show job`, such as JobState and Restarts."""
        words = self.call("scontrol", "-o", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons; at the end stop the jobs and then the daemons. Their files are in `folder`."""
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    settings = SETTINGS.format(folder=folder, host=host, ports=_free_ports(3), cpus=CPUS)
    (folder / "slurm.conf").write_text(settings, encoding="utf-8")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = Cluster(folder, environ)
    daemons: list[Daemon] = []
    try:
        daemons.append(_start(cluster, "munged", "--foreground", "--force", *_munge_files(folder)))
        _wait(cluster, daemons, (folder / "munge.socket").exists, "munge does not listen")
        daemons.append(_start(cluster, "slurmctld", "-D"))
        daemons += [_start(cluster, "slurmd", "-D", "-N", node) for node in NODES]
        _wait(cluster, daemons, lambda: _idle_nodes(cluster) == len(NODES), "the nodes are not idle")
        yield cluster
    finally:
        if len(daemons) > len(NODES):
            _end_jobs(cluster)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(_SECONDS)


def _munge_files(folder: Path) -> list[str]:
    names = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder / f'munge.{ending}'}" for option, ending in names.items()]


def _start(cluster: Cluster, *words: str) -> Daemon:
    with (cluster.folder / "screen.log").open("ab") as screen:
        return subprocess.Popen(
            words, env=cluster.environ, cwd=cluster.folder, stdout=screen, stderr=screen, start_new_session=True
        )


def _wait(cluster: Cluster, daemons: list[Daemon], condition: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > end:
            raise RuntimeError(f"{otherwise}; ended: {dead}\n{cluster.logs()}")
        time.sleep(0.1)


def _idle_nodes(cluster: Cluster) -> int:
    words = ("sinfo", "--noheader", "--Node", "--format=%t")
    done = subprocess.run(words, env=cluster.environ, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout.split().count("idle")


def _end_jobs(cluster: Cluster) -> None:
    """What a failed test has left is killed: without its daemon a job would run on."""
    for words in (["scancel", "--user=root", "--full", "--signal=KILL"], ["scancel", "--user=root"]):
        subprocess.run(words, env=cluster.environ, timeout=_SECONDS, capture_output=True)
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and cluster.call("squeue", "--noheader").strip():
        time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    """Ports that nothing listens on now, each another one."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _path() -> str:
    """PATH with the folders of daemons, which a user's need not have."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"])
