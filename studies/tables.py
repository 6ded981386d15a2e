"""The tables of the study, as markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from esper.foundation.statistics import mean_interval
from esper.lifecycle.actions import Blueprint, Op
from studies.ablations import CHANGES
from studies.effects import (
    TAMIYO,
    Effect,
    at_equal_parameters,
    by_title,
    effect,
    frontier,
    matrix,
    time_to,
)
from studies.records import Arm, Evaluation, Growth
from studies.variants import MAIN, VARIANTS

# Blueprints that look at neighbours; CONV_SMALL sees one place at a time.
SPATIAL = (Blueprint.CONV_LIGHT, Blueprint.CONV_HEAVY, Blueprint.DEPTHWISE, Blueprint.BOTTLENECK)
NOTHING = "–"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words and whose others are numbers, aligned to the right."""
    align = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, align, *rows))


def number(value: float, form: str, sign: str = "") -> str:
    return format(value, f"{sign}{form}") if math.isfinite(value) else NOTHING


def interval(mean: float, half: float, form: str = ".4f", sign: str = "+") -> str:
    return f"{number(mean, form, sign)} ± {number(half, form)}"


def is_change(name: str) -> bool:
    """Whether an arm lives under a change of the lifecycle, or was trained with something taken away."""
    return name.rpartition(", ")[2] in CHANGES or name.rpartition("-")[0] in VARIANTS


SHIPPED = f"{MAIN}-0"  # of several trainings the first, named before any was evaluated
OPPONENTS = {
    "no growth": "static",
    "random": "random",
    "heuristic": "heuristic",
    "periodic": "periodic",
    "scheduled": "scheduled",
    "its own final network": f"static-final of {TAMIYO}",
    "the same, equal FLOPs": f"static-final of {TAMIYO}, equal FLOPs",
    "pruned to its size": "pruned from twice the width",
}


def summary_table(found: dict[str, Evaluation]) -> str:
    """Φ of the trained controller minus Φ of each opponent, a task a line."""
    rows = []
    for task, evaluation in found.items():
        series = by_title(evaluation)
        ours, static = series[TAMIYO], series["static"]
        gaps = [effect(ours, series[name]) if name in series else None for name in OPPONENTS.values()]
        rows.append(
            [
                f"{task} ({evaluation.members})",
                f"{100 * matrix(static, 'test_accuracy').mean():.1f}",
                f"{100 * matrix(ours, 'test_accuracy').mean():.1f}",
                f"{matrix(ours, 'parameters').mean() / evaluation.host_parameters:.1f}",
                *(interval(gap.mean, gap.half) if gap else NOTHING for gap in gaps),
            ]
        )
    header = ["task (members)", "static, %", "Tamiyo, %", "size / host", *OPPONENTS]
    return markdown(header, rows)


def shipped_table(found: dict[str, Evaluation]) -> str:
    """The controller that comes with the package against the three controls, and its mean over tasks."""
    rows, opponents = [], ("static", "random", "heuristic")
    gaps = {
        task: [effect([evaluation[SHIPPED]], [evaluation[name]]) for name in opponents]
        for task, evaluation in found.items()
    }
    for task, effects in gaps.items():
        rows.append([task, *(interval(gap.mean, gap.half) for gap in effects)])
    means = [np.mean([effects[k].mean for effects in gaps.values()]) for k in range(len(opponents))]
    halves = [
        math.sqrt(sum(effects[k].half ** 2 for effects in gaps.values())) / len(gaps)
        for k in range(len(opponents))
    ]
    rows.append(["mean over tasks", *map(interval, map(float, means), halves)])
    return markdown(["task", *(f"Φ above {name}" for name in opponents)], rows)


def main_table(found: dict[str, Evaluation]) -> str:
    """Every arm but the ablations, against the trained controller."""
    rows = []
    for task, evaluation in found.items():
        series = {name: arms for name, arms in by_title(evaluation).items() if not is_change(name)}
        ungrown = matrix(series["static"], "flops").mean()
        for name, arms in series.items():
            accuracy, half = mean_interval((100 * matrix(arms, "test_accuracy").mean(axis=0)).tolist())
            gap = None if name == TAMIYO else effect(series[TAMIYO], arms)
            rows.append(
                [
                    task,
                    name,
                    f"{accuracy:.2f} ± {half:.2f}",
                    f"{matrix(arms, 'parameters').mean():.0f}",
                    f"{matrix(arms, 'potential').mean():.4f}",
                    *_effect_cells(gap),
                    f"{matrix(arms, 'flops').mean() / ungrown:.2f}",
                ]
            )
    header = ["task", "arm", "test accuracy, %", "parameters", "Φ", "Φ: Tamiyo minus arm", "over seeds", "d"]
    return markdown([*header, "FLOPs / static"], rows, words=2)


def _effect_cells(gap: Effect | None) -> list[str]:
    if gap is None:
        return ["", "", ""]
    seeds = "± " + number(gap.over_seeds, ".4f") if math.isfinite(gap.over_seeds) else NOTHING
    return [interval(gap.mean, gap.half), seeds, number(gap.size, ".2f", "+")]


