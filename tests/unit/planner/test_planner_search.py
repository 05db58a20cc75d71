"""The search for a layout: what it finds is what looking at everything finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_qwen3.arch import resolve_layout
from mcore_qwen3.cli.resolve import layout_of
from mcore_qwen3.config import RunConfig, with_values
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.planner.calibration import load_calibration
from mcore_qwen3.planner.gpus import find_gpu
from mcore_qwen3.planner.layout_words import layout_words, read_layout
from mcore_qwen3.planner.memory import GIB, Account, heaviest_account, stage_account
from mcore_qwen3.planner.models import find_model
from mcore_qwen3.planner.optimizers import best_of, fewest_of, lightest_of
from mcore_qwen3.planner.search import Plan, Search, for_layout, pipeline_cuts, sizes
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.step_time import estimate_step


def search(model: str = "30B-A3B", gpu: str = "h100-80", length: int = 8192, batch: int = 64, **fixed: Any) -> Search:
    calibration = load_calibration()
    settings = Settings(
        row_length=length,
        effective_length=float(length),
        global_batch_size=batch,
        micro_batch_size=fixed.get("micro_batch_size", 1),
        moe_imbalance=calibration.natural_imbalance,
    )
    return Search(shape=find_model(model), gpu=find_gpu(gpu), settings=settings, fixed=fixed, calibration=calibration)


def explained(look: Search, gpus: int, words: str) -> Plan:
    """The plan of a layout that is written in words."""
    run = with_values(RunConfig(), {"sequence_parallel": True, **read_layout([words])})
    layout = layout_of(run, gpus, look.shape)
    granularity = run.model.recompute_granularity
    return look.one(layout, replace(for_layout(look.settings, layout), recompute_granularity=granularity))


def unpruned(look: Search, gpus: int) -> tuple[list[tuple[float, tuple[int, ...], bool]], int]:
    """(seconds, sizes, whether at the edge) of the ten best, by costing every choice of every start; and how many those are."""
    usable, number = look.gpu.memory_gib * GIB, 0
    safe: dict[tuple[int, ...], float] = {}
    fitting: dict[tuple[int, ...], float] = {}
    for start in look._starts(gpus):
        place = sizes(start.layouts[0])
        for layout, settings in look._choices(start):
            number += 1
            account = heaviest_account(look.shape, layout, settings)
            for kept, limit in ((safe, account.high), (fitting, account.total)):
                if limit <= usable:
                    step = estimate_step(look.shape, layout, settings, look.gpu, look.calibration)
                    kept[place] = min(step.seconds, kept.get(place, step.seconds))
    table = sorted((seconds, place, False) for place, seconds in safe.items())
    table += sorted((seconds, place, True) for place, seconds in fitting.items() if place not in safe)
    return table[:10], number


SMALL_SEARCHES = [
    ("30B-A3B", "h100-80", 8, {}),
    ("30B-A3B", "a100-40", 32, {}),
    ("30B-A3B", "h200-141", 8, {"length": 32768}),
    ("30B-A3B", "h100-80", 16, {"pipeline_model_parallel_size": 2}),
    ("8B", "h100-80", 4, {}),
    ("32B", "h20-96", 16, {"length": 32768}),
    ("4B", "rtx4090-24", 8, {"batch": 16}),
    ("235B-A22B", "h200-141", 48, {"batch": 96}),
]


@pytest.mark.parametrize(("model", "gpu", "gpus", "more"), SMALL_SEARCHES)
def test_the_table_is_that_of_costing_everything(
    model: str, gpu: str, gpus: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = search(model, gpu, **more)
    expected, number = unpruned(look, gpus)
    costed = 0

    def count(*arguments: Any) -> Account:
        nonlocal costed
        costed += 1
        return heaviest_account(*arguments)

    monkeypatch.setattr("mcore_qwen3.planner.search.heaviest_account", count)
    plans = look.best(gpus, 10)
    found = [(plan.step.seconds, sizes(plan.layout), plan.at_the_edge(look.gpu)) for plan in plans]
    assert found == [(pytest.approx(seconds), place, edge) for seconds, place, edge in expected]
    assert found and costed < number


def test_few_accounts_are_made_for_a_thousand_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `megatron plan` takes is these: fewer than a thousand of the 13,220 choices."""
    look = search("235B-A22B", batch=2048)
    choices = sum(len(list(look._choices(start))) for start in look._starts(1024))
    costed = 0

    def count(*arguments: Any) -> Account:
        nonlocal costed
        costed += 1
        return heaviest_account(*arguments)

    monkeypatch.setattr("mcore_qwen3.planner.search.heaviest_account", count)
    assert len(look.best(1024, 10)) == 10
    assert costed < choices / 8, (costed, choices)


