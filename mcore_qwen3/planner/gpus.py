"""GPUs by name: memory, arithmetic, and the links that carry messages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU and the place it has in a cluster.

    Attributes:
        name: as `--gpu` takes it.
        memory_gib: GiB (2^30 bytes) that a process can allocate; the driver keeps the rest of the nominal memory.
        nominal_gb: GB (10^9 bytes) on the label.
        bf16_tflops: peak of dense bf16 products with fp32 accumulation, 10^12 operations a second, without sparsity.
        memory_bw: GB/s of its own memory.
        intra_bw: GB/s in one direction to the GPUs of the same NVLink domain (or PCIe, where there is no NVLink).
        inter_bw: GB/s in one direction to other nodes: the GPU's share of the network cards.
        gpus_per_node: GPUs that one operating system sees.
        gpus_per_domain: GPUs that reach each other at intra_bw; more than a node where racks share NVLink.
    """

    name: str
    memory_gib: float
    nominal_gb: float
    bf16_tflops: float
    memory_bw: float
    intra_bw: float
    inter_bw: float
    gpus_per_node: int = 8
    gpus_per_domain: int = 8


def _gpu(
    name: str, memory_gib: float, nominal_gb: float, tflops: float, memory_bw: float, intra: float, inter: float,
    per_node: int = 8, per_domain: int = 8,
) -> Gpu:  # fmt: skip
    return Gpu(
        name=name, memory_gib=memory_gib, nominal_gb=nominal_gb, bf16_tflops=tflops, memory_bw=memory_bw,
        intra_bw=intra, inter_bw=inter, gpus_per_node=per_node, gpus_per_domain=per_domain,
    )  # fmt: skip


# Peaks, memory bandwidth and NVLink: NVIDIA's data sheets of the SXM, HGX and NVL72 forms; NVLink figures there add both
# directions, half of it stands here. Network: one card a GPU as in NVIDIA's reference designs, 200 Gb/s with A100, 400 with
# H100 to GB200, 800 with B300 and GB300. Usable memory: what torch and nvidia-smi report on such cards.
_TABLE = (
    _gpu("a100-40", 39.4, 40, 312, 1555, 300, 25),
    _gpu("a100-80", 79.1, 80, 312, 2039, 300, 25),
    _gpu("a800-40", 39.4, 40, 312, 1555, 200, 25),  # A800 and H800: NVLink cut to 400 GB/s
    _gpu("a800-80", 79.1, 80, 312, 2039, 200, 25),
    _gpu("h100-80", 79.1, 80, 989, 3350, 450, 50),
    _gpu("h800-80", 79.1, 80, 989, 3350, 200, 50),
    _gpu("h20-96", 94.0, 96, 148, 4000, 450, 50),
    _gpu("h20-141", 139.0, 141, 148, 4800, 450, 50),
    _gpu("h200-141", 139.0, 141, 989, 4800, 450, 50),
    _gpu("b200-180", 178.0, 180, 2250, 7700, 900, 50),
    _gpu("b300-270", 267.0, 270, 2250, 7700, 900, 100),
    _gpu("gb200-186", 184.0, 186, 2500, 8000, 900, 50, 4, 72),  # NVL72: trays of 4 GPUs, one NVLink domain a rack
    _gpu("gb300-279", 276.0, 279, 2500, 8000, 900, 100, 4, 72),
    # No NVLink: PCIe 4.0 and 5.0 x16; one 200 Gb/s card for eight GPUs. Peak with fp32 accumulation.
    _gpu("rtx4090-24", 23.6, 24, 165, 1008, 32, 3.1),
    _gpu("rtx5090-32", 31.4, 32, 209, 1792, 64, 3.1),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}

CUSTOM = "custom"
# Bytes of memory traffic a floating-point operation that a GPU without a known bandwidth is given: H100's.
_H100_BALANCE = GPUS["h100-80"].memory_bw / GPUS["h100-80"].bf16_tflops


def find_gpu(
    name: str,
    *,
    gpu_memory: float | None = None,
    gpu_tflops: float | None = None,
    intra_bw: float | None = None,
    inter_bw: float | None = None,
    gpus_per_node: int | None = None,
) -> Gpu:
    """A GPU by name, with the facts that the user knows better.

    Args:
        name: as in `GPUS`, in any case, with or without its memory ("h100", "H100-80", "RTX 4090"); or "custom", which
            needs every fact. Memory bandwidth of a custom GPU is taken in H100's ratio to its arithmetic.
        gpu_memory: usable GiB.
        gpu_tflops: dense bf16 peak, 10^12 operations a second.
        intra_bw, inter_bw: GB/s in one direction within and between nodes.
        gpus_per_node: GPUs of a node, which is then the NVLink domain as well.

    Raises:
        ConfigError: no such GPU, several of that name, a custom one without a fact, or a fact that is not above 0.
    """
    facts = {
        "gpu_memory": gpu_memory, "gpu_tflops": gpu_tflops, "intra_bw": intra_bw, "inter_bw": inter_bw,
        "gpus_per_node": gpus_per_node,
    }  # fmt: skip
    for flag, value in facts.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{flag} must be above 0", seen=value, fix=f"--{flag}")
    if name.lower() != CUSTOM:
        gpu = _named(name)
    else:
        missing = [f"--{flag}" for flag, value in facts.items() if value is None]
        if missing:
            raise ConfigError("a custom GPU needs all its facts", seen=f"no {', '.join(missing)}", fix="give them")
        gpu = _gpu(CUSTOM, 0, gpu_memory or 0, 0, (gpu_tflops or 0) * _H100_BALANCE, 0, 0)
    return replace(
        gpu,
        memory_gib=gpu_memory or gpu.memory_gib,
        bf16_tflops=gpu_tflops or gpu.bf16_tflops,
        intra_bw=intra_bw or gpu.intra_bw,
        inter_bw=inter_bw or gpu.inter_bw,
        gpus_per_node=gpus_per_node or gpu.gpus_per_node,
        gpus_per_domain=gpus_per_node or gpu.gpus_per_domain,
    )


def _named(name: str) -> Gpu:
    wanted = name.lower().replace(" ", "").removeprefix("nvidia").strip("-")
    if wanted[:4] in ("4090", "5090"):
        wanted = f"rtx{wanted}"
    matches = [gpu for known, gpu in GPUS.items() if wanted in (known, known.rsplit("-", 1)[0])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(
            "a GPU that comes with several sizes of memory needs its size",
            seen=name,
            fix="--gpu " + " or ".join(gpu.name for gpu in matches),
        )
    raise ConfigError(
        "a GPU is one of the table, or custom",
        seen=name,
        fix=f"--gpu {', '.join(GPUS)}, or --gpu {CUSTOM} with its facts",
    )


def group_bandwidth(gpu: Gpu, size: int, stride: int) -> float:
    """GB/s in one direction at which each rank of a group takes part in a ring.

    Ranks fill the NVLink domains in order. A group inside one domain uses its links. A group over several ones is held up
    at their borders, where each member inside a domain has its own network card.

    Args:
        gpu: the GPU.
        size: ranks of the group.
        stride: distance between neighbours, in ranks.
    """
    if size * stride <= gpu.gpus_per_domain:
        return gpu.intra_bw
    return min(gpu.intra_bw, gpu.inter_bw * max(1, gpu.gpus_per_domain // stride))
