"""The headroom study: plans of equal cost, and figures without optimism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from esper.tasks.task import Split
from studies.headroom import analysis
from studies.headroom.cells import Scale, draw_group, with_noise
from studies.headroom.runs import CHANGE_AT, PLANS, RULES, Arms, Plan, Rates, Rule, run_group

TINY = Scale(
    families=("tables",), cells=2, budgets=(0.12, 0.13), samples=(80, 200), sizes=1, test=64, epochs=23
)
FEW = Arms({name: PLANS[name] for name in ("static", "widen and clone")}, RULES[:1])


def test_every_arm_spends_the_same_flops_and_is_recorded_for_every_cell() -> None:
    group = draw_group(0, TINY)
    records = run_group(group, "cpu", FEW)
    assert [record["samples"] for record in records] == [cell.samples for cell in group.cells]
    assert group.cells[0].updates == pytest.approx(384 * group.cells[0].budget, rel=0.03)  # of the least host
    for record in records:
        assert tuple(record["arms"]) == FEW.names
        for arm in record["arms"].values():
            assert arm["flops"] == pytest.approx([1.0, 1.0], abs=0.05)
            assert np.shape(arm["final"]) == np.shape(arm["best"]) == (2, 2)  # twins, halves
        parameters = {name: arm["parameters"] for name, arm in record["arms"].items()}
        assert parameters["widen and clone"] > 2 * parameters["static"]  # more than either alone
        curve = record["curve"]
        assert CHANGE_AT <= curve["spent"][-1] <= 0.2
        assert np.shape(curve["loss"]) == (2, len(curve["spent"]))
        assert np.isfinite(analysis.curve_features(curve, record["classes"])).all()


def test_a_group_is_drawn_again_alike_and_repeats_short_splits() -> None:
    first, again = draw_group(3, TINY), draw_group(3, TINY)
    assert first == again != draw_group(4, TINY)
    longest = max(cell.samples for cell in first.cells)
    short = min(range(2), key=lambda k: first.cells[k].samples)
    train, samples = first.tasks[short].train, first.cells[short].samples
    assert len(train) == longest
    assert torch.equal(train.inputs[samples:], train.inputs[: longest - samples])


def test_label_noise_draws_that_share_anew() -> None:
    split = Split(torch.zeros(20_000, 1), torch.zeros(20_000, dtype=torch.long))
    noisy = with_noise(split, 0.4, 8, torch.Generator().manual_seed(0))
    assert float((noisy.targets != 0).float().mean()) == pytest.approx(0.4 * 7 / 8, abs=0.02)


def test_rates_part_where_plans_do_and_rules_follow_the_loss() -> None:
    arms = Arms(
        {"static": Plan(), "×2": Plan(factor=2.0), "decay": Plan(decay_at=0.2)},
        (Rule(0.0, 0.1), Rule(0.5, 0.1, doubles=True)),
    )
    rates = Rates(torch.tensor([3.0]), 10, arms)

    def at(share: float) -> list[float]:
        return rates.at(torch.full((5,), share), torch.full((5,), share)).tolist()

    assert at(0.1) == pytest.approx([3.0] * 5)
    assert at(0.2) == pytest.approx([3.0, 6.0, 3.0, 3.0, 3.0])
    assert at(0.85) == pytest.approx([1.5, 3.0, 3.0 * 0.15 / 0.8, 1.5, 1.5])
    for loss in (1.0, 0.9):  # it falls, but slowly
        rates.see(torch.full((5,), loss), torch.full((5,), 0.3))
    assert at(0.5) == pytest.approx([3.0, 6.0, 3.0 * 0.5 / 0.8, 3.0, 6.0])
    rates.see(torch.full((5,), 1.2), torch.full((5,), 0.4))  # it rises
    assert at(0.5) == pytest.approx([3.0, 6.0, 3.0 * 0.5 / 0.8, 1.5, 3.0])


def made_records(effect: float, cells: int = 100) -> list[dict[str, Any]]:
    """Records of noise; `effect` points for one of two plans, by a curve that falls or does not."""
    rng = np.random.default_rng(1)
    names = ("static", "rate ×2", "rate ÷2", "rule halve 0 0.05")
    found = []
    for cell in range(cells):
        level, better = rng.uniform(0.3, 0.8), int(rng.integers(1, 3))
        arms = {}
        for k, name in enumerate(names):
            scores = level + 0.01 * effect * (k == better) + rng.normal(0, 0.02, (2, 2))
            arms[name] = {"final": scores.tolist(), "best": (scores + rng.normal(0, 0.02, (2, 2))).tolist()}
        fall = 0.3 if better == 1 else 0.0
        losses = [[2.0 - fall * t + 0.02 * rng.normal() for t in range(4)] for _ in range(2)]
        curve = {"spent": [0.04, 0.08, 0.12, 0.16], "training_loss": losses, "loss": losses}
        found.append(
            {
                "family": "tables",
                "group": cell // 4,
                "budget": float(rng.uniform(0.25, 64)),
                "size": int(rng.integers(6)),
                "samples": int(rng.integers(300, 60_000)),
                "rate": float(rng.uniform(0.1, 10)),
                "updates": 100,
                "host_parameters": 1000,
                "classes": 9,
                "arms": arms,
                "curve": {**curve, "accuracy": [[0.1] * 4] * 2},
            }
        )
    return found


@pytest.fixture
def quick_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms of policies instead of five: the others take seconds."""
    few = {name: analysis.MODELS[name] for name in ("tree", "ridge")}
    monkeypatch.setattr(analysis, "MODELS", few)


