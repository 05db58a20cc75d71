"""`megatron compare` without ranks: its flags, its plain loop by itself, and what first differences point to."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import hf_model, reference_step, samples, write_model

from mcore_qwen3.arch import read_model_shape
from mcore_qwen3.cli.compare import check_hf, differing_settings, training_run
from mcore_qwen3.cli.compare_faults import (
    fault_of_activations,
    fault_of_gradients,
    fault_of_weights,
    matching_order,
)
from mcore_qwen3.cli.compare_loops import Group, relative
from mcore_qwen3.cli.compare_tensors import Pair, parameter_pairs, relative_error
from mcore_qwen3.cli.main import main
from mcore_qwen3.cli.plain_loop import (
    PlainSettings,
    learning_rate,
    load_plain_model,
    plain_loop,
    token_losses,
    weight_decay,
)
from mcore_qwen3.config import COMPARE, parse_command, to_flat_dict
from mcore_qwen3.data.micro_batch import build_micro_batch
from mcore_qwen3.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "steps": 20,
    "optimizer": "adam",
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 3,
    "lr_warmup_init": 1e-5,
    "lr_decay_iters": 15,
    "lr_wsd_decay_iters": 6,
    "lr_wsd_decay_style": "linear",
    "weight_decay": 0.1,
    "start_weight_decay": 0.02,
    "end_weight_decay": 0.2,
    "weight_decay_incr_style": "constant",
    "train_iters": 20,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.9,
    "clip_grad": 1.0,
}
BASE = ["--hf", "hf", "--dataset", "rows.jsonl"]


def test_the_training_run_is_the_users_in_fp32_and_saves_nothing() -> None:
    words = [*BASE, "--steps", "5", "--lr", "1e-3", "--bf16", "true", "--save", "out", "--report_to", "wandb"]
    words += ["--use_precision_aware_optimizer", "true", "--overlap_grad_reduce", "true", "--resume", "auto"]
    parsed = parse_command(words, COMPARE)
    run = training_run(parsed)
    flat = to_flat_dict(run.config)
    wanted = {"load": "hf", "lr": 1e-3, "bf16": False, "train_iters": 5, "resume": "never", "report_to": []}
    wanted |= {"use_precision_aware_optimizer": False, "overlap_grad_reduce": True, "moe_aux_loss_coeff": 0.0}
    assert {name: flat[name] for name in wanted} == wanted
    (note,) = [note for note in run.notes if "no effect" in note]
    assert note.endswith("--bf16, --report_to, --resume, --save, --use_precision_aware_optimizer")
    assert run.explicit >= {"load", "lr", "overlap_grad_reduce"} and not run.explicit & {"bf16", "save", "hf_dir"}
    assert run.command == "sft"
    text = parse_command([*BASE, "--raw_text", "true", "--load", "mine", "--train_iters", "50"], COMPARE)
    assert (training_run(text).command, training_run(text).config.model.load) == ("pt", "mine")
    assert training_run(text).config.train.train_iters == 50, "the schedule is the whole run's"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "rows.jsonl"], "megatron compare needs --hf"),
        ([*BASE, "--train_iters", "10"], "--steps 10 or less"),
        ([*BASE, "--moe_expert_capacity_factor", "1.5"], "the plain loop drops no token"),
        ([*BASE, "--lr_mult", "*.router.weight=0.1"], "trains every parameter at one rate"),
        ([*BASE, "--freeze_parameters", "embedding"], "trains every parameter at one rate"),
        ([*BASE, "--lr_warmup_iters", "20"], "the warm-up must be shorter than the decay"),
    ],
)
def test_refusals(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        parse_command(words, COMPARE)


def test_refusals_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model", moe=True)
    write_model(tmp_path / "other", moe=True, num_hidden_layers=4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n')
    words = ["compare", "--hf", str(tmp_path / "model"), "--dataset", str(rows), "--device", "cpu"]
    monkeypatch.setattr("mcore_qwen3.cli.compare.available_memory", lambda: 1000)
    for more, nodes, said in (
        ([], "1", "1,000 available"),
        ([], "2", "megatron compare runs on one node; seen: NNODES=2"),
        (["--load", str(tmp_path / "other")], "1", "num_layers 4 and 2"),
    ):
        monkeypatch.setenv("NNODES", nodes)
        monkeypatch.setenv("NODE_RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_torch_dist_directory_is_nothing_for_transformers(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", moe=False)
    assert main(["convert", "hf2mcore", str(tmp_path / "hf"), str(tmp_path / "mcore")]) == 0
    check_hf(tmp_path / "hf")
    with pytest.raises(ConfigError, match="--hf is a Hugging Face directory"):
        check_hf(tmp_path / "mcore")


def test_settings_that_two_models_do_not_share_are_named(tmp_path: Path) -> None:
    from mcore_qwen3.arch import read_model_shape

    write_model(tmp_path / "a", moe=True)
    write_model(tmp_path / "b", moe=True, rope_theta=1e4, norm_topk_prob=False)
    ours, theirs = (read_model_shape(tmp_path / name) for name in "ab")
    assert differing_settings(ours, theirs) == [
        "config.json: rope_theta is 1000000.0 in --load and 10000.0 in --hf",
        "config.json: norm_topk_prob is True in --load and False in --hf",
    ]
    assert differing_settings(ours, ours) == []


def test_the_plain_loop_uses_nothing_of_this_project_but_its_data(repo_root: Path) -> None:
    tree = ast.parse((repo_root / "mcore_qwen3" / "cli" / "plain_loop.py").read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = {str(name) for name in modules if str(name).startswith(("mcore_qwen3", "megatron"))}
    assert ours == {"mcore_qwen3.data.batches", "mcore_qwen3.data.micro_batch"}


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
@pytest.mark.parametrize("fall", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_schedules_are_megatrons(style: str, fall: str) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rising = {"constant": "constant", "linear": "linear"}.get(style, "cosine")
    changes = {"lr_decay_style": style, "lr_wsd_decay_style": fall, "weight_decay_incr_style": rising}
    settings = PlainSettings(**SETTINGS | changes)
    group: dict[str, Any] = {"params": []}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    rises = rising != "constant"
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters,
        lr_decay_style=style,
        start_wd=settings.start_weight_decay if rises else settings.weight_decay,
        end_wd=settings.end_weight_decay if rises else settings.weight_decay,
        wd_incr_steps=settings.train_iters,
        wd_incr_style=rising,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=fall,
    )
    for finished in range(20):
        assert learning_rate(settings, finished) == pytest.approx(group["lr"], rel=1e-12), finished
        assert weight_decay(settings, finished) == pytest.approx(group["weight_decay"], rel=1e-12), finished
        scheduler.step(1)


def packs(rows: list[Any], number: int) -> list[Any]:
    """Micro-batches of `number` samples each, padded between and behind."""
    groups = [rows[at : at + number] for at in range(0, len(rows), number)]
    return [build_micro_batch([[(s.ids, s.mask) for s in group]], 128, 0, sample_multiple=8) for group in groups]


@pytest.mark.parametrize("moe", [False, True])
def test_the_plain_loop_keeps_documents_apart(moe: bool, tmp_path: Path) -> None:
    """Its loss and gradients are those of each document alone, by transformers."""
    rows = samples(6, seed=2)
    reference = write_model(tmp_path, moe=moe)
    loss = reference_step(reference, rows)
    model = load_plain_model(tmp_path, torch.device("cpu"))
    trained = sum(int(sample.mask[1:].sum()) for sample in rows)
    step = SimpleNamespace(micro_batches=packs(rows, 3), global_trained_tokens=trained)
    seen: list[Any] = []
    steps: Any = iter([step])
    found = next(plain_loop(model, [steps], PlainSettings(**SETTINGS | {"clip_grad": 0.0}), seen.append))
    assert found.loss == pytest.approx(loss, rel=1e-6)
    wanted = {name: each.grad for name, each in reference.named_parameters()}
    got = {name: each.grad for name, each in model.named_parameters()}
    assert max(relative_error(got[name], wanted[name]) for name in wanted) < 1e-5
    assert found.grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in wanted.values())), rel=1e-6)
    assert len(seen) == 1 and {kind for kind, _ in seen[0]} >= {"embedding", "query", "context", "loss"}
    assert ("router" in {kind for kind, _ in seen[0]}) == moe


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_plain_loops_update(optimizer: str, tmp_path: Path) -> None:
    """One step by the formulas: matrices decay, vectors do not; the gradient is cut to norm 1."""
    write_model(tmp_path, moe=False)
    model = load_plain_model(tmp_path, torch.device("cpu"))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    rows = samples(4)
    step = SimpleNamespace(micro_batches=packs(rows, 2), global_trained_tokens=5)
    settings = PlainSettings(**SETTINGS | {"optimizer": optimizer, "lr_warmup_iters": 0, "clip_grad": 1e-3})
    steps: Any = iter([step])
    made = next(plain_loop(model, [steps], settings, lambda activations: None))
    assert made.grad_norm > 1e-3
    for name, parameter in model.named_parameters():
        decay = 0.1 if parameter.dim() > 1 else 0.0
        cut = parameter.grad  # clipped in place
        if optimizer == "sgd":
            wanted = before[name] - 1e-3 * (cut + decay * before[name])
        else:
            wanted = before[name] * (1 - 1e-3 * decay) - 1e-3 * cut / (cut.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_a_step_without_trained_tokens_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, moe=False)
    model = load_plain_model(tmp_path, torch.device("cpu"))
    before = [each.detach().clone() for each in model.parameters()]
    (row,) = samples(1)
    batch = build_micro_batch([[(row.ids, np.zeros_like(row.mask))]], 64, 0)
    steps: Any = iter([SimpleNamespace(micro_batches=[batch], global_trained_tokens=0)])
    found = next(plain_loop(model, [steps], PlainSettings(**SETTINGS), lambda activations: None))
    assert (found.loss, found.grad_norm) == (0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# What first differences point to: 12 tokens, three documents from 0, 5 and 9; 4 heads of 8 values, 2 groups.
STARTS = [0, 5, 9]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_layer(**ours: torch.Tensor) -> list[Pair]:
    """One layer's activations; what is not given is the same on both sides."""
    value = normal(12, 2, 8, seed=3)
    context = normal(12, 4, 8, seed=4)
    context[STARTS] = value[STARTS].repeat_interleave(2, dim=1)  # the first token of a document sees itself alone
    theirs = {"query": normal(12, 4, 8, seed=1), "key": normal(12, 2, 8, seed=2), "value": value, "context": context}
    return [Pair(kind, 0, kind, kind, ours.get(kind, tensor), tensor) for kind, tensor in theirs.items()]


