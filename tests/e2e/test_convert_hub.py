"""Models named by a hub's OWNER/NAME: what is fetched, when, and what is said where there is no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_kit import Done, Site, steps_of
from helpers.model_hub import ModelHub
from helpers.tiny import write_model

pytestmark = pytest.mark.timeout(900)

NAME = "tiny-owner/Tiny-Qwen3"
SIDE_FILES = ["config.json", "generation_config.json", "tokenizer_config.json"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    """A tiny model, with files beside it that nobody should ask for."""
    directory = tmp_path / "served"
    write_model(directory, moe=True)
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling.py").write_text("raise SystemExit")
    (directory / "onnx").mkdir()
    (directory / "onnx/config.json").write_text("{}")
    with ModelHub(NAME, directory) as served:
        yield served


@pytest.fixture
def own_site(tmp_path: Path) -> Site:
    """A folder to work in whose hub cache is empty."""
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site")
    site.environ = {name: value for name, value in site.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    return site


def words_of(done: Done) -> str:
    return done.stdout + done.stderr


def test_a_hub_s_model_is_fetched_and_converted(hub: ModelHub, own_site: Site, tmp_path: Path) -> None:
    """First the small files, then the weights; never code, pickles or subdirectories. Once fetched, no hub is needed."""
    dry = own_site.run("convert", "hf2mcore", NAME, "--dry_run", "true", HF_ENDPOINT=hub.url)
    assert dry.returncode == 0, words_of(dry)
    assert f"{NAME} is a model of Hugging Face" in dry.stdout and sorted(hub.sent) == SIDE_FILES
    done = own_site.run("convert", "hf2mcore", NAME, "out", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, words_of(done)
    assert sorted(hub.sent) == sorted([*SIDE_FILES, "model.safetensors"])
    release = own_site.folder / "out/release"
    assert json.loads((release / "conversion.json").read_text())["source"] == NAME
    assert sorted(path.name for path in (release / "hf").iterdir()) == SIDE_FILES
    verified = own_site.run("convert", "verify", NAME, "out", HF_HUB_OFFLINE="1")
    assert verified.returncode == 0 and "69 of 69 tensors are equal" in verified.stdout, words_of(verified)
    assert len(hub.sent) == 4


def test_a_path_wins_over_a_hub(hub: ModelHub, own_site: Site) -> None:
    write_model(own_site.folder / NAME, moe=False)
    done = own_site.run("convert", "hf2mcore", NAME, "--dry_run", "true", HF_ENDPOINT=hub.url)
    assert done.returncode == 0 and f"source: {NAME}: " in done.stdout and hub.sent == [], words_of(done)


@pytest.mark.parametrize(
    "command", [("convert", "hf2mcore", NAME, "out"), ("sft", "--load", NAME)], ids=["hf2mcore", "sft"]
)
def test_without_a_network_one_line_says_so(own_site: Site, command: tuple[str, ...]) -> None:
    more = ["--dataset", "a.jsonl", "--train_iters", "1"] if command[0] == "sft" else []
    done = own_site.run(*command, *more, "--use_hf", "true", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, words_of(done)
    assert (
        f"{NAME} is a directory on this machine, or a model that can be downloaded; seen: Hugging Face: " in done.stderr
    )
    assert list(own_site.folder.glob("out*")) == []


def test_a_name_that_no_hub_has(hub: ModelHub, own_site: Site) -> None:
    """Both hubs are asked; ModelScope's library is not installed here, and that is said too."""
    done = own_site.run("convert", "hf2mcore", "tiny-owner/other", "out", HF_ENDPOINT=hub.url)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, words_of(done)
    assert "Hugging Face: RepositoryNotFoundError" in done.stderr and "ModelScope: ModuleNotFoundError" in done.stderr


def test_training_starts_from_a_hub_s_model(
    hub: ModelHub, own_site: Site, small_vocabulary_moe: Path, chat_rows: Path
) -> None:
    """A dry run fetches no weights; the run does, once for all ranks, and is called after the model."""
    with ModelHub(NAME, small_vocabulary_moe) as trained:
        words = ["sft", "--load", NAME, "--dataset", chat_rows, "--train_iters", 1, "--global_batch_size", 2]
        words += ["--max_length", 256, "--use_hf", "true"]
        dry = own_site.run(*words, "--dry_run", "true", HF_ENDPOINT=trained.url)
        assert dry.returncode == 0 and "model.safetensors" not in trained.sent, words_of(dry)
        done = own_site.run(*words, NPROC_PER_NODE="2", HF_ENDPOINT=trained.url)
        assert done.returncode == 0, words_of(done)
        assert trained.sent.count("model.safetensors") == 1 and f"{NAME} is a model of Hugging Face" in done.stdout
    (record,) = steps_of(own_site.folder / "megatron_output/Tiny-Qwen3")
    assert record["iteration"] == 1