@pytest.mark.usefixtures("quick_models")
def test_plans_that_are_equal_in_truth_have_no_headroom() -> None:
    table = analysis.table_of(made_records(0.0))
    values = analysis.evaluate(table)
    for name, each in analysis.headroom(values).items():
        _, low, high = analysis.interval(each, table.groups)
        assert low < 0 < high, name
    # What is chosen and scored by the same networks does look better, by luck alone.
    lucky = values.of["hindsight"] - values.of["function"]
    assert analysis.interval(lucky, table.groups)[1] > 0


@pytest.mark.usefixtures("quick_models")
def test_a_planted_effect_is_found_and_recovered_from_the_curve() -> None:
    records = made_records(8.0)
    found = analysis.headroom(analysis.evaluate(analysis.table_of(records)))
    h1, h2, h3 = (float(found[name].mean()) for name in ("H1", "H2", "H3"))
    assert h1 == pytest.approx(4.0, abs=0.8)  # the function gets half of the cells right
    assert h2 == pytest.approx(4.0, abs=0.8)
    assert h3 == pytest.approx(4.0, abs=0.8)
    text = analysis.report(records)
    assert "has something to decide" in text
    assert "| H1: " in text


def test_cells_of_a_group_stay_together_where_there_are_groups_enough() -> None:
    records = made_records(0.0)
    assert analysis.groups_of(records).tolist() == [k // 4 for k in range(100)]
    assert analysis.groups_of(records[:40]).tolist() == list(range(40))
    values = np.repeat([1.0, 2.0, 3.0], 30)
    apart = analysis.interval(values, np.arange(90))
    together = analysis.interval(values, np.repeat(np.arange(3), 30))
    assert apart[0] == together[0] == 2.0
    assert together[2] - together[1] > 3 * (apart[2] - apart[1])


def test_the_verdict_follows_from_both_bars() -> None:
    assert "nothing to decide" in analysis.verdict(0.9, 0.9, lowest_h1=0.5)
    assert "under 0.3 of H1" in analysis.verdict(2.0, 0.5)
    assert "has something to decide" in analysis.verdict(2.0, 0.7)
    assert "run more groups" in analysis.verdict(2.0, 0.7, lowest_h1=0.5, lowest_h3=0.1)
    assert "run more groups" in analysis.verdict(2.0, 0.7, lowest_h1=1.5, lowest_h3=-0.1)
