"""The name table between Hugging Face tensors and Megatron's torch_dist keys, as data.

One `Rule` serves both directions. A torch_dist key holds one global tensor of shape `stacked + (rows,) + columns`. What
lies under one index of the stacked axes (layer, or layer and expert) is a *unit*. Its rows are row blocks of one to
three HF tensors (*parts*) laid end to end; its columns are theirs unchanged. So a rule is a list of blocks: read
forwards it fills a unit from HF tensors, read backwards it takes them out of the unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mcore_qwen3.arch.shape import ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_HEAD = "lm_head.weight"
LAYERS = "decoder.layers."
_HF_LAYER = "model.layers.{layer}."


@dataclass(frozen=True)
class Packed:
    """Where an expert's tensor lies if a layer's are packed in one: from `first_row` in (experts, rows, columns)."""

    name: str
    rows: int
    first_row: int


@dataclass(frozen=True)
class Part:
    """One HF tensor of a unit: its name with `{layer}` and `{expert}` left open, its rows, its packed place if any."""

    name: str
    rows: int
    packed: Packed | None = None


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of part number `part`, taken whole and in order."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A run of rows that both sides share: unit row `unit_row` on is part row `part_row` on, `rows` of them."""

    part: int
    part_row: int
    unit_row: int
    rows: int


