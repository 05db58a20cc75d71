"""HFSource: values, slices, accounting and refusals over files that transformers wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converter_kit import build_model, load_all, shape_of, tiny_shape
from safetensors.torch import save_file

from mcore_qwen3.converters import HFSource
from mcore_qwen3.errors import ConversionError

FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"
CopyOf = Callable[[str], Path]


def read_all(source: HFSource) -> dict[str, torch.Tensor]:
    return {key: source.read(key, (slice(None),) * len(entry.shape)) for key, entry in source.entries().items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


def random_slices(shape: tuple[int, ...], rng: random.Random) -> tuple[slice, ...]:
    return tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_all(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_whole_tensors(hf_dir: Path, kind: str, mcore_tensors: dict) -> None:
    """Every key against the layout written out by hand; afterwards every HF tensor was used."""
    with HFSource(hf_dir, shape_of(hf_dir)) as source:
        assert {key: entry.shape for key, entry in source.entries().items()} == {
            key: tuple(tensor.shape) for key, tensor in mcore_tensors[kind].items()
        }
        assert_same(read_all(source), mcore_tensors[kind])
        assert source.used_tensors == source.all_tensors
        source.check_all_used(source.used_tensors)


def test_slices_equal_slices_of_the_whole(hf_dir: Path, kind: str, mcore_tensors: dict) -> None:
    rng = random.Random(7)
    with HFSource(hf_dir, shape_of(hf_dir)) as source:
        for key, whole in mcore_tensors[kind].items():
            for _ in range(40):
                slices = random_slices(tuple(whole.shape), rng)
                piece = source.read(key, slices)
                assert piece.is_contiguous() and torch.equal(piece, whole[slices]), (key, slices)


def test_a_slice_touches_only_its_tensors(hf_dirs: dict[str, Path]) -> None:
    with HFSource(hf_dirs["moe"], shape_of(hf_dirs["moe"])) as source:
        source.read(FC1, (slice(1, 2), slice(2, 3), slice(3, 8), slice(None)))
        assert source.used_tensors == {"model.layers.1.mlp.experts.2.gate_proj.weight"}
        source.used_tensors.clear()
        source.read(QKV, (slice(0, 1), slice(16, 24), slice(0, 5)))
        assert source.used_tensors == {"model.layers.0.self_attn.k_proj.weight"}
        source.used_tensors.clear()
        assert source.read(FC1, (slice(0, 2), slice(0, 0), slice(None), slice(None))).shape == (2, 0, 16, 16)
        assert source.used_tensors == set()


def test_tensors_stay_when_the_source_is_closed(hf_dirs: dict[str, Path]) -> None:
    with HFSource(hf_dirs["moe"], shape_of(hf_dirs["moe"])) as source:
        piece = source.read(EMBEDDING, (slice(0, 3), slice(None)))
        assert piece.untyped_storage().nbytes() == piece.nbytes
    assert torch.equal(piece, load_all(hf_dirs["moe"])["model.embed_tokens.weight"][:3])


def test_fingerprints_of_experts(copy_of: CopyOf) -> None:
    """B03 and B05: with 4 experts over 2 EP ranks, rank 1 holds experts 2 and 3 as its local 0, 1; both read all."""
    directory = copy_of("moe")

    def mark(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            for expert in range(4):
                for number, name in enumerate(("gate", "up", "down")):
                    value = 1000 * layer + 10 * expert + number
                    tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"].fill_(value)

    rewrite(directory, mark)
    ranks = [HFSource(directory, shape_of(directory)) for _ in range(2)]
    for rank, source in enumerate(ranks):
        for key, entry in source.entries().items():
            expert_axis = ".experts." in key
            mine = slice(2 * rank, 2 * rank + 2) if expert_axis else slice(None)
            local = source.read(key, (slice(None), mine, *[slice(None)] * (len(entry.shape) - 2))[: len(entry.shape)])
            if key == FC1:
                for layer in range(2):
                    for j in range(2):
                        expected = 1000 * layer + 10 * (2 * rank + j)
                        assert local[layer, j, :8].unique().tolist() == [expected]
                        assert local[layer, j, 8:].unique().tolist() == [expected + 1]
    with pytest.raises(
        ConversionError, match=r"12 tensors \(model.layers.0.mlp.experts.2.down_proj.weight, .*never read"
    ):
        ranks[0].check_all_used(ranks[0].used_tensors)
    ranks[0].check_all_used(ranks[0].used_tensors | ranks[1].used_tensors)


def test_both_expert_layouts_give_the_same(hf_dirs: dict[str, Path], mcore_tensors: dict, tmp_path: Path) -> None:
    """B07: transformers 5's packed layout has 4 expert tensors instead of 24."""
    build_model("moe").save_pretrained(tmp_path, save_original_format=False)
    names = [name for name in load_all(tmp_path) if ".experts." in name]
    assert sorted(names) == [f"model.layers.{i}.mlp.experts.{n}" for i in (0, 1) for n in ("down_proj", "gate_up_proj")]
    rng = random.Random(3)
    with HFSource(tmp_path, shape_of(tmp_path)) as source:
        assert_same(read_all(source), mcore_tensors["moe"])
        source.check_all_used(source.used_tensors)
        for _ in range(40):
            slices = random_slices((2, 4, 16, 16), rng)
            assert torch.equal(source.read(FC1, slices), mcore_tensors["moe"][FC1][slices])
        source.used_tensors.clear()
        source.read(FC1, (slice(1, 2), slice(3, 4), slice(8, 9), slice(None)))
        assert source.used_tensors == {"model.layers.1.mlp.experts.gate_up_proj"}


