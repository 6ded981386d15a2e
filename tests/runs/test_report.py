"""The report and its pictures: whole, self-contained, and drawn from whatever the folder holds."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from esper import cli
from esper.runs import charts
from esper.runs.differences import against_growers, clear_among, paired_differences
from esper.runs.earnings import blueprint_ledger
from esper.runs.pictures import png_bytes
from esper.runs.report import render_report, write_report
from esper.runs.run_folder import RunFolder
from esper.runs.schema import (
    Comparison,
    ControllerResult,
    Event,
    PairedDifference,
    RoundSummary,
    SavedNetwork,
    SavedSlot,
    to_json,
)
from esper.utils.statistics import learning_verdict, t_quantile
from tests.runs.made_up_run import made_up_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return made_up_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> str:
    return write_report(folder).read_text(encoding="utf-8")


class Balanced(HTMLParser):
    """Checks that every tag is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def test_the_page_is_whole_and_stands_alone(page: str) -> None:
    checker = Balanced()
    checker.feed(page)
    assert checker.faults == []
    assert checker.open == []
    sources = re.findall(r'(?:src|href)\s*=\s*"([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script", page)


def test_the_page_holds_every_part(page: str) -> None:
    titles = re.findall(r"<figcaption><b>(.+?)\.</b>", page)
    assert titles == [
        "Learning curves",
        "What Tamiyo does, round by round",
        "What Tamiyo does, step by step",
        "Per-head entropy",
        "The learner",
        "The frontier",
        "Differences, paired",
        "What each blueprint earned",
        "Contribution against parameters",
    ]
    for part in (
        "24 of 24",
        "The return rose from",
        "tamiyo",
        "esper train --preset demo",
        "Versions",
        "Seed 7",
    ):
        assert part in page


def test_the_verdict_comes_first_and_results_before_what_was_asked_for(page: str) -> None:
    sections = re.findall(r"<h2>(.+?)</h2>", page)
    assert sections[:3] == ["What came out", "Results", "What was asked for"]
    assert "Train a controller on digits" in page
    first = page.split("<h2>Results</h2>")[0]
    verdict = first.split("<h2>")[0].split('<p class="verdict">')[1]
    assert verdict.startswith("tamiyo is above static: +4.2 ± 0.4 points of test accuracy.</p>")
    assert "validation accuracy at the end of the last round" in first
    assert first.count("<img") == 1, "one picture"


def test_numbers_have_units_and_no_exponents(page: str) -> None:
    text = re.sub(r"base64,[^\"]+", "", page)
    assert not re.search(r"\d[eE][+-]\d", text)
    assert "GFLOPs a member" in text
    assert "nowrap" in text


def test_differences_are_one_wide_table_with_a_caution(page: str) -> None:
    rows = re.findall(r"<tr>(.+?)</tr>", page.split("<h2>Results</h2>")[1].split("</section>")[0])
    heads = [row for row in rows if "<th>" in row]
    assert len(heads) == 2
    assert "Δ accuracy, points" in heads[1]
    assert sum("<td>static</td>" in row for row in rows) == 1 + 3, "itself, and three against it"
    assert "even if all 3 are to hold at once" in page


@pytest.mark.usefixtures("blank_pictures")
def test_a_network_from_the_start_is_set_against_the_controller_that_grew_it(tmp_path: Path) -> None:
    def result(name: str, gain: float) -> ControllerResult:
        accuracy = [0.5 + gain + 0.001 * i for i in range(4)]
        return ControllerResult(name, [0, 1, 2, 3], accuracy, [9.0] * 4, [2.0] * 4, [1e9] * 4)

    arms = [result("static", 0.0), result("habit", 0.1), result("static-final of habit", 0.3)]
    (gap,) = [d for d in against_growers(arms) if d.quantity == "test_accuracy"]
    assert (gap.controller, gap.baseline) == ("static-final of habit", "habit")
    assert gap.mean == pytest.approx(0.2)
    folder = RunFolder.create(tmp_path / "run", config="", seed=1, kind="compare")
    folder.write(Comparison("digits", "cnn", arms, paired_differences(arms)))
    text = render_report(folder)
    assert "<td>static-final of habit</td><td>habit</td>" in text
    assert "habit is above static: +10.0" in text


def test_several_intervals_that_hold_at_once_are_wider() -> None:
    alone = PairedDifference("a", "b", "test_accuracy", mean=1.0, ci=0.9, members=10)
    assert clear_among(alone, 1)
    assert not clear_among(alone, 5)
    assert t_quantile(9, 5) == pytest.approx(3.25, abs=0.005), "99.5 % of Student's t with 9 degrees"


def test_the_kl_panel_shows_the_limit_and_who_stopped(folder: RunFolder) -> None:
    rounds = [replace(r, extra={"epochs_done": 2.0 if r.round == 3 else 4.0}) for r in folder.metrics()]
    limit, stopped, _ = charts.learner_health(rounds, kl_limit=0.02, epochs=4).axes[0].lines
    assert set(limit.get_ydata()) == {0.02}
    assert list(stopped.get_xdata()) == [3]


def test_refusals_are_drawn_where_there_were_any(folder: RunFolder) -> None:
    extra = {"refused_advance": 0.4, "refused_prune": 0.0}
    axes = charts.refusals([replace(r, extra=extra) for r in folder.metrics()]).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["advance"]


@pytest.mark.parametrize("values", [(0.21, 0.45), (1e-7, 3e-6), (3.0, 4e8)])
def test_logarithmic_axes_have_at_least_two_plain_ticks(
    folder: RunFolder, values: tuple[float, float]
) -> None:
    rounds = [replace(r, value_loss=values[r.round % 2]) for r in folder.metrics()]
    figure = charts.learner_health(rounds)
    figure.canvas.draw()
    axis = figure.axes[-1].yaxis
    low, high = axis.get_view_interval()
    ticks = [
        label.get_text()
        for label, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)
        if low <= at <= high
    ]
    assert len(ticks) >= 2
    assert not any("e" in tick for tick in ticks)


