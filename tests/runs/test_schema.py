"""Records survive the way to a file and back, and say what is wrong with a foreign one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

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


def controller(name: str, accuracy: list[float]) -> ControllerResult:
    flat = [10.0] * len(accuracy)
    return ControllerResult(name, (0, 1, 2), accuracy, flat, flat, flat)


def test_summary_round_trip_and_derived_figures() -> None:
    shares = {"op_shares": {"WAIT": 0.75, "PRUNE": 0.25}, "op_shares_by_step": [[1.0, 0.0], [0.5, 0.5]]}
    notes = {"extra": {"rent": math.inf}, "anomalies": ["member 3 was rolled back"]}
    summary = RoundSummary(
        2, 10, members=4, member_epochs=80, seconds=4.0, return_mean=0.5, **shares, **notes
    )  # type: ignore[arg-type]
    line = json.loads(to_json(summary))
    again = from_json(RoundSummary, line | {"colour": "blue"}, "metrics.jsonl")  # a key of a later version
    assert line["return_ci"] is None
    assert math.isnan(again.return_ci)
    assert again.op_shares == summary.op_shares
    assert again.anomalies == summary.anomalies
    assert summary.member_epochs_per_second == 20.0
    assert summary.seconds_left == 16.0
    assert summary.scalars()["op_shares/PRUNE"] == 0.25
    assert "extra/rent" not in summary.scalars()


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


def test_differences_are_paired_by_member() -> None:
    rows = paired_differences([controller("static", [0.1, 0.5, 0.9]), controller("tamiyo", [0.2, 0.6, 1.0])])
    accuracy = rows[0]
    names = (accuracy.controller, accuracy.baseline, accuracy.quantity)
    assert names == ("tamiyo", "static", "test_accuracy")
    assert accuracy.mean == pytest.approx(0.1)
    assert accuracy.ci == pytest.approx(0.0, abs=1e-9), "a constant gap, however much members differ"


def test_an_event_is_checked_and_its_unmeasured_numbers_are_nan() -> None:
    event = Event(round=1, step=2, member=3, kind="pruned", numbers={"contribution": math.nan})
    again = from_json(Event, json.loads(to_json(event)), "")
    assert again.slot is None
    assert math.isnan(again.numbers["contribution"])
    with pytest.raises(UserError, match="file does not hold a Event: kind: Input should be 'germinated'"):
        from_json(Event, {"round": 1, "step": 1, "member": 0, "kind": "exploded"}, "file")
