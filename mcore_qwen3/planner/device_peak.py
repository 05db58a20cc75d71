"""The arithmetic peak of the device that a run is on, by the name that its driver gives it."""

from __future__ import annotations

import re

from mcore_qwen3.planner.gpus import GPUS

_FAMILY = re.compile(r"\b(A100|A800|H100|H800|H200|H20|B200|B300|GB200|GB300|RTX [45]090)\b(.*)", re.IGNORECASE)
# Cards of the same family with another peak than the table's: PCIe and NVL forms but of A100, the RTX 4090 D, parts of a card.
_OTHER_FORM = re.compile(r"\b(PCIe|NVL|D|Laptop|MIG)\b", re.IGNORECASE)
_SAME_PEAK = {"a100": "-PCIE-"}


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak in TFLOP/s of a device such as "NVIDIA H100 80GB HBM3"; None for one that the table does not have."""
    found = _FAMILY.search(device_name)
    if found is None:
        return None
    family, rest = found[1].lower().replace(" ", ""), found[2]
    if _OTHER_FORM.search(rest.replace(_SAME_PEAK.get(family, "-"), " ")):
        return None
    return next(gpu.bf16_tflops for name, gpu in GPUS.items() if name.rsplit("-", 1)[0] == family)
