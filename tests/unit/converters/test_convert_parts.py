"""The pieces of a conversion: FP8 sources, plans, parts, nodes, and directories that killed processes left."""

from __future__ import annotations

import fcntl
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from converter_kit import load_all, tiny_shape
from safetensors.torch import save_file

from mcore_qwen3.arch.shape import ModelShape
from mcore_qwen3.cli.convert import run
from mcore_qwen3.config.convert import shard_bytes
from mcore_qwen3.converters import HFSource, Team, plan_mcore
from mcore_qwen3.converters.mcore_writer import CHUNK_BYTES
from mcore_qwen3.converters.nodes import run_team, shared_staging
from mcore_qwen3.converters.parts import run_parts, split_evenly
from mcore_qwen3.converters.source import Entry
from mcore_qwen3.converters.staging import staged_directory
from mcore_qwen3.converters.table import name_table
from mcore_qwen3.converters.torch_dist_writer import Chunk, merge_parts, write_part
from mcore_qwen3.errors import ConfigError, ConversionError

# No axis is a multiple of the block of 128, and most have more than one.
FP8_SIZES = {"hidden_size": 144, "head_dim": 40, "moe_intermediate_size": 136}


def big_config(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """A released MoE model's config.json, as far as it fixes shapes."""
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3 * hidden, "moe_intermediate_size": inner,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def quantised(directory: Path) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """Write a directory whose projections are FP8; returns the shape and what each tensor means, by the formula."""
    shape = tiny_shape("moe", torch_dtype="bfloat16", **FP8_SIZES)
    generator = torch.Generator().manual_seed(1)
    tensors, meaning = {}, {}
    for rule in name_table(shape):
        for number, part in enumerate(rule.parts):
            for layer in range(2 if "{layer}" in part.name else 1):
                for expert in range(4 if "{expert}" in part.name else 1):
                    name = part.name.format(layer=layer, expert=expert)
                    values = torch.randn(rule.hf_shape(number), generator=generator)
                    if "proj" not in name:
                        tensors[name] = meaning[name] = values.bfloat16()
                        continue
                    rows, columns = values.shape
                    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.01
                    tensors[name], tensors[name + "_scale_inv"] = values.to(torch.float8_e4m3fn), scale
                    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
                    meaning[name] = (tensors[name].float() * spread).bfloat16()
    save_file(tensors, directory / "model.safetensors")
    return shape, meaning


def test_fp8_blocks(tmp_path: Path) -> None:
    shape, meaning = quantised(tmp_path)
    fc1, rng = "decoder.layers.mlp.experts.experts.linear_fc1.weight", random.Random(4)
    names = [f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("gate", "up")]
    wanted = torch.cat([meaning[name] for name in names])
    with HFSource(tmp_path, shape) as source:
        assert {entry.dtype for entry in source.entries().values()} == {torch.bfloat16}
        for _ in range(30):
            rows, columns = (slice(*sorted(rng.choices(range(size + 1), k=2))) for size in wanted.shape)
            read = source.read(fc1, (slice(1, 2), slice(3, 4), rows, columns))[0, 0]
            assert torch.equal(read, wanted[rows, columns]), (rows, columns)
        for key, entry in source.entries().items():
            source.read(key, (slice(None),) * len(entry.shape))
        source.check_all_used(source.used_tensors)


def test_fp8_release_to_mcore_and_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The export is bf16, says so, and its config.json does not call it quantised."""
    source = tmp_path / "fp8"
    source.mkdir()
    _, meaning = quantised(source)
    config = big_config(144, 2, 4, 136) | FP8_SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 101}
    config |= {"num_key_value_heads": 2, "intermediate_size": 32}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    assert run(["hf2mcore", str(source), str(tmp_path / "mcore")]) == 0
    assert run(["mcore2hf", str(tmp_path / "mcore"), str(tmp_path / "back")]) == 0
    assert "quantization_config removed" in capsys.readouterr().out

    back = load_all(tmp_path / "back")
    assert back.keys() == meaning.keys() and all(torch.equal(back[name], meaning[name]) for name in back)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_fp8_without_its_factors(tmp_path: Path) -> None:
    shape, _ = quantised(tmp_path)

    tensors = load_all(tmp_path)
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"1 tensor \(model.layers.0.self_attn.q_proj.weight_scale_inv\) missing"):
        HFSource(tmp_path, shape)


@pytest.mark.parametrize(
    ("config", "tensors", "size"),
    [
        (big_config(2048, 48, 32, 768), "18,867", "61,064,245,248"),
        (big_config(4096, 94, 64, 1536), "36,945", "470,187,269,120"),
    ],
    ids=["30B-A3B", "235B-A22B"],
)
def test_dry_run_of_the_released_models(
    tmp_path: Path, capsys: pytest.CaptureFixture, config: dict, tensors: str, size: str
) -> None:
    """From config.json alone; the numbers are those of the published indexes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["hf2mcore", str(tmp_path), "--dry_run", "true"]) == 0
    out = capsys.readouterr().out
    assert f"{tensors} tensors, {size} bytes" in out.splitlines()[0]
    assert "12 tensors in " in out and out.count(size) == 2


