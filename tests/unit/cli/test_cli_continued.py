"""A continued run: what has to be the same, what may change and is said, and whose schedule is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3.cli.resolve import ResolvedRun, resolve
from mcore_qwen3.config import parse_args, to_yaml
from mcore_qwen3.errors import ConfigError

WriteCheckpoint = Callable[..., Path]


class Site:
    """A run that was saved after step 4, and the same command with other words."""

    def __init__(self, folder: Path, model: Path, rows: Path, write_checkpoint: WriteCheckpoint) -> None:
        (model / "tokenizer.json").write_text("{}")
        (model / "tokenizer_config.json").write_text("{}")
        self.model, self.save = model, folder / "out"
        self.words = {"load": model, "dataset": rows, "save": self.save, "device": "cpu", "train_iters": 10}
        first = self.run()
        self.iteration = write_checkpoint(self.save, 4)
        shutil.copytree(model, self.iteration / "hf")
        (self.iteration / "run_config.yaml").write_text(to_yaml(first.config), encoding="utf-8")

    def run(self, **words: object) -> ResolvedRun:
        given = [word for name, value in (self.words | words).items() for word in (f"--{name}", str(value))]
        return resolve(parse_args(given, "sft"), 1, {})


@pytest.fixture
def site(tmp_path: Path, moe_dir: Path, rows_file: Path, write_checkpoint: WriteCheckpoint) -> Site:
    return Site(tmp_path, moe_dir, rows_file, write_checkpoint)


def test_the_same_command_continues_without_a_word(site: Site) -> None:
    run = site.run()
    assert run.resume is not None and run.resume.iteration == 4
    assert [note for note in run.notes if "run to continue" in note or "trained with" in note] == []


def test_b52_flags_are_used_and_a_change_is_said_once(site: Site) -> None:
    """B52: saved with weight decay 0.1, now 0.0: this run's flag is what the first step uses."""
    run = site.run(weight_decay=0.0, global_batch_size=8, micro_batch_size=2)
    assert run.config.optim.weight_decay == 0.0
    assert [note for note in run.notes if "run to continue" in note] == [
        "weight_decay is 0.0, in the run to continue it was 0.1: 0.0 is used",
        "global_batch_size is 8, in the run to continue it was 16: 8 is used",
    ]


def test_b52_the_checkpoints_schedule_when_asked_for(site: Site) -> None:
    """B52: saved 0.1, new argument 0.0, "from checkpoint": the first step uses 0.1; limits are taken whole."""
    words = {"weight_decay": 0.0, "lr": 3e-4, "min_lr": 1e-4, "lr_warmup_iters": 3, "adam_beta2": 0.99}
    run = site.run(**words, use_checkpoint_opt_param_scheduler="true")
    optim = run.config.optim
    assert (optim.weight_decay, optim.lr, optim.min_lr, optim.lr_warmup_iters) == (0.1, 1e-5, 0.0, 0)
    assert optim.adam_beta2 == 0.99
    assert [note for note in run.notes if "run to continue" in note] == [
        "adam_beta2 is 0.99, in the run to continue it was 0.95: 0.99 is used"
    ]
    (site.iteration / "run_config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"holds the schedule; seen: no lr, .*run_config\.yaml"):
        site.run(use_checkpoint_opt_param_scheduler="true")


def test_the_checkpoints_schedule_of_weight_decay_and_wsd(site: Site) -> None:
    file = site.iteration / "run_config.yaml"
    ours = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2}
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "linear"}
    given = site.run(**ours, **wsd, lr_warmup_init=1e-6, lr_warmup_iters=2).config
    assert site.run(use_checkpoint_opt_param_scheduler="true", **ours).config.optim.start_weight_decay is None
    file.write_text(to_yaml(given), encoding="utf-8")
    optim = site.run(use_checkpoint_opt_param_scheduler="true").config.optim
    assert {name: getattr(optim, name) for name in ours | wsd} == ours | wsd
    assert (optim.lr_warmup_init, optim.lr_warmup_iters) == (1e-6, 2)
    # An older checkpoint does not have them: it was written when there was nothing but their defaults.
    lines = [line for line in file.read_text().splitlines() if "wsd" not in line and "weight_decay_" not in line]
    file.write_text("\n".join(line for line in lines if "_weight_decay" not in line), encoding="utf-8")
    optim = site.run(use_checkpoint_opt_param_scheduler="true", **ours).config.optim
    assert (optim.weight_decay_incr_style, optim.start_weight_decay, optim.lr_wsd_decay_iters) == (
        "constant",
        None,
        None,
    )


def test_a_run_keeps_its_optimizer(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"the optimizer that it began with; seen: adam in .*--optimizer sgd here"):
        site.run(optimizer="sgd")
    assert site.run(optimizer="sgd", no_load_optim="true").resume is not None
    (site.iteration / "run_config.yaml").write_text("lr: 1e-5")  # written before there was another
    with pytest.raises(ConfigError, match="the optimizer that it began with"):
        site.run(optimizer="sgd")


def test_other_frozen_parameters_are_said(site: Site) -> None:
    notes = [note for note in site.run(freeze_parameters="embedding.").notes if "run to continue" in note]
    assert notes == ["freeze_parameters is embedding., in the run to continue it was empty: embedding. is used"]


def test_more_steps_stretch_the_decay_and_that_is_said(site: Site) -> None:
    notes = [note for note in site.run(train_iters=20).notes if "run to continue" in note]
    assert notes == ["lr_decay_iters is 20, in the run to continue it was 10: 20 is used"]


def test_a_checkpoint_of_another_model_is_refused(site: Site) -> None:
    config = json.loads((site.model / "config.json").read_text())
    (site.model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "rope_theta": 1e4}))
    with pytest.raises(ConfigError) as caught:
        site.run()
    for part in ("the model that it began with", "num_layers 4 there, 2 here", "rope", str(site.iteration / "hf")):
        assert part in str(caught.value)
    assert site.run(resume="never").resume is None


def test_a_changed_tokenizer_is_refused(site: Site) -> None:
    (site.model / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match=r"the tokenizer that it began with.*seen: tokenizer\.json in .*tiny-moe"):
        site.run()


def test_a_changed_template_is_said(site: Site) -> None:
    (site.model / "tokenizer_config.json").write_text('{"chat_template": ""}')
    (note,) = [note for note in site.run().notes if "trained with" in note]
    assert note.startswith("tokenizer_config.json in ") and "iter_0000004" in note
