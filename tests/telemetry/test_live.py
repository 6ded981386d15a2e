"""The views of a running run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from esper.telemetry.live import (
    JsonView,
    LiveView,
    PlainView,
    QuietView,
    open_view,
    plain_line,
    sparkline,
)
from esper.telemetry.numbers import duration
from esper.telemetry.schema import Film, FilmReel, RoundSummary


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


def reel() -> FilmReel:
    film = Film(3, "best", ["r0c0"], [[2], [3]], [[0.0], [0.0]], [[1], [1]], [1, 0], [0, 0], [True, True])
    return FilmReel({2: "GERMINATED", 3: "TRAINING"}, {0: "WAIT", 1: "GERMINATE"}, {1: "NORM"}, [film])


def screen(terminal: bool, height: int = 40) -> Console:
    colours = (
        "truecolor" if terminal else None
    )  # rich remembers the codes of a style: one system for all tests
    return Console(
        file=io.StringIO(), force_terminal=terminal, color_system=colours, width=100, height=height
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("terminal", "options", "kind"),
    [
        (True, {}, LiveView),
        (False, {}, PlainView),
        (True, {"quiet": True}, QuietView),
        (True, {"json_lines": True}, JsonView),
        (False, {"json_lines": True, "quiet": True}, JsonView),
    ],
)
def test_the_view_fits_the_terminal_and_the_wish(
    terminal: bool, options: dict[str, bool], kind: type
) -> None:
    with open_view(screen(terminal), "digits", 20, **options) as view:
        assert type(view) is kind


def test_live_shows_progress_figures_ops_slots_and_anomalies() -> None:
    console = screen(True)
    with open_view(console, "digits · 16 members", 20) as view:
        view.progress(0.5)
        view.update(summary(1))
        view.update(summary(2, anomalies=["member 4 was rolled back"]), reel())
    text = shown(console)
    for part in ("digits · 16 members", "2 of 20", "1:12", "120", "0.200 ± 0.020", "91.3 ± 0.8 %", "1.42"):
        assert part in text
    for part in ("germinate", "20.0%", "member 3", "r0c0", "round 2: member 4 was rolled back"):
        assert part in text


def test_a_low_screen_leaves_the_strips_out() -> None:
    console = screen(True, height=20)
    with open_view(console, "digits", 20) as view:
        view.update(summary(1), reel())
    assert "r0c0" not in shown(console)


def test_plain_lines_hold_no_control_codes() -> None:
    console = screen(False)
    with open_view(console, "digits", 20) as view:
        view.update(summary(1, anomalies=["member 4 was rolled back"]), reel())
    first, second = shown(console).splitlines()
    assert first == plain_line(summary(1))
    assert first.startswith("round 1/20  return +0.100 ± 0.020  accuracy 91.3 ± 0.8 %  parameters x 1.42")
    assert first.endswith("1:16 left  WAIT 70% GERMINATE 20% PRUNE 10%")
    assert second == "  ! member 4 was rolled back"


def test_json_lines_are_what_the_metrics_file_gets() -> None:
    console = screen(True)
    with open_view(console, "digits", 20, json_lines=True) as view:
        view.update(summary(1))
    line = json.loads(shown(console))
    assert line["round"] == 1
    assert line["kl"] is None


def test_unmeasured_figures_are_dashes() -> None:
    line = plain_line(RoundSummary(round=1, rounds=2, members=1, member_epochs=0, seconds=0.0))
    assert "return –  accuracy – %" in line


def test_durations_and_sparklines() -> None:
    assert [duration(s) for s in (0, 61, 3723, float("nan"))] == ["0:00", "1:01", "1:02:03", "–"]
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([]) == ""
