"""The report of a run: one self-contained page, made from the files of its folder and nothing else.

It begins with the verdict in one sentence, what came out and one picture; tables and the rest follow.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from esper.runs import charts
from esper.runs.differences import clear_among
from esper.runs.earnings import blueprint_ledger
from esper.runs.files import write_atomically
from esper.runs.numbers import duration, interval, number
from esper.runs.pictures import png_bytes
from esper.runs.report_page import FIGURE, PAGE, SECTION
from esper.runs.report_tables import (
    bullets,
    cards,
    differences_table,
    growth_cards,
    network_cards,
    network_table,
    results_table,
    table,
)
from esper.runs.run_folder import RunFolder
from esper.runs.schema import Comparison, Growth, RoundSummary
from esper.utils.errors import UserError
from esper.utils.settings import parse_yaml
from esper.utils.statistics import learning_verdict

_GROWTH = "Score and size"
# Which pictures may stand on the first screen, the most wanted first.
_FIRST = {"compare": ("Differences, paired",), "grow": (_GROWTH,)}


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
    """The whole page as HTML."""
    rounds, results, network = folder.metrics(), folder.results(), folder.network()
    settings = _settings(folder)
    pictures = list(_pictures(folder, rounds, results, settings))
    by_title = {picture.title: picture for picture in pictures}
    wanted = [by_title[title] for title in _FIRST.get(folder.kind, ()) if title in by_title]
    first = next(iter([*wanted, *pictures]), None)
    sections = {
        "What came out": _came_out(folder, rounds, results) + (_figure(first) if first else ""),
        "Results": results_table(results) + differences_table(results)
        if results is not None and results.controllers
        else "",
        "The saved network": network_table(network) if network is not None else "",
        "What was asked for": f"<p>{escape(asked_for(folder, settings))}</p>",
        "More pictures": "".join(_figure(picture) for picture in pictures if picture is not first),
        "Anomalies": bullets(f"round {r.round}: {text}" for r in rounds for text in r.anomalies),
        "How it was made": _origins(folder, rounds),
    }
    body = "".join(
        SECTION.substitute(title=escape(title), body=text) for title, text in sections.items() if text
    )
    verdict = escape(verdict_of(folder, rounds, results))
    return PAGE.substitute(title=escape(f"Esper: {folder.path.name}"), verdict=verdict, body=body)


def _settings(folder: RunFolder) -> dict[str, Any]:
    """The settings as they stand in config.yaml; nothing where they cannot be read."""
    try:
        found = parse_yaml(folder.config_text(), "config.yaml")
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def asked_for(folder: RunFolder, settings: dict[str, Any]) -> str:
    """What a run was asked to do, in a sentence."""
    if folder.from_python:
        model = settings.get("model", {})
        return (
            f"Grow {settings.get('task', 'a model')} ({model.get('parameters', 0):,} parameters) by "
            f"{settings.get('controller')} in {settings.get('epochs')} epochs, on {settings.get('train')}."
        )
    task, members = settings.get("task", "a task"), settings.get("members", "some")
    steps = settings.get("episode", {}).get("steps", "some")
    rounds, request = settings.get("rounds", "some"), folder.request
    controller = request.get("controller", "a controller")
    trained = (
        f"Train a controller on {task}: {members} networks at once, for {rounds} rounds of {steps} decision "
        "steps each, after every one of which the controller learns"
    )
    sentences = {
        "train": trained,
        "demo": f"{trained}; then compare it with controls on fresh networks",
        "compare": f"Compare {request.get('controllers', 'controllers')} on {task}: {members} networks under "
        f"each, {steps} decision steps, {request.get('seeds', 1)} seed(s)",
        "grow": f"Grow {members} networks on {task} by {controller} in {steps} decision steps, and save the "
        "best",
    }
    return sentences[folder.kind] + "."


def verdict_of(folder: RunFolder, rounds: Sequence[RoundSummary], results: Comparison | None) -> str:
    """Return what came of a run, in one sentence."""
    network, growth = folder.network(), folder.growth()
    if growth is not None and growth.curves:
        grown = growth.curves[0]
        said = growth.verdicts[0] if growth.verdicts else "nothing was run beside it to compare with"
        return (
            f"The grown model reached a validation {growth.score_name} of {number(grown.score[-1], '.3f')} "
            f"with {grown.parameters[-1]:,} parameters; {said}."
        )
    if network is not None:
        gain = number(100 * (network.test_accuracy - network.ungrown_test_accuracy), "+.1f")
        return (
            f"The saved network has {network.test_accuracy:.1%} test accuracy with {network.parameters:,} "
            f"parameters, {gain} points beside the same member without growth."
        )
    compared = list(_verdicts(results)) if results is not None else []
    if compared:
        return compared[0] + "."
    return learning_in_words(rounds) if rounds else "No round was finished."


def _came_out(folder: RunFolder, rounds: Sequence[RoundSummary], results: Comparison | None) -> str:
    network, growth = folder.network(), folder.growth()
    if growth is not None:
        return growth_cards(growth, network) + bullets(growth.verdicts)
    if network is not None:
        return network_cards(network)
    if not rounds:
        return bullets(_verdicts(results)) if results is not None else ""
    return _round_cards(rounds) + f"<p>{escape(learning_in_words(rounds))}</p>"


def _verdicts(results: Comparison) -> Iterator[str]:
    """What each controller's test accuracy says beside that of the first, the most accurate one first."""
    gaps = [d for d in results.differences if d.quantity == "test_accuracy"]
    gaps.sort(key=lambda gap: -gap.mean)
    for gap in gaps:
        clear = clear_among(gap, len(gaps))
        word = "not clearly apart from" if not clear else "above" if gap.mean > 0 else "below"
        points = interval(100 * gap.mean, 100 * gap.ci, "+.1f")
        yield f"{gap.controller} is {word} {gap.baseline}: {points} points of test accuracy"


