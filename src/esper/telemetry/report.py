"""The report of a run: one self-contained page, made from the files of its folder and nothing else."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from esper.foundation.statistics import learning_verdict, mean_interval
from esper.telemetry import charts
from esper.telemetry.consistency import complaints
from esper.telemetry.earnings import blueprint_ledger
from esper.telemetry.files import write_atomically
from esper.telemetry.live import duration, interval
from esper.telemetry.pictures import film_strips, png_bytes
from esper.telemetry.report_page import FIGURE, PAGE, SECTION
from esper.telemetry.run_folder import RunFolder
from esper.telemetry.schema import Comparison, RoundSummary


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows, and how to read it."""

    draw: Callable[[], Figure]
    title: str
    caption: str


def write_report(folder: RunFolder) -> Path:
    """Write report.html into the run folder and return its path. Works for unfinished runs too."""
    write_atomically(folder.report_path, render_report(folder).encode())
    return folder.report_path


def render_report(folder: RunFolder) -> str:
    rounds, results = folder.metrics(), folder.results()
    sections = [
        _section("Summary", "" if results and not rounds else _cards(rounds) + _verdict(rounds)),
        _section("Results", _results_table(results) + _differences_table(results)),
        _section("Pictures", "".join(_figure(picture) for picture in _pictures(folder, rounds, results))),
        _section("Anomalies", _list(f"round {r.round}: {text}" for r in rounds for text in r.anomalies)),
        _section("What does not fit together in the files", _list(complaints(folder))),
        _section("How it was made", _origins(folder)),
    ]
    return PAGE.substitute(title=escape(f"Esper: {folder.path.name}"), body="".join(sections))


def _pictures(
    folder: RunFolder, rounds: Sequence[RoundSummary], results: Comparison | None
) -> Iterator[Picture]:
    """Every picture that the folder has the numbers for."""
    if rounds:
        yield from _round_pictures(rounds)
    if results is not None and results.controllers:
        yield Picture(
            lambda: charts.frontier(results.controllers),
            "The frontier",
            "Up is more accurate, left is smaller. Faint points are members; bars are 95 % intervals.",
        )
        if any(d.quantity == "test_accuracy" for d in results.differences):
            yield Picture(
                lambda: charts.paired_differences_chart(results.differences),
                "Differences, paired",
                "The same members under both controllers. Green lies clearly above the baseline, red below.",
            )
    reel = folder.film()
    if reel is not None and reel.films:
        yield Picture(
            lambda: film_strips(reel, f"The life of every slot, round {reel.round}"),
            "Film strips",
            "One band per member, one lane per slot; the hue is the stage, the shade of blending is alpha.",
        )
    ledger = blueprint_ledger(folder.events())
    if ledger:
        yield Picture(
            lambda: charts.blueprint_earnings(ledger),
            "What each blueprint earned",
            "Left: the fate of the seeds that were planted. Right: mean contribution of those that stayed.",
        )
    if any(entry.contributions for entry in ledger):
        yield Picture(
            lambda: charts.contribution_against_parameters(ledger),
            "Contribution against parameters",
            "Every kept seed at the moment it was kept: what it costs and what it brings.",
        )


def _round_pictures(rounds: Sequence[RoundSummary]) -> Iterator[Picture]:
    last = rounds[-1]
    yield Picture(
        lambda: charts.learning_curves(rounds),
        "Learning curves",
        "Means over the members of a round; the bands are 95 % intervals.",
    )
    if last.op_shares:
        yield Picture(
            lambda: charts.op_shares_by_round(rounds),
            "What Tamiyo does, round by round",
            "Shares of executed ops among all steps of all members; a refused action counts as waiting.",
        )
    if last.op_shares and last.op_shares_by_step:
        yield Picture(
            lambda: charts.op_shares_over_episode(last.op_shares_by_step, list(last.op_shares)),
            "What Tamiyo does, step by step",
            f"The same over the steps of an episode, in round {last.round}.",
        )
    if last.head_entropy:
        yield Picture(
            lambda: charts.head_entropy(rounds),
            "Per-head entropy",
            "1 means that a head still chooses evenly among what is legal, 0 that it is certain.",
        )
    if any(r.kl == r.kl or r.value_loss == r.value_loss for r in rounds):
        yield Picture(
            lambda: charts.learner_health(rounds),
            "The learner",
            _about_the_learner(last),
        )


