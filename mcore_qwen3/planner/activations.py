"""What one layer keeps for its backward, row by row: how many values a token, of how many bytes, for which tokens.

Letters: h hidden; n and g query and key-value heads of a rank, d head_dim; f width of an MLP or expert on a rank; E experts,
K top-k; e bytes of an activation. The rows of the torch modules are what `torch.autograd.graph.saved_tensors_hooks` shows on
CPU (megatron-core 0.19.2, torch 2.13); on a GPU, RMSNorm and SwiGLU of a dense MLP are fused and attention is torch's
variable-length kernel, so fewer rows remain: read in the source, not measured. The rows of transformer-engine are read in
Megatron-LM's and transformer-engine's source, and were never run here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_qwen3.arch import ModelShape, ParallelLayout, padded_vocab_size
from mcore_qwen3.planner.settings import Settings

# Parts of a layer. `--recompute_modules` drops some of them and keeps the input of what is computed again.
ATTENTION_NORM, QKV, CORE, PROJECTION = "attention norm", "qkv", "core attention", "attention output"
MLP_NORM, MLP, ROUTER, DISPATCH, EXPERTS = "mlp norm", "mlp", "router", "dispatch", "experts"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one micro-batch on one rank: `row` of its context-parallel share, `sequence` of its sequence-parallel
    share, `received` (token, choice) pairs that its experts compute, `gathered` its sequence-parallel share on all
    expert-TP ranks."""

    row: float
    sequence: float
    received: float
    gathered: float


@dataclass(frozen=True, slots=True)
class Saved:
    """`values` per token, each of `width` bytes, for the tokens named by a field of `Tokens`."""

    part: str
    what: str
    tokens: str
    values: float
    width: float

    def bytes(self, tokens: Tokens) -> float:
        """Bytes of a micro-batch."""
        return self.values * self.width * float(getattr(tokens, self.tokens))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The letters of this module's docstring, for one rank."""

    h: int
    n: int
    g: int
    d: int
    f: int
    e: int
    experts: int
    top_k: int
    context: int
    load: float


