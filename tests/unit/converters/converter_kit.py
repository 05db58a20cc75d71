"""What the converter tests share: tiny models, their tensors laid out by hand, and torch_dist directories."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore_qwen3.arch.shape import ModelShape, read_model_shape

# The tiny models: 4 query heads over 2 KV heads, head_dim 8 which is not 16 / 4.
SIZES = {
    "vocab_size": 101,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
}
EXPERT_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
KINDS = ("dense_tied", "dense_untied", "moe")
ROPE_THETA = 1_000_000.0


def build_model(kind: str):
    """A transformers model of one kind, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(KINDS.index(kind))
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    common = dict(SIZES, rope_parameters=rope, eos_token_id=1, tie_word_embeddings=kind == "dense_tied")
    if kind == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **EXPERT_SIZES)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**common)).eval()


def tiny_shape(kind: str, **changes: object) -> ModelShape:
    """The ModelShape of a tiny model, from a config in the official spelling."""
    config = SIZES | {
        "model_type": "qwen3_moe" if kind == "moe" else "qwen3",
        "tie_word_embeddings": kind == "dense_tied",
        "rope_theta": ROPE_THETA,
        "torch_dtype": "float32",
    }
    if kind == "moe":
        config |= EXPERT_SIZES
    return ModelShape.from_hf_config(config | changes)


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a directory."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def expected_mcore(hf: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """torch_dist tensors written out by hand from per-expert HF tensors of a tiny model."""
    layers = [{n.removeprefix(f"model.layers.{i}."): t for n, t in hf.items() if f"layers.{i}." in n} for i in (0, 1)]

    def stack(make) -> torch.Tensor:
        return torch.stack([make(layer) for layer in layers])

    def qkv(layer: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = (layer[f"self_attn.{name}_proj.weight"].split(8) for name in "qkv")
        return torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])

    def gate_up(layer: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        return torch.cat([layer[prefix + "gate_proj.weight"], layer[prefix + "up_proj.weight"]])

    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": stack(qkv),
    }
    renamed = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    }
    if kind == "moe":
        renamed |= {"pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
        renamed |= {"mlp.router.weight": "mlp.gate.weight"}
        experts = "decoder.layers.mlp.experts.experts."
        out[experts + "linear_fc1.weight"] = stack(
            lambda layer: torch.stack([gate_up(layer, f"mlp.experts.{e}.") for e in range(4)])
        )
        out[experts + "linear_fc2.weight"] = stack(
            lambda layer: torch.stack([layer[f"mlp.experts.{e}.down_proj.weight"] for e in range(4)])
        )
    else:
        renamed |= {"mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight"}
        renamed |= {"mlp.linear_fc2.weight": "mlp.down_proj.weight"}
        out["decoder.layers.mlp.linear_fc1.weight"] = stack(lambda layer: gate_up(layer, "mlp."))
    for key, name in renamed.items():
        out["decoder.layers." + key] = stack(lambda layer, name=name: layer[name])
    if kind != "dense_tied":
        out["output_layer.weight"] = hf["lm_head.weight"]
    return out


class _ChunkPlanner(DefaultSavePlanner):
    """Saves each tensor as a grid of chunks, and BytesIO values as bytes entries."""

    def __init__(self, pieces: dict[str, tuple[int, ...]]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                items += [self._chunk(key, value, *chunk) for chunk in enumerate(self._grid(key, value))]
            else:
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
        self.plan = SavePlan(items)
        return self.plan

    def _grid(self, key: str, tensor: torch.Tensor) -> list[tuple[list[int], list[int]]]:
        """Offsets and sizes of the chunks: axis a is cut into pieces[a], as evenly as torch.chunk does."""
        axes = []
        for size, count in zip(tensor.shape, self._pieces.get(key, (1,) * tensor.dim()), strict=True):
            pieces = torch.arange(size).chunk(count)
            axes.append([(int(piece[0]), len(piece)) for piece in pieces])
        return [([a for a, _ in cell], [n for _, n in cell]) for cell in itertools.product(*axes)]

    @staticmethod
    def _chunk(key: str, tensor: torch.Tensor, number: int, cell: tuple[list[int], list[int]]) -> WriteItem:
        offsets, sizes = map(torch.Size, cell)
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=tensor.dtype), tensor.size()
        )
        return WriteItem(MetadataIndex(key, offsets, number), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.state_dict[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            return value
        chunk = item.tensor_data.chunk
        cut = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return value[cut].clone()


def saved(value: object) -> io.BytesIO:
    """What torch.save writes, as the value of a bytes entry."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def write_torch_dist(
    directory: Path, state: dict[str, torch.Tensor | io.BytesIO], pieces: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A torch_dist directory in Megatron's old form, written without a process group.

    Args:
        directory: where to.
        state: tensors, and the saved bytes of other values.
        pieces: for each key, into how many chunks each axis is cut; one chunk where nothing is said.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=FileSystemWriter(directory), planner=_ChunkPlanner(pieces or {}), no_dist=True)
    form = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    form |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(form))
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, directory / "common.pt")
    return directory


def shape_of(directory: Path) -> ModelShape:
    """The ModelShape that a directory's config.json describes."""
    return read_model_shape(directory)


class Planted:
    """Pickles to a call that leaves a file behind if the pickle is ever run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return Path.touch, (self.trace,)
