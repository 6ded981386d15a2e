"""The table and the figure of docs/study.md, from the files under studies/results.

python -m studies.report
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from esper.telemetry.statistics import mean_interval
from studies.growth import REWARD

RESULTS = Path("studies/results")
FIGURE = Path("docs/study.png")
LEARNED = "tamiyo"
Row = dict[str, Any]


def evaluations() -> dict[str, dict[str, Row]]:
    """Task → arm → row."""
    found = {}
    for path in sorted(RESULTS.glob("evaluation-*.json")):
        rows = json.loads(path.read_text())
        found[rows[0]["task"]] = {row["arm"]: row for row in rows}
    return found


def worth(arms: dict[str, Row], arm: str) -> list[float]:
    """Φ of every member on the test split, against the task's own host, whatever host the arm had."""
    host = arms["static"]["host_parameters"]
    pairs = zip(arms[arm]["test_accuracy"], arms[arm]["parameters"], strict=True)
    return [accuracy - REWARD.rent_weight * math.log(size / host) for accuracy, size in pairs]


def difference(arms: dict[str, Row], arm: str) -> tuple[float, float]:
    """Φ of the learned controller minus that of an arm, member by member: mean and half-width at 95 %."""
    pairs = zip(worth(arms, LEARNED), worth(arms, arm), strict=True)
    return mean_interval([learned - other for learned, other in pairs])


def table(found: dict[str, dict[str, Row]]) -> str:
    lines = [
        "| task | arm | test accuracy, % | parameters | Φ | Φ: Tamiyo minus arm |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for task, arms in found.items():
        for arm, row in arms.items():
            accuracy, half = mean_interval([100 * a for a in row["test_accuracy"]])
            gap = ""
            if arm != LEARNED:
                mean, ci = difference(arms, arm)
                gap = f"{mean:+.4f} ± {ci:.4f}"
            lines.append(
                f"| {task} | {arm} | {accuracy:.2f} ± {half:.2f} | {np.mean(row['parameters']):.0f} "
                f"| {np.mean(worth(arms, arm)):.4f} | {gap} |"
            )
    return "\n".join(lines)


def figure(found: dict[str, dict[str, Row]], training: list[Row]) -> None:
    panels, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for family in dict.fromkeys(row["family"] for row in training):
        rows = [row for row in training if row["family"] == family]
        start = rows[0]["potential"]
        rise = [row["potential"] - start for row in rows]
        left.plot([row["round"] for row in rows], rise, marker="o", ms=3, label=family)
    left.axhline(0, color="0.6", lw=0.8)
    left.set(xlabel="round (1,024 episodes each)", ylabel="Φ at the end, above the first round")
    left.set_title("Training on made tasks")
    left.legend(frameon=False)

    controls = ("static", "heuristic", "random", "periodic", "scheduled", f"static-final of {LEARNED}")
    for k, (task, arms) in enumerate(found.items()):
        shown = [arm for arm in controls if arm in arms]
        gaps = [difference(arms, arm) for arm in shown]
        places = [controls.index(arm) + 0.15 * (k - (len(found) - 1) / 2) for arm in shown]
        right.errorbar(
            [g[0] for g in gaps], places, xerr=[g[1] for g in gaps], fmt="o", ms=4, capsize=2, label=task
        )
    right.axvline(0, color="0.6", lw=0.8)
    right.set_yticks(range(len(controls)), controls)
    right.set(xlabel="Φ of Tamiyo minus Φ of the arm (95 % interval)")
    right.set_title("Held-out tasks, paired members")
    right.legend(frameon=False)
    panels.savefig(FIGURE, dpi=140)


def main() -> None:
    found = evaluations()
    training = [json.loads(line) for line in (RESULTS / "train-0.jsonl").read_text().splitlines()]
    print(table(found))
    figure(found, training)


if __name__ == "__main__":
    main()
