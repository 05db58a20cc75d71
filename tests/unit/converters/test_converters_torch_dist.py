"""TorchDistSource over directories that plain torch.distributed.checkpoint wrote."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converter_kit import saved, tiny_shape, write_torch_dist

from mcore_qwen3.converters import OptimizerSource, TorchDistSource, torch_dist
from mcore_qwen3.errors import ConversionError

QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
# As ranks write them: one chunk for each layer, expert, and half of the rows (or columns).
PIECES = {QKV: (2, 2, 1), FC1: (2, 4, 2, 1), FC2: (2, 4, 1, 2), EMBEDDING: (2, 1)}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The place of each chunk that gets loaded, in order."""
    places: list[str] = []
    load = torch_dist.load_plain

    def counted(stream, place: str):
        places.append(place)
        return load(stream, place)

    monkeypatch.setattr(torch_dist, "load_plain", counted)
    return places


def random_slices(shape: tuple[int, ...], rng: random.Random) -> tuple[slice, ...]:
    return tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)


@pytest.mark.parametrize("pieces", [{}, PIECES], ids=["one_chunk", "many_chunks"])
def test_whole_tensors_and_slices(kind: str, mcore_tensors: dict, tmp_path: Path, pieces: dict) -> None:
    wanted = mcore_tensors[kind]
    rng = random.Random(5)
    with TorchDistSource(write_torch_dist(tmp_path, wanted, pieces), tiny_shape(kind)) as source:
        assert source.entries().keys() == wanted.keys()
        for key, whole in wanted.items():
            assert source.entries()[key].dtype == whole.dtype
            assert torch.equal(source.read(key, (slice(None),) * whole.dim()), whole), key
            for _ in range(20):
                slices = random_slices(tuple(whole.shape), rng)
                assert torch.equal(source.read(key, slices), whole[slices]), (key, slices)
        source.check_all_used(source.used_tensors)


def test_only_overlapping_chunks_are_opened(mcore_tensors: dict, tmp_path: Path, loads: list[str]) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], PIECES)
    with TorchDistSource(directory, tiny_shape("moe")) as source:
        assert loads == []
        source.read(FC1, (slice(1, 2), slice(2, 4), slice(0, 8), slice(None)))
        assert len(loads) == 2
        assert source.used_tensors == {FC1}
        with pytest.raises(ConversionError, match=r"11 tensors \(.* never read"):
            source.check_all_used(source.used_tensors)


def test_slicing_one_chunk_by_layers_loads_it_once(mcore_tensors: dict, tmp_path: Path, loads: list[str]) -> None:
    with TorchDistSource(write_torch_dist(tmp_path, mcore_tensors["moe"]), tiny_shape("moe")) as source:
        for layer in range(2):
            for expert in range(4):
                source.read(FC1, (slice(layer, layer + 1), slice(expert, expert + 1), slice(None), slice(None)))
        assert len(loads) == 1


def test_the_cache_forgets_the_oldest_chunk(
    mcore_tensors: dict, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dist, "_CACHE_BYTES", 2 * 16 * 16 * 4)
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], {FC1: (2, 4, 1, 1)})
    with TorchDistSource(directory, tiny_shape("moe")) as source:
        for expert in (0, 1, 0, 2, 0, 1):
            source.read(FC1, (slice(0, 1), slice(expert, expert + 1), slice(None), slice(None)))
    assert len(loads) == 4  # 0, 1, 2, and 1 again: it was the oldest when 2 came


def test_the_last_chunk_is_kept_however_large(
    mcore_tensors: dict, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dist, "_CACHE_BYTES", 1)
    with TorchDistSource(write_torch_dist(tmp_path, mcore_tensors["moe"]), tiny_shape("moe")) as source:
        for expert in range(4):
            source.read(FC1, (slice(0, 1), slice(expert, expert + 1), slice(None), slice(None)))
    assert len(loads) == 1


