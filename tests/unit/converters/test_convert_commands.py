"""`convert hf2mcore | mcore2hf | verify` in this process: round trips, what is printed, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converter_kit import KINDS, Planted, load_all, tiny_shape, write_torch_dist
from safetensors.torch import save_file

from mcore_qwen3.arch import read_model_shape
from mcore_qwen3.cli.convert import run
from mcore_qwen3.cli.main import main
from mcore_qwen3.converters import TorchDistSource

CopyOf = Callable[[str], Path]
EMBEDDING = "embedding.word_embeddings.weight"
OFFICIAL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 101,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}


def convert(*words: object) -> int:
    return run([str(word) for word in words])


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a
    )


@pytest.fixture
def official(copy_of: CopyOf) -> Path:
    """A MoE directory as the official ones are: their spelling, an index, side files of odd bytes."""
    directory = copy_of("moe")
    (directory / "config.json").write_text(json.dumps(OFFICIAL, indent=2))
    (directory / "generation_config.json").write_bytes(b'{"eos_token_id":[1,2], "top_p":0.95}')
    (directory / "tokenizer_config.json").write_bytes('{"a":\t"\u4e2d"}\r\n'.encode())
    (directory / "merges.txt").write_bytes(b"a b\n")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(hf_dirs: dict[str, Path], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """B03, B07, B09: every tensor used and written once, by count; the same bits come back under the same names."""
    mcore, back = tmp_path / "mcore", tmp_path / "back"
    assert convert("hf2mcore", hf_dirs[kind], mcore, "--check_finite", "true") == 0
    number = len(load_all(hf_dirs[kind]))
    assert f"source tensors used: {number} of {number}\n" in capsys.readouterr().out
    facts = json.loads((mcore / "release/conversion.json").read_text())
    assert (facts["source_tensors_used"], facts["bytes"]) == (
        number,
        sum(tensor.nbytes for tensor in load_all(hf_dirs[kind]).values()),
    )
    assert convert("mcore2hf", mcore, back) == 0
    assert f"targets written once: {number} tensors in 1 files" in capsys.readouterr().out
    assert same_bits(load_all(back), load_all(hf_dirs[kind]))
    assert convert("verify", hf_dirs[kind], mcore) == 0
    assert f"{number} of {number} tensors are equal" in capsys.readouterr().out


def test_files_of_an_mcore_directory(official: Path, tmp_path: Path) -> None:
    """The old form, which megatron-core 0.16 and 0.19 read; nothing else lies beside it."""
    assert convert("hf2mcore", official, tmp_path / "mcore") == 0
    release = tmp_path / "mcore/release"
    assert {path.name for path in (tmp_path / "mcore").iterdir()} == {"release", "latest_checkpointed_iteration.txt"}
    assert (tmp_path / "mcore/latest_checkpointed_iteration.txt").read_text() == "release"
    assert {path.name for path in release.iterdir()} == {
        "__0_0.distcp", ".metadata", "metadata.json", "common.pt", "hf", "run_config.yaml", "conversion.json",
    }  # fmt: skip
    assert torch.load(release / "common.pt", weights_only=True) == {"iteration": 0, "checkpoint_version": 3.0}
    assert json.loads((release / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_side_files_come_back_byte_for_byte(official: Path, tmp_path: Path) -> None:
    """B14, B17: nothing in them changes, rope_theta 1,000,000.0 included; from the root or from the iteration."""
    before = {name: value for name, value in hashes(official).items() if not name.endswith(".safetensors")}
    assert convert("hf2mcore", official, tmp_path / "mcore") == 0
    assert hashes(tmp_path / "mcore/release/hf") == before
    for number, source in enumerate((tmp_path / "mcore", tmp_path / "mcore/release")):
        assert convert("mcore2hf", source, tmp_path / f"back{number}") == 0
        after = hashes(tmp_path / f"back{number}")
        assert after.pop("model.safetensors")
        assert after == before


def test_the_rope_base_stays_beside_a_scaling(official: Path, tmp_path: Path) -> None:
    """B14: base 1,000,000 with YaRN, in the official spelling and back; head_dim 8 gives these inverse frequencies."""
    from transformers import AutoConfig

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    written = json.dumps(OFFICIAL | {"rope_scaling": scaling}, indent=2)
    (official / "config.json").write_text(written)
    assert convert("hf2mcore", official, tmp_path / "mcore") == 0
    shape = read_model_shape(tmp_path / "mcore")
    assert shape.rope_scaling is not None and shape.rope_scaling.factor == 4.0
    frequencies = [shape.rope_theta ** (-channel / shape.head_dim) for channel in range(0, 8, 2)]
    assert frequencies == pytest.approx([1, 0.0316228, 0.001, 3.16228e-05], rel=1e-5)
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "back") == 0
    assert (tmp_path / "back/config.json").read_text() == written
    assert AutoConfig.from_pretrained(tmp_path / "back").rope_parameters["rope_theta"] == 1_000_000


def test_packed_experts_give_the_same_checkpoint(official: Path, tmp_path: Path) -> None:
    """B07: gate rows first, then up rows; 4 packed tensors stand for 24."""
    tensors = load_all(official)
    packed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.experts.{e}." for e in range(4)]
        gate_up = [torch.cat([tensors[n + "gate_proj.weight"], tensors[n + "up_proj.weight"]]) for n in names]
        packed[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        packed[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(
            [tensors[n + "down_proj.weight"] for n in names]
        )
    other = Path(shutil.copytree(official, tmp_path / "packed"))
    save_file(packed, other / "model.safetensors", metadata={"format": "pt"})
    assert len(packed) == len(tensors) - 24 + 4
    assert convert("hf2mcore", other, tmp_path / "mcore") == 0
    assert convert("verify", official, tmp_path / "mcore") == 0
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "back") == 0
    assert same_bits(load_all(tmp_path / "back"), tensors)


def test_vocabulary_is_padded_and_cut(official: Path, tmp_path: Path) -> None:
    """B01, B02: 101 rows, padded once to the number asked for, with zeros; the export has 101 rows again."""
    assert convert("hf2mcore", official, tmp_path / "mcore", "--vocab_size", 128) == 0
    assert json.loads((tmp_path / "mcore/release/conversion.json").read_text())["vocabulary_rows"] == 128
    with TorchDistSource(tmp_path / "mcore/release", tiny_shape("moe", vocab_size=128)) as source:
        rows = source.read(EMBEDDING, (slice(None), slice(None)))
    assert torch.equal(rows[:101], load_all(official)["model.embed_tokens.weight"]) and not rows[101:].any()
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "back") == 0
    assert same_bits(load_all(tmp_path / "back"), load_all(official))
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "cut", "--vocab_size", 96) == 0
    assert load_all(tmp_path / "cut")["lm_head.weight"].shape == (96, 16)
    assert json.loads((tmp_path / "cut/config.json").read_text())["vocab_size"] == 96


@pytest.mark.parametrize("words", [("mcore2hf", "--dtype", "bf16"), ("hf2mcore", "--dtype", "bf16")])
def test_dtype_with_the_router_s_own_rule(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture, words: tuple[str, ...]
) -> None:
    """B19 through the commands: stated in the log, 1.0009765625 kept; --router_dtype same rounds it to 1.0."""
    tensors = load_all(official)
    tensors["model.layers.0.mlp.gate.weight"].fill_(1 + 2**-10)
    save_file(tensors, official / "model.safetensors", metadata={"format": "pt"})
    command, *flags = words
    for number, (rule, value) in enumerate((("keep", 1.0009765625), ("same", 1.0))):
        mcore, back = tmp_path / f"mcore{number}", tmp_path / f"back{number}"
        cast = [*flags, "--router_dtype", rule]
        assert convert("hf2mcore", official, mcore, *(cast if command == "hf2mcore" else [])) == 0
        assert convert("mcore2hf", mcore, back, "--dtype", "bf16", *(cast[2:])) == 0
        assert ("router stays in float32" in capsys.readouterr().out) == (rule == "keep")
        written = load_all(back)
        assert float(written["model.layers.0.mlp.gate.weight"][2, 3]) == value
        assert written["model.norm.weight"].dtype == torch.bfloat16


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_all(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def cut_in_half(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def index_that_leaves(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "x.safetensors")
    weight_map = {"model.norm.weight": "../x.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: edit(d, lambda t: t.pop(EXPERT)), f"1 tensor ({EXPERT}) missing"),
        (lambda d: edit(d, lambda t: t.update({EXPERT: torch.zeros(9, 16)})), f"{EXPERT} has (9, 16)"),
        (lambda d: edit(d, lambda t: t.update({"model.extra": torch.zeros(2)})), "1 tensor (model.extra)"),
        (
            lambda d: edit(d, lambda t: t[EXPERT].fill_(float("nan"))),
            "128 of 2048 values in decoder.layers.mlp.experts",
        ),
        (cut_in_half, "a safetensors file must be whole"),
        (index_that_leaves, "'../x.safetensors'"),
    ],
    ids=["deleted", "shape", "stray", "nan", "half", "outside"],
)
def test_a_spoiled_source_is_refused_and_nothing_is_left(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture, spoil: Callable, message: str
) -> None:
    """B03, B16: one line, its own; the exit code is not 0; no directory of any name."""
    spoil(official)
    before = {path.name for path in tmp_path.iterdir()}
    assert convert("hf2mcore", official, tmp_path / "mcore", "--check_finite", "true") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error, error
    assert {path.name for path in tmp_path.iterdir()} == before


def planted_pickle(root: Path) -> str:
    torch.save(Planted(root.parent / "trace"), root / "release/common.pt")
    return "may only hold tensors and plain data"


def no_tracker(root: Path) -> str:
    (root / "latest_checkpointed_iteration.txt").unlink()
    return "latest_checkpointed_iteration.txt"


def no_data(root: Path) -> str:
    (root / "release/__0_0.distcp").unlink()
    return "__0_0.distcp"


def no_side_files(root: Path) -> str:
    shutil.rmtree(root / "release/hf")
    return "--hf_config"


@pytest.mark.parametrize("spoil", [planted_pickle, no_tracker, no_data, no_side_files])
def test_a_spoiled_checkpoint_is_refused(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture, spoil: Callable[[Path], str]
) -> None:
    """B15, B16: the message names what is missing; what a pickle asks for is never run."""
    assert convert("hf2mcore", official, tmp_path / "mcore") == 0
    message = spoil(tmp_path / "mcore")
    assert convert("mcore2hf", tmp_path / "mcore", tmp_path / "back") == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {official.name, "mcore"}


def test_a_checkpoint_of_another_tool(hf_dirs: dict[str, Path], mcore_tensors: dict, tmp_path: Path) -> None:
    """No hf/, padded vocabulary, moments, an own norm name, extra state: --hf_config is all it needs."""
    norm, local = "decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    state = {local if key == norm else key: tensor for key, tensor in mcore_tensors["moe"].items()}
    state[EMBEDDING] = torch.cat([state[EMBEDDING], torch.ones(27, 16)])
    state["optimizer.state.exp_avg." + EMBEDDING] = torch.zeros(128, 16)
    state["decoder.final_layernorm._extra_state"] = torch.zeros(3)
    (tmp_path / "iter_0000007").mkdir()
    write_torch_dist(tmp_path / "iter_0000007", state)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    reference = ("--hf_config", hf_dirs["moe"])
    assert convert("mcore2hf", tmp_path, tmp_path / "back", *reference) == 0
    assert same_bits(load_all(tmp_path / "back"), load_all(hf_dirs["moe"]))
    assert convert("verify", tmp_path, hf_dirs["moe"], *reference) == 0
    assert main(["export", "--mcore_model", str(tmp_path), "--output_dir", str(tmp_path / "two"), "--hf_config",
                 str(hf_dirs["moe"])]) == 0  # fmt: skip
    assert hashes(tmp_path / "two") == hashes(tmp_path / "back")


def test_verify_names_every_tensor_that_differs(official: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Bits, not values: 0.0 and -0.0 differ."""
    other = Path(shutil.copytree(official, tmp_path / "other"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT][3, 5] += 1
        tensors["model.layers.0.self_attn.k_proj.weight"][9, 1] = 7
        tensors["model.norm.weight"].fill_(0.0)

    edit(other, change)
    edit(official, lambda tensors: tensors["model.norm.weight"].fill_(-0.0))
    assert convert("verify", official, other) == 1
    out = capsys.readouterr().out
    assert out.count("differs: ") == 3 and "42 of 45 tensors are equal" in out
    for place in (f"{EXPERT}: first at [3, 5]", "layers.0.self_attn.k_proj.weight: first at [9, 1]", "norm.weight"):
        assert place in out
    edit(other, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if "down_proj" in n}))
    assert convert("verify", official, other) == 1
    assert "layers.0.mlp.experts.0.down_proj.weight: float32 and bfloat16" in capsys.readouterr().out


def test_existing_output_and_a_full_disk(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mcore").mkdir()
    assert convert("hf2mcore", official, tmp_path / "mcore") == 2
    assert "--overwrite true" in capsys.readouterr().err
    assert convert("hf2mcore", official, tmp_path / "mcore", "--overwrite", "true") == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert convert("hf2mcore", official, tmp_path / "two") == 2
    assert "1,000 bytes free" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {official.name, "mcore"}


def test_dry_run_reads_the_index_and_writes_nothing(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    names = list(load_all(official))[:-1]
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 7}, "weight_map": weight_map}
    (official / "model.safetensors.index.json").write_text(json.dumps(index))
    (official / "model.safetensors").unlink()
    assert convert("hf2mcore", official, "--dry_run", "true") == 0
    out = capsys.readouterr().out
    assert "45 tensors, 38,464 bytes" in out and "44 tensors in 1 files, total_size 7" in out
    assert "1 tensor (" in out and [path.name for path in tmp_path.iterdir()] == [official.name]
