"""What a run prints."""

from __future__ import annotations

from esper.runs.console import duration, round_lines
from esper.runs.schema import RoundSummary

SHARES = {"WAIT": 0.7, "GERMINATE": 0.2, "PRUNE": 0.1}
FIRST = RoundSummary(
    1, 20, 16, 480, 4.0, 0.1, 0.02, 0.913, 0.008, 1.42, op_shares=SHARES, anomalies=["member 4 broke"]
)


def test_a_round_is_a_line_and_one_for_each_anomaly() -> None:
    first, second = round_lines(FIRST).splitlines()
    assert first.startswith("round 1/20  return +0.100 ± 0.020  accuracy 91.3 ± 0.8 %  parameters x 1.42")
    assert first.endswith("1:16 left  WAIT 70% GERMINATE 20% PRUNE 10%")
    assert second == "  ! member 4 broke"


def test_unmeasured_figures_are_dashes_and_durations_are_read_as_clocks() -> None:
    line = round_lines(RoundSummary(round=1, rounds=2, members=1, member_epochs=0, seconds=0.0))
    assert "return –  accuracy – %" in line
    assert [duration(s) for s in (0, 61, 3723, float("nan"))] == ["0:00", "1:01", "1:02:03", "–"]