def tokens_of(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> Tokens:
    """How many tokens of a micro-batch a rank computes.

    The dispatcher gathers the tokens of all expert-TP ranks, and every token goes to top-k experts; a capacity bounds what
    the heaviest rank receives, and is what it receives where experts are padded to it.
    """
    row = settings.row_length * settings.micro_batch_size / layout.context
    sequence = row / layout.tensor if layout.sequence_parallel else row
    gathered = sequence * layout.expert_tensor
    return Tokens(row, sequence, gathered * shape.moe_router_topk * settings.expert_load(layout), gathered)


def sizes_of(shape: ModelShape, layout: ParallelLayout, settings: Settings, has_experts: bool) -> Sizes:
    """The letters for a layer with or without experts."""
    width = shape.moe_ffn_hidden_size // layout.expert_tensor if has_experts else shape.ffn_hidden_size // layout.tensor
    return Sizes(
        h=shape.hidden_size,
        n=shape.num_attention_heads // layout.tensor,
        g=shape.num_query_groups // layout.tensor,
        d=shape.head_dim,
        f=width,
        e=settings.element_bytes,
        experts=shape.num_experts,
        top_k=shape.moe_router_topk,
        context=layout.context,
        load=settings.expert_load(layout),
    )


def layer_rows(shape: ModelShape, layout: ParallelLayout, settings: Settings, has_experts: bool) -> tuple[Saved, ...]:
    """Everything that a layer keeps for its backward when nothing of it is computed again."""
    z = sizes_of(shape, layout, settings, has_experts)
    rows = [
        *norm_rows(z, settings, ATTENTION_NORM),
        *_qkv_rows(z, settings),
        *_core_rows(z, settings),
        Saved(PROJECTION, "input of the output projection", "row", z.n * z.d, z.e),
        *norm_rows(z, settings, MLP_NORM),
    ]
    if has_experts:
        rows += [*_router_rows(shape, z, settings), *_dispatch_rows(z, settings), *_expert_rows(z, settings)]
    else:
        # Unfused: gate and up, silu(gate), up + 0 (megatron's linear offset), their product. Fused: gate and up, product.
        rows.append(Saved(MLP, "SwiGLU", "row", (3 if _is_fused(settings) else 5) * z.f, z.e))
    return tuple(rows)


def kept_rows(shape: ModelShape, layout: ParallelLayout, settings: Settings, has_experts: bool) -> tuple[Saved, ...]:
    """What a layer keeps under `--recompute_granularity` none or selective.

    A part that is computed again keeps its input alone. The output of a recomputed norm or expert activation is not kept
    either: the module that used it gets it back before its backward (megatron's CheckpointWithoutOutput).
    """
    rows = layer_rows(shape, layout, settings, has_experts)
    if settings.recompute_granularity != "selective":
        return rows
    z = sizes_of(shape, layout, settings, has_experts)
    modules, dropped, inputs = set(settings.recompute_modules), set(), []
    if "layernorm" in modules:
        for part in _separate_norms(settings, has_experts):
            dropped.add(part)
            inputs.append(Saved(part, "input of the recomputed norm", "sequence", z.h, z.e))
    if "core_attn" in modules:
        dropped.add(CORE)
        inputs.append(Saved(CORE, "rotated query and key", "row", (z.n + z.g) * z.d, z.e))
        if not _keeps_mixed_qkv(z, settings):
            inputs.append(Saved(CORE, "value, as a part of mixed qkv", "row", (z.n + 2 * z.g) * z.d, z.e))
    if has_experts and "moe" in modules:
        dropped |= {ROUTER, DISPATCH, EXPERTS}
    elif has_experts and "moe_act" in modules:
        dropped.add(EXPERTS)
        inputs += [
            Saved(EXPERTS, "input and output of fc1", "received", z.h + 2 * z.f, z.e),
            Saved(EXPERTS, "probability", "received", 1, 4),
        ]
    if not has_experts and "mlp" in modules:
        dropped.add(MLP)
    return (*(row for row in rows if row.part not in dropped), *inputs)


def checkpoint_rows(shape: ModelShape, settings: Settings) -> tuple[Saved, ...]:
    """What a group of layers keeps that is computed again as a whole (`--recompute_granularity full`): its input."""
    return (Saved("layer input", "input of a group of layers", "sequence", shape.hidden_size, settings.element_bytes),)


def shared_rows(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> tuple[Saved, ...]:
    """What the layers of a micro-batch keep together, once."""
    full = settings.recompute_granularity == "full"
    rows = []
    if full:
        # One table as long as the longest sample, whatever part of it the rank holds; effective_length stands for it.
        longest = settings.effective_length * layout.context / settings.row_length / settings.micro_batch_size
        rows.append(Saved("shared", "rotary table", "row", shape.head_dim * longest, 4))
        rows.append(Saved("shared", "padding mask", "row", 1 if shape.is_moe else 0, 1))
    again = full or (settings.recompute_granularity == "selective" and "core_attn" in settings.recompute_modules)
    if layout.context > 1 and settings.modules == "torch" and not again:
        rows.append(Saved("shared", "places of the gathered keys", "row", (2 * layout.context + 1) / 2, 8))
    return tuple(rows)


def embedding_rows(layout: ParallelLayout) -> tuple[Saved, ...]:
    """Token ids; with the vocabulary split, also which of them another rank holds."""
    split = layout.tensor > 1
    return (Saved("embedding", "token ids", "row", 1, 8), Saved("embedding", "masked ids", "row", 1 if split else 0, 1))


def head_rows(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> tuple[Saved, ...]:
    """Final norm and the output layer's input; the probabilities of the vocabulary are `logit_values`."""
    z = sizes_of(shape, layout, settings, has_experts=False)
    return (*norm_rows(z, settings, "final norm"), Saved("loss", "labels and masks", "row", 1, 10))


def logit_values(shape: ModelShape, layout: ParallelLayout, tokens: Tokens) -> float:
    """Logits of a micro-batch on one rank. Megatron's cross entropy keeps their softmax in fp32, fused or not
    (megatron-core 0.19.2, `_VocabParallelCrossEntropy`), beside the logits themselves while it computes it and their
    gradient while it uses it."""
    return tokens.row * padded_vocab_size(shape.vocab_size, layout.tensor) / layout.tensor


def total_bytes(rows: Iterable[Saved], tokens: Tokens) -> float:
    """Bytes of a micro-batch."""
    return sum(row.bytes(tokens) for row in rows)


def norm_rows(z: Sizes, settings: Settings, part: str) -> list[Saved]:
    """An RMSNorm and its output, which the next layer keeps. Unfused, its input and product are kept in fp32."""
    wide = 4 if not _norm_is_fused(settings) else z.e
    rows = [
        Saved(part, "norm input", "sequence", z.h, wide),
        Saved(part, "1 / root mean square", "sequence", 1, 4),
        Saved(part, "norm output", "sequence", z.h, z.e),
    ]
    if not _norm_is_fused(settings):
        rows.append(Saved(part, "normalised input", "sequence", z.h, 4))
    return rows


def _qkv_rows(z: Sizes, settings: Settings) -> list[Saved]:
    """Mixed qkv, query and key norms, rotary embedding.

    Megatron reshapes the query out of mixed qkv, which copies it unless the rank has a single group; key and value stay
    views of mixed qkv, which is therefore kept whole.
    """
    query, key = z.n * z.d, z.g * z.d
    rows = [Saved(QKV, "1 / root mean square of each head", "row", z.n + z.g, 4)]
    if _keeps_mixed_qkv(z, settings):
        rows.append(Saved(QKV, "mixed qkv", "row", query + 2 * key, z.e))
        rows.append(Saved(QKV, "copy of the query", "row", query if z.g > 1 else 0, z.e))
    else:
        rows.append(Saved(QKV, "query and key in fp32", "row", query + key, 4))
    if not _norm_is_fused(settings):
        rows.append(Saved(QKV, "normalised query and key", "row", query + key, 4))
    if settings.modules == "torch":
        # Sine and cosine of the query, and of the key; transformer-engine's fused form keeps one table for all layers.
        rows.append(Saved(QKV, "rotary embedding", "row", 4 * z.d, z.e))
    return rows


def _core_rows(z: Sizes, settings: Settings) -> list[Saved]:
    """Core attention: rotated query, key, value, log-sum-exp.

    Under context parallel the torch modules gather keys and values, and lay them out anew for each of a rank's two chunks of
    a sample: (2 CP + 1) / 2 rows for each token of the rank. transformer-engine passes them in a ring and keeps its own.
    Call by call (CPU, and fp32), keys and values are repeated for every query head, the outputs are joined, and a chunk
    whose queries are not its first keys has a mask.
    """
    rows = [Saved(CORE, "query", "row", z.n * z.d, z.e), Saved(CORE, "log-sum-exp", "row", z.n, 4)]
    copies = (2 * z.context + 1) / 2 if z.context > 1 else 1
    if settings.modules == "transformer_engine":
        return [*rows, Saved(CORE, "key", "row", z.g * z.d, z.e)]
    if settings.on_cuda and settings.bf16:
        tensors = 2 if z.context > 1 else 1  # the value is a view of mixed qkv where nothing is gathered
        return [*rows, Saved(CORE, "key and value", "row", copies * tensors * z.g * z.d, z.e)]
    rows += [
        Saved(CORE, "key and value of every head", "row", copies * 2 * z.n * z.d, z.e),
        Saved(CORE, "output of each call", "row", z.n * z.d, z.e),
    ]
    if z.context > 1:
        rows.append(Saved(CORE, "masks", "row", _mask_values(z, settings), z.e))
    return rows


def _mask_values(z: Sizes, settings: Settings) -> float:
    return (2 * z.context + 1) / (4 * z.context) * settings.effective_length


def _router_rows(shape: ModelShape, z: Sizes, settings: Settings) -> list[Saved]:
    """Choice and probabilities; scores over all experts for each auxiliary loss, and for a softmax before the choice."""
    wide = 8 if settings.moe_router_dtype == "fp64" else 4
    rows = [
        Saved(ROUTER, "chosen experts", "sequence", z.top_k, 8),
        Saved(ROUTER, "probabilities", "sequence", z.top_k if shape.norm_topk_prob else z.experts, 4),
    ]
    if settings.moe_aux_loss_coeff:
        rows.append(Saved(ROUTER, "scores of the balance loss", "sequence", z.experts, 4))
    if settings.moe_z_loss_coeff:
        rows.append(Saved(ROUTER, "logits of the z-loss", "sequence", z.experts, wide))
    if settings.moe_expert_capacity_factor is not None:
        rows.append(Saved(ROUTER, "places within capacity", "sequence", z.top_k * z.load, 8))
        masks = 1 if settings.moe_pad_expert_input_to_capacity else 2
        rows.append(Saved(ROUTER, "masks of the capacity", "sequence", masks * z.experts, 1))
    return rows


def _dispatch_rows(z: Sizes, settings: Settings) -> list[Saved]:
    """Indices that put tokens in the order of their experts, and back.

    Megatron's sort (`moe_permute_fusion` is off) keeps the whole argsort of the E x tokens map. allgather keeps mask and
    probabilities of the gathered tokens for the rank's own experts: as many as its own tokens for all experts and expert-TP.
    """
    if settings.moe_token_dispatcher_type == "allgather":
        return [
            Saved(DISPATCH, "token of each row", "received", 1, 8),
            Saved(DISPATCH, "mask and probabilities of the gathered tokens", "gathered", z.experts, 5),
        ]
    if settings.moe_pad_expert_input_to_capacity:
        return [Saved(DISPATCH, "token and probability of each row", "sequence", 2 * z.top_k * z.load, 8)]
    return [
        Saved(DISPATCH, "argsort of the map", "sequence", z.experts, 8),
        Saved(DISPATCH, "token of each row", "sequence", z.top_k * min(z.load, 1), 8),
    ]


def _expert_rows(z: Sizes, settings: Settings) -> list[Saved]:
    """Inputs of fc1 and fc2, and SwiGLU between them: gate and up, silu(gate), silu(gate) x up, and the scaled product.

    Fused (transformer-engine; one module an expert on a GPU): gate and up, and the scaled product. One module an expert
    without fusion: megatron's MLP, with up + 0 on top.
    """
    if settings.modules == "transformer_engine" or (_is_fused(settings) and not settings.moe_grouped_gemm):
        inner = 3
    else:
        inner = 5 if settings.moe_grouped_gemm else 6
    return [
        Saved(EXPERTS, "input of fc1", "received", z.h, z.e),
        Saved(EXPERTS, "SwiGLU", "received", inner * z.f, z.e),
        Saved(EXPERTS, "probability", "received", 1, 4),
    ]


def _is_fused(settings: Settings) -> bool:
    """SwiGLU outside grouped experts is one kernel (`bias_activation_fusion`, switched on on GPUs)."""
    return settings.on_cuda


def _norm_is_fused(settings: Settings) -> bool:
    """RMSNorm is one kernel on a GPU; on CPU torch computes it in fp32 from parts."""
    return settings.on_cuda


def _keeps_mixed_qkv(z: Sizes, settings: Settings) -> bool:
    """On CPU in bf16 the norms keep fp32 copies, and the value is repeated: nothing points into mixed qkv."""
    return settings.on_cuda or not settings.bf16


def _separate_norms(settings: Settings, has_experts: bool) -> list[str]:
    """Norms that are modules of their own, and so can be computed again: transformer-engine fuses the others with the
    linear layer behind them."""
    if settings.modules == "torch":
        return [ATTENTION_NORM, MLP_NORM]
    return [MLP_NORM] if has_experts else []
