"""GPUs by name and by facts, and the speed of groups over their links."""

from __future__ import annotations

import pytest

from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.gpus import GPUS, Gpu, find_gpu, group_bandwidth

# Dense bf16 peaks and memory of the data sheets, and NVLink in one direction.
DATA_SHEETS = {
    "a100-80": (312, 80, 300),
    "a800-80": (312, 80, 200),
    "h100-80": (989, 80, 450),
    "h800-80": (989, 80, 200),
    "h20-96": (148, 96, 450),
    "h200-141": (989, 141, 450),
}
CUSTOM = {"gpu_memory": 60.0, "gpu_tflops": 500.0, "intra_bw": 100.0, "inter_bw": 10.0, "gpus_per_node": 4}


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_facts_of_the_data_sheets(name: str) -> None:
    gpu = GPUS[name]
    assert (gpu.bf16_tflops, gpu.nominal_gb, gpu.intra_bw) == DATA_SHEETS[name]


def test_every_family_is_there() -> None:
    families = {name.split("-")[0] for name in GPUS}
    hopper = {"h100", "h800", "h20", "h200"}
    assert families == hopper | {"a100", "a800", "b200", "b300", "gb200", "gb300", "rtx4090", "rtx5090"}


@pytest.mark.parametrize("name", GPUS)
def test_usable_memory_is_below_the_label_and_above_nine_tenths(name: str) -> None:
    gpu = GPUS[name]
    assert 0.9 * gpu.nominal_gb < gpu.memory_gib < gpu.nominal_gb


@pytest.mark.parametrize(
    ("written", "name"),
    [("H100", "h100-80"), ("NVIDIA H100-80", "h100-80"), ("RTX 4090", "rtx4090-24"), ("4090", "rtx4090-24")],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert find_gpu(written) is not None
    assert find_gpu(written).name == name


def test_two_sizes_of_memory_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="a100-40 or a100-80"):
        find_gpu("A100")


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h800-80"):
        find_gpu("v100")


def test_a_custom_gpu_is_its_facts() -> None:
    gpu = find_gpu("custom", **CUSTOM)
    assert (gpu.memory_gib, gpu.bf16_tflops, gpu.intra_bw, gpu.inter_bw) == (60, 500, 100, 10)
    assert (gpu.gpus_per_node, gpu.gpus_per_domain) == (4, 4)
    assert gpu.memory_bw == pytest.approx(500 * 3350 / 989)


@pytest.mark.parametrize("fact", CUSTOM)
def test_a_custom_gpu_without_a_fact_is_refused(fact: str) -> None:
    with pytest.raises(ConfigError, match=f"--{fact}"):
        find_gpu("custom", **{name: value for name, value in CUSTOM.items() if name != fact})


def test_a_fact_overrules_the_table_and_nothing_else() -> None:
    gpu = find_gpu("h100-80", inter_bw=25.0)
    assert (gpu.inter_bw, gpu.intra_bw, gpu.bf16_tflops, gpu.memory_bw) == (25, 450, 989, 3350)


def test_a_fact_that_is_not_above_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="inter_bw"):
        find_gpu("h100-80", inter_bw=0.0)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, 450),  # TP 8 fills a node
        (2, 4, 450),  # two ranks, four apart, in one node
        (2, 8, 50),  # the neighbour is in the next node: one card
        (16, 1, 400),  # eight cards of 50 side by side
        (4, 4, 100),  # two members a node
        (64, 16, 50),
    ],
)
def test_a_group_is_as_fast_as_its_slowest_border(size: int, stride: int, expected: float) -> None:
    assert group_bandwidth(GPUS["h100-80"], size, stride) == expected


def test_a_rack_of_72_is_one_domain() -> None:
    rack: Gpu = GPUS["gb200-186"]
    assert group_bandwidth(rack, 32, 1) == 900
    assert rack.gpus_per_node == 4