def test_padded_vocabulary_is_shown_unpadded(mcore_tensors: dict, tmp_path: Path) -> None:
    """101 rows padded to 128, in chunks of 64: the pad rows are never seen."""
    wanted = mcore_tensors["moe"]
    padded = wanted | {key: torch.cat([wanted[key], torch.full((27, 16), 9.0)]) for key in (EMBEDDING, HEAD)}
    with TorchDistSource(write_torch_dist(tmp_path, padded, {EMBEDDING: (2, 1)}), tiny_shape("moe")) as source:
        for key in (EMBEDDING, HEAD):
            assert source.entries()[key].shape == (101, 16)
            assert torch.equal(source.read(key, (slice(None), slice(None))), wanted[key])
            with pytest.raises(ConversionError, match="lie inside the tensor"):
                source.read(key, (slice(0, 102), slice(None)))


def test_optimizer_and_extra_state_are_passed_over(mcore_tensors: dict, tmp_path: Path) -> None:
    state = mcore_tensors["moe"] | {
        "optimizer.state.exp_avg." + EMBEDDING: torch.zeros(101, 16),
        "chained_0.optimizer.state.exp_avg_sq." + FC1: torch.zeros(2, 4, 16, 16),
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": saved(None),
        "decoder.final_layernorm._extra_state": torch.zeros(3),
        "rng_state/shard_0_1": saved([torch.zeros(4, dtype=torch.uint8)]),
    }
    with TorchDistSource(write_torch_dist(tmp_path, state), tiny_shape("moe")) as source:
        assert source.entries().keys() == mcore_tensors["moe"].keys() == source.all_tensors


def test_optimizer_state_by_slices(mcore_tensors: dict, tmp_path: Path) -> None:
    """Every optimizer tensor with the shape it is stored with, padding and all; no weights among them."""
    name = "optimizer.state.exp_avg." + FC1
    moment = torch.arange(2048.0).reshape(2, 4, 16, 16)
    padded = torch.arange(128 * 16.0).reshape(128, 16)
    state = mcore_tensors["moe"] | {name: moment, "optimizer.state.exp_avg_sq." + EMBEDDING: padded}
    directory = write_torch_dist(tmp_path, state, {name: (2, 2, 3, 1)})
    with OptimizerSource(directory) as source:
        assert {key: entry.shape for key, entry in source.entries().items()} == {
            name: (2, 4, 16, 16),
            "optimizer.state.exp_avg_sq." + EMBEDDING: (128, 16),
        }
        rng = random.Random(2)
        for _ in range(20):
            slices = random_slices((2, 4, 16, 16), rng)
            assert torch.equal(source.read(name, slices), moment[slices])


def test_the_local_spec_s_norm_name_is_understood(mcore_tensors: dict, tmp_path: Path) -> None:
    norm, local = "decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    state = {local if key == norm else key: tensor for key, tensor in mcore_tensors["moe"].items()}
    marked = state[local] = torch.arange(32.0).reshape(2, 16)
    with TorchDistSource(write_torch_dist(tmp_path, state), tiny_shape("moe")) as source:
        assert torch.equal(source.read(norm, (slice(None), slice(None))), marked)
        assert source.used_tensors == {local}


