"""`convert verify --logits true`: this project's model against transformers, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from e2e_kit import Site
from helpers.tiny import write_model
from safetensors.torch import load_file, save_file

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.convert import run
from mcore_qwen3.cli.convert_logits import available_memory, check_memory
from mcore_qwen3.errors import ConfigError

pytestmark = pytest.mark.timeout(900)
LOGITS = ("--logits", "true", "--max_logit_difference", "1e-5")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_b22_a_converted_model_computes_the_same(site: Site, tmp_path: Path, moe: bool) -> None:
    """fp32 on CPU: under 1e-5, and the exit code says so. Query heads in a wrong order are seen, though every bit that
    verify compares is then a copy of the same wrong file."""
    write_model(tmp_path / "hf", moe=moe)
    assert run(["hf2mcore", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 0
    done = site.run("convert", "verify", tmp_path / "hf", tmp_path / "mcore", *LOGITS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "192 tokens" in done.stdout and "same first token 100.00%" in done.stdout
    largest = float(done.stdout.split("largest difference ")[1].split()[0])
    assert 0 < largest < 1e-5

    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name in ("config.json", "generation_config.json"):
        (wrong / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    tensors = load_file(tmp_path / "hf/model.safetensors")
    query = tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.cat([query[32:], query[:32]])  # 4 heads of 16 rows
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    done = site.run("convert", "verify", wrong, tmp_path / "mcore", *LOGITS)
    assert done.returncode == 1
    assert "differs: model.layers.1.self_attn.q_proj.weight" in done.stdout
    assert float(done.stdout.split("largest difference ")[1].split()[0]) > 1e-2


def test_text_is_the_input_where_there_is_a_tokenizer(site: Site, small_vocabulary_moe: Path, tmp_path: Path) -> None:
    assert run(["hf2mcore", str(small_vocabulary_moe), str(tmp_path / "mcore")]) == 0
    done = site.run("convert", "verify", small_vocabulary_moe, tmp_path / "mcore", *LOGITS)
    assert done.returncode == 0 and "tokens of text in fp32" in done.stdout, done.stdout + done.stderr


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """The official Qwen3-0.6B: 596,049,920 parameters, so 4 bytes x 2 of each."""
    config = {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "rope_theta": 1e6,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shape = ModelShape.from_hf_config(config)
    check_memory(shape, 8 * 596_049_920)
    with pytest.raises(ConfigError, match="4,768,399,360 bytes needed, 4,768,399,359 available"):
        check_memory(shape, 8 * 596_049_920 - 1)


def test_the_check_comes_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from mcore_qwen3.cli import convert_verify

    write_model(tmp_path / "hf", moe=False)
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_hidden_layers"] == 2
    (tmp_path / "hf/model.safetensors").unlink()
    monkeypatch.setattr(convert_verify, "available_memory", lambda: 1000)
    assert run(["verify", str(tmp_path / "hf"), str(tmp_path / "hf"), "--logits", "true"]) == 2
    assert "1,000 available" in capsys.readouterr().err


def test_available_memory_is_that_of_the_machine() -> None:
    import psutil

    assert available_memory() <= psutil.virtual_memory().total
    assert available_memory() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
