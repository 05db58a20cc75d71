"""Models with experts in some layers only: every layer has keys of its own on the Megatron side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converter_kit import EXPERT_SIZES, SIZES, load_all, shape_of, write_torch_dist

from mcore_qwen3.converters import HFSource, TorchDistSource
from mcore_qwen3.converters.verify import compare
from mcore_qwen3.errors import ConversionError

NORM, LOCAL_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, experts in layer 1 alone (B20)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    changes = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    directory = tmp_path_factory.mktemp("mixed")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERT_SIZES | changes)).save_pretrained(directory)
    return directory


@pytest.fixture
def state(mixed: Path) -> dict[str, torch.Tensor]:
    """The torch_dist tensors, some laid out by hand."""
    with HFSource(mixed, shape_of(mixed)) as source:
        state = {
            key: source.read(key, tuple(slice(0, size) for size in entry.shape))
            for key, entry in source.entries().items()
        }
    hf = load_all(mixed)
    one = "model.layers.1.mlp.experts.2."
    gate_up = torch.cat([hf[one + "gate_proj.weight"], hf[one + "up_proj.weight"]])
    assert torch.equal(state["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"][2], gate_up)
    assert torch.equal(state["decoder.layers.2.mlp.linear_fc2.weight"], hf["model.layers.2.mlp.down_proj.weight"])
    assert len(state) == 3 + 3 * 8 + 9  # embedding, norm, head; three dense layers; one with experts
    return state


@pytest.mark.parametrize("norm", [NORM, LOCAL_NORM])
def test_layers_of_two_kinds_are_read(mixed: Path, state: dict, tmp_path: Path, norm: str) -> None:
    """Both spellings of the norm before the experts; whole and in chunks."""
    state["decoder.layers.1." + norm] = state.pop("decoder.layers.1." + NORM)
    experts = {"decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (2, 2, 1)}
    write_torch_dist(tmp_path, state, experts)
    shape = shape_of(mixed)
    with TorchDistSource(tmp_path, shape) as stored, HFSource(mixed, shape) as source:
        result = compare(source, stored, shape)
    assert (result.num_tensors, result.differences) == (len(load_all(mixed)), ())


def test_a_layer_of_the_wrong_kind_is_named(mixed: Path, state: dict, tmp_path: Path) -> None:
    state["decoder.layers.3.mlp.router.weight"] = state.pop("decoder.layers.1.mlp.router.weight")
    write_torch_dist(tmp_path, state)
    with pytest.raises(
        ConversionError, match=r"\(decoder.layers.1.mlp.router.weight\) missing; 1 tensor \(decoder.layers.3"
    ):
        TorchDistSource(tmp_path, shape_of(mixed))


def test_a_wrong_shape_is_named(mixed: Path, state: dict, tmp_path: Path) -> None:
    key = "decoder.layers.2.mlp.linear_fc2.weight"
    state[key] = state[key][0]
    write_torch_dist(tmp_path, state)
    with pytest.raises(ConversionError, match=rf"{key} has \(32,\), the model needs \(16, 32\)"):
        TorchDistSource(tmp_path, shape_of(mixed))
