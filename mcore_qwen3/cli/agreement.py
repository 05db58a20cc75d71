"""Whether all ranks have the same."""

from __future__ import annotations


def disagreement(mine: str, shown: str) -> str:
    """Two ranks that do not have the same, in words; "" where all agree. Collective over all ranks.

    Args:
        mine: what is compared.
        shown: how it is named to the user.
    """
    import torch.distributed as dist

    everyone = [(mine, shown)] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, shown))
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other[0] != first[0]:
            return f"rank 0 has {first[1]}, rank {rank} has {other[1]}"
    return ""
