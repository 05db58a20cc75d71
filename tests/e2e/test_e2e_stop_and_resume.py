"""SIGTERM saves and stops, the same command continues as if nothing had happened, and the export is what was trained."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_kit import Job, Site, steps_of, write_rows

from mcore_qwen3.arch import read_model_shape
from mcore_qwen3.converters import HFSource, OptimizerSource, TorchDistSource, WeightSource

pytestmark = pytest.mark.timeout(900)

HEADER, NO_THINKING, END = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n", "<|im_end|>"
END_ID = 151645
VALIDATION_ROWS = 5


def command(load: Path, rows: Path, save: str, *more: object) -> list[object]:
    """Two ranks, each with half of the experts; the learning rate is another at every step, whatever --train_iters."""
    words = f"""sft --load {load} --dataset {rows} --val_dataset validation.jsonl --expert_model_parallel_size 2
        --max_length 128 --global_batch_size 4 --lr 1e-3 --lr_warmup_iters 2 --lr_decay_iters 40
        --moe_aux_loss_coeff 0.01 --eval_interval 100000 --save {save} --num_workers 1"""
    return [*words.split(), *more]


@dataclass(frozen=True)
class Story:
    """A run that was stopped twice and saved beside its steps, and one of as many steps that did neither."""

    stops: list[Job]
    stopped_at: list[int]
    broken: Path
    unbroken: Path


def stop_after(site: Site, words: list[object], save: Path, step: int) -> Job:
    """Start the command and send SIGTERM to it, that is to the supervisor, after a step."""
    job = site.start(*words, NPROC_PER_NODE="2")
    job.wait_for_step(save, step)
    job.process.send_signal(signal.SIGTERM)
    job.end()
    return job


def checkpoint(save: Path) -> Path:
    """The directory that the tracker names."""
    return save / f"iter_{int((save / 'latest_checkpointed_iteration.txt').read_text()):07d}"


def train_state(save: Path) -> dict[str, Any]:
    return json.loads((checkpoint(save) / "train_state.json").read_text())


@pytest.fixture(scope="module")
def story(site: Site, tiny_moe: Path, chat_rows: Path) -> Story:
    write_rows(site.folder / "validation.jsonl", VALIDATION_ROWS, first=1000)
    broken, unbroken = site.folder / "broken", site.folder / "unbroken"
    often = ("--async_save", "true", "--save_interval", 2, "--save_total_limit", 2)
    words = command(tiny_moe, chat_rows, "broken", "--train_iters", 100000, *often)
    stops, stopped_at = [], []
    for more in ([], ["--exit_code_on_signal", 143]):
        stops.append(stop_after(site, [*words, *more], broken, len(steps_of(broken)) + 2))
        stopped_at.append(train_state(broken)["iteration"])
    once = ["--train_iters", stopped_at[-1], "--save_interval", 100000, "--eval_on_start"]
    once += ["--async_save", "true", "--save_hf", "true"]
    words = command(tiny_moe, chat_rows, "unbroken", *once)
    done = site.run(*words, NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr + done.stdout
    return Story(stops, stopped_at, broken, unbroken)


def kept(stopped_at: list[int]) -> list[str]:
    """The newest two of the checkpoints at every second step and at the stops."""
    written = {*range(2, stopped_at[-1] + 1, 2), *stopped_at}
    return [f"iter_{iteration:07d}" for iteration in sorted(written)[-2:]]


def test_sigterm_saves_and_stops_in_order(story: Story) -> None:
    assert [job.process.returncode for job in story.stops] == [0, 143], story.stops[0].screen
    for job, step in zip(story.stops, story.stopped_at, strict=True):
        assert f"stopped by SIGTERM after step {step}; the same command continues" in job.screen
        assert job.last_line == "launcher: all ranks ended in order after SIGTERM"
        assert "Traceback" not in job.screen
        job.assert_nothing_left()
    second = story.stopped_at[-1]
    assert sorted(path.name for path in story.broken.glob("iter_*")) == kept(story.stopped_at)
    assert [step["iteration"] for step in steps_of(story.broken)] == list(range(1, second + 1))
    state = train_state(story.broken)
    assert (state["stopped_by"], state["iteration"], state["consumed_samples"]) == ("SIGTERM", second, second * 4)


def test_a_continued_run_is_bitwise_the_unbroken_one(story: Story) -> None:
    assert f"continuing after step {story.stopped_at[0]} with the optimizer's state" in story.stops[1].screen
    names = ("iteration", "loss", "balance_loss", "grad_norm", "lr", "tokens", "trained_tokens")
    broken, unbroken = (
        [[step[name] for name in names] for step in steps_of(save)] for save in (story.broken, story.unbroken)
    )
    assert broken == unbroken
    assert len({step[names.index("trained_tokens")] for step in unbroken}) > 1  # the rows differ from step to step
    for source in (weights, OptimizerSource):
        with source(checkpoint(story.broken)) as one, source(checkpoint(story.unbroken)) as other:
            assert_equal(one, other)


def test_the_export_is_the_checkpoint_bit_for_bit(story: Story) -> None:
    with weights(checkpoint(story.unbroken)) as saved, HFSource(export(story), shape(story)) as exported:
        assert_equal(saved, exported)


def test_transformers_finds_the_loss_that_training_logged(story: Story) -> None:
    """Everything at once, from rows to export: the loss over the validation rows, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(export(story), dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokenizer = AutoTokenizer.from_pretrained(export(story))
    total, trained = 0.0, 0
    for line in (story.unbroken.parent / "validation.jsonl").read_text(encoding="utf-8").splitlines():
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        first = text.index(HEADER) + len(HEADER)
        assert text.startswith(NO_THINKING, first)  # by the template, in every answer; by default it is not trained
        first += len(NO_THINKING)
        last = text.index(END, first) + len(END)
        labels = [
            token if first <= start < last else -100
            for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]
        with torch.no_grad():
            output = model(input_ids=torch.tensor([encoded["input_ids"]]), labels=torch.tensor([labels]))
        count = sum(label != -100 for label in labels)
        total, trained = total + float(output.loss) * count, trained + count
    log = (story.unbroken / "train_log.jsonl").read_text().splitlines()
    first, logged = [json.loads(line) for line in log if "eval_loss" in line]
    assert first["iteration"] == 0 and abs(first["eval_loss"] - math.log(151936)) < 0.2  # --eval_on_start true
    assert logged["trained_tokens"] == trained
    assert math.isclose(logged["eval_loss"], total / trained, rel_tol=1e-6)


def test_the_export_ends_its_turns(story: Story, tiny_moe: Path) -> None:
    """The source, a Base model, ends at another token: a chat model would never stop."""
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tiny_moe / name).read_text())["eos_token_id"] == 151643
        assert END_ID in json.loads((export(story) / name).read_text())["eos_token_id"]


def export(story: Story) -> Path:
    directory = checkpoint(story.unbroken)
    return directory.with_name(f"{directory.name}-hf")


def shape(story: Story) -> Any:
    return read_model_shape(str(story.unbroken))


def weights(directory: Path) -> TorchDistSource:
    return TorchDistSource(directory, read_model_shape(str(directory.parent)))


def assert_equal(one: WeightSource, other: WeightSource) -> None:
    """The same keys, shapes, dtypes and bytes."""
    assert one.entries() == other.entries() and one.entries()
    for key, entry in one.entries().items():
        everything = tuple(slice(0, size) for size in entry.shape)
        first, second = one.read(key, everything), other.read(key, everything)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), key
