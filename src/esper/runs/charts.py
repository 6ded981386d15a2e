"""Charts of a run: learning curves, the frontier, what the controller does and what it earns.

Each is a function from plain records or arrays to a matplotlib figure, in the common look of `pictures`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from esper.runs.earnings import BlueprintEarnings
from esper.runs.numbers import plain_number
from esper.runs.palette import INK, MUTED, OP_COLOURS, SERIES, STAGE_COLOURS
from esper.runs.pictures import figure, percent, style_axes
from esper.runs.schema import ControllerResult, Curve, PairedDifference, RoundSummary
from esper.utils.statistics import mean_interval

_MARKERS = "osD^vPX*"
_WIDE = 6.0  # the ratio from which on sizes need a logarithmic axis
REFUSED = "refused_"  # what names of refusal rates begin with
_CURVES = (  # what of a round, its title, and the stage whose colour it has
    ("return", "return", "HOLDING"),
    ("accuracy", "validation accuracy", "FOSSILIZED"),
    ("parameter_ratio", "parameters / host parameters", "TRAINING"),
)
_LEARNER = {  # metric → (title, whether it is best read on a logarithmic axis)
    "kl": ("KL from the old policy", False),
    "clip_fraction": ("share of clipped ratios", False),
    "explained_variance": ("explained variance of V", False),
    "value_loss": ("value loss", True),
}


def learning_curves(rounds: Sequence[RoundSummary]) -> Figure:
    """Return, accuracy and size over the rounds, each with its 95 % interval over members.

    Where ungrown twins were played, the return is what lies above theirs, member by member.
    """
    picture = figure(3.2)
    panels = picture.subplots(1, 3)
    twins = all("above_twin" in r.extra for r in rounds)
    for axes, (name, label, stage) in zip(panels, _CURVES, strict=True):
        mean, half = ([getattr(r, f"{name}_{part}") for r in rounds] for part in ("mean", "ci"))
        if twins and name == "return":
            label += " above ungrown twins"
            mean = [r.extra["above_twin"] for r in rounds]
            half = [r.extra.get("above_twin_ci", np.nan) for r in rounds]
            axes.axhline(0, color=INK, linewidth=1)
        style_axes(axes, label, x="round")
        _band(axes, [r.round for r in rounds], mean, half, STAGE_COLOURS[stage])
    panels[1].yaxis.set_major_formatter(percent())
    return picture


def growth_curves(
    curves: Sequence[Curve], score_name: str, planted: Sequence[tuple[int, str]] = ()
) -> Figure:
    """Score and size of a growing model, over the epochs; with others beside it, over the compute spent.

    `planted`: (epochs that were over, what was planted then) of the first curve.
    """
    picture = figure(4.6)
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    several = len(curves) > 1
    whole = curves[0].flops[-1] or 1.0
    style_axes(above, y=f"validation {score_name}")
    style_axes(
        below, x="training FLOPs, as a share of what growth spent" if several else "epoch", y="parameters"
    )
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))

    def places(curve: Curve) -> list[float]:
        return [f / whole for f in curve.flops] if several else list(range(len(curve.score)))

    for curve, colour, line in zip(curves, SERIES, ("-", "--", ":"), strict=False):
        above.plot(places(curve), curve.score, line, color=colour, linewidth=1.8, label=curve.name)
        below.step(places(curve), curve.parameters, line, where="post", color=colour, linewidth=1.6)
    if several:
        above.legend(frameon=False, fontsize=9, loc="lower right")
        below.xaxis.set_major_formatter(percent())
    else:
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for epoch, text in planted:
        place = places(curves[0])[epoch]
        above.axvline(place, color=MUTED, linewidth=0.8)
        above.annotate(
            text, (place, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, color=INK
        )
    return picture


def learner_health(
    rounds: Sequence[RoundSummary], kl_limit: float | None = None, epochs: int | None = None
) -> Figure:
    """How the update behaves: KL, clipping, explained variance, value loss.

    `kl_limit` is where an update stops, drawn as a line; a round whose update stopped before all of its
    `epochs` has a mark on it.
    """
    picture = figure(2.6)
    panels = picture.subplots(1, len(_LEARNER))
    if kl_limit is not None:
        panels[0].axhline(kl_limit, color=MUTED, linestyle="--", linewidth=1.2, label="limit")
        stopped = [r.round for r in rounds if epochs and r.extra.get("epochs_done", epochs) < epochs]
        panels[0].plot(stopped, [kl_limit] * len(stopped), "x", color=SERIES[1], label="stopped early")
        panels[0].legend(frameon=False, fontsize=8)
    for axes, (name, (title, logarithmic)), colour in zip(panels, _LEARNER.items(), SERIES, strict=False):
        style_axes(axes, title, x="round")
        axes.title.set_fontsize(9.5)
        values = np.array([getattr(r, name) for r in rounds], dtype=float)
        axes.plot([r.round for r in rounds], values, color=colour, linewidth=1.6)
        if logarithmic and np.nanmin(np.where(np.isfinite(values), values, np.nan), initial=np.inf) > 0:
            axes.set_yscale("log")
            _plain_log(axes.yaxis)
    return picture


def refusals(rounds: Sequence[RoundSummary]) -> Figure:
    """How often a gate refused what was asked for, op by op."""
    picture = figure(2.8)
    axes = style_axes(picture.subplots(), "What gates refuse", x="round", y="share of what was asked for")
    for name in rounds[-1].extra:
        op = name.removeprefix(REFUSED)
        values = [r.extra.get(name, np.nan) for r in rounds]
        if name.startswith(REFUSED) and np.nanmax(values) > 0:
            axes.plot(
                [r.round for r in rounds],
                values,
                color=OP_COLOURS.get(op.upper(), MUTED),
                linewidth=1.6,
                label=op.replace("_", " "),
            )
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(percent())
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture


def op_shares_by_round(rounds: Sequence[RoundSummary]) -> Figure:
    """What the controller did, as shares of all steps, round by round."""
    names = list(rounds[-1].op_shares)
    shares = np.array([[r.op_shares.get(name, 0.0) for name in names] for r in rounds])
    return _stacked([r.round for r in rounds], shares, names, "What Tamiyo does, over the rounds", "round")


def op_shares_over_episode(shares: Sequence[Sequence[float]], names: Sequence[str]) -> Figure:
    """When in an episode the controller does what.  # shares [T][ops]"""
    values = np.array(shares, dtype=float)
    return _stacked(range(len(values)), values, names, "What Tamiyo does, over the episode", "decision step")


