"""The peak that MFU is counted against, by the names that drivers give."""

from __future__ import annotations

import pytest

from mcore_qwen3.planner.device_peak import peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H800", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", 165),
        # Other forms of the same family have other peaks, and others are in no table.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L40S", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
