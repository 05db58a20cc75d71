"""Settings of `megatron doctor`, which looks at the machines of a run and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_qwen3.config.flags import flag


@dataclass(frozen=True, kw_only=True, slots=True)
class PatientFlags:
    """Run: the one that is looked after; flags as it will have them."""

    load: str | None = flag(
        None, "checkpoint or config.json of the model, to compare a checkpoint's size with the disk"
    )
    save: str = flag("megatron_output", "folder that the run will save to; nothing is left there")
    device: str = flag("auto", "auto: cuda where a GPU is found, else cpu", choices=("auto", "cpu", "cuda"))
    platform: str = flag(
        "auto",
        "whose variables give nodes, node rank and processes, as for megatron sft",
        choices=("auto", "local", "dlc", "slurm"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFlags:
    """Trials: how long and how much."""

    meeting_seconds: float = flag(90.0, "how long the ranks may take to start, meet and answer", at_least=1)
    disk_mib: int = flag(256, "MiB of the file that is written to --save and read back", at_least=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """Settings of `megatron doctor`."""

    patient: PatientFlags = field(default_factory=PatientFlags)
    trials: TrialFlags = field(default_factory=TrialFlags)