def head_entropy(rounds: Sequence[RoundSummary]) -> Figure:
    """How undecided each head still is: 1 is uniform over what is legal, 0 is certain."""
    picture = figure(3.2)
    axes = style_axes(
        picture.subplots(), "How undecided each head is", x="round", y="entropy / ln(legal choices)"
    )
    for i, head in enumerate(rounds[-1].head_entropy):
        values = [r.head_entropy.get(head, np.nan) for r in rounds]
        style = "-" if i < len(SERIES) else "--"
        axes.plot(
            [r.round for r in rounds], values, style, color=SERIES[i % len(SERIES)], label=head, linewidth=1.6
        )
    axes.set_ylim(-0.02, 1.05)
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture


def accuracy_against_compute(controllers: Sequence[ControllerResult]) -> Figure:
    """Validation accuracy against what was spent, a line for each arm; points are as large as networks."""
    picture = figure(4.2)
    axes = style_axes(
        picture.subplots(), "Accuracy against compute", x="training GFLOPs", y="validation accuracy"
    )
    curves = {result.name: result.curve for result in controllers if len(result.curve) > 1}
    least = min(point.parameters for curve in curves.values() for point in curve)
    lowest = min(curve[-1].accuracy for curve in curves.values())
    for i, (name, curve) in enumerate(curves.items()):
        spent, reached = [p.flops / 1e9 for p in curve], [p.accuracy for p in curve]
        colour = SERIES[i % len(SERIES)]
        axes.plot(spent, reached, color=colour, linewidth=1.6, label=name)
        areas = [12 * p.parameters / least for p in curve]
        axes.scatter(spent, reached, s=areas, color=colour, alpha=0.45, linewidths=0)
    axes.set_ylim(max(0.0, 2 * lowest - 1.02), 1.0)
    axes.yaxis.set_major_formatter(percent())
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return picture


def frontier(controllers: Sequence[ControllerResult]) -> Figure:
    """Test accuracy against parameters: every member faintly, every controller's mean with its intervals."""
    picture = figure(4.2)
    axes = style_axes(picture.subplots(), "Accuracy against size", x="parameters", y="test accuracy")
    for i, result in enumerate(controllers):
        colour, marker = SERIES[i % len(SERIES)], _MARKERS[i % len(_MARKERS)]
        axes.scatter(result.parameters, result.test_accuracy, s=14, color=colour, alpha=0.25, linewidths=0)
        (x, x_half), (y, y_half) = mean_interval(result.parameters), mean_interval(result.test_accuracy)
        axes.errorbar(
            x,
            y,
            xerr=_bar(x_half),
            yerr=_bar(y_half),
            fmt=marker,
            color=colour,
            markersize=8,
            markeredgecolor="white",
            capsize=3,
            label=f"{result.name} ({len(result.members)})",
        )
    _size_axis(axes)
    axes.yaxis.set_major_formatter(percent())
    axes.legend(frameon=False, fontsize=9, title="controller (members)", title_fontsize=9)
    return picture