def test_several_files_with_an_index(mcore_tensors: dict, tmp_path: Path) -> None:
    build_model("moe").save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with HFSource(tmp_path, shape_of(tmp_path)) as source:
        assert_same(read_all(source), mcore_tensors["moe"])


def test_bfloat16_keeps_its_bits(copy_of: CopyOf, mcore_tensors: dict) -> None:
    directory = copy_of("dense_untied")
    rewrite(directory, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    with HFSource(directory, shape_of(directory)) as source:
        assert_same(read_all(source), {key: t.bfloat16() for key, t in mcore_tensors["dense_untied"].items()})


def test_tied_model_with_a_copy_of_its_embedding(copy_of: CopyOf) -> None:
    directory = copy_of("dense_tied")
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with HFSource(directory, shape_of(directory)) as source:
        assert "output_layer.weight" not in source.entries()
        read_all(source)
        source.check_all_used(source.used_tensors)

    def flip_one_bit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"].view(torch.int32)[60, 3] ^= 1

    rewrite(directory, flip_one_bit)
    with HFSource(directory, shape_of(directory)) as source:
        source.read(EMBEDDING, (slice(0, 60), slice(None)))
        with pytest.raises(ConversionError, match=r"lm_head.weight must equal model.embed_tokens.weight bit for bit"):
            source.read(EMBEDDING, (slice(60, 61), slice(None)))


def test_slices_that_do_not_fit(hf_dirs: dict[str, Path]) -> None:
    with HFSource(hf_dirs["moe"], shape_of(hf_dirs["moe"])) as source:
        for bad in (slice(0, 102), slice(-1, 5), slice(0, 10, 2), slice(5, 4)):
            with pytest.raises(ConversionError, match="step 1"):
                source.read(EMBEDDING, (bad, slice(None)))
        with pytest.raises(ConversionError, match="one slice for each axis"):
            source.read(EMBEDDING, (slice(None),))
        with pytest.raises(ConversionError, match=r"no tensor of this name.*decoder.nothing"):
            source.read("decoder.nothing", (slice(None),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"1 tensor \(model.layers.1.mlp.experts.3.up_proj.weight\) missing",
        ),
        (lambda t: t.clear() or t.update(x=torch.zeros(1)), r"45 tensors \(lm_head.weight, .*, \.\.\.\) missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(16, 16)}),
            r"model.layers.0.self_attn.q_proj.weight has \(16, 16\), the model needs \(32, 16\); 1 wrong",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            r"1 tensor \(model.layers.0.self_attn.q_proj.bias\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(16).to(torch.float8_e4m3fn)}),
            r"only matrices may be quantised; seen: model.norm.weight in .* is F8_E4M3",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.zeros(4, 16).bfloat16()}),
            r"model.layers.0.mlp.gate.weight is torch.float32, model.layers.1.mlp.gate.weight is torch.bfloat16",
        ),
    ],
    ids=["missing", "all_missing", "wrong_shape", "stray", "quantised", "mixed_dtypes"],
)
def test_tensors_that_do_not_fit(copy_of: CopyOf, change: Callable, message: str) -> None:
    directory = copy_of("moe")
    rewrite(directory, change)
    with pytest.raises(ConversionError, match=message):
        HFSource(directory, tiny_shape("moe"))


def test_truncated_file(copy_of: CopyOf) -> None:
    directory = copy_of("moe")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConversionError, match=r"must be whole; seen: .*model.safetensors"):
        HFSource(directory, tiny_shape("moe"))


def change_index(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"model.norm.weight": "../x.safetensors"}), r"own directory; seen: '\.\./x.safetensors'"),
        (lambda m: m.update({"model.norm.weight": "/etc/x.safetensors"}), r"own directory; seen: '/etc/x.safetensors'"),
        (lambda m: m.update({"model.norm.weight": "model.bin"}), r"own directory; seen: 'model.bin'"),
        (lambda m: m.update({"a.weight": m["model.norm.weight"]}), r"1 tensor \(a.weight\) of model-0.* not the other"),
        (lambda m: m.pop("model.norm.weight"), r"1 tensor \(model.norm.weight\) of model-0.* not the other"),
        (lambda m: m.update({"a.weight": "other.safetensors"}), r"a weight file is missing; seen: .*other.safetensors"),
    ],
    ids=["parent", "absolute", "no_safetensors", "promises_more", "promises_less", "no_file"],
)
def test_index_that_does_not_fit(tmp_path: Path, change: Callable, message: str) -> None:
    directory = tmp_path / "model"
    build_model("dense_untied").save_pretrained(directory, max_shard_size="10KB")
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "x.safetensors")
    change_index(directory, change)
    with pytest.raises(ConversionError, match=message):
        HFSource(directory, tiny_shape("dense_untied"))


def test_directories_without_one_set_of_weights(copy_of: CopyOf) -> None:
    directory = copy_of("moe")
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"both model.safetensors and model.safetensors.index.json"):
        HFSource(directory, tiny_shape("moe"))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="weight_map"):
        HFSource(directory, tiny_shape("moe"))
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ConversionError, match=r"must hold model.safetensors or"):
        HFSource(directory, tiny_shape("moe"))
