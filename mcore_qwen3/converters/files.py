"""Reads bytes of a file straight into the memory that asks for them."""

from __future__ import annotations

import os

import torch


def read_into(descriptor: int, offset: int, target: memoryview) -> int:
    """Fill `target` from a place in an open file; returns the bytes read, fewer only where the file ends."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
