from __future__ import annotations

import math
from pathlib import Path

import pytest

from esper.foundation.statistics import mean_interval
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.schema import RoundSummary
from esper.watch.finals import differences, final_of
from tests.telemetry.made_up_lanes import made_up_lanes


def run_of(path: Path, config: str = "seed: 1\ntask: digits\n", seed: int = 0, lanes: bool = True) -> Path:
    rows = made_up_lanes(3, members=8, seed=seed)
    accuracy = rows.columns["accuracy"][-1].astype(float)
    mean, ci = mean_interval(accuracy.tolist())
    with RunFolder.create(path, config=config, seed=1) as folder:
        folder.append_metrics(RoundSummary(3, 3, 8, 1, 1.0, accuracy_mean=mean, accuracy_ci=ci))
        if lanes:
            folder.lanes.write(rows)
    return path


def test_runs_with_the_same_members_are_paired(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b", seed=5)]
    finals = [final for run in runs if (final := final_of(run.name, run)) is not None]
    [gap] = differences(finals)
    rows = [final.rows["accuracy"] for final in finals]
    mean, ci = mean_interval((rows[1] - rows[0]).tolist())
    assert (gap.name, gap.baseline, gap.quantity, gap.paired) == ("b", "a", "accuracy", True)
    assert gap.mean == pytest.approx(mean)
    assert gap.ci == pytest.approx(ci)


@pytest.mark.parametrize(
    "other", [{"config": "seed: 2\ntask: digits\n"}, {"config": "seed: 1\ntask: letter\n"}, {"lanes": False}]
)
def test_runs_with_other_members_are_not_paired(tmp_path: Path, other: dict[str, object]) -> None:
    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b", seed=5, **other)]  # type: ignore[arg-type]
    finals = [final for run in runs if (final := final_of(run.name, run)) is not None]
    [gap] = differences(finals)
    assert not gap.paired
    assert gap.ci == pytest.approx(math.hypot(*(final.figures["accuracy"].ci for final in finals)))


def test_a_run_without_rounds_has_no_final_figures(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "young", config="seed: 1\n", seed=1):
        assert final_of("young", tmp_path / "young") is None
    assert differences([]) == []
