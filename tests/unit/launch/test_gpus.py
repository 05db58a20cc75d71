"""GPUs are counted as CUDA would show them to a process, without CUDA and without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3.launch import count_gpus, visible_gpus


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        *[(None, 4), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("2", 1), ("0, 3", 2), ("0,4,1", 1), ("1,-1,2", 1)],
        *[("GPU-8f,GPU-9a", 2), ("MIG-1,MIG-2,MIG-3,MIG-4,MIG-5", 1), ("MIG-GPU-8f/1/0", 1)],
    ],
)
def test_device_files_narrowed_as_cuda_does(four_gpus: Path, visible: str | None, expected: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, four_gpus) == expected


def test_they_have_the_names_of_the_machine(four_gpus: Path) -> None:
    """Two containers of one machine see different ones, although CUDA numbers both from 0."""
    (four_gpus / "dev/nvidia0").unlink()
    (four_gpus / "dev/nvidia10").touch()
    assert visible_gpus({}, four_gpus) == ("nvidia1", "nvidia2", "nvidia3", "nvidia10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,0,GPU-8f"}, four_gpus) == ("nvidia10", "nvidia1", "GPU-8f")


def test_a_container_has_fewer_device_files_than_the_driver_lists(four_gpus: Path) -> None:
    for name in range(8):
        (four_gpus / f"proc/driver/nvidia/gpus/0000:{name}b:00.0").mkdir(parents=True)
    assert count_gpus({}, four_gpus) == 4


def test_the_drivers_list_where_no_device_file_has_been_made_yet(tmp_path: Path) -> None:
    for name in range(2):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{name}b:00.0").mkdir(parents=True)
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo '  MIG 1g.10gb  Device  0: (UUID: MIG-1)'; echo 'GPU 1: x'", 2),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9", 0),
    ],
)
def test_nvidia_smi_where_there_is_nothing_else(tmp_path: Path, script: str, expected: int) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$*" = -L ] || exit 1\n{script}\n')
    smi.chmod(0o755)
    assert count_gpus({"PATH": str(tmp_path)}, tmp_path) == expected
    assert count_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert count_gpus({"PATH": ""}, tmp_path) == 0
    assert count_gpus({"PATH": "", "CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0
