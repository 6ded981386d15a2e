"""At the end every seed is at full strength or gone, and chance keeps none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import esper
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.stages import Stage
from esper.simic.deciding import LEVEL, decide_seeds, lower_bounds
from esper.tamiyo.scripted import RandomLegal, Scheduled
from tests.growing import models

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 9))
def test_the_bound_is_that_of_a_one_sided_t_test(seed: int, blocks: int, planted: int) -> None:
    gains = torch.randn(blocks, 2, 3, generator=torch.Generator().manual_seed(seed)).double() + 0.5
    level = torch.tensor([LEVEL / planted, LEVEL])
    mean, low = lower_bounds(gains, level)
    for n in range(2):
        for s in range(3):
            test = stats.ttest_1samp(gains[:, n, s], 0.0, alternative="greater")
            assert (low[n, s] > 0) == (test.pvalue < level[n]).item()
            interval = test.confidence_interval(1 - level[n].item())
            assert low[n, s].item() == pytest.approx(interval.low, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(mean, gains.mean(0))


def test_one_block_shows_nothing() -> None:
    alive = torch.ones(1, 2, dtype=torch.bool)
    decision = decide_seeds(lambda kept: torch.full((1, 1, 2), 50.0), alive, torch.tensor([2]))
    assert not decision.kept.any()


def test_of_two_seeds_that_stand_in_for_each_other_one_stays() -> None:
    """Neither is missed while the other is there; alone each is worth ten points."""
    noise = torch.randn(20, 1, 2, generator=torch.Generator().manual_seed(0))

    def measure(kept: Tensor) -> Tensor:
        alone = kept.sum() == 1
        return noise + (10.0 if alone else 0.0)

    decision = decide_seeds(measure, torch.ones(1, 2, dtype=torch.bool), torch.tensor([2]))
    assert decision.kept.sum() == 1
    assert decision.surely[decision.kept].item() > 5


def test_many_seeds_raise_the_bar() -> None:
    gains = torch.randn(20, 1, 1, generator=torch.Generator().manual_seed(1)) + 0.55
    alive = torch.ones(1, 1, dtype=torch.bool)
    kept = [decide_seeds(lambda _: gains, alive, torch.tensor([n])).kept.item() for n in (1, 1000)]
    assert kept == [True, False]


def noise(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=draw), torch.randint(0, 3, (samples,), generator=draw)


@pytest.mark.parametrize(
    ("controller", "most"),
    [("heuristic", 0), (RandomLegal(germination_rate=1.0), 1)],  # of 1 in 100 that chance may keep
    ids=["heuristic", "random"],
)
def test_on_labels_of_pure_noise_nothing_stays(controller: Any, most: int) -> None:
    grown = esper.grow(
        models.small_mlp,
        train=noise(200, 0),
        val=noise(200, 100),
        controller=controller,
        epochs=16,
        lr=1e-2,
        members=24,
        lifecycle=QUICK,
        progress=False,
    )
    assert int(grown.record.germinated.sum()) >= 24
    assert int((grown.record.final_slots.stage == Stage.FOSSILIZED).sum()) <= most


class Narrow(nn.Sequential):
    """A host that can hardly see: one feature wide at its joint."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def test_what_helps_stays_at_full_strength_and_the_count_adds_up() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, 5, generator=draw)
    y = ((x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] * x[:, 3] > 0).long()) % 3  # needs hidden units
    grown = esper.grow(
        Narrow(),
        train=(x[:400], y[:400]),
        val=(x[400:], y[400:]),
        controller=Scheduled(steps=(0,), gates=QUICK.gates),
        blueprints=["MLP"],
        epochs=30,
        lr=1e-2,
        batch_size=32,
        lifecycle=QUICK,
        progress=False,
    )
    slots = grown.record.final_slots
    assert set(slots.stage.flatten().tolist()) <= {int(Stage.FOSSILIZED), int(Stage.DORMANT)}
    assert grown.added, grown.report()
    assert all(item.contribution > 0 for item in grown.added)
    assert slots.alpha[slots.stage == Stage.FOSSILIZED].eq(1).all()
    planted, kept = int(grown.record.germinated[:, 0].sum()), len(grown.added)
    told = f"seeds: {planted} planted, {kept} kept, {planted - kept} taken out"
    assert told in grown.report()
    measured = (grown.model(x[400:]).argmax(1) == y[400:]).float().mean().item()
    assert measured == pytest.approx(grown.record.accuracy[-1, 0], abs=1e-6)
    assert sum(p.numel() for p in grown.model.parameters()) == grown.record.parameters[-1, 0]


def test_the_best_epoch_is_restored() -> None:
    """A rate that wrecks the network at the end costs nothing: an earlier epoch comes back."""
    x, y = models.table(200)
    grown = esper.grow(
        models.small_mlp(),
        train=(x[:120], y[:120]),
        val=(x[120:], y[120:]),
        controller="static",
        epochs=12,
        lr=0.3,
        schedule="constant",
        progress=False,
    )
    scores = grown.record.accuracy[:, 0]
    assert scores[-1] == scores.max()
    assert scores[-1] == scores[grown.epochs[0]]
    measured = (grown.model(x[120:]).argmax(1) == y[120:]).float().mean().item()
    assert measured == pytest.approx(scores[-1], abs=1e-6)