def test_chunks_are_bounded_and_cover_every_tensor_once() -> None:
    """Memory does not grow with the model: no chunk is above the limit, whatever the tensor."""
    shape = ModelShape.from_hf_config(big_config(4096, 94, 64, 1536))
    entries = {rule.key: Entry(rule.shape, torch.bfloat16) for rule in name_table(shape)}
    pieces = plan_mcore(entries, shape)
    assert max(piece.nbytes for piece in pieces) <= CHUNK_BYTES <= 256 * 2**20
    assert sum(piece.nbytes for piece in pieces) == 470_187_269_120
    experts = {piece.sizes[1] for piece in pieces if "linear_fc1.weight" in piece.key}
    assert len(experts) == 1 and 128 % experts.pop() == 0, "whole groups of experts, so that EP ranks read their own"


def test_merging_parts_sees_holes_and_doubles(tmp_path: Path) -> None:
    """B03: a chunk written never or twice, one that overlaps, and a tensor that is not whole are refused."""
    values = torch.arange(24.0).reshape(6, 4)

    def chunk(row: int, rows: int) -> Chunk:
        return Chunk("w", (6, 4), (row, 0), (rows, 4), torch.float32, lambda: values[row : row + rows])

    first, second = [chunk(0, 2)], [chunk(2, 4)]
    written = [write_part(tmp_path, first, 0, lambda n: None), write_part(tmp_path, second, 1, lambda n: None)]
    assert {path.name for path in tmp_path.iterdir()} == {"__0_0.distcp", "__1_0.distcp"}
    merge_parts(tmp_path, [*first, *second], [*written[0], *written[1]])
    for chunks, done in (
        ([*first, *second], written[0]),
        ([*first, *second], [*written[0], *written[0], *written[1]]),
        (first, written[0]),
        ([chunk(0, 3), *second], [*written[0], *written[1]]),
    ):
        with pytest.raises(ConversionError, match="exactly once"):
            merge_parts(tmp_path, chunks, done)


def test_split_evenly() -> None:
    assert split_evenly("abcdef", [1] * 6, 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert split_evenly("ab", [9, 1], 2) == [["a"], ["b"]]
    assert split_evenly("a", [5], 4) == [[], [], ["a"], []]
    parts = split_evenly(range(100), list(range(100)), 7)
    assert [item for part in parts for item in part] == list(range(100))


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("7", 7), ("20KB", 20_000)])
def test_sizes(text: str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "5GiB", "big", "-1GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="a size is a number"):
        shard_bytes(text)


def _count(payload: int, report: Any) -> dict[str, Any]:
    report(payload)
    return {"value": payload * 2}


def _fail(payload: int, report: Any) -> dict[str, Any]:
    report(7)
    if payload:
        raise ConversionError("a rule", seen=payload, fix="this")
    return {}


def test_a_part_that_fails_stops_them_all() -> None:
    """Real processes; that they succeed too is seen end to end."""
    reported: list[int] = []
    with pytest.raises(ConversionError, match="a rule; seen: 1; change: this"):
        run_parts(_fail, [0, 1], reported.append)
    assert set(reported) == {7}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Killed in the middle: its directory goes. Killed while changing places: the old directory comes back."""
    target, staging, former = tmp_path / "out", tmp_path / ".out.new", tmp_path / ".out.old"
    staging.mkdir()
    (staging / "half").write_text("x")
    former.mkdir()
    (former / "precious").write_text("x")
    with pytest.raises(ConversionError, match="not written over"), staged_directory(target):
        raise AssertionError
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]
    with staged_directory(target, overwrite=True) as new:
        (new / "whole").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]


def test_a_living_process_keeps_its_directory(tmp_path: Path) -> None:
    staging = tmp_path / ".out.new"
    staging.mkdir()
    with (staging / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another one is writing"), staged_directory(tmp_path / "out"):
            raise AssertionError
    assert (staging / ".lock").exists()


def test_nodes_meet_on_a_shared_disk(tmp_path: Path) -> None:
    """Node 1 starts first and finds what a killed run left; both end with the same directory, every part done once."""
    target, seen = tmp_path / "out", []
    stale = tmp_path / ".out.new/.nodes"
    stale.mkdir(parents=True)
    (stale / "tokens.json").write_text('["old"]')

    def node(rank: int) -> None:
        team = Team(workers=1, nodes=2, node_rank=rank)
        with shared_staging(target, team, overwrite=False) as staging:
            results, complete = run_team(_count, [10, 20], staging, team, "plan")
            seen.append((rank, complete, results))
            (staging / f"file{rank}").write_text("x")

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(0, True, [{"value": 20}, {"value": 40}]), (1, False, [{"value": 40}])]
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "file0", "file1"}


def test_nodes_that_plan_different_things(tmp_path: Path) -> None:
    errors = []

    def node(rank: int) -> None:
        team = Team(workers=1, nodes=2, node_rank=rank)
        try:
            with shared_staging(tmp_path / "out", team, overwrite=False) as staging:
                run_team(_count, [1, 2], staging, team, f"plan of {rank}")
        except ConversionError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and any("same command on the same files" in text for text in errors)
    assert list(tmp_path.iterdir()) == []
