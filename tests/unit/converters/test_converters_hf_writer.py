"""write_hf: round trips, what transformers makes of them, config edits, and failures that leave nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converter_kit import load_all, shape_of, tiny_shape, write_torch_dist
from safetensors.torch import save_file

from mcore_qwen3.converters import HFSource, TorchDistSource, hf_writer, staging, write_hf
from mcore_qwen3.errors import ConversionError

CopyOf = Callable[[str], Path]


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(torch.arange(12).reshape(1, 12) * 7).logits


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 4096])
def test_round_trip_through_torch_dist(
    hf_dir: Path, kind: str, mcore_tensors: dict, tmp_path: Path, max_shard_bytes: int
) -> None:
    """HF -> torch_dist (vocabulary padded, many chunks) -> HF: the same bits under the same names, the same logits."""
    state = {
        key: torch.cat([t, torch.zeros(27, 16)]) if t.shape[0] == 101 else t for key, t in mcore_tensors[kind].items()
    }
    pieces = {"decoder.layers.self_attention.linear_qkv.weight": (2, 4, 1), "embedding.word_embeddings.weight": (4, 1)}
    directory = write_torch_dist(tmp_path / "iter_0000001", state, pieces)
    with TorchDistSource(directory, shape_of(hf_dir)) as source:
        report = write_hf(source, tmp_path / "export", hf_dir, shape_of(hf_dir), max_shard_bytes=max_shard_bytes)
    original = load_all(hf_dir)
    assert same_bits(load_all(report.path), original)
    assert (report.num_tensors, report.num_bytes) == (len(original), sum(t.nbytes for t in original.values()))
    assert torch.equal(logits(report.path), logits(hf_dir))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_export_of_an_hf_directory(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    with HFSource(hf_dirs["moe"], shape_of(hf_dirs["moe"])) as source:
        write_hf(source, tmp_path / "export", hf_dirs["moe"], shape_of(hf_dirs["moe"]))
    assert same_bits(load_all(tmp_path / "export"), load_all(hf_dirs["moe"]))


def test_files_and_index(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    """B09: the index names exactly what the files hold; a model that fits one file has no index; limits are kept."""
    from safetensors import safe_open

    shape = shape_of(hf_dirs["dense_tied"])
    with HFSource(hf_dirs["dense_tied"], shape) as source:
        one = write_hf(source, tmp_path / "one", hf_dirs["dense_tied"], shape)
        many = write_hf(source, tmp_path / "many", hf_dirs["dense_tied"], shape, max_shard_bytes=8000)
    assert one.weight_files == ("model.safetensors",)
    assert sorted(p.name for p in one.path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    index = json.loads((many.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 7_872
    held = {}
    for file in many.weight_files:
        with safe_open(many.path / file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            names = list(handle.keys())
            held |= dict.fromkeys(names, file)
            size = sum(handle.get_tensor(name).nbytes for name in names)
            assert size <= 8000 or len(names) == 1
    assert index["weight_map"] == held
    assert len(held) == 24
    assert many.weight_files[0] == f"model-00001-of-{len(many.weight_files):05d}.safetensors"


def test_dtypes(copy_of: CopyOf, tmp_path: Path) -> None:
    """None is the dtype that config.json gives; another one is written to config.json and reported."""
    directory = copy_of("moe")
    shape = shape_of(directory)
    original = load_all(directory)
    with HFSource(directory, shape) as source:
        kept = write_hf(source, tmp_path / "kept", directory, shape)
        cast = write_hf(source, tmp_path / "cast", directory, shape, dtype="bfloat16")
        with pytest.raises(ConversionError, match=r"dtype of weights must be one of .*int8"):
            write_hf(source, tmp_path / "int8", directory, shape, dtype="int8")
    assert not any("torch_dtype changed" in line or "cast" in line for line in kept.changes)
    assert cast.changes[:2] == (
        "weights cast from float32 to bfloat16",
        "the router stays in float32, as it is in the source",
    )
    assert "config.json: torch_dtype changed from 'float32' to 'bfloat16'" in cast.changes
    assert json.loads((cast.path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert same_bits(load_all(cast.path), {n: t if "mlp.gate." in n else t.bfloat16() for n, t in original.items()})


@pytest.mark.parametrize(("keep_router", "value"), [(True, 1.0009765625), (False, 1.0)])
def test_the_router_s_precision(copy_of: CopyOf, tmp_path: Path, keep_router: bool, value: float) -> None:
    """B19: 1 + 2^-10 needs more bits than bf16 has."""
    directory = copy_of("moe")
    tensors = load_all(directory)
    tensors["model.layers.1.mlp.gate.weight"].fill_(1 + 2**-10)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    report = export(directory, tmp_path / "export", dtype="bfloat16", keep_router=keep_router)
    written = load_all(report.path)["model.layers.1.mlp.gate.weight"]
    assert set(written.float().flatten().tolist()) == {value}
    assert ("the router stays in float32, as it is in the source" in report.changes) == keep_router


def official_config() -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "vocab_size": 101,
    }


def export(directory: Path, target: Path, **options: object) -> hf_writer.ExportReport:
    shape = tiny_shape("moe")
    with HFSource(directory, shape) as source:
        return write_hf(source, target, directory, shape, **options)


def test_side_files_keep_their_bytes(copy_of: CopyOf, tmp_path: Path) -> None:
    """B17, with a config.json in the official spelling and in a layout of its own."""
    directory = copy_of("moe")
    files = {
        "config.json": json.dumps(official_config()).replace(",", " ,\n\t").encode(),
        "generation_config.json": b'{"eos_token_id":[1,2], "top_p":0.95}',
        "tokenizer.json": b"{}\r\n",
        "tokenizer_config.json": '{"a": "\u4e2d"}'.encode(),
        "vocab.json": b"{}",
        "merges.txt": b"a b\n",
        "chat_template.jinja": b"{{ messages }}\n\n",
        "special_tokens_map.json": b"{}",
        "LICENSE": b"text",
    }
    left_behind = [
        "pytorch_model.bin",
        "x.pt",
        "modeling.py",
        "old.safetensors",
        ".hidden",
        "pytorch_model.bin.index.json",
    ]
    for name, content in files.items():
        (directory / name).write_bytes(content)
    for name in left_behind:
        (directory / name).write_bytes(b"x")
    (directory / "sub").mkdir()
    report = export(directory, tmp_path / "export")
    assert report.changes == ()
    assert report.side_files == tuple(sorted(files))
    written = {path.name: path.read_bytes() for path in report.path.iterdir()}
    assert written.pop("model.safetensors")
    assert written == files


def test_config_in_transformers_5_spelling_is_respelled(copy_of: CopyOf, tmp_path: Path) -> None:
    directory = copy_of("moe")
    before = json.loads((directory / "config.json").read_text())
    report = export(directory, tmp_path / "export")
    after = json.loads((report.path / "config.json").read_text())
    new = {"dtype", "num_local_experts", "rope_parameters"}
    official = {"torch_dtype": "float32", "num_experts": 4, "rope_theta": 1_000_000.0, "rope_scaling": None}
    assert after == {key: value for key, value in before.items() if key not in new} | official
    assert report.changes == (
        "config.json: dtype written as torch_dtype",
        "config.json: num_local_experts written as num_experts",
        "config.json: rope_parameters written as rope_theta and rope_scaling",
    )
    assert shape_of(report.path) == shape_of(directory)


def test_vocabulary_size_of_the_weights_goes_into_the_config(copy_of: CopyOf, tmp_path: Path) -> None:
    directory = copy_of("moe")
    (directory / "config.json").write_text(json.dumps(official_config() | {"vocab_size": 96}))
    report = export(directory, tmp_path / "export")
    assert report.changes == ("config.json: vocab_size changed from 96 to 101",)
    assert json.loads((report.path / "config.json").read_text()) == official_config()


@pytest.mark.parametrize(
    ("present", "after"),
    [(1, [1, 5]), ([1, 2], [1, 2, 5]), (None, [5]), (5, 5), ([5, 1], [5, 1])],
)
def test_end_token(copy_of: CopyOf, tmp_path: Path, present: object, after: object) -> None:
    directory = copy_of("moe")
    (directory / "config.json").write_text(json.dumps(official_config() | {"eos_token_id": present}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": present, "top_k": 20}))
    report = export(directory, tmp_path / "export", end_token_id=5)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((report.path / name).read_text())["eos_token_id"] == after
    changed = [] if present == after else ["config.json", "generation_config.json"]
    assert report.changes == tuple(f"{name}: eos_token_id changed from {present!r} to {after!r}" for name in changed)


def test_existing_destination(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(ConversionError, match=r"not written over; seen: .*export"):
        export(hf_dirs["moe"], target)
    assert [path.name for path in tmp_path.iterdir()] == ["export"] and (target / "precious").read_text() == "x"
    export(hf_dirs["moe"], target, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["export"] and not (target / "precious").exists()
    assert same_bits(load_all(target), load_all(hf_dirs["moe"]))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_in_the_middle_leaves_nothing(
    hf_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, overwrite: bool
) -> None:
    """B16: no half directory; an existing one stays as it was."""
    target = tmp_path / "export"
    if overwrite:
        target.mkdir()
        (target / "precious").write_text("x")
    append, done = hf_writer._ShardWriter.append, []

    def failing(self, name: str, tensor: torch.Tensor) -> None:
        if len(done) == 20:
            raise error
        done.append(name)
        append(self, name, tensor)

    monkeypatch.setattr(hf_writer._ShardWriter, "append", failing)
    with pytest.raises(ConversionError if isinstance(error, OSError) else KeyboardInterrupt):
        export(hf_dirs["moe"], target, overwrite=overwrite)
    assert len(done) == 20
    assert [path.name for path in tmp_path.rglob("*")] == (["export", "precious"] if overwrite else [])


def test_a_crash_while_changing_places_keeps_the_old_directory(
    hf_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    target.mkdir()
    (target / "precious").write_text("x")
    rename = Path.rename

    def failing(self: Path, other: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, other)

    monkeypatch.setattr(staging.Path, "rename", failing)
    with pytest.raises(ConversionError, match="Input/output error"):
        export(hf_dirs["moe"], target, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "precious"]


def test_damage_between_writing_and_reading_back(
    hf_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B16: a file that the disk cut short is noticed before the directory gets its name."""
    leave = hf_writer._ShardWriter.__exit__

    def cut_short(self, *reason: object) -> None:
        self._file.truncate(self._file.tell() - 8)
        leave(self, *reason)

    monkeypatch.setattr(hf_writer._ShardWriter, "__exit__", cut_short)
    with pytest.raises(ConversionError, match="must be readable"):
        export(hf_dirs["moe"], tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError, match="output must be writable"):
        export(hf_dirs["moe"], tmp_path / "file" / "export")


def test_weights_of_another_model(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    with (
        HFSource(hf_dirs["dense_tied"], shape_of(hf_dirs["dense_tied"])) as source,
        pytest.raises(ConversionError, match=r"1 tensor \(output_layer.weight\) missing"),
    ):
        write_hf(source, tmp_path / "export", hf_dirs["dense_tied"], tiny_shape("dense_untied"))
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_the_source_never_gave_out(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    with HFSource(hf_dirs["moe"], tiny_shape("moe")) as source:
        source.all_tensors |= {"model.extra.weight"}
        with pytest.raises(ConversionError, match=r"1 tensor \(model.extra.weight\) never read"):
            write_hf(source, tmp_path / "export", hf_dirs["moe"], tiny_shape("moe"))
    assert list(tmp_path.iterdir()) == []


def test_no_config_beside_the_weights(hf_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with (
        HFSource(hf_dirs["moe"], tiny_shape("moe")) as source,
        pytest.raises(ConversionError, match=r"must include config\.json"),
    ):
        write_hf(source, tmp_path / "export", tmp_path / "empty", tiny_shape("moe"))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
