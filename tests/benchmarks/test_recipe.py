"""The comparison of the default recipe with a plain loop, at a reduced size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import esper
from benchmarks import recipe
from benchmarks.recipe import CASES, ENTRIES, Row, measure
from esper.config import load_config
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("difference", "half_width", "level"),
    [(-0.5, 0.6, True), (0.5, 0.5, True), (0.0, 0.0, True), (-0.7, 0.6, False), (0.0, float("nan"), False)],
)
def test_level_is_a_difference_whose_interval_holds_0(
    difference: float, half_width: float, level: bool
) -> None:
    assert Row("digits", "rows", [0.9], [0.9], difference, half_width).level == level


def test_the_estimator_is_level_with_the_loop_and_a_spoiled_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CASES, "digits", replace(CASES["digits"], epochs=3))
    honest = measure("digits", "estimator", 3)
    assert abs(honest.difference) < 3, "not `level`: one interval in twenty is unlucky, on some machine"
    assert min(honest.plain) > 0.9

    classifier = esper.GrowingClassifier
    slow = lambda lr, **settings: classifier(lr=0.02 * lr, **settings)  # noqa: E731
    monkeypatch.setattr(esper, "GrowingClassifier", slow)
    spoiled = measure("digits", "estimator", 3)
    assert spoiled.plain == honest.plain
    assert not spoiled.level
    assert spoiled.difference < -5


def test_every_entry_point_is_compared_with_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CASES, "digits", replace(CASES["digits"], epochs=1, batch=300))
    tiny = lambda preset, overrides: load_config(preset=preset, overrides=[*TINY, *overrides])  # noqa: E731
    monkeypatch.setattr(recipe, "load_config", tiny)
    recipe.plain_score.cache_clear()
    recipe.main(["--tasks", "digits", "--seeds", "2", "--json"])
    recipe.plain_score.cache_clear()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["entry"] for row in rows] == list(ENTRIES)
    assert all(0 < score < 1 for row in rows for score in (*row["plain"], *row["ours"]))
    assert all(len(row["plain"]) == len(row["ours"]) == 2 for row in rows)