@dataclass(frozen=True)
class Rule:
    """One torch_dist key and the HF tensors it is made of.

    Attributes:
        key: torch_dist key.
        stacked: sizes of the leading axes: () for a single tensor, (layers,), or (layers, experts).
        columns: trailing axes, shared with every part: (columns,), or () for a vector.
        parts: the HF tensors of one unit.
        blocks: the unit's rows, in order.
        vocabulary: rows are vocabulary entries, which Megatron may pad at the end.
    """

    key: str
    stacked: tuple[int, ...]
    columns: tuple[int, ...]
    parts: tuple[Part, ...]
    blocks: tuple[Block, ...]
    vocabulary: bool = False

    @property
    def rows(self) -> int:
        """Rows of one unit."""
        return sum(block.stop - block.start for block in self.blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the key, without vocabulary padding."""
        return (*self.stacked, self.rows, *self.columns)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Where unit rows [start, stop) lie in the parts, in unit order."""
        block_row = 0
        for block in self.blocks:
            size = block.stop - block.start
            low, high = max(start, block_row), min(stop, block_row + size)
            if low < high:
                yield Segment(block.part, block.start + low - block_row, low, high - low)
            block_row += size

    def hf_name(self, part: int, index: tuple[int, ...]) -> str:
        """The HF name of a part at an index of the stacked axes."""
        return fill_name(self.parts[part].name, index)

    def hf_shape(self, part: int) -> tuple[int, ...]:
        """The HF shape of a part."""
        return (self.parts[part].rows, *self.columns)


def fill_name(template: str, index: tuple[int, ...]) -> str:
    """Put layer and expert numbers into a name template, each where the template still leaves it open."""
    fields = [field for field in ("layer", "expert") if f"{{{field}}}" in template]
    return template.format(**dict(zip(fields, index, strict=False)))


def units(table: tuple[Rule, ...]) -> Iterator[tuple[Rule, tuple[int, ...]]]:
    """Every unit of a table once: single tensors first, then layer by layer, so that neighbours are read together."""
    for rule in table:
        if not rule.stacked:
            yield rule, ()
    per_layer = [rule for rule in table if rule.stacked]
    for layer in range(per_layer[0].stacked[0]):
        for rule in per_layer:
            for rest in itertools.product(*(range(size) for size in rule.stacked[1:])):
                yield rule, (layer, *rest)


def name_table(shape: ModelShape) -> tuple[Rule, ...]:
    """The whole table of a Qwen3 or Qwen3-MoE model. A tied model has no output layer on either side.

    Where some layers have experts and others have not, megatron stores each layer under its own keys.
    """
    hidden = (shape.hidden_size,)
    if shape.is_mixed:
        layers = [rule for layer in range(shape.num_layers) for rule in _one_layer(shape, layer)]
    else:
        layers = [*_attention(shape), *(_moe(shape) if shape.is_moe else _dense(shape))]
    table = [
        _whole(EMBEDDING, HF_EMBEDDING, (), shape.vocab_size, hidden, vocabulary=True),
        *layers,
        _whole("decoder.final_layernorm.weight", "model.norm.weight", (), shape.hidden_size, ()),
    ]
    if not shape.tie_word_embeddings:
        table.append(_whole(HEAD, HF_HEAD, (), shape.vocab_size, hidden, vocabulary=True))
    return tuple(table)


def key_aliases(shape: ModelShape) -> Mapping[str, str]:
    """Other spellings of a key, mapped to the table's.

    Megatron's local spec stores a MoE layer's norm under the dense layer's name; its transformer-engine spec does not.
    """
    layers = [f"{LAYERS}{layer}." for layer, has_experts in enumerate(shape.moe_layers) if has_experts]
    prefixes = layers if shape.is_mixed or not shape.is_moe else [LAYERS]
    return {prefix + "mlp.linear_fc1.layer_norm_weight": prefix + "pre_mlp_layernorm.weight" for prefix in prefixes}


def _one_layer(shape: ModelShape, layer: int) -> Iterator[Rule]:
    """The rules of one layer under keys of its own, without the layer axis."""
    number = str(layer)
    for rule in (*_attention(shape), *(_moe(shape) if shape.moe_layers[layer] else _dense(shape))):
        parts = tuple(
            replace(
                part,
                name=part.name.replace("{layer}", number),
                packed=part.packed and replace(part.packed, name=part.packed.name.replace("{layer}", number)),
            )
            for part in rule.parts
        )
        key = rule.key.replace(LAYERS, f"{LAYERS}{number}.", 1)
        yield replace(rule, key=key, stacked=rule.stacked[1:], parts=parts)


def _whole(
    key: str, name: str, stacked: tuple[int, ...], rows: int, columns: tuple[int, ...], *, vocabulary: bool = False
) -> Rule:
    """A plain rename, stacked over layers where there are any."""
    return Rule(key, stacked, columns, (Part(name, rows),), (Block(0, 0, rows),), vocabulary)


def _attention(shape: ModelShape) -> tuple[Rule, ...]:
    hidden, head_dim, layers = shape.hidden_size, shape.head_dim, (shape.num_layers,)
    attention = LAYERS + "self_attention."
    query_rows, group_rows = shape.num_attention_heads * head_dim, shape.num_query_groups * head_dim
    qkv = tuple(
        Part(f"{_HF_LAYER}self_attn.{name}_proj.weight", rows)
        for name, rows in (("q", query_rows), ("k", group_rows), ("v", group_rows))
    )
    return (
        _whole(attention + "linear_qkv.layer_norm_weight", _HF_LAYER + "input_layernorm.weight", layers, hidden, ()),
        Rule(attention + "linear_qkv.weight", layers, (hidden,), qkv, _qkv_by_group(shape)),
        _whole(attention + "q_layernorm.weight", _HF_LAYER + "self_attn.q_norm.weight", layers, head_dim, ()),
        _whole(attention + "k_layernorm.weight", _HF_LAYER + "self_attn.k_norm.weight", layers, head_dim, ()),
        _whole(attention + "linear_proj.weight", _HF_LAYER + "self_attn.o_proj.weight", layers, hidden, (query_rows,)),
    )


def _dense(shape: ModelShape) -> tuple[Rule, ...]:
    hidden, inner, layers = shape.hidden_size, shape.ffn_hidden_size, (shape.num_layers,)
    mlp = LAYERS + "mlp."
    gate_up = tuple(Part(f"{_HF_LAYER}mlp.{name}_proj.weight", inner) for name in ("gate", "up"))
    return (
        _whole(mlp + "linear_fc1.layer_norm_weight", _HF_LAYER + "post_attention_layernorm.weight", layers, hidden, ()),
        Rule(mlp + "linear_fc1.weight", layers, (hidden,), gate_up, _end_to_end(gate_up)),
        _whole(mlp + "linear_fc2.weight", _HF_LAYER + "mlp.down_proj.weight", layers, hidden, (inner,)),
    )


def _moe(shape: ModelShape) -> tuple[Rule, ...]:
    hidden, inner, experts = shape.hidden_size, shape.moe_ffn_hidden_size, shape.num_experts
    layers, stacked = (shape.num_layers,), (shape.num_layers, shape.num_experts)
    one, all_experts = _HF_LAYER + "mlp.experts.{expert}.", _HF_LAYER + "mlp.experts."
    gate_up = tuple(
        Part(f"{one}{name}_proj.weight", inner, Packed(all_experts + "gate_up_proj", 2 * inner, first_row))
        for name, first_row in (("gate", 0), ("up", inner))
    )
    down = (Part(one + "down_proj.weight", hidden, Packed(all_experts + "down_proj", hidden, 0)),)
    expert_key = LAYERS + "mlp.experts.experts."
    norm = _HF_LAYER + "post_attention_layernorm.weight"
    return (
        _whole(LAYERS + "pre_mlp_layernorm.weight", norm, layers, hidden, ()),
        _whole(LAYERS + "mlp.router.weight", _HF_LAYER + "mlp.gate.weight", layers, experts, (hidden,)),
        Rule(expert_key + "linear_fc1.weight", stacked, (hidden,), gate_up, _end_to_end(gate_up)),
        Rule(expert_key + "linear_fc2.weight", stacked, (inner,), down, _end_to_end(down)),
    )


def _end_to_end(parts: tuple[Part, ...]) -> tuple[Block, ...]:
    """All rows of each part in turn: gate rows, then up rows."""
    return tuple(Block(number, 0, part.rows) for number, part in enumerate(parts))


def _qkv_by_group(shape: ModelShape) -> tuple[Block, ...]:
    """For each KV group: its query heads' rows, its key rows, its value rows."""
    head_dim, groups = shape.head_dim, shape.num_query_groups
    query_rows = shape.num_attention_heads // groups * head_dim
    return tuple(
        Block(part, group * rows, (group + 1) * rows)
        for group in range(groups)
        for part, rows in ((0, query_rows), (1, head_dim), (2, head_dim))
    )