def paired_differences_chart(differences: Sequence[PairedDifference]) -> Figure:
    """How far each controller lies above the baseline in accuracy, member by member."""
    rows = [d for d in differences if d.quantity == "test_accuracy"]
    picture = figure(0.9 + 0.38 * len(rows))
    baseline = rows[0].baseline if rows else ""
    axes = style_axes(picture.subplots(), f"Test accuracy above {baseline}, paired", x="percentage points")
    for i, row in enumerate(rows):
        ahead = SERIES[2] if row.mean - row.ci > 0 else SERIES[1] if row.mean + row.ci < 0 else MUTED
        axes.errorbar(
            100 * row.mean, i, xerr=_bar(100 * row.ci), fmt="o", color=ahead, markersize=7, capsize=3
        )
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [row.controller for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return picture


def blueprint_earnings(earnings: Sequence[BlueprintEarnings]) -> Figure:
    """What became of each blueprint's seeds, and what those that were kept contribute."""
    picture = figure(1.2 + 0.36 * max(len(earnings), 2))
    fates, worth = picture.subplots(1, 2, sharey=True)
    style_axes(fates, "What became of its seeds", x="seeds")
    style_axes(worth, "Contribution when kept (kept only above 0)", x="percentage points")
    rows = range(len(earnings))
    left = np.zeros(len(earnings))
    for label, stage in (("kept", "FOSSILIZED"), ("taken out", "PRUNED"), ("unfinished", "DORMANT")):
        counts = np.array([e.fates[label] for e in earnings], dtype=float)
        fates.barh(rows, counts, left=left, color=STAGE_COLOURS[stage], label=label, height=0.68)
        left += counts
    picture.legend(
        *fates.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=8.5
    )
    for i, entry in enumerate(earnings):
        mean, half = mean_interval(entry.contributions)
        if np.isfinite(mean):
            worth.errorbar(mean, i, xerr=_bar(half), fmt="o", color=STAGE_COLOURS["FOSSILIZED"], capsize=3)
    worth.axvline(0, color=INK, linewidth=1)
    fates.set_yticks(rows, [e.blueprint.lower().replace("_", " ") for e in earnings])
    fates.set_ylim(len(earnings) - 0.5, -0.5)
    return picture


def contribution_against_parameters(earnings: Sequence[BlueprintEarnings]) -> Figure:
    """Every kept seed: what it costs and what it brings."""
    picture = figure(3.8)
    axes = style_axes(picture.subplots(), "What kept seeds cost and bring", x="parameters of the seed")
    axes.set_ylabel("contribution, percentage points", fontsize=9.5, color=INK)
    for i, entry in enumerate(e for e in earnings if e.contributions):
        axes.scatter(
            entry.parameters,
            entry.contributions,
            s=30,
            marker=_MARKERS[i % len(_MARKERS)],
            color=SERIES[i % len(SERIES)],
            alpha=0.65,
            linewidths=0,
            label=entry.blueprint.lower().replace("_", " "),
        )
    axes.axhline(0, color=INK, linewidth=1)
    _size_axis(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture


def _band(axes: Axes, x: Sequence[int], mean: Sequence[float], half: Sequence[float], colour: str) -> None:
    middle, reach = np.array(mean, dtype=float), np.nan_to_num(np.array(half, dtype=float))
    axes.fill_between(x, middle - reach, middle + reach, color=colour, alpha=0.22, linewidth=0)
    axes.plot(x, middle, color=colour, linewidth=1.8, marker="o" if len(x) < 3 else "")


def _stacked(x: Sequence[int], shares: np.ndarray, names: Sequence[str], title: str, label: str) -> Figure:
    """Shares as bands from bottom to top, WAIT above all the others."""
    picture = figure(3.2)
    axes = style_axes(picture.subplots(), title, x=label, y="share")
    order = sorted(range(len(names)), key=lambda i: names[i] == "WAIT")
    axes.stackplot(
        x,
        shares[:, order].T,
        labels=[names[i].lower().replace("_", " ") for i in order],
        colors=[OP_COLOURS.get(names[i], MUTED) for i in order],
        linewidth=0,
    )
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(percent())
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    return picture


def _size_axis(axes: Axes) -> None:
    """Parameters: a logarithmic axis where they span a wide range, with numbers that people read."""
    low, high = axes.get_xlim()
    if low > 0 and high < _WIDE * low:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
        return
    axes.set_xscale("log")
    _plain_log(axes.xaxis)


def _plain_log(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers, and at least two of them."""
    low, high = sorted(axis.get_view_interval())
    fine, coarse = LogLocator(subs=(1.0, 2.0, 5.0), numticks=6), LogLocator(numticks=6)
    enough = (
        ticks for ticks in (fine, coarse) if sum(low <= t <= high for t in ticks.tick_values(low, high)) > 1
    )
    axis.set_major_locator(next(enough, MaxNLocator(4)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axis.set_minor_formatter(NullFormatter())


def _bar(half: float) -> float | None:
    return half if np.isfinite(half) else None