def _pictures(
    folder: RunFolder, rounds: Sequence[RoundSummary], results: Comparison | None, settings: dict[str, Any]
) -> Iterator[Picture]:
    """Every picture that the folder has the numbers for."""
    growth = folder.growth()
    if growth is not None and growth.curves:
        yield Picture(
            lambda: charts.growth_curves(growth.curves, growth.score_name, _planted(folder, growth)),
            _GROWTH,
            "What the model reached on its validation data and how large it was, the best member where there "
            "are several; each line across is a seed that was planted.",
        )
    elif rounds:
        yield from _round_pictures(rounds, settings.get("ppo", {}))
    if results is not None and any(len(result.curve) > 1 for result in results.controllers):
        yield Picture(
            lambda: charts.accuracy_against_compute(results.controllers),
            "Accuracy against compute",
            f"Means over {len(results.controllers[0].members)} networks an arm on validation data; a point "
            "is as large as the networks are then, so that one sees them grow.",
        )
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
                "The same members under both controllers. Green lies above the baseline, red below; each "
                "interval stands alone at 95 %.",
            )
    ledger = blueprint_ledger(folder.events())
    if ledger:
        yield Picture(
            lambda: charts.blueprint_earnings(ledger),
            "What each blueprint earned",
            "Left: the fate of the seeds that were planted. Right: mean contribution of those that stayed. A "
            "gate keeps only seeds that measure above 0, so that these means are above what a seed is worth.",
        )
    if any(entry.contributions for entry in ledger):
        yield Picture(
            lambda: charts.contribution_against_parameters(ledger),
            "Contribution against parameters",
            "Every kept seed at the moment it was kept: what it costs and what it brings, selected above 0.",
        )


def _planted(folder: RunFolder, growth: Growth) -> list[tuple[int, str]]:
    """When the member of the first curve got which seed."""
    network = folder.network()
    member = network.member if network is not None else 0
    return [
        (event.step + 1, f"{event.blueprint} after {event.slot}")
        for event in folder.events()
        if event.kind == "germinated"
        and event.member == member
        and event.step + 1 < len(growth.curves[0].score)
    ]


def _round_pictures(rounds: Sequence[RoundSummary], ppo: dict[str, Any]) -> Iterator[Picture]:
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
    if any(r.extra.get(name, 0.0) > 0 for r in rounds for name in r.extra if name.startswith(charts.REFUSED)):
        yield Picture(
            lambda: charts.refusals(rounds),
            "What gates refuse",
            "A refused action changes nothing and costs the step; an op that was never refused has no line.",
        )
    if last.head_entropy:
        yield Picture(
            lambda: charts.head_entropy(rounds),
            "Per-head entropy",
            "1 means that a head still chooses evenly among what is legal, 0 that it is certain.",
        )
    if any(r.kl == r.kl or r.value_loss == r.value_loss for r in rounds):
        yield Picture(
            lambda: charts.learner_health(rounds, ppo.get("target_kl"), ppo.get("epochs")),
            "The learner",
            _about_the_learner(rounds, ppo),
        )


def _about_the_learner(rounds: Sequence[RoundSummary], ppo: dict[str, Any]) -> str:
    limit, epochs = ppo.get("target_kl"), ppo.get("epochs")
    stops = sum(r.extra.get("epochs_done", epochs) < epochs for r in rounds) if epochs else 0
    about = f"An update stops at a KL of {limit:g}: {stops} of {len(rounds)} did. " if limit else ""
    explained = rounds[-1].extra.get("explained_by_baseline")
    if explained is None:
        return about + "Stops in every round, or explained variance near 0, are where to look first."
    return about + (
        "V has only what lies beyond ungrown twins to explain: near 0 is usual. Together they account for "
        f"{explained:.0%} of the variance of returns."
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(png_bytes(picture.draw())).decode()
    return FIGURE.substitute(title=escape(picture.title), caption=escape(picture.caption), data=data)


def _round_cards(rounds: Sequence[RoundSummary]) -> str:
    last = rounds[-1]
    figures = {
        "rounds": f"{last.round} of {last.rounds}",
        "time": duration(last.seconds),
        "return, last round": interval(last.return_mean, last.return_ci, "+.3f"),
        "validation accuracy at the end of the last round": interval(
            100 * last.accuracy_mean, 100 * last.accuracy_ci, ".1f"
        )
        + " %",
        "parameters, in those of the host": "× "
        + interval(last.parameter_ratio_mean, last.parameter_ratio_ci, ".2f"),
    }
    return cards(figures)


def learning_in_words(rounds: Sequence[RoundSummary]) -> str:
    """Whether it learned, in a sentence: by what lies above ungrown twins, where they were played."""
    gains = [r.extra["above_twin"] for r in rounds if "above_twin" in r.extra]
    if len(gains) == len(rounds):
        return learning_verdict(gains, "The return above that of ungrown twins")
    return learning_verdict([r.return_mean for r in rounds])


def _origins(folder: RunFolder, rounds: Sequence[RoundSummary]) -> str:
    versions = [[name, version] for name, version in folder.about.get("versions", {}).items()]
    pace = ""
    if rounds:
        last = rounds[-1]
        pace = (
            f" {last.members:,} members, {last.member_epochs:,} member-epochs, "
            f"{last.member_epochs_per_second:,.0f} a second."
        )
    return (
        f"<p>Seed {folder.seed}.{pace}</p><pre>{escape(folder.command_text())}</pre>"
        f"<details><summary>Versions</summary>{table(('what', 'version'), versions)}</details>"
        f"<details><summary>Configuration</summary><pre>{escape(folder.config_text())}</pre></details>"
    )
