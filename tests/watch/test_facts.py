from __future__ import annotations

import math
from pathlib import Path

import pytest

from esper.runs.run_folder import RunFolder
from esper.runs.schema import Curve, Growth, RoundSummary
from esper.utils.statistics import mean_interval
from esper.watch.facts import ALONE, BY_SAMPLES, PAIRED, UNPAIRED, Final, differences, final_of
from tests.runs.made_up import made_up_lanes


def finals_of(*runs: Path) -> list[Final]:
    return [final for run in runs if (final := final_of(run.name, run)) is not None]


def run_of(path: Path, config: str = "seed: 1\ntask: digits\n", seed: int = 0, lanes: bool = True) -> Path:
    rows = made_up_lanes(3, members=8, seed=seed)
    accuracy = rows.columns["accuracy"][-1].astype(float)
    mean, ci = mean_interval(accuracy.tolist())
    with RunFolder.create(path, config=config, seed=1) as folder:
        folder.metrics_file.append(RoundSummary(3, 3, 8, 1, 1.0, accuracy_mean=mean, accuracy_ci=ci))
        if lanes:
            folder.lanes.write(rows)
    return path


def test_runs_with_the_same_members_are_paired(tmp_path: Path) -> None:
    finals = finals_of(run_of(tmp_path / "a"), run_of(tmp_path / "b", seed=5))
    [gap] = differences(finals)
    rows = [final.rows["accuracy"] for final in finals]
    mean, ci = mean_interval((rows[1] - rows[0]).tolist())
    assert (gap["name"], gap["baseline"], gap["quantity"], gap["basis"]) == ("b", "a", "accuracy", PAIRED)
    assert gap["mean"] == pytest.approx(mean)
    assert gap["ci"] == pytest.approx(ci)


@pytest.mark.parametrize(
    "other", [{"config": "seed: 2\ntask: digits\n"}, {"config": "seed: 1\ntask: letter\n"}, {"lanes": False}]
)
def test_runs_with_other_members_are_not_paired(tmp_path: Path, other: dict[str, object]) -> None:
    finals = finals_of(run_of(tmp_path / "a"), run_of(tmp_path / "b", seed=5, **other))  # type: ignore[arg-type]
    [gap] = differences(finals)
    assert gap["basis"] == UNPAIRED
    assert gap["ci"] == pytest.approx(math.hypot(*(final.figures["accuracy"][1] for final in finals)))


def test_a_run_without_rounds_has_no_final_figures(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "young", config="seed: 1\n", seed=1):
        assert final_of("young", tmp_path / "young") is None
    assert differences([]) == []


def growth_of(path: Path, members: int, seed: int, score: str = "accuracy", samples: int = 300) -> Path:
    rows = made_up_lanes(0, members=members, seed=seed)
    curve = Curve("grown", [0.5], [10], [1.0])
    config = "seed: 1\ntask: Net\ntrain: 900 samples\nval: 300 samples\n"
    with RunFolder.create(path, kind="grow", config=config, seed=1) as folder:
        folder.write(Growth("Net", "habit", score, 9, True, [curve], (), samples))
        folder.metrics_file.append(RoundSummary(9, 9, members, 1, 1.0))
        folder.lanes.write(rows)
    return path


@pytest.mark.parametrize(
    ("members", "score", "samples", "basis"),
    [
        (8, "accuracy", 300, PAIRED),
        (1, "accuracy", 300, BY_SAMPLES),
        (1, "accuracy", 0, ALONE),
        (1, "R²", 300, ALONE),
    ],
)
def test_growths_are_set_side_by_side_by_how_they_ended(
    tmp_path: Path, members: int, score: str, samples: int, basis: str
) -> None:
    runs = [growth_of(tmp_path / name, members, seed, score, samples) for seed, name in enumerate("ab")]
    finals = finals_of(*runs)
    gaps = {gap["quantity"]: gap for gap in differences(finals)}
    assert set(gaps) == {score, "parameter_ratio"}, "a growth is paid no return"
    a, b = (final.rows["accuracy"] for final in finals)
    assert gaps[score]["basis"] == basis
    assert gaps[score]["mean"] == pytest.approx(float(b.mean() - a.mean()))
    if basis == PAIRED:
        assert gaps[score]["ci"] == pytest.approx(mean_interval((b - a).tolist())[1])
    elif basis == BY_SAMPLES:
        shrunk = [(300 * float(share[0]) + 1) / 302 for share in (a, b)]
        assert gaps[score]["ci"] == pytest.approx(
            1.959964 * math.sqrt(sum(p * (1 - p) / 302 for p in shrunk))
        )
    else:
        assert math.isnan(gaps[score]["ci"])


def test_scores_of_two_kinds_have_no_difference(tmp_path: Path) -> None:
    finals = finals_of(growth_of(tmp_path / "a", 1, 0), growth_of(tmp_path / "b", 1, 1, score="R²"))
    assert {gap["quantity"] for gap in differences(finals)} == {"parameter_ratio"}