def test_several_optimizers_are_one_table() -> None:
    """The best of each TP, CP, PP, EP and expert-TP over all searches, what fits with room first."""
    plain = search("30B-A3B")
    host = replace(
        plain, settings=replace(plain.settings, optimizer_offload_fraction=1.0), optimizer=("in host memory", {})
    )
    plans = best_of([plain, host], 8, 10)
    one_by_one = [plan for look in (plain, host) for plan in look.best(8, 1000)]
    best = {sizes(plan.layout): (plan.at_the_edge(plain.gpu), plan.step.seconds) for plan in plans}
    for plan in one_by_one:
        place = (plan.at_the_edge(plain.gpu), plan.step.seconds)
        assert place >= best.get(sizes(plan.layout), max(best.values()))
    assert {plan.optimizer[0] for plan in one_by_one} == {"as given", "in host memory"}
    assert list(best.values()) == sorted(best.values()) and len(best) == len(plans) == 10
    assert fewest_of([plain, host], 64) == host.fewest_gpus(64) == 4 and plain.fewest_gpus(64) == 8
    lightest = lightest_of([plain, host], 4)
    assert lightest is not None and lightest.optimizer[0] == "in host memory"


def test_what_fits_only_just_comes_last() -> None:
    look = search("235B-A22B", batch=128)
    plans = look.best(64, 10)
    edges = [plan.at_the_edge(look.gpu) for plan in plans]
    assert edges == sorted(edges) and all(plan.fits(look.gpu) for plan in plans)
    assert len({layout_words(plan.layout) for plan in plans}) == len(plans) == 10


def test_fewest_gpus_and_one_node_less() -> None:
    look = search()
    gpus = look.fewest_gpus(64)
    assert gpus == 8  # 2 nodes are what people use; one holds it with everything recomputed
    assert look.best(gpus, 1) and not look.best(4, 1)
    roomy = look.fewest_gpus(64, at_the_edge=False)
    assert roomy == 16
    assert not look.best(roomy, 1)[0].at_the_edge(look.gpu)
    assert all(plan.at_the_edge(look.gpu) for plan in look.best(8, 10))
    lightest = look.lightest(4)
    assert lightest is not None and not lightest.fits(look.gpu)


def test_fixed_flags_are_kept() -> None:
    look = search(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        micro_batch_size=2,
    )
    plans = look.best(32, 10)
    assert plans
    for plan in plans:
        assert (plan.layout.tensor, plan.layout.pipeline, plan.settings.micro_batch_size) == (2, 2, 2)


def test_every_plan_obeys_the_rules_and_divides_the_batch() -> None:
    look = search("Coder-480B-A35B-Instruct", gpu="h200-141", batch=256)
    for plan in look.best(256, 10):
        layout = plan.layout
        assert resolve_layout(
            256,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            context=layout.context,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            sequence_parallel=layout.sequence_parallel,
            virtual_pipeline=layout.virtual_pipeline,
            first_stage_layers=layout.first_stage_layers,
            last_stage_layers=layout.last_stage_layers,
            account_for_embedding=layout.account_for_embedding,
            account_for_loss=layout.account_for_loss,
            shape=look.shape,
        )
        assert 256 % (plan.settings.micro_batch_size * layout.data) == 0


def test_a_stage_that_is_left_out_holds_no_more() -> None:
    """Only stages that differ are looked at; here all are."""
    look = search("235B-A22B", batch=128)
    for words in ("TP2 PP8 EP8 FIRST11 LAST11 full", "PP16x3 EP4 L+2 full", "TP4 PP4 EP16 FIRST23 LAST23"):
        plan = explained(look, 64, words)
        accounts = [
            stage_account(look.shape, plan.layout, plan.settings, stage).total for stage in range(plan.layout.pipeline)
        ]
        assert plan.account.total == max(accounts) and accounts.index(max(accounts)) == plan.account.stage


def test_cuts_of_94_layers() -> None:
    cuts = {(cut.virtual, cut.first, cut.embedding) for cut in pipeline_cuts(94, 8, None)}
    assert cuts == {(virtual, None, True) for virtual in (1, 2, 3, 4, 6, 12)}  # 94 + 2 = 96 = 8 x 12
    (balanced,) = pipeline_cuts(94, 9, None)
    assert (balanced.first, balanced.last) == (8, 9)  # 8 + 7 x 11 + 9
    assert {cut.virtual for cut in pipeline_cuts(48, 4, None)} == {1, 2, 3, 4, 6, 12}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("TP2 PP8x3 EP8", {"tensor": 2, "pipeline": 8, "virtual_pipeline": 3, "expert": 8}),
        ("tp2,ep8 CP4/ETP2", {"tensor": 2, "expert": 8, "context": 4, "expert_tensor": 2}),
    ],
)
def test_words_of_a_layout(text: str, flags: dict[str, int]) -> None:
    names = {"tensor", "pipeline", "expert", "virtual_pipeline"}
    expected = {
        f"{name}_model_parallel_size" if name in names else f"{name}_parallel_size": n for name, n in flags.items()
    }
    assert read_layout([text]) == expected


@pytest.mark.parametrize("text", ["TP", "TP2 TP4", "DP8", "TP2x3", "fast", ""])
def test_words_that_are_no_layout(text: str) -> None:
    with pytest.raises(ConfigError, match="a layout"):
        read_layout([text])


def test_words_are_read_back() -> None:
    look = search("235B-A22B", batch=128)
    for plan in look.best(64, 10):
        again = explained(look, 64, layout_words(plan.layout))
        assert replace(again.layout, notes=()) == replace(plan.layout, notes=())