def seeds_table(found: dict[str, Evaluation]) -> str:
    """Φ of every training seed above no growth: how much of the result is the luck of one training."""
    rows = []
    for task, evaluation in found.items():
        static = [evaluation["static"]]
        for arm in by_title(evaluation)[TAMIYO]:
            gap = effect([arm], static)
            rows.append([f"{task}, {arm.name}", interval(gap.mean, gap.half), number(gap.size, ".2f", "+")])
        whole = effect(by_title(evaluation)[TAMIYO], static)
        rows.append([f"{task}, all seeds", interval(whole.mean, whole.over_seeds), ""])
    return markdown(["controller", "Φ above static (95 %; the last line: over seeds)", "d"], rows)


def frontier_table(found: dict[str, Evaluation]) -> str:
    """Accuracy of networks against a static host of equally many parameters."""
    rows = []
    for task, evaluation in found.items():
        points = frontier(evaluation)
        for name, arms in by_title(evaluation).items():
            if is_change(name) or name.startswith("static width") or name == "static":
                continue
            size = float(matrix(arms, "parameters").mean())
            accuracy = 100 * float(matrix(arms, "test_accuracy").mean())
            line = 100 * at_equal_parameters(points, size)
            rows.append(
                [
                    f"{task}, {name}",
                    f"{size:.0f}",
                    f"{accuracy:.2f}",
                    number(line, ".2f"),
                    number(accuracy - line, ".2f", "+"),
                ]
            )
    return markdown(["network", "parameters", "accuracy, %", "static host of that size", "difference"], rows)


def time_table(found: dict[str, Evaluation]) -> str:
    """Minibatches and FLOPs to the accuracy that the static host ends with, as shares of what it took."""
    rows = []
    for task, evaluation in found.items():
        static = evaluation["static"]
        for name, arms in by_title(evaluation).items():
            if is_change(name) or len(static.curve) != len(arms[0].curve):
                continue
            times = [time_to(arm, static.curve[-1]) for arm in arms]
            batches = float(np.mean([t.batches for t in times])) / static.batches[-1]
            flops = float(np.mean([t.flops for t in times])) / static.spent[-1]
            rows.append([f"{task}, {name}", number(batches, ".2f"), number(flops, ".2f")])
    return markdown(["arm", "minibatches", "FLOPs"], rows)


def tamiyo(evaluation: Evaluation) -> list[Arm]:
    return by_title(evaluation)[TAMIYO]


# ---- what was learned ------------------------------------------------------------------------------------


def growths(evaluation: Evaluation) -> list[Growth]:
    return [arm.growth for arm in tamiyo(evaluation) if arm.growth is not None]


def spatial_share(growth: Growth) -> float:
    """The share of seeds at the end that look at neighbours."""
    placed = np.array(growth.placed)
    return float(placed[:, [int(b) for b in SPATIAL]].sum() / max(placed.sum(), 1))


def policy_table(found: dict[str, Evaluation]) -> str:
    """When the trained controllers plant, how long they hold, what they end with."""
    rows = []
    for task, evaluation in found.items():
        told = growths(evaluation)
        germinated = np.mean([g.germinated for g in told], axis=0)  # [T]
        holds = np.sum([g.hold_lengths for g in told], axis=0)
        placed = np.sum([g.placed for g in told], axis=0)  # [S, blueprints]
        ops = np.mean([g.op_shares for g in told], axis=(0, 1))
        steps = np.arange(len(germinated))
        favourite = Blueprint(int(placed.sum(axis=0).argmax())).name
        rows.append(
            [
                task,
                f"{germinated.sum():.2f}",
                number(float((steps * germinated).sum() / max(germinated.sum(), 1e-9)), ".1f"),
                f"{ops[Op.PRUNE] * len(germinated):.2f}",
                f"{ops[Op.FOSSILIZE] * len(germinated):.2f}",
                f"{np.mean([g.rollbacks for g in told]):.2f}",
                number(float((np.arange(len(holds)) * holds).sum() / max(holds.sum(), 1)), ".1f"),
                f"{favourite} {100 * placed.sum(axis=0).max() / max(placed.sum(), 1):.0f} %",
                f"{100 * np.mean([spatial_share(g) for g in told]):.0f} %",
            ]
        )
    header = ["task", "germinated", "mean step", "pruned", "fossilised", "rolled back", "steps held"]
    return markdown([*header, "most frequent", "look at neighbours"], rows)


def calibration_table(found: dict[str, Evaluation]) -> str:
    """How often random growth germinates, beside the controllers that it was matched to."""
    rows = []
    for task, evaluation in found.items():
        matched, random = evaluation.calibration, evaluation["random"].growth
        if matched is not None and random is not None:
            ours = float(np.mean([g.seeds_planted for g in growths(evaluation)]))
            cells = (matched.rate, matched.wanted, matched.expected, ours, random.seeds_planted)
            rows.append([task, *(f"{cell:.2f}" for cell in cells)])
    header = ["task", "rate", "Tamiyo before", "random, expected", "Tamiyo judged", "random judged"]
    return markdown(header, rows)


def gromo_table(path: Path) -> str:
    rows = []
    for row in json.loads(path.read_text()):
        test = 100 * np.array(row["test"])
        spread = f"{test.mean():.1f} ({test.min():.1f} to {test.max():.1f})"
        rows.append([row["way"], f"{np.mean(row['parameters']):.0f}", spread])
    return markdown(["network on MNIST-1D", "parameters", "test accuracy, % (min to max)"], rows)
