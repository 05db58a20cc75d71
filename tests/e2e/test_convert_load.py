"""Converted directories in megatron's own loader, at every layout; and back, whatever layout wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.converting import load_by_megatron
from helpers.ranks import pool
from helpers.resuming import train_and_save
from helpers.tiny import samples, write_model
from helpers.training import Cut, Layout
from safetensors.torch import load_file, save_file

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.cli.convert import run
from mcore_qwen3.converters.data_only import read_metadata
from mcore_qwen3.converters.table import name_table, units

TP2_EP2 = Layout(tensor=2, expert=2, data=2)
# (model, layout, grouped experts)
CASES = [
    ("moe", Layout(), True),
    ("moe", Layout(), False),
    ("moe", Layout(tensor=2), True),
    ("moe", Layout(pipeline=2), True),
    ("moe", Layout(data=2, expert=2), False),
    ("moe", Layout(tensor=2, expert_tensor=2), True),
    ("moe", TP2_EP2, True),
    ("deep", Layout(pipeline=2, virtual=2), True),
    ("tied", Layout(tensor=2), True),
    ("tied", Layout(pipeline=2), True),
    ("mixed", Layout(pipeline=2), False),
    ("mixed", TP2_EP2, True),
]
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"moe": True, "vocab_size": 101},  # 101 rows: TP 2 has to pad them
    "deep": {"moe": True, "num_hidden_layers": 4},
    "tied": {"moe": False, "tie_word_embeddings": True, "vocab_size": 101},
    "mixed": {
        "moe": True,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },  # experts: layer 1
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """kind -> (Hugging Face directory, the same converted)."""
    made = {}
    for kind, changes in KINDS.items():
        root = tmp_path_factory.mktemp(kind)
        write_model(root / "hf", **changes)
        assert run(["hf2mcore", str(root / "hf"), str(root / "mcore")]) == 0
        made[kind] = (root / "hf", root / "mcore")
    return made


@pytest.mark.parametrize(("kind", "layout", "grouped"), CASES, ids=str)
def test_megatron_loads_it(models: dict, kind: str, layout: Layout, grouped: bool) -> None:
    """B04 to B06, B08, B21: no model of ours reads the files here; every parameter of every rank has the right bits."""
    hf, mcore = models[kind]
    ranks = pool(layout.world).run(
        load_by_megatron,
        model_dir=str(hf),
        checkpoint=str(mcore / "release"),
        layout=layout,
        sequence_parallel=layout.tensor > 1,
        moe_grouped_gemm=grouped,
    )
    assert [rank["wrong"] for rank in ranks] == [[]] * layout.world
    assert [rank["iteration"] for rank in ranks] == [0] * layout.world
    assert min(rank["parameters"] for rank in ranks) >= 5


def test_a_swapped_expert_is_seen(models: dict, tmp_path: Path) -> None:
    """The check above can fail: two experts change places in the source of the comparison."""
    hf, mcore = models["moe"]
    tensors = load_file(hf / "model.safetensors")
    one, two = (f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (2, 3))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    (tmp_path / "config.json").write_bytes((hf / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (rank,) = pool(1).run(load_by_megatron, model_dir=str(tmp_path), checkpoint=str(mcore / "release"), layout=Layout())
    assert rank["wrong"] and all("layers.1.mlp.experts." in name for name in rank["wrong"])


def test_the_layout_that_wrote_a_checkpoint_does_not_show(models: dict, tmp_path: Path) -> None:
    """B04, B06, B15: trained at TP2 x EP2, then saved at other layouts: all export the same bytes, moments left out."""
    hf, _ = models["moe"]
    rows = samples(8, vocabulary=101)
    common = {"model_dir": str(hf), "cut": Cut(pack=2), "sequence_parallel": True}
    pool(4).run(train_and_save, layout=TP2_EP2, batches=[rows], save=str(tmp_path / "four"), **common)
    first = tmp_path / "four/iter_0000001"
    others = {"one": Layout(), "pp2": Layout(pipeline=2), "pp2_ep2": Layout(pipeline=2, expert=2, data=2)}
    for name, layout in others.items():
        pool(layout.world).run(
            train_and_save, layout=layout, batches=[rows], skip=1, resume=str(first), save=str(tmp_path / name),
            **common | {"sequence_parallel": False},
        )  # fmt: skip
    assert (tmp_path / "four/latest_checkpointed_iteration.txt").read_text() == "1"
    weights = []
    for number, source in enumerate((tmp_path / "four", first, *(tmp_path / name for name in others))):
        target = tmp_path / f"back{number}"
        assert run(["mcore2hf", str(source), str(target), "--hf_config", str(hf)]) == 0
        weights.append((target / "model.safetensors").read_bytes())
    assert len(weights) == 5 and all(written == weights[0] for written in weights)
    assert weights[0] != (hf / "model.safetensors").read_bytes(), "a step was trained"


def test_a_mixed_model_goes_there_and_back_and_is_trained(models: dict, tmp_path: Path) -> None:
    """B20: experts in layer 1 alone. Keys layer by layer, as megatron asks for them; the same bits under the same names."""
    hf, mcore = models["mixed"]
    keys = read_metadata(mcore / "release").state_dict_metadata
    assert {key for key in keys if ".mlp.experts." in key} == {
        f"decoder.layers.1.mlp.experts.experts.linear_fc{n}.weight" for n in (1, 2)
    }
    assert {key for key in keys if key.endswith(".mlp.linear_fc2.weight")} == {
        f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 2, 3)
    }
    source = load_file(hf / "model.safetensors")
    assert sum(".experts." in name for name in source) == 24 and sum(".mlp.up_proj." in name for name in source) == 3
    assert run(["mcore2hf", str(mcore), str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == source.keys() and all(torch.equal(back[name], source[name]) for name in source)
    assert run(["verify", str(hf), str(mcore)]) == 0

    common = {"layout": TP2_EP2, "batches": [samples(8)], "cut": Cut(pack=2), "sequence_parallel": True}
    losses = [
        pool(4).run(train_and_save, model_dir=str(start), save=str(tmp_path / f"trained{number}"), **common)[0][
            "losses"
        ]
        for number, start in enumerate((hf, mcore))
    ]
    assert losses[0] == losses[1] and losses[0][0] > 1
    assert run(["mcore2hf", str(tmp_path / "trained1"), str(tmp_path / "trained"), "--hf_config", str(hf)]) == 0
    trained = load_file(tmp_path / "trained/model.safetensors")
    assert trained.keys() == source.keys()
    experts = [name for name in source if name.startswith("model.layers.1.mlp.experts.")]
    assert len(experts) == 24 and all(not torch.equal(trained[name], source[name]) for name in experts)


@pytest.mark.parametrize("spec", ["dense", "moe_grouped"])
def test_keys_and_shapes_are_those_of_transformer_engine(repo_root: Path, tmp_path: Path, spec: str) -> None:
    golden = json.loads((repo_root / "tests/golden/te_checkpoint_keys.json").read_text())
    sizes = golden["config"]
    config = {
        "model_type": "qwen3" if spec == "dense" else "qwen3_moe", "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_layers"], "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_query_groups"], "head_dim": sizes["kv_channels"],
        "intermediate_size": sizes["ffn_hidden_size"], "vocab_size": sizes["vocab_size"], "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    if spec != "dense":
        config |= {
            "num_experts": sizes["num_moe_experts"],
            "moe_intermediate_size": sizes["moe_ffn_hidden_size"],
            "num_experts_per_tok": 2,
        }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    table = name_table(ModelShape.from_hf_config(config))
    tensors = {
        rule.hf_name(part, index): torch.zeros(rule.hf_shape(part), dtype=torch.bfloat16)
        for rule, index in units(table)
        for part in range(len(rule.parts))
    }
    save_file(tensors, tmp_path / "hf/model.safetensors")
    assert run(["hf2mcore", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 0
    written = read_metadata(tmp_path / "mcore/release").state_dict_metadata
    assert {key: list(entry.size) for key, entry in written.items()} == golden["specs"][spec]
