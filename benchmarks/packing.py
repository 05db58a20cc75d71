"""How long packing takes and how full the packs are, on two length sets that anyone can make again.

    python benchmarks/packing.py [--peer] [--repeat 5]

100,000 lengths at 8,192 tokens, one core: `clip(rint(default_rng(0).lognormal(...)))`. Ours is global
best-fit-decreasing. `--peer` runs ms-swift's method beside it (the package `binpacking` is needed): constant-volume
packing of windows of 1,000 samples, the last pack of a window carried into the next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from mcore_qwen3.data.pack import pack

CAPACITY = 8192
WINDOW = 1000
SETS = {"reasoning-like": (7.7, 0.7, 32), "short": (5.3, 0.8, 16)}


def lengths_of(name: str) -> np.ndarray:
    """The 100,000 lengths of a set, int64."""
    mean, sigma, least = SETS[name]
    drawn = np.random.default_rng(0).lognormal(mean, sigma, 100_000)
    return np.clip(np.rint(drawn), least, CAPACITY).astype(np.int64)


def ours(lengths: np.ndarray) -> int:
    """Packs of our packer."""
    return len(pack(lengths, CAPACITY)[1]) - 1


def best_fit_decreasing(lengths: np.ndarray) -> int:
    """Packs of global best-fit-decreasing, written in the plainest way: a sorted list of the room that is left."""
    import bisect

    rooms: list[int] = []
    packs = 0
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            packs += 1
            room = CAPACITY
        else:
            room = rooms.pop(at)
        bisect.insort(rooms, room - length)
    return packs


def peer(lengths: np.ndarray) -> int:
    """Packs of ms-swift's method."""
    import binpacking

    packs = 0
    carried: list[tuple[int, int]] = []
    entries = list(enumerate(lengths.tolist()))
    for start in range(0, len(entries), WINDOW):
        window = carried + entries[start : start + WINDOW]
        found = binpacking.to_constant_volume(window, CAPACITY, weight_pos=1)
        last = start + WINDOW >= len(entries)
        carried = [] if last else found.pop()
        packs += len(found)
    return packs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    methods: dict[str, Callable[[np.ndarray], int]] = {"ours": ours, "plain best-fit-decreasing": best_fit_decreasing}
    if options.peer:
        methods["ms-swift's binpacking, windows of 1,000"] = peer
    for name in SETS:
        lengths = lengths_of(name)
        least = -(-int(lengths.sum()) // CAPACITY)
        print(f"{name}: {len(lengths):,} lengths, {lengths.sum():,} tokens, at least {least:,} packs of {CAPACITY:,}")
        for title, method in methods.items():
            seconds = []
            for _ in range(options.repeat):
                start = time.perf_counter()
                packs = method(lengths)
                seconds.append(time.perf_counter() - start)
            fill = 100 * lengths.sum() / (packs * CAPACITY)
            times = f"min {min(seconds):.3f} s, median {np.median(seconds):.3f} s"
            print(f"  {title}: {packs:,} packs, {fill:.2f} % full, {times}")


if __name__ == "__main__":
    main()
