"""How much compute does growing into a model save? A law from the results of studies.growth_grid.

    python -m studies.growth_law     the points, the fit to text, and what the other budgets predict of each

A point is one family of networks at one budget. The saving is 1 − budget / B, where B is the budget at which
the whole network, trained plainly, reaches the loss of the grown one: on a line through its own losses at
the two nearest budgets, loss against the logarithm of FLOPs. Every arm has its best learning rate, and
growth its best time and, where it was measured, the order of copies that is the default. Targets are tokens
for text, else samples; an epoch counts every time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper.growing.estimate import TOKENS, count_parameters
from esper.growing.progressive import ORDERS
from studies import command_line, gpt, growth_grid

RESULTS = Path(__file__).parent / "results"
GPUS = ("h200", "6p-h200", "pilot-h200", "retuned-h200", "alone-h200", "middle-h200", "images-h200")
FILES = [RESULTS / f"growth_grid-{name}.jsonl" for name in (*GPUS, "letter", "letter-32", "letter-64")]
ENOUGH = 3  # seeds: where an arm of a network has them, arms with fewer are not its best by luck
LABELS = {"whole": "8 layers", "half": "4 layers", "grown": "4 layers that become 8"}
STYLES = {"whole": ("s--", "C0"), "half": ("^:", "C1"), "grown": ("o-", "C2")}
TEXT = "gpt"  # how the names of families begin whose targets are tokens
LEAST = 10.0  # tokens a parameter: below, half of the depth is better, and a saving against the whole no gain
ALONE = RESULTS / "growth_grid-alone-h200.jsonl"  # runs that had a GPU for themselves


@dataclass(frozen=True)
class Point:
    """What growth saved in one family at one budget."""

    family: str
    budget: float
    targets: float  # for each parameter of the whole network
    saved: float  # of the FLOPs of plain training of the whole network
    ahead_of_half: float  # loss of the half-size network minus that of the grown one


def kind_of(run: Mapping[str, Any]) -> str:
    """Tell whole, half-size and grown networks; what is none of them is "other"."""
    if run["start"]:
        copies = run.get("order", "interleaved") in ORDERS and not run.get("equal_steps")
        return "grown" if 2 * run["start"] == run["depth"] and copies else "other"
    whole = growth_grid.FAMILIES[run.get("family", "gpt")].depth
    return {whole: "whole", whole // 2: "half"}.get(run["depth"], "other")


def best_losses(paths: Sequence[Path] = FILES) -> dict[tuple[str, int], dict[float, dict[str, float]]]:
    """Return the least mean validation loss of whole, half-size and grown networks by budget.

    A family is told apart by name and width. Only growth from half of the blocks counts. Arms in the order
    that is the default go before others, and then arms with ENOUGH seeds before those with fewer.
    """
    runs: dict[tuple[str, int, float, str, str, float], list[float]] = defaultdict(list)
    for line in (line for path in paths for line in path.read_text().splitlines()):
        run = json.loads(line)
        key = run.get("family", "gpt"), run["width"], run["budget"], kind_of(run), run["name"], run["rate"]
        runs[key].append(run["validation"])
    found: dict[tuple[str, int], dict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    # Those with few seeds first, so that a mean over enough of them replaces what they have.
    for (family, width, budget, kind, *_), losses in sorted(runs.items(), key=lambda item: _rank(*item)):
        found[family, width][budget][kind] = float(np.mean(losses))
    return found


def _rank(arm: Sequence[Any], losses: Sequence[float]) -> tuple[bool, bool, float]:
    """Order arms so that the best is the last one."""
    name, loss = arm[4], float(np.mean(losses))
    return "middle" in name, len(losses) >= ENOUGH, -loss if np.isfinite(loss) else -np.inf


def targets_per_parameter(family: str, width: int, budget: float) -> float:
    """Return the tokens, or samples, of plain training of the whole network for each of its parameters."""
    arm = growth_grid.Arm(family, budget, growth_grid.FAMILIES[family].depth, width, 0.0)
    (steps,), _ = growth_grid.plan(arm)
    parameters = count_parameters(growth_grid.FAMILIES[family].make(width, arm.depth))
    each = gpt.FULL.context if growth_grid.FAMILIES[family].text else 1
    return steps * growth_grid.FAMILIES[family].batch * each / parameters


def points(paths: Sequence[Path] = FILES) -> list[Point]:
    """Return a point for every family and budget that has all three networks and a second budget."""
    result = []
    for (family, width), by_budget in best_losses(paths).items():
        budgets = sorted(b for b, best in by_budget.items() if "whole" in best)
        for k, budget in enumerate(budgets):
            best = by_budget[budget]
            if len(budgets) < 2 or not {"grown", "half"} <= best.keys():
                continue
            # Through this budget and the next, where there is one: a grown network is ahead or level.
            low, high = budgets[max(0, min(k, len(budgets) - 2)) :][:2]
            fall = (by_budget[low]["whole"] - by_budget[high]["whole"]) / np.log(high / low)
            saved = 1.0 - np.exp(-(best["whole"] - best["grown"]) / fall) if fall > 0 else np.nan
            per = targets_per_parameter(family, width, budget)
            ahead = best["half"] - best["grown"]
            result.append(Point(f"{family} x{width}", budget, per, float(saved), ahead))
    return result


def for_the_law(found: Sequence[Point]) -> list[Point]:
    """Return the points of text at which growth can be a gain."""
    return [p for p in found if p.family.startswith(TEXT) and p.targets >= LEAST]


def fit(chosen: Sequence[Point]) -> tuple[float, float]:
    """Fit saved = saves - fade · ln(targets per parameter / 20) by least squares; return saves and fade."""
    per, saved = (np.array([getattr(p, name) for p in chosen]) for name in ("targets", "saved"))
    slope, saves = np.polyfit(np.log(per / 20), saved, 1)
    return float(saves), -float(slope)


def draw(path: Path) -> None:
    """Draw the losses beside that of the whole GPT, and what growth saved, by tokens for each parameter."""
    import matplotlib.pyplot as plt

    by_budget = best_losses()["gpt", growth_grid.FAMILIES["gpt"].width]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    found = [p for p in points() if p.family.startswith(TEXT)]
    per = [p.targets for p in found]
    for kind in ("half", "grown"):
        ahead = [by_budget[p.budget][kind] - by_budget[p.budget]["whole"] for p in found]
        left.plot(per, ahead, STYLES[kind][0], color=STYLES[kind][1], label=LABELS[kind])
    left.axhline(0, color="0.6", linewidth=0.8)
    left.set(xscale="log", xlabel="tokens for each parameter, log scale")
    left.set_ylabel("loss minus that of 8 layers, nats\n(log scale beyond ± 0.01)")
    left.set_yscale("symlog", linthresh=0.01)
    left.set_ylim(-0.25, 0.02)
    left.set_yticks([-0.1, -0.01, 0.0, 0.01], ["−0.1", "−0.01", "0", "0.01"])
    left.legend(frameon=False)
    right.plot(per, [100 * p.saved for p in found], "o", color="C2")
    # Where 8 and 4 layers, trained plainly, have the same loss: on a line between two budgets.
    gaps = [by_budget[p.budget]["half"] - by_budget[p.budget]["whole"] for p in found]
    level = np.exp(np.interp(0.0, gaps, np.log(per)))
    tokens = np.geomspace(*TOKENS.measured)
    saved = 100 * np.array([TOKENS.saved(t) for t in tokens])
    right.plot(tokens, saved, color="C2")
    right.fill_between(
        tokens, saved - 100 * TOKENS.margin, saved + 100 * TOKENS.margin, alpha=0.15, color="C2"
    )
    right.axvspan(3.0, TOKENS.smaller_below, color="0.92", zorder=0)
    right.text(3.2, -18, "4 layers are\nthe better choice", va="bottom")
    right.axvline(level, color="0.6", linestyle=":", linewidth=0.8)
    right.text(1.04 * level, 70, "8 layers beat 4\nfrom here on", va="top")
    right.axhline(0, color="0.6", linewidth=0.8)
    right.set(xscale="log", xlabel="tokens for each parameter, log scale")
    right.set(ylabel="FLOPs saved, %", ylim=(-20, 75))
    for axes in (left, right):
        axes.set_xticks([4, 10, 20, 40], ["4", "10", "20", "40"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def draw_seconds(path: Path) -> None:
    """Draw the losses against seconds on a GPU of its own, and how much later plain training is level."""
    import matplotlib.pyplot as plt

    runs = [run for run in map(json.loads, ALONE.read_text().splitlines()) if run["family"] == "gpt"]
    pace = {kind_of(run): run["curve"][-1][1] / run["flops"] for run in runs}  # seconds of training a FLOP
    by_budget = best_losses()["gpt", growth_grid.FAMILIES["gpt"].width]
    budgets = sorted(budget for budget in by_budget if budget > min(by_budget))
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for kind, (style, color) in STYLES.items():
        seconds = [pace[kind] * budget for budget in budgets]
        axes.plot(seconds, [by_budget[b][kind] for b in budgets], style, color=color, label=LABELS[kind])
    shown = runs[0]["budget"]
    loss, at = by_budget[shown]["grown"], pace["grown"] * shown
    times = [np.log(pace["whole"] * budget) for budget in budgets]
    plain = [by_budget[budget]["whole"] for budget in budgets]
    later = float(np.exp(np.interp(-loss, [-each for each in plain], times)))
    axes.annotate("", (at, loss), (later, loss), arrowprops={"arrowstyle": "<->"})
    saved = f"the same loss in {100 * (1 - at / later):.0f} % less time"
    axes.annotate(saved, (at, loss), (0.9 * at, loss - 0.015), arrowprops={"arrowstyle": "-", "color": "0.6"})
    gaps = [by_budget[budget]["half"] - by_budget[budget]["whole"] for budget in budgets]
    level = float(np.exp(np.interp(0.0, gaps, times)))
    axes.axvline(level, color="0.6", linestyle=":", linewidth=0.8)
    axes.text(1.01 * level, 0.651, "8 layers beat 4 from here on", va="top")
    axes.set(xscale="log", xlabel="seconds of training on one H200, log scale")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_xticks([20, 30, 40, 60], ["20", "30", "40", "60"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the points and the law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=FILES)
    given = parser.parse_args(arguments)
    found = points(given.files)
    for point in found:
        print(
            f"{point.family:12} {gpt.peta(point.budget):>7}  {point.targets:7.2f} targets a parameter, saved "
            f"{100 * point.saved:+6.1f} %, loss ahead of half the depth {point.ahead_of_half:+.4f}"
        )
    chosen = for_the_law(found)
    if len(chosen) > 1:
        saves, fade = fit(chosen)
        print(f"text: saved = {saves:.3f} - {fade:.3f} ln(tokens a parameter / 20)")
    for left in chosen if len(chosen) > 2 else ():
        saves, fade = fit([p for p in chosen if p is not left])
        predicted = 100 * (saves - fade * np.log(left.targets / 20))
        print(f"without {gpt.peta(left.budget)}: predicts {predicted:.1f} % there")


if __name__ == "__main__":
    command_line.run(main)
