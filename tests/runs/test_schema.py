"""Records survive the way to a file and back, and say what is wrong with a foreign one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.runs.schema import (
    Comparison,
    ControllerResult,
    Event,
    RoundSummary,
    from_json,
    json_values,
    paired_differences,
    to_json,
)
from esper.utils.errors import UserError
from esper.utils.statistics import mean_interval, t_quantile


def controller(name: str, accuracy: list[float], members: tuple[int, ...] = (0, 1, 2)) -> ControllerResult:
    flat = [10.0] * len(accuracy)
    return ControllerResult(name, members, accuracy, flat, flat, flat)


def test_summary_round_trip_and_derived_figures() -> None:
    summary = RoundSummary(
        round=2,
        rounds=10,
        members=4,
        member_epochs=80,
        seconds=4.0,
        return_mean=0.5,
        op_shares={"WAIT": 0.75, "PRUNE": 0.25},
        op_shares_by_step=[[1.0, 0.0], [0.5, 0.5]],
        extra={"rent": math.inf},
        anomalies=["member 3 was rolled back"],
    )
    line = json.loads(to_json(summary))
    again = from_json(RoundSummary, line, "metrics.jsonl")
    assert line["return_ci"] is None
    assert math.isnan(again.return_ci)
    assert again.op_shares == summary.op_shares
    assert again.anomalies == summary.anomalies
    assert summary.member_epochs_per_second == 20.0
    assert summary.seconds_left == 16.0
    assert summary.scalars()["op_shares/PRUNE"] == 0.25
    assert "extra/rent" not in summary.scalars()


def test_keys_of_a_later_version_are_passed_over() -> None:
    line = {"round": 1, "rounds": 1, "members": 1, "member_epochs": 1, "seconds": 1.0, "colour": "blue"}
    assert from_json(RoundSummary, line, "metrics.jsonl").round == 1


@pytest.mark.parametrize("data", [None, [], 3, {}, {"round": 1}, {"controllers": 3}])
def test_foreign_records_are_one_sentence(data: object) -> None:
    for kind in (RoundSummary, Comparison, Event):
        with pytest.raises(UserError, match=f"file does not hold a {kind.__name__}: "):
            from_json(kind, data, "file")


def test_numbers_of_any_kind_become_plain() -> None:
    assert json_values({"a": np.float32(0.5), "b": np.arange(2), 3: (math.nan, True)}) == {
        "a": 0.5,
        "b": [0, 1],
        "3": [None, True],
    }


def test_an_event_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="event kind is 'exploded'; allowed are germinated"):
        Event(round=1, step=1, member=0, kind="exploded")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 400))
def test_t_quantile_against_scipy(degrees: int) -> None:
    from scipy import stats

    assert t_quantile(degrees) == pytest.approx(float(stats.t.ppf(0.975, degrees)), abs=3e-3)


def test_mean_interval_of_known_values() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0, float("nan")])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 * 1.0 / math.sqrt(3))
    assert math.isnan(mean_interval([])[0])
    assert math.isnan(mean_interval([1.0])[1])


def test_differences_are_paired_by_member() -> None:
    rows = paired_differences([controller("static", [0.1, 0.5, 0.9]), controller("tamiyo", [0.2, 0.6, 1.0])])
    accuracy = rows[0]
    assert (accuracy.controller, accuracy.baseline, accuracy.quantity) == (
        "tamiyo",
        "static",
        "test_accuracy",
    )
    assert accuracy.mean == pytest.approx(0.1)
    assert accuracy.ci == pytest.approx(0.0, abs=1e-9), (
        "a constant gap has no spread, however much members differ"
    )
    comparison = Comparison("digits", "cnn", [controller("static", [0.1, 0.5, 0.9])], rows)
    assert from_json(Comparison, json.loads(to_json(comparison)), "") == from_json(
        Comparison, json_values(comparison), ""
    )
    with pytest.raises(UserError, match="different members"):
        paired_differences([controller("a", [0.1], (0,)), controller("b", [0.1], (1,))])


def test_unmeasured_numbers_of_an_event_are_nan_and_missing_names_none() -> None:
    event = Event(round=1, step=2, member=3, kind="pruned", numbers={"contribution": math.nan})
    again = from_json(Event, json.loads(to_json(event)), "")
    assert again.slot is None
    assert math.isnan(again.numbers["contribution"])


def test_records_whose_lengths_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of \\[1\\]; expected 2"):
        RoundSummary(1, 1, 1, 1, 1.0, op_shares={"WAIT": 1.0, "PRUNE": 0.0}, op_shares_by_step=[[1.0]])
    with pytest.raises(ValueError, match=r"ControllerResult\.flops has 1 entries; expected 2"):
        ControllerResult("a", [0, 1], [0.1, 0.2], [1.0, 1.0], [1.0, 1.0], [1.0])