def pointed(pairs: list[Pair]) -> str:
    first = next(pair for pair in pairs if pair.error > 1e-3)
    return fault_of_activations(pairs, first, STARTS, 1e-3)


def changed(kind: str, tokens: Any, by: float = 0.5) -> torch.Tensor:
    (pair,) = [pair for pair in attention_layer() if pair.kind == kind]
    tensor = pair.theirs.clone()
    tensor[tokens] += by * normal(*tensor[tokens].shape, seed=9)
    return tensor


INSIDE = [n for n in range(12) if n not in STARTS]


@pytest.mark.parametrize(
    ("ours", "named"),
    [
        ({"query": changed("query", INSIDE), "key": changed("key", INSIDE)}, "the rotary embedding: its base"),
        ({"query": changed("query", slice(5, 12)), "key": changed("key", slice(5, 12))}, "position ids: they do not start anew"),
        ({"query": changed("query", slice(None))}, "q_proj, k_proj, q_norm or k_norm"),
        ({"query": changed("query", slice(None)), "value": changed("value", slice(None))}, "input_layernorm, or the projections"),
        ({"query": attention_layer()[0].theirs[:, [1, 0, 3, 2]]}, "head order: our heads of the query are transformers' heads [1, 0, 3, 2]"),
        ({"context": changed("context", [6, 7, 9, 10])}, "the mask: documents of a pack see each other"),
        ({"context": changed("context", slice(0, 4))}, "the mask: tokens see what comes after them"),
        ({"context": changed("context", INSIDE)}, "the softmax scale"),
        ({"context": attention_layer()[3].theirs.roll(1, dims=1)}, "head order: our heads of attention's result"),
    ],
)  # fmt: skip
def test_activations_point_to(ours: dict[str, torch.Tensor], named: str) -> None:
    assert pointed(attention_layer(**ours)).startswith(named)


