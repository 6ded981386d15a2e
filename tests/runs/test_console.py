"""The views of a running run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from esper.runs.console import (
    JsonView,
    PlainView,
    QuietView,
    duration,
    open_view,
    plain_line,
)
from esper.runs.schema import RoundSummary


def summary(number: int, **more: object) -> RoundSummary:
    return RoundSummary(
        round=number,
        rounds=20,
        members=16,
        member_epochs=480 * number,
        seconds=4.0 * number,
        return_mean=0.1 * number,
        return_ci=0.02,
        accuracy_mean=0.913,
        accuracy_ci=0.008,
        parameter_ratio_mean=1.42,
        op_shares={"WAIT": 0.7, "GERMINATE": 0.2, "PRUNE": 0.1},
        **more,  # type: ignore[arg-type]
    )


def screen(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("terminal", "options", "kind"),
    [
        (True, {}, PlainView),
        (False, {}, PlainView),
        (True, {"quiet": True}, QuietView),
        (True, {"json_lines": True}, JsonView),
        (False, {"json_lines": True, "quiet": True}, JsonView),
    ],
)
def test_the_view_is_the_one_that_was_asked_for(terminal: bool, options: dict[str, bool], kind: type) -> None:
    assert type(open_view(screen(terminal), 20, **options)) is kind


def test_plain_lines_hold_no_control_codes() -> None:
    console = screen(False)
    open_view(console, 20).update(summary(1, anomalies=["member 4 was rolled back"]))
    first, second = shown(console).splitlines()
    assert first == plain_line(summary(1))
    assert first.startswith("round 1/20  return +0.100 ± 0.020  accuracy 91.3 ± 0.8 %  parameters x 1.42")
    assert first.endswith("1:16 left  WAIT 70% GERMINATE 20% PRUNE 10%")
    assert second == "  ! member 4 was rolled back"


def test_json_lines_are_what_the_metrics_file_gets() -> None:
    console = screen(True)
    open_view(console, 20, json_lines=True).update(summary(1))
    line = json.loads(shown(console))
    assert line["round"] == 1
    assert line["kl"] is None


def test_unmeasured_figures_are_dashes() -> None:
    line = plain_line(RoundSummary(round=1, rounds=2, members=1, member_epochs=0, seconds=0.0))
    assert "return –  accuracy – %" in line


def test_durations() -> None:
    assert [duration(s) for s in (0, 61, 3723, float("nan"))] == ["0:00", "1:01", "1:02:03", "–"]
