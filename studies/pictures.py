"""The pictures of docs/study.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from esper.lifecycle.actions import Blueprint
from studies.effects import TAMIYO, by_title, effect, frontier, matrix
from studies.records import Evaluation
from studies.tables import growths, spatial_share

COLOURS = {
    "static": "#7f7f7f",
    TAMIYO: "#d62728",
    "heuristic": "#2ca02c",
    "random": "#ff7f0e",
    "periodic": "#9467bd",
    "scheduled": "#1f77b4",
    f"static-final of {TAMIYO}": "#8c564b",
    "random search over sizes": "#17becf",
    "pruned from twice the width": "#bcbd22",
}
Found = dict[str, Evaluation]


def grid(count: int, height: float = 3.0, columns: int = 3) -> tuple[Any, list[Any]]:
    """A figure with a panel for each task, the last ones blank where there are fewer."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.9 * columns, height * rows), layout="constrained", squeeze=False
    )
    panels = list(axes.flat)
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)


def legend(figure: Any, panels: list[Any]) -> None:
    """One legend for all panels, above them."""
    shown: dict[str, Any] = {}
    for panel in panels:
        shown |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(
        shown.values(), shown.keys(), loc="outside upper center", ncols=3, fontsize=7, frameon=False
    )


def differences(found: Found, path: Path) -> None:
    """Φ of the trained controller minus that of every arm, a panel for each task."""
    figure, panels = grid(len(found))
    names = [name for name in COLOURS if name != TAMIYO]
    for panel, (task, evaluation) in zip(panels, found.items(), strict=False):
        series = by_title(evaluation)
        for place, name in enumerate(names):
            if name in series:
                gap = effect(series[TAMIYO], series[name])
                panel.errorbar(gap.mean, place, xerr=gap.half, fmt="o", ms=4, capsize=2, color=COLOURS[name])
        panel.axvline(0, color="0.6", lw=0.8)
        first = panel.get_subplotspec().is_first_col()
        panel.set_yticks(range(len(names)), names if first else [""] * len(names), fontsize=7)
        panel.invert_yaxis()
        panel.set_title(task, fontsize=9)
        panel.tick_params(axis="x", labelsize=7)
    figure.supxlabel("Φ of Tamiyo minus Φ of the arm (95 % interval over members)", fontsize=9)
    save(figure, path)


def frontiers(found: Found, path: Path) -> None:
    """Accuracy by parameters: static hosts as a line, every other arm as a point."""
    figure, panels = grid(len(found))
    for panel, (task, evaluation) in zip(panels, found.items(), strict=False):
        points = frontier(evaluation)
        panel.plot(
            [p for p, _ in points], [100 * a for _, a in points], "o-", color=COLOURS["static"], ms=3, lw=1
        )
        for name, arms in by_title(evaluation).items():
            if name in COLOURS and name != "static":
                size, accuracy = matrix(arms, "parameters").mean(), matrix(arms, "test_accuracy").mean()
                panel.plot(size, 100 * accuracy, "D", ms=5, color=COLOURS[name], label=name)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_title(task, fontsize=9)
        panel.tick_params(labelsize=7, which="both")
    legend(figure, panels)
    figure.supylabel("test accuracy, %", fontsize=9)
    figure.supxlabel("parameters (line: static hosts by width)", fontsize=9)
    save(figure, path)


def curves(found: Found, path: Path) -> None:
    """Validation accuracy over the training."""
    figure, panels = grid(len(found))
    for panel, (task, evaluation) in zip(panels, found.items(), strict=False):
        for name, arms in by_title(evaluation).items():
            if name in COLOURS and len(arms[0].curve) > 1:
                mean = 100 * matrix(arms, "curve").mean(axis=0)
                panel.plot(arms[0].batches, mean, color=COLOURS[name], lw=1, label=name)
        panel.set_title(task, fontsize=9)
        panel.tick_params(labelsize=7)
    legend(figure, panels)
    figure.supylabel("validation accuracy, %", fontsize=9)
    figure.supxlabel("minibatches", fontsize=9)
    save(figure, path)


def policy(found: Found, path: Path) -> None:
    """When it germinates, how long it holds, what it places where, and how often that looks at neighbours."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (when, held), (where, spatial) = axes
    tasks = {task: growths(evaluation) for task, evaluation in found.items()}
    for task, told in tasks.items():
        when.plot(np.mean([g.germinated for g in told], axis=0), lw=1, label=task)
        lengths = np.sum([g.hold_lengths for g in told], axis=0)
        held.plot(lengths / max(lengths.sum(), 1), lw=1, label=task)
    when.set(xlabel="decision step", ylabel="germinations a member", title="When it germinates")
    held.set(xlabel="steps in HOLDING", ylabel="share of holds", title="How long it holds")
    when.legend(frameon=False, fontsize=7)
    placements(where, tasks)
    shares = {
        task: [100 * spatial_share(g) for g in told]
        for task, told in tasks.items()
        if found[task].host.startswith("cnn")
    }
    for place, values in enumerate(shares.values()):
        spatial.bar(place, np.mean(values), color="#9ecae1")
        spatial.plot([place] * len(values), values, "k.", ms=5)
    spatial.set_xticks(range(len(shares)), list(shares), fontsize=8)
    spatial.set(ylabel="%", title="Seeds that look at neighbours (dots: trainings)")
    save(figure, path)


def placements(panel: Any, tasks: dict[str, list[Any]]) -> None:
    """A map of blueprints by task and slot, as shares of what the slot ends with."""
    rows, labels = [], []
    for task, told in tasks.items():
        placed = np.sum([g.placed for g in told], axis=0)  # [S, blueprints]
        for slot, counts in enumerate(placed):
            rows.append(counts / max(counts.sum(), 1))
            labels.append(f"{task} {slot + 1}")
    panel.imshow(np.array(rows), aspect="auto", cmap="Blues", vmin=0)
    panel.set_yticks(range(len(labels)), labels, fontsize=5)
    names = [b.name.lower() for b in Blueprint]
    panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=6)
    panel.set_title("Which blueprints in which slots")


PICTURES = {
    "study.png": differences,
    "study_frontier.png": frontiers,
    "study_curves.png": curves,
    "study_policy.png": policy,
}
