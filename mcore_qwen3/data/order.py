"""The order of rows, from a seed and an epoch (or a name) alone."""

from __future__ import annotations

import zlib

import numpy as np


def permutation(number: int, seed: int, stream: int | str) -> np.ndarray:
    """A permutation of range(number), int64; another for each seed (>= 0) and stream (an epoch number, or a name).

    Made by sorting raw Philox output: NumPy promises that its raw streams stay the same, not so its `permutation`,
    and a resumed run must see the same order under any NumPy.
    """
    # Epochs are whole numbers from 0; names lie above them.
    word = stream if isinstance(stream, int) else (1 << 32) + zlib.crc32(stream.encode())
    raw = np.random.Philox(np.random.SeedSequence([seed, word])).random_raw(number)
    return np.argsort(raw, kind="stable")


def uniform(number: int, seed: int, stream: str) -> np.ndarray:
    """`number` floats in [0, 1), from Philox's raw output for the same reason."""
    raw = np.random.Philox(np.random.SeedSequence([seed, (1 << 32) + zlib.crc32(stream.encode())])).random_raw(number)
    return (raw >> np.uint64(11)) * 2.0**-53