def test_key_value_heads_that_go_to_the_wrong_query_heads() -> None:
    pairs = attention_layer()
    value, context = pairs[2].theirs, changed("context", INSIDE)
    context[STARTS] = value[STARTS].repeat(1, 2, 1)  # 0 1 0 1 instead of 0 0 1 1
    assert pointed(attention_layer(context=context)) == (
        "head grouping: our query heads take the key-value heads [0, 1, 0, 1]"
    )


def test_routers_point_to() -> None:
    chosen = torch.tensor([[0.0, 0.6, 0.2, 0.0], [0.3, 0.0, 0.0, 0.5]])
    normalised = chosen / chosen.sum(dim=1, keepdim=True)
    for ours, named in (
        (normalised, "norm_topk_prob: the same experts"),
        (chosen.clamp(max=0.4), "the router's weights or its softmax"),
        (chosen.flip(0), "the norm before the MLP, or the router: 100.0% of the tokens go to other experts"),
    ):
        pair = Pair("router", 0, "router", "gate", ours, chosen)
        assert fault_of_activations([pair], pair, STARTS, 1e-3).startswith(named)


def test_weights_point_to() -> None:
    shape: Any = SimpleNamespace(num_attention_heads=4, num_query_groups=2)
    theirs = {
        f"model.layers.0.self_attn.{name}_proj.weight": normal(8 * heads, 16, seed=heads + at)
        for at, (name, heads) in enumerate((("q", 4), ("k", 2), ("v", 2)))
    } | {"model.layers.0.mlp.down_proj.weight": normal(6, 5)}
    q, k, _, down = theirs.values()

    def fault(name: str, ours: torch.Tensor) -> str:
        full = next(each for each in theirs if name in each)
        return fault_of_weights(Pair("weight", 0, "", full, ours, theirs[full]), shape, theirs.get)

    mixed = torch.cat([q[:16], k])
    assert fault("q_proj", mixed) == "head order: our heads of q_proj are transformers' q0 q1 k0 k1"
    assert fault("q_proj", q[:, [1, 0, *range(2, 16)]]) == "column order: ours 0 is theirs 1, ours 1 is theirs 0"
    assert fault("down_proj", down[[0, 1, 2, 3, 5, 4]]) == "row order: ours 4 is theirs 5, ours 5 is theirs 4"
    assert fault("q_proj", q + 1).startswith("the two directories hold other weights")
    assert matching_order(q, q) is None, "in order is no fault"