def _about_the_learner(last: RoundSummary) -> str:
    explained = last.extra.get("explained_by_baseline")
    if explained is None:
        return "A KL that keeps stopping early, or explained variance near 0, is where to look first."
    return (
        "A KL that keeps stopping early is where to look first. V has only what lies beyond ungrown twins "
        f"to explain: near 0 is usual. Together they account for {explained:.0%} of the variance of returns."
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(png_bytes(picture.draw())).decode()
    return FIGURE.substitute(title=escape(picture.title), caption=escape(picture.caption), data=data)


def _section(title: str, body: str) -> str:
    """A section, or nothing where there is nothing to say."""
    return SECTION.substitute(title=escape(title), body=body) if body else ""


def _cards(rounds: Sequence[RoundSummary]) -> str:
    if not rounds:
        return "<p>No round was finished.</p>"
    last = rounds[-1]
    figures = {
        "rounds": f"{last.round} of {last.rounds}",
        "members": f"{last.members:,}",
        "member-epochs": f"{last.member_epochs:,}",
        "time": duration(last.seconds),
        "member-epochs / s": f"{last.member_epochs_per_second:,.0f}",
        "return": interval(last.return_mean, last.return_ci, "+.3f"),
        "accuracy": interval(100 * last.accuracy_mean, 100 * last.accuracy_ci, ".1f") + " %",
        "parameters": "× " + interval(last.parameter_ratio_mean, last.parameter_ratio_ci, ".2f"),
    }
    cards = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in figures.items())
    return f'<div class="cards">{cards}</div>'


def course(rounds: Sequence[RoundSummary]) -> str:
    """Whether it learned, in a sentence: by what lies above ungrown twins, where they were played."""
    gains = [r.extra["above_twin"] for r in rounds if "above_twin" in r.extra]
    if len(gains) == len(rounds):
        return learning_verdict(gains, "The return above that of ungrown twins").sentence
    return learning_verdict([r.return_mean for r in rounds]).sentence


def _verdict(rounds: Sequence[RoundSummary]) -> str:
    return f"<p>{escape(course(rounds))}</p>" if rounds else ""


def _results_table(results: Comparison | None) -> str:
    if results is None or not results.controllers:
        return ""
    rows = [
        [
            result.name,
            str(len(result.members)),
            interval(100 * accuracy, 100 * half, ".2f") + " %",
            interval(*mean_interval(result.parameters), ",.0f"),
            interval(*mean_interval(result.potential), ".4f"),
            interval(*mean_interval(result.member_epochs), ",.0f"),
            interval(*mean_interval(result.flops), ".3g"),
        ]
        for result in results.controllers
        for accuracy, half in [mean_interval(result.test_accuracy)]
    ]
    heading = (
        f"<p>{escape(results.task)}, host {escape(results.host)}; means with 95 % intervals over members.</p>"
    )
    titles = ("controller", "members", "test accuracy", "parameters", "Φ", "member-epochs", "FLOPs")
    return heading + _table(titles, rows)


def _differences_table(results: Comparison | None) -> str:
    if results is None or not results.differences:
        return ""
    scale = {
        "test_accuracy": (100.0, "+.2f", " points"),
        "parameters": (1.0, "+,.0f", ""),
        "potential": (1.0, "+.4f", ""),
    }
    rows = []
    for d in results.differences:
        factor, form, unit = scale.get(d.quantity, (1.0, "+.3g", ""))
        value = interval(factor * d.mean, factor * d.ci, form) + unit
        rows.append([d.controller, d.baseline, d.quantity.replace("_", " "), value, str(d.members)])
    return _table(("controller", "against", "quantity", "paired difference", "pairs"), rows)


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _origins(folder: RunFolder) -> str:
    versions = [[name, version] for name, version in folder.about.get("versions", {}).items()]
    return (
        f"<p>Seed {folder.seed}.</p><pre>{escape(folder.command_text())}</pre>"
        f"<details><summary>Versions</summary>{_table(('what', 'version'), versions)}</details>"
        f"<details><summary>Configuration</summary><pre>{escape(folder.config_text())}</pre></details>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
