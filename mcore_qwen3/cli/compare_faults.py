"""What kind of fault a first difference points to, as far as the tensors themselves can tell.

Shapes: T tokens of a micro-batch, N query heads, G key-value heads, D head_dim, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.compare_tensors import Pair, relative_error

_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_query_groups", "v_proj": "num_query_groups"}
_PLAIN = {
    "embedding": "the token ids, or the rows of the embedding",
    "attention": "o_proj, the order of its columns, or a sum over tensor-parallel ranks",
    "layer": "a residual connection",
    "final_norm": "the last norm",
    "loss": "the output layer, the labels, or the padding of the vocabulary",
}


def fault_of_weights(pair: Pair, shape: ModelShape, theirs: Callable[[str], torch.Tensor | None]) -> str:
    """What a parameter that differs before the first step points to: the files, or how they are read.

    Args:
        pair: the first that differs.
        shape: the model.
        theirs: Hugging Face name -> tensor.
    """
    path, projection = pair.hf_name.rsplit(".", 2)[:2]
    if projection in _HEADS:
        heads: list[tuple[str, torch.Tensor]] = []
        for name, count in _HEADS.items():
            rows = theirs(f"{path}.{name}.weight")
            assert rows is not None
            heads += [(f"{name[0]}{at}", head) for at, head in enumerate(rows.cpu().chunk(getattr(shape, count)))]
        ours = pair.ours.chunk(getattr(shape, _HEADS[projection]))
        found = [next((name for name, head in heads if relative_error(own, head) < 1e-5), "?") for own in ours]
        if "?" not in found:
            return f"head order: our heads of {projection} are transformers' {' '.join(found)}"
        order = matching_order(pair.ours.T, pair.theirs.T)
        if order is not None:
            return f"column order: {_first_moves(order)}"
    order = matching_order(pair.ours, pair.theirs)
    if order is not None:
        return f"row order: {_first_moves(order)}"
    return "the two directories hold other weights, or one of them is read wrongly"


def matching_order(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> list[int] | None:
    """Which slice of theirs each slice of ours along the first axis is; None where they do not all match, or in order."""
    flat, others = ours.flatten(1), theirs.flatten(1)
    limit = tolerance * float(others.abs().max())
    order = []
    for row in flat:
        distance = (others - row).abs().amax(dim=1)
        nearest = int(distance.argmin())
        if not float(distance[nearest]) <= limit:
            return None
        order.append(nearest)
    return order if sorted(order) == list(range(len(order))) and order != sorted(order) else None


def _first_moves(order: list[int]) -> str:
    moved = [(at, source) for at, source in enumerate(order) if at != source]
    shown = ", ".join(f"ours {at} is theirs {source}" for at, source in moved[:4])
    return shown + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")


def fault_of_activations(pairs: Sequence[Pair], first: Pair, starts: Sequence[int], tolerance: float) -> str:
    """What the first activation that differs points to.

    Args:
        pairs: all of them.
        first: one of them; all before it agree.
        starts: the first token of each segment (document) of the line.
        tolerance: relative error above which tensors differ.
    """
    same_layer = {pair.kind: pair for pair in pairs if pair.layer == first.layer}
    if first.kind in ("query", "key", "value"):
        return _fault_of_inputs(same_layer, first, starts, tolerance)
    if first.kind == "context":
        return _fault_of_attention(same_layer, starts, tolerance)
    if first.kind == "router":
        return _fault_of_router(first, tolerance)
    if first.kind == "mlp":
        experts = "the experts' order, or a token that went to the wrong one; " if "router" in same_layer else ""
        return f"{experts}gate and up exchanged, or a sum over tensor- or expert-parallel ranks"
    return _PLAIN[first.kind]


def _fault_of_inputs(layer: dict[str, Pair], first: Pair, starts: Sequence[int], tolerance: float) -> str:
    order = matching_order(first.ours.transpose(0, 1), first.theirs.transpose(0, 1))
    if order is not None:
        return f"head order: our heads of the {first.kind} are transformers' heads {order}"
    turned = [layer[kind] for kind in ("query", "key") if layer[kind].error > tolerance]
    at_start = max(relative_error(pair.ours[list(starts)], pair.theirs[list(starts)]) for pair in turned or [first])
    if turned and layer["value"].error <= tolerance:
        whole_first = slice(0, starts[1] if len(starts) > 1 else None)
        if all(relative_error(pair.ours[whole_first], pair.theirs[whole_first]) <= tolerance for pair in turned):
            return "position ids: they do not start anew with each document of a pack"
        if at_start <= tolerance:  # position 0 is not turned, whatever the base
            return "the rotary embedding: its base (rope_theta), its scaling (YaRN), or the position ids"
        return "q_proj, k_proj, q_norm or k_norm, or the rotary embedding's scale"
    return "input_layernorm, or the projections to query, key and value"


def _fault_of_attention(layer: dict[str, Pair], starts: Sequence[int], tolerance: float) -> str:
    """Query, key and value agree; the first token of a document sees itself alone, so its context is its value."""
    context, value_TGD = layer["context"], layer["value"].theirs
    order = matching_order(context.ours.transpose(0, 1), context.theirs.transpose(0, 1))
    if order is not None:
        return f"head order: our heads of attention's result are transformers' heads {order}"
    first, later = [starts[0]], list(starts[1:])
    if relative_error(context.ours[first], context.theirs[first]) > tolerance:
        limit = tolerance * float(value_TGD[first].abs().max())
        distance_NG = (context.ours[starts[0]][:, None] - value_TGD[starts[0]][None]).abs().amax(dim=-1)
        if float(distance_NG.amin(dim=1).max()) <= limit:
            return f"head grouping: our query heads take the key-value heads {distance_NG.argmin(dim=1).tolist()}"
        return "the mask: tokens see what comes after them"
    if later and relative_error(context.ours[later], context.theirs[later]) > tolerance:
        return "the mask: documents of a pack see each other"
    return "the softmax scale, or which earlier tokens the mask hides"


def _fault_of_router(first: Pair, tolerance: float) -> str:
    if torch.equal(first.ours > 0, first.theirs > 0):
        shares = [side / side.sum(dim=1, keepdim=True).clamp(min=1e-30) for side in (first.ours, first.theirs)]
        if relative_error(*shares) <= tolerance:
            return "norm_topk_prob: the same experts with weights of the same proportions and another sum"
        return "the router's weights or its softmax: the same experts with other weights"
    ties = float((first.ours > 0).ne(first.theirs > 0).any(dim=1).float().mean())
    return f"the norm before the MLP, or the router: {ties:.1%} of the tokens go to other experts (few: near ties)"


def fault_of_gradients(pairs: Sequence[tuple[float, float]]) -> str:
    """What gradients that differ after an equal forward pass point to.

    Args:
        pairs: (relative error, factor by which ours is longer along theirs) of each parameter.
    """
    factors = [factor for _, factor in pairs]
    middle = sorted(factors)[len(factors) // 2]
    if abs(middle - 1) > 1e-3 and all(abs(factor / middle - 1) < 1e-2 for factor in factors):
        return f"a scale: every gradient is {middle:.4g} times transformers' (a division by tokens, ranks or micro-batches)"
    bad = sum(abs(factor - 1) > 1e-3 for factor in factors)
    return f"the backward pass, or a sum over ranks that is missing ({bad} of {len(factors)} parameters off in length)"