def test_gradients_point_to() -> None:
    assert fault_of_gradients([(0.5, 0.5), (0.5, 0.5001)]).startswith("a scale: every gradient is 0.5001 times")
    assert "1 of 3 parameters off in length" in fault_of_gradients([(0.0, 1.0), (0.9, 0.3), (0.0, 1.0)])


def test_the_measures() -> None:
    assert relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([math.nan]), torch.ones(1)) == math.inf
    assert relative(1.1, 1.0) == pytest.approx(0.1)
    assert (relative(0.0, 0.0), relative(1.0, 0.0), relative(math.nan, 1.0)) == (0.0, math.inf, math.inf)


def test_tensors_that_no_rank_has_left_are_an_error(tmp_path: Path) -> None:
    """Else what is missing would pass as equal; a hole in a tensor is no number, and differs."""
    write_model(tmp_path, moe=True)
    shape = read_model_shape(tmp_path)
    with pytest.raises(RuntimeError, match="no rank has left a gradient of embedding"):
        list(parameter_pairs("gradient", [], lambda name: None, shape))


def test_a_group_names_the_first_that_differs_and_the_worst_that_agrees() -> None:
    group = Group("things", 1e-3)
    ones = torch.ones(3)
    for name, error in (("a", 1e-5), ("b", 1e-4), ("c", 0.5), ("d", 0.9)):
        group.add(Pair("weight", 0, f"our {name}", name, ones + error, ones))
    group.fault = "a thing"
    lines = list(group.lines())
    assert lines[0].startswith("things, 4: 2 differ; the first")
    assert lines[1:3] == ["  megatron      our c", "  transformers  c"]
    assert lines[4] == "  points to     a thing"
    assert group.worst[1] == "b"
    assert list(Group("none", 1e-3).lines()) == ["none, 0: the same, bit for bit"]


def test_a_mask_that_is_only_causal_would_be_seen(tmp_path: Path) -> None:
    """The plain loop's own mask is what keeps documents apart: without it the losses are others."""
    model = hf_model(moe=False)
    (batch,) = packs(samples(3), 3)
    apart = token_losses(model, batch)
    together = model(input_ids=batch.tokens, use_cache=False).logits[0]
    joined = torch.nn.functional.cross_entropy(together, batch.labels[0], reduction="none")
    trained = batch.loss_mask[0] > 0
    assert float((apart - joined)[trained].detach().abs().max()) > 0.1
