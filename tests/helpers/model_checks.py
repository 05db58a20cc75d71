"""Functions about the model's modules that run inside a rank; results are compared in the test's own process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from helpers.tiny import Sample
from helpers.training import Layout, build, start_groups

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 8,
    "ffn_hidden_size": 32,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}
TINY_MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "norm_topk_prob": True}


def new_config(sizes: dict[str, Any], layout: Layout | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """(ModelShape, ParallelLayout, ModelOptions, TransformerConfig) of `TINY` with changed sizes; the groups are made."""
    import torch.distributed as dist

    from mcore_qwen3.arch.layout import resolve_layout
    from mcore_qwen3.arch.shape import ModelShape
    from mcore_qwen3.model.config import ModelOptions, transformer_config

    layout = layout or Layout()
    sizes = {**TINY, **sizes}
    shape = ModelShape(model_type="qwen3_moe" if "num_experts" in sizes else "qwen3", **sizes)
    resolved = resolve_layout(
        dist.get_world_size(),
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        sequence_parallel=options.pop("sequence_parallel", False),
        shape=shape,
    )
    start_groups(resolved)
    chosen = ModelOptions(**options)
    return shape, resolved, chosen, transformer_config(shape, resolved, chosen)


def new_model(sizes: dict[str, Any], layout: Layout | None = None, **options: Any) -> Any:
    """A model with unset weights."""
    from mcore_qwen3.model.build import build_model

    shape, resolved, chosen, _ = new_config(sizes, layout, **options)
    return build_model(shape, resolved, chosen)


def stored_tensors(sizes: dict[str, Any], **options: Any) -> dict[str, tuple[list[int], bool]]:
    """Key -> (global shape, each of its values is held exactly once) of a model on one rank."""
    from mcore_qwen3.model.pieces import pieces

    times: dict[str, torch.Tensor] = {}
    for piece in pieces(new_model(sizes, **options)):
        held = times.setdefault(piece.key, torch.zeros(piece.global_shape, dtype=torch.int32))
        held[piece.global_block(piece.block).slices] += 1
    return {key: (list(held.shape), bool((held == 1).all())) for key, held in times.items()}


def routing_weights(norm_topk_prob: bool, logits: list[float]) -> tuple[str, list[float]]:
    """(router class, weight of each expert) for one token with the given router logits, in a whole model."""
    moe = {**TINY_MOE, "norm_topk_prob": norm_topk_prob, "num_experts": len(logits)}
    model = new_model({**moe, "hidden_size": len(logits), "num_attention_heads": 2, "head_dim": 4})
    router = model.eval().decoder.layers[0].mlp.router
    with torch.no_grad():
        router.weight.copy_(torch.eye(len(logits)))
        probabilities, chosen = router(torch.tensor(logits)[None, None])
    assert torch.equal(probabilities > 0, chosen)
    return type(router).__name__, probabilities[0].tolist()


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor, lengths: list[int]
) -> dict[str, torch.Tensor]:
    """Output and input gradients of PackedAttention; query [T, N, D], key and value [T, G, D], upstream [T, N * D]."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    from mcore_qwen3.model.attention import PackedAttention
    from mcore_qwen3.model.context_parallel import PackedRow

    *_, config = new_config({"head_dim": query.shape[2]})
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = PackedRow(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    output = attention(*inputs, None, packed_seq_params=packed)
    output.backward(upstream)
    gradients = {name: tensor.grad for name, tensor in zip(("query", "key", "value"), inputs, strict=True)}
    return {"output": output.detach(), **gradients}


def grouped_experts(
    weight1: torch.Tensor, weight2: torch.Tensor, hidden: torch.Tensor, counts: list[int], probs: torch.Tensor
) -> dict[str, Any]:
    """Output and gradients of sum(output), and how often torch's grouped_mm was used; weights [E, 2F, H] and [E, H, F]."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mcore_qwen3.model import experts as module

    number, hidden_size, width = weight2.shape
    moe = {**TINY_MOE, "num_experts": number, "moe_ffn_hidden_size": width}
    *_, config = new_config({**moe, "hidden_size": hidden_size})
    experts = module.GroupedExperts(number, config, ProcessGroupCollection.use_mpu_process_groups())
    with torch.no_grad():
        experts.weight1.copy_(weight1)
        experts.weight2.copy_(weight2)
    hidden, probs = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
    with mock.patch.object(module, "grouped_mm", wraps=module.grouped_mm) as grouped_mm:
        output, bias = experts(hidden, torch.tensor(counts), probs)
        output.sum().backward()  # a gradient of stride 0
    assert bias is None
    return {
        "output": output.detach(),
        "weight1": experts.weight1.grad,
        "weight2": experts.weight2.grad,
        "hidden": hidden.grad,
        "probs": probs.grad,
        "grouped_mm calls": grouped_mm.call_count,
    }


def expert_entries(layout: Layout) -> dict[str, dict[str, Any]]:
    """Checkpoint entries of this rank's experts, as GroupedExperts and as SequentialMLP with the same weights.

    Each: key -> (global tensor with NaN where this rank holds nothing, replica ids, {(dtype, may be ragged)}).
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mcore_qwen3.model.provider import TorchSpecProvider

    *_, config = new_config(TINY_MOE, layout, sequence_parallel=layout.tensor > 1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    local = config.num_moe_experts // layout.expert
    provider = TorchSpecProvider()
    grouped = provider.grouped_mlp_modules(True)(local, config, pg_collection=groups)
    sequential = provider.grouped_mlp_modules(False)(local, config, pg_collection=groups)
    torch.manual_seed(parallel_state.get_expert_model_parallel_rank() * 10 + groups.expt_tp.rank())
    with torch.no_grad():
        for number, expert in enumerate(sequential.local_experts):
            for grouped_weight, linear in ((grouped.weight1, expert.linear_fc1), (grouped.weight2, expert.linear_fc2)):
                grouped_weight[number].normal_()
                linear.weight.copy_(grouped_weight[number])
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found: dict[str, dict[str, Any]] = {}
    for name, module in (("grouped", grouped), ("sequential", sequential)):
        state = module.sharded_state_dict("mlp.experts.", ((0, 1, 3),), metadata)  # the second of three layers
        apply_factories(state)
        entries: dict[str, Any] = {}
        for shard in nested_values(state):
            if not isinstance(shard, ShardedTensor):  # `_extra_state`, which no checkpoint of ours holds
                continue
            empty = torch.full(shard.global_shape, torch.nan)
            whole, *rest = entries.setdefault(shard.key, (empty, set(), set()))
            lead = shard.prepend_axis_num
            starts, sizes = shard.global_offset, (1,) * lead + tuple(shard.data.shape)
            place = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
            assert whole[place].isnan().all(), "two pieces at one place"
            whole[place] = shard.data.detach().reshape(sizes)
            rest[0].add(shard.replica_id)
            rest[1].add((shard.dtype, shard.allow_shape_mismatch))
        found[name] = entries
    return found


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, sequence_parallel: bool) -> tuple[Any, ...]:
    """(output, the weight's gradient of sum(output), its `sequence_parallel` mark)."""
    from types import SimpleNamespace

    from mcore_qwen3.model.norm import RMSNorm

    config: Any = SimpleNamespace(sequence_parallel=sequence_parallel, params_dtype=torch.float32)
    norm = RMSNorm(config, len(weight), eps=eps)
    with torch.no_grad():
        norm.weight.copy_(weight)
    output = norm(hidden)
    output.sum().backward()
    return output.detach(), norm.weight.grad, norm.weight.sequence_parallel  # type: ignore[attr-defined]


def all_flat_ranges(shapes: list[tuple[int, ...]]) -> int:
    """Check `flat_range_blocks` on every range of arrays of the shapes; returns the number of ranges."""
    from mcore_qwen3.model.pieces import flat_range_blocks

    ranges = 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        numbered = torch.arange(size).view(shape)
        for start in range(size + 1):
            for stop in range(start, size + 1):
                blocks = list(flat_range_blocks(start, stop, shape))
                values = [numbered[block.slices].flatten().tolist() for _, block in blocks]
                case = f"shape {shape}, range {start} to {stop}: {blocks}"
                assert [value for part in values for value in part] == list(range(start, stop)), (
                    f"{case} holds {values}"
                )
                assert [flat for flat, _ in blocks] == [part[0] for part in values], case
                assert all(tuple(numbered[block.slices].shape) == block.sizes for _, block in blocks), case
                assert len(blocks) <= 2 * len(shape) - 1, case
                ranges += 1
    return ranges


def block_arithmetic() -> list[Any]:
    """Common parts of rectangles and the same rectangles counted from another's corner."""
    from mcore_qwen3.model.pieces import Block

    big, other = Block((2, 3), (4, 5)), Block((4, 0), (9, 5))
    common = big.intersect(other)
    assert common is not None
    return [
        (common.starts, common.sizes),
        (common.relative_to(big).starts, common.relative_to(big).sizes),
        common.slices,
        big.intersect(Block((6, 3), (1, 1))),  # they touch, and share nothing
        big.intersect(Block((2, 0), (4, 3))),
    ]


def losses_by_token(model_dir: str, layout: Layout, rows: list[list[Sample]], **options: Any) -> list[float]:
    """The model's loss at each trained position of one micro-batch of rows, in order."""
    from mcore_qwen3.data.micro_batch import build_micro_batch
    from mcore_qwen3.train.step import forward_step

    _, models = build(model_dir, layout, **options)
    length = max(sum(len(sample.ids) for sample in row) for row in rows)
    length = -(-length // layout.tensor) * layout.tensor
    batch = build_micro_batch([[(sample.ids, sample.mask) for sample in row] for row in rows], length, 0)
    output, _ = forward_step(iter([batch]), models[0].eval())
    return output.detach()[batch.loss_mask > 0].tolist()


def choices_of_modules(cases: list[tuple[str, bool, bool]]) -> list[str]:
    """For each (wanted, on a GPU, transformer-engine installed): "choice: reason", or the error."""
    from mcore_qwen3.errors import ConfigError
    from mcore_qwen3.model import provider

    answers = []
    for wanted, on_cuda, installed in cases:
        spec = object() if installed else None
        with mock.patch.object(provider.importlib.util, "find_spec", lambda name, spec=spec: spec):
            try:
                answers.append(": ".join(provider.choose_modules(wanted, on_cuda)))
            except ConfigError as error:
                answers.append(str(error))
    return answers


def config_fields(sizes: dict[str, Any], names: list[str], **options: Any) -> dict[str, Any]:
    """Fields of megatron's configuration for a model."""
    *_, config = new_config(sizes, **options)
    return {name: getattr(config, name) for name in names}


def logits_gradients(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of the summed cross entropy over fp32 logits [T, 1, V] by megatron's fused and plain functions."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    new_config({})
    group = parallel_state.get_tensor_model_parallel_group()
    found = {}
    for name, function in (
        ("fused", lambda x: fused_vocab_parallel_cross_entropy(x, labels, group)),
        ("plain", lambda x: vocab_parallel_cross_entropy(x, labels)),
    ):
        leaf = logits.clone().requires_grad_()
        function(leaf * 1.0).sum().backward()  # the functions write into their input
        found[name] = leaf.grad
    return found


class FakeSource:
    """A checkpoint whose tensors are the flat positions of their values, with faults on demand."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._tensors = {key: torch.arange(torch.Size(shape).numel()).view(shape) for key, shape in shapes.items()}

    def entries(self) -> dict[str, torch.Tensor]:
        """The tensors themselves: they have a shape."""
        return self._tensors

    def read(self, key: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as any source."""
        return self._tensors[key][slices]


def read_with_fault(sizes: dict[str, Any], fault: str) -> tuple[str, bool]:
    """Read a fake checkpoint into a model; returns (the error or "", whether every value came to its place).

    Faults of the source: "missing", "shape", "wider vocabulary"; of the description of the parameters: "twice", "half".
    "fewer rows" is none: a vocabulary that another layout has padded less.
    """
    from mcore_qwen3.errors import ConversionError
    from mcore_qwen3.model import weights
    from mcore_qwen3.model.pieces import Block, pieces

    model = new_model(sizes)
    described = list(pieces(model))
    shapes = {piece.key: piece.global_shape for piece in described}
    key = "decoder.layers.self_attention.linear_proj.weight"
    vocabulary = "embedding.word_embeddings.weight"
    if fault == "missing":
        del shapes[key]
    elif fault == "shape":
        shapes[key] = (*shapes[key][:-1], shapes[key][-1] + 1)
    elif fault == "fewer rows":
        shapes[vocabulary] = (shapes[vocabulary][0] - 2, *shapes[vocabulary][1:])
    elif fault == "wider vocabulary":
        shapes[vocabulary] = (shapes[vocabulary][0], shapes[vocabulary][1] + 1)
    elif fault == "twice":
        described.append(described[-1])
    elif fault == "half":
        last = described.pop()
        object.__setattr__(last, "block", Block(last.block.starts, (last.block.sizes[0] // 2, *last.block.sizes[1:])))
        described.append(last)
    source: Any = FakeSource(shapes)
    with mock.patch.object(weights, "pieces", lambda model: described) if fault else nullcontext():
        try:
            weights.read_weights(model, source)
        except ConversionError as error:
            return str(error), False
    return "", all(_holds_positions(piece, shapes[piece.key][0]) for piece in described)


def _holds_positions(piece: Any, stored_rows: int) -> bool:
    """Whether a piece holds the flat positions that its place in the global tensor says; past the stored rows, zeros."""
    wanted = torch.arange(torch.Size(piece.global_shape).numel()).view(piece.global_shape).float()
    wanted[stored_rows:] = 0
    part = wanted[piece.global_block(piece.block).slices].reshape(piece.block.sizes)
    return torch.equal(piece.parameter.detach()[piece.block.slices], part)


def one_step(model_dir: str, rows: list[list[Sample]], **options: Any) -> dict[str, Any]:
    """One forward and backward pass over rows, each a micro-batch: loss, dtypes, gradient norm."""
    from mcore_qwen3.data.micro_batch import build_micro_batch
    from mcore_qwen3.train.optimizer import wrap_for_data_parallel
    from mcore_qwen3.train.step import run_schedule, sum_over_ranks

    _, models = build(model_dir, Layout(), **options)
    chunks = wrap_for_data_parallel(models)
    length = max(sum(len(sample.ids) for sample in row) for row in rows)
    batches = [build_micro_batch([[(s.ids, s.mask) for s in row]], length, 0) for row in rows]
    total, trained = sum_over_ranks(run_schedule(chunks, batches, forward_only=False), 2)
    gradients = [parameter.main_grad for parameter in chunks[0].parameters()]
    return {
        "loss": total / trained,
        "parameters": {str(parameter.dtype) for parameter in chunks[0].parameters()},
        "gradients": {str(gradient.dtype) for gradient in gradients},
        "norm": float(torch.stack([gradient.double().norm() for gradient in gradients]).norm()),
    }
