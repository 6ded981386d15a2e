"""The tables of the report, as HTML: what was reached, how far apart it lies, what was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from esper.runs.differences import against_growers, clear_among
from esper.runs.numbers import flop_unit, interval, number, three_digits
from esper.runs.palette import stage_name
from esper.runs.schema import Comparison, Growth, PairedDifference, SavedNetwork
from esper.utils.statistics import mean_interval

PHI = "Φ is accuracy less a price on parameters: what a controller is paid for."


def cards(figures: Mapping[str, str]) -> str:
    """Figures that stand out, each with what it is."""
    items = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in figures.items())
    return f'<div class="cards">{items}</div>'


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences, or nothing."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways rather than wrap its numbers; long names in its first column wrap."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def results_table(results: Comparison) -> str:
    """What every controller reached: means with 95 % intervals over members."""
    scale, unit = flop_unit([value for result in results.controllers for value in result.flops])
    rows = []
    for result in results.controllers:
        accuracy, half = mean_interval(result.test_accuracy)
        flops, flops_half = (value / scale for value in mean_interval(result.flops))
        rows.append(
            [
                result.name,
                str(len(result.members)),
                interval(100 * accuracy, 100 * half, ".1f"),
                interval(*mean_interval(result.parameters), ",.0f"),
                interval(*mean_interval(result.potential), ".3f"),
                interval(*mean_interval(result.member_epochs), ",.0f"),
                interval(flops, flops_half, three_digits(flops)),
            ]
        )
    heading = f"{results.task}, host {results.host}: means with 95 % intervals over members. {PHI}"
    titles = ("controller", "members", "test accuracy, %", "parameters", "Φ", "epochs", f"{unit} a member")
    return f"<p>{escape(heading)}</p>{table(titles, rows)}"


def differences_table(results: Comparison) -> str:
    """How far each controller lies above the first one, and networks from the start above their growers."""
    found = [*results.differences, *against_growers(results.controllers)]
    if not found:
        return ""
    scale, unit = flop_unit([abs(d.mean) for d in found if d.quantity == "flops"])
    pairs = {(d.controller, d.baseline): {} for d in found}  # type: dict[tuple[str, str], dict[str, PairedDifference]]
    for difference in found:
        pairs[difference.controller, difference.baseline][difference.quantity] = difference

    def cell(difference: PairedDifference | None, factor: float, form: str) -> str:
        if difference is None:
            return ""
        mean, half = factor * difference.mean, factor * difference.ci
        star = " *" if clear_among(difference, len(pairs)) else ""
        return interval(mean, half, "+" + (form or three_digits(mean))) + star

    rows = [
        [
            controller,
            baseline,
            cell(gaps.get("test_accuracy"), 100.0, ".1f"),
            cell(gaps.get("parameters"), 1.0, ",.0f"),
            cell(gaps.get("potential"), 1.0, ".3f"),
            cell(gaps.get("flops"), 1 / scale, ""),
            str(next(iter(gaps.values())).members),
        ]
        for (controller, baseline), gaps in pairs.items()
    ]
    titles = ("controller", "against", "Δ accuracy, points", "Δ parameters", "Δ Φ", f"Δ {unit}", "pairs")
    return table(titles, rows) + f"<p>{escape(_caution(len(pairs)))}</p>"


def _caution(comparisons: int) -> str:
    paired = "Differences are between the same members under both, with 95 % intervals."
    if comparisons < 2:
        return f"{paired} * is clear of 0."
    return (
        f"{paired} Each interval stands alone, and of {comparisons} comparisons one misses 0 by chance more "
        f"easily than a single one does. * is clear of 0 even if all {comparisons} are to hold at once."
    )


def network_cards(network: SavedNetwork) -> str:
    """The saved network's figures, beside the same member without growth."""
    return cards(
        {
            "test accuracy of the saved network": f"{network.test_accuracy:.1%}",
            "test accuracy of the same member ungrown": number(network.ungrown_test_accuracy, ".1%"),
            "validation accuracy, by which it was chosen": f"{network.validation_accuracy:.1%}",
            "parameters": f"{network.parameters:,}",
            "parameters of its host": f"{network.host_parameters:,}",
        }
    )


def growth_cards(growth: Growth, network: SavedNetwork | None) -> str:
    """What an `esper.grow` came to, beside what it is measured against."""
    figures = {
        f"{curve.name}: validation {growth.score_name}, {curve.parameters[-1]:,} parameters": number(
            curve.score[-1], ".3f"
        )
        for curve in growth.curves
    }
    if growth.curves:
        figures["epochs of growth"] = f"{len(growth.curves[0].score) - 1} of {growth.epochs}"
    if network is not None:
        figures["parameters of the model as given"] = f"{network.host_parameters:,}"
    return cards(figures)


def network_table(network: SavedNetwork) -> str:
    """What every slot of the saved network holds."""
    rows = [
        [
            slot.slot,
            slot.blueprint.lower().replace("_", " ") if slot.blueprint else "nothing",
            stage_name(slot.stage),
            number(slot.alpha, ".2f"),
            slot.style.lower().replace("_", " ") if slot.style else "",
            number(slot.contribution, "+.1f"),
        ]
        for slot in network.slots
    ]
    titles = ("slot", "holds", "stage", "alpha", "style", "contribution, validation points")
    files = "network.pt2 (torch alone runs it), network.safetensors, network.md"
    grew = f"<p>What grew: {escape('; '.join(network.changes))}.</p>" if network.changes else ""
    return f"<p>{escape(files)} in the run folder.</p>{grew}{table(titles, rows)}"
