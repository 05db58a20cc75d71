"""The page of `megatron report` in a headless Chromium: two real runs, drawn, named, without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_kit import Site
from helpers.browser import opened, started
from helpers.comparing import rows
from helpers.real_runs import two_runs
from helpers.tiny import write_model

NAMES = ["lr-1e-3", "lr-3e-3-balanced"]


@pytest.fixture(scope="module")
def page(site: Site) -> Path:
    """The report of two runs."""
    write_model(site.folder / "model", moe=True)
    runs = two_runs(site.folder, site.folder / "model", rows(site.folder))
    done = site.run("report", *runs, "--output", "two.html")
    assert done.returncode == 0, done.stderr
    assert "lr-3e-3-balanced: 24 steps" in done.stdout and "note" not in done.stdout
    return site.folder / "two.html"


@pytest.fixture(scope="module")
def browser(repo_root: Path) -> Iterator[Any]:
    with started(repo_root) as one:
        yield one


@pytest.fixture(scope="module")
def shown(page: Path, browser: Any) -> tuple[Any, list[str]]:
    return opened(browser, page, color_scheme="light")


def test_both_runs_are_drawn_and_named_without_an_error(shown: tuple[Any, list[str]]) -> None:
    page, wrong = shown
    assert wrong == []
    assert page.title() == f"Training report: {', '.join(NAMES)}"
    for chart in (
        "loss",
        "eval_loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "memory_gib",
        "balance_loss",
        "expert_load",
    ):
        curves = page.locator(f"#chart-{chart} path.curve:not(.overruled)")
        assert [curves.nth(at).get_attribute("data-run") for at in range(curves.count())] == NAMES[-curves.count() :]
        assert curves.count() == (1 if chart == "balance_loss" else 2)
        for at in range(curves.count()):
            box = curves.nth(at).bounding_box()
            assert box["width"] > 200 and (box["height"] > 5 or chart in ("lr", "memory_gib", "tokens_per_second"))
        for name in NAMES[-curves.count() :]:
            assert name in page.locator(f"#chart-{chart} .values").inner_text()
    assert page.locator("#chart-loss path.overruled").count() == 1, "the four steps that were done again"
    assert page.locator("#chart-loss text").all_text_contents().count("step") == 1
    assert page.locator("figure.heat").count() == 2


def test_tables_tell_settings_and_events(shown: tuple[Any, list[str]]) -> None:
    page, _ = shown
    settings = page.locator("#settings tbody tr").all_inner_texts()
    cells = {row.split("\t")[0]: row.split("\t")[1:] for row in settings}
    assert cells["lr"] == ["0.001", "0.003"]
    assert cells["moe_aux_loss_coeff"] == ["0.0", "0.01"]
    assert "global_batch_size" not in cells
    events = [row.split("\t") for row in page.locator("#events tbody tr").all_inner_texts()]
    second = [(step, kind) for step, run, kind, _ in events if run.strip() == NAMES[1]]
    assert second == [
        ("0", "start"), ("8", "save"), ("16", "save"), ("16", "memory"), ("16", "stop"),
        ("16", "resume"), ("20", "save"), ("20", "memory"), ("20", "stop"),
        ("16", "resume"), ("24", "save"), ("24", "memory"), ("24", "stop"),
    ]  # fmt: skip
    assert any("4 step(s) past it overruled" in row[3] for row in events)


def test_the_pointer_shows_values(shown: tuple[Any, list[str]], page: Path) -> None:
    view, wrong = shown
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    steps, losses = data["runs"][0]["series"]["loss"]
    drawing = view.locator("#chart-loss svg")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    view.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + box["height"] / 2)
    values = view.locator("#chart-loss .values").inner_text()
    at = next(at for at, step in enumerate(steps) if f"{NAMES[0]} step {step}: " in values)
    assert 4 < at < 20
    assert f"step {steps[at]}: {losses[at]:.5g}" in values
    assert view.locator("#chart-loss line.cross").get_attribute("visibility") == "visible"
    assert f"step {steps[at]}" in view.locator("#chart-grad_norm .values").inner_text(), "all charts show the step"
    heat = view.locator("figure.heat canvas").first
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    view.mouse.move(box["x"] + 3, box["y"] + box["height"] - 3)
    load = data["runs"][0]["loads"]["loads"][0][-1]
    assert f"step 1, layer with experts 1: {load:.5g}" in view.locator("figure.heat .values").first.inner_text()
    assert wrong == []


def test_runs_hide_and_scales_change(shown: tuple[Any, list[str]]) -> None:
    page, wrong = shown
    path = page.locator("#chart-loss path.curve:not(.overruled)")
    before = path.first.get_attribute("d")
    page.get_by_label("logarithmic").check()
    assert path.first.get_attribute("d") != before
    assert "logarithmic" in page.locator("#chart-loss text").all_text_contents()
    page.get_by_label("logarithmic").uncheck()
    assert path.first.get_attribute("d") == before
    page.get_by_label("smooth").check()
    assert page.locator("#chart-loss path.raw").count() == 2
    page.get_by_label("smooth").uncheck()
    page.get_by_label(NAMES[1], exact=True).uncheck()
    assert [path.nth(at).get_attribute("data-run") for at in range(path.count())] == NAMES[:1]
    page.get_by_label(NAMES[1], exact=True).check()
    assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_paper(scheme: str, page: Path, browser: Any) -> None:
    """The contrast of WCAG 2 (AA): 4.5 to 1 for text, 3 to 1 for curves."""
    view, wrong = opened(browser, page, color_scheme=scheme)
    colours = view.evaluate(
        "['--paper', '--panel', '--ink', '--soft', '--warn', ...Array.from({length: 8}, (_, n) => `--c${n}`)].map("
        "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim())"
    )
    assert wrong == []
    assert contrast("#ffffff", view.evaluate(_PAPER)) == pytest.approx(1 if scheme == "light" else 19, abs=1)
    paper, panel, *texts = colours
    for number, colour in enumerate(texts):
        assert min(contrast(colour, ground) for ground in (paper, panel)) >= (4.5 if number < 3 else 3), (
            colour,
            scheme,
        )


_PAPER = """() => '#' + getComputedStyle(document.body).backgroundColor.match(/\\d+/g)
    .map(part => Number(part).toString(16).padStart(2, '0')).join('')"""


def contrast(one: str, other: str) -> float:
    """By WCAG 2.2's relative luminance, of two colours as #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_hostile_run_is_shown_as_text(site: Site, browser: Any) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    folder = site.folder / hostile
    folder.mkdir()
    records = [{"event": "start", "iteration": 0}, {"iteration": 1, "loss": 2.0, "dataset_loss": {hostile: 1.0}}]
    records += [{"event": "skipped", "iteration": 1, "reason": f"</script><script>alert(2)</script>{hostile}"}]
    (folder / "train_log.jsonl").write_text("\n".join(map(json.dumps, records)))
    empty = site.folder / "empty"
    empty.mkdir()
    (empty / "train_log.jsonl").touch()
    assert site.run("report", folder, empty, "--output", "hostile.html").returncode == 0
    view, wrong = opened(browser, site.folder / "hostile.html")
    view.wait_for_timeout(200)
    assert wrong == []
    assert view.locator("img").count() == 0
    assert view.locator("script").count() == 2
    assert hostile in view.title()
    assert f"alert(2)</script>{hostile}" in view.locator("#events").inner_text()
    assert "empty: the log has no finished step" in view.locator("#summary").inner_text()