def test_layers_under_names_of_their_own(mcore_tensors: dict, tmp_path: Path, loads: list[str]) -> None:
    """What Megatron writes with a `moe_layer_freq` list: no layer axis, experts still on the first one."""
    wanted, state = mcore_tensors["moe"], {}
    for key, whole in wanted.items():
        if key.startswith("decoder.layers."):
            state |= {key.replace("layers.", f"layers.{i}.", 1): whole[i].clone() for i in range(2)}
        else:
            state[key] = whole
    single = FC1.replace("layers.", "layers.1.", 1)
    rng = random.Random(3)
    with TorchDistSource(write_torch_dist(tmp_path, state, {single: (4, 2, 1)}), tiny_shape("moe")) as source:
        source.read(FC1, (slice(1, 2), slice(2, 3), slice(None), slice(None)))
        assert (source.used_tensors, len(loads)) == ({single}, 2)
        for key, whole in wanted.items():
            for _ in range(10):
                slices = random_slices(tuple(whole.shape), rng)
                assert torch.equal(source.read(key, slices), whole[slices]), (key, slices)
            source.read(key, (slice(None),) * whole.dim())
        source.check_all_used(source.used_tensors)
        assert source.all_tensors == state.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(FC2), rf"1 tensor \({FC2}\) missing"),
        (lambda s: s.update({"mtp.layers.0.enorm.weight": torch.zeros(16)}), r"1 tensor \(mtp.*\) unknown"),
        (
            lambda s: s.update({QKV: torch.zeros(2, 32, 16)}),
            rf"{QKV} has \(2, 32, 16\), the model needs \(2, 64, 16\)",
        ),
        (lambda s: s.update({EMBEDDING: torch.zeros(100, 16)}), r"has \(100, 16\), the model needs \(101, 16\)"),
        (lambda s: s.update({EMBEDDING: torch.zeros(101, 8)}), r"has \(101, 8\), the model needs \(101, 16\)"),
        (
            lambda s: s.update({QKV.replace("layers.", "layers.0."): s.pop(QKV)[0]}),
            r"1 tensor \(decoder.layers.1.self_attention.linear_qkv.weight\) missing",
        ),
    ],
    ids=["missing", "stray", "wrong_rows", "too_few_rows", "wrong_columns", "a_layer_missing"],
)
def test_tensors_that_do_not_fit(mcore_tensors: dict, tmp_path: Path, change: Callable, message: str) -> None:
    state = dict(mcore_tensors["moe"])
    change(state)
    with pytest.raises(ConversionError, match=message):
        TorchDistSource(write_torch_dist(tmp_path, state), tiny_shape("moe"))


def edit_metadata(directory: Path, change: Callable) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # written by this very test
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def drop_chunk(metadata) -> None:
    metadata.state_dict_metadata[FC1].chunks.pop()


def drop_place(metadata) -> None:
    metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == FC1))


def repeat_chunk(metadata) -> None:
    chunks = metadata.state_dict_metadata[FC1].chunks
    chunks[-1] = chunks[0]


def compress(metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_chunk, rf"cover it exactly once; seen: {FC1}"),
        (drop_place, rf"cover it exactly once; seen: {FC1}"),
        (compress, r"stored plainly; seen: .*stream.zstd"),
    ],
)
def test_damaged_metadata(mcore_tensors: dict, tmp_path: Path, change: Callable, message: str) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], PIECES)
    edit_metadata(directory, change)
    with pytest.raises(ConversionError, match=message):
        TorchDistSource(directory, tiny_shape("moe"))


def test_a_hole_behind_a_doubled_chunk_is_seen_when_read(mcore_tensors: dict, tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"], PIECES)
    edit_metadata(directory, repeat_chunk)
    with (
        TorchDistSource(directory, tiny_shape("moe")) as source,
        pytest.raises(ConversionError, match="cover it exactly once"),
    ):
        source.read(FC1, (slice(1, 2), slice(3, 4), slice(None), slice(None)))


def test_truncated_and_missing_data_files(mcore_tensors: dict, tmp_path: Path) -> None:
    directory = write_torch_dist(tmp_path, mcore_tensors["moe"])
    (file,) = directory.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with (
        TorchDistSource(directory, tiny_shape("moe")) as source,
        pytest.raises(ConversionError, match=rf"must be whole; seen: .*{file.name} ends at byte {len(content) // 2}"),
    ):
        for key, entry in source.entries().items():
            source.read(key, (slice(None),) * len(entry.shape))
    file.write_bytes(b"\0" * len(content))
    with (
        TorchDistSource(directory, tiny_shape("moe")) as source,
        pytest.raises(ConversionError, match=rf"seen: .*{file.name} at byte \d+ is damaged"),
    ):
        source.read(QKV, (slice(None),) * 3)
    file.unlink()
    with (
        TorchDistSource(directory, tiny_shape("moe")) as source,
        pytest.raises(ConversionError, match=rf"must be readable; seen: .*{file.name}"),
    ):
        source.read(QKV, (slice(None),) * 3)
