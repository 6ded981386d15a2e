"""The tables of what was taken away: from the lifecycle, or from a controller before it was trained."""

from __future__ import annotations

import math

import numpy as np

from esper.simic.rollout import Doubles
from studies.ablations import CHANGES
from studies.effects import another_training, effect, matrix, title
from studies.records import Evaluation
from studies.tables import interval, markdown, number, tamiyo
from studies.variants import MAIN, VARIANTS


def ablations_table(found: dict[str, Evaluation]) -> str:
    """Φ of an arm under a change of the lifecycle minus that of the arm that it was made from."""
    rows = []
    for task, evaluation in found.items():
        for arm in evaluation.arms:
            base, comma, change = arm.name.rpartition(", ")
            if comma and change in CHANGES:
                gap, points = (effect([arm], [evaluation[base]], q) for q in ("potential", "test_accuracy"))
                rows.append(
                    [
                        f"{task}, {title(arm.name)}",
                        interval(gap.mean, gap.half),
                        number(gap.size, ".2f", "+"),
                        interval(100 * points.mean, 100 * points.half, ".2f"),
                    ]
                )
    return markdown(["ablation", "Φ: changed minus unchanged", "d", "accuracy, points"], rows)


def variants_table(found: dict[str, Evaluation]) -> str:
    """One training with something taken away, against all trainings of the study's own controller."""
    rows = []
    for variant in VARIANTS:
        judged = {task: e for task, e in found.items() if f"{variant}-0" in e and variant != MAIN}
        gaps = {task: effect([e[f"{variant}-0"]], tamiyo(e)) for task, e in judged.items()}
        worths = {task: matrix(tamiyo(e), "potential").mean(axis=1) for task, e in judged.items()}  # each [K]
        for task, gap in gaps.items():
            rows.append(_variant(variant, task, gap.mean, gap.half, worths[task]))
        if gaps:
            mean = float(np.mean([gap.mean for gap in gaps.values()]))
            half = math.sqrt(sum(gap.half**2 for gap in gaps.values())) / len(gaps)
            rows.append(_variant(variant, "mean", mean, half, np.mean(list(worths.values()), axis=0)))
    header = ["controller", "task", "Φ minus the mean of all trainings", "another training", "beyond"]
    return markdown(header, rows, words=2)


def _variant(variant: str, task: str, mean: float, half: float, worths: Doubles) -> list[str]:
    """`worths`: Φ of every training of the study's own controller.  # [K]"""
    spread = another_training(worths)
    beyond = "" if not abs(mean) > spread else "above" if mean > 0 else "below"
    return [variant, task, interval(mean, half), "± " + number(spread, ".4f"), beyond]