def test_a_grown_network_stands_in_its_report_beside_itself_ungrown(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path / "run", config="task: digits", seed=1, kind="grow", request={"controller": "habit"}
    )
    slots = [
        SavedSlot("r0c0", "FOSSILIZED", "CONV_LIGHT", "LINEAR_ADD", 1.0, 2.5),
        SavedSlot("r0c1", "DORMANT"),
    ]
    network = SavedNetwork("digits", "cnn(width=4)", "habit", 3, 8, 24, 100, 250, 0.9, 0.88, 0.8, slots)
    network = replace(network, changes=["block 2 repeated once"])
    (folder.path / "network.json").write_text(to_json(network))
    text = render_report(folder)
    for part in (
        "by habit",
        "88.0%",
        "80.0%",
        "conv light",
        "+2.5",
        "nothing",
        "block 2 repeated",
        "network.pt2",
        "+8.0 points beside the same member without growth.</p>",
    ):
        assert part in text


def test_what_people_wrote_is_escaped(page: str) -> None:
    assert "loss 41 &amp; rising" in page
    assert "&lt;script&gt;" in page


def test_an_empty_run_still_gets_a_page(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config="", seed=1)
    text = render_report(folder)
    assert "No round was finished" in text
    assert "<img" not in text


def test_a_run_of_one_round_without_any_extras_gets_its_curves(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config="", seed=1)
    folder.append_metrics(
        RoundSummary(round=1, rounds=1, members=1, member_epochs=5, seconds=1.0, return_mean=0.2)
    )
    text = render_report(folder)
    assert text.count("<img") == 1
    assert "too few to say" in text


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "explained variance near 0"),
        ({"explained_by_baseline": 0.967}, "account for 97% of the variance"),
    ],
)
def test_the_learner_is_judged_by_its_whole_baseline(
    tmp_path: Path, extra: dict[str, float], says: str
) -> None:
    folder = RunFolder.create(tmp_path / "run", config="", seed=1)
    made = RoundSummary(
        round=1, rounds=1, members=1, member_epochs=5, seconds=1.0, return_mean=0.2, kl=0.1, extra=extra
    )
    folder.append_metrics(made)
    assert says in render_report(folder)


def test_pictures_touch_nothing_process_wide(folder: RunFolder) -> None:
    before = dict(matplotlib.rcParams)
    results = folder.results()
    assert results is not None
    assert png_bytes(charts.frontier(results.controllers)).startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_the_frontier_shows_every_member_and_every_mean(folder: RunFolder) -> None:
    results = folder.results()
    assert results is not None
    axes = charts.frontier(results.controllers).axes[0]
    assert sum(len(c.get_offsets()) for c in axes.collections if len(c.get_offsets()) == 24) == 4 * 24
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        f"{name} (24)" for name in ("static", "random", "heuristic", "tamiyo")
    ]


def test_the_ledger_counts_fates() -> None:
    def event(kind: str, blueprint: str | None = "NORM", **numbers: float) -> Event:
        return Event(round=1, step=1, member=0, kind=kind, blueprint=blueprint, numbers=numbers)  # type: ignore[arg-type]

    ledger = blueprint_ledger(
        [event("germinated")] * 4
        + [
            event("fossilised", contribution=2.0, parameters=33.0),
            event("pruned"),
            event("germinated", "MLP"),
        ]
        + [event("gate_refused", None)]
    )
    assert [entry.blueprint for entry in ledger] == ["NORM", "MLP"]
    assert ledger[0].fates == {"kept": 1, "taken out": 1, "unfinished": 2}
    assert (ledger[0].contributions, ledger[0].parameters) == ([2.0], [33.0])


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ([0.0, 0.1] * 2, "too few"),
        ([0.0, 0.01] * 4 + [0.5, 0.51] * 4, "The return rose from +0.005"),
        ([0.5, 0.51] * 4 + [0.0, 0.01] * 4, "The return fell"),
        ([0.0, 0.5] * 8, "did not clearly rise"),
        ([float("nan")] * 20, "too few"),
        ([0.1], "1 round is too few"),
    ],
)
def test_the_verdict_is_honest(returns: list[float], says: str) -> None:
    assert says in learning_verdict(returns)


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", config="", seed=1)
    assert cli.run(["report", str(folder.path)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert folder.report_path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
