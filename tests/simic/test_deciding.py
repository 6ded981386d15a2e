"""At the end every seed is at full strength or gone, and chance keeps none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import esper
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.stages import Stage
from esper.simic.bodies import BlockScores
from esper.simic.config import EpisodeConfig
from esper.simic.ending import LEVEL, FinalSelection, decide_seeds, lower_bounds
from esper.simic.environment import GrowthEnvironment
from esper.simic.rollout import Episode
from esper.tamiyo.schedule import Schedule
from tests.controllers import Scheduled
from tests.growing import models
from tests.simic import worlds

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


def by_subset(table: Tensor) -> Callable[[Tensor], BlockScores]:
    """Scores of networks with some of their seeds, read from a table.  # [blocks, N, 2 ** S]"""
    bits = 2 ** torch.arange(table.shape[2].bit_length() - 1)

    def measure(kept: Tensor) -> BlockScores:
        index = (kept * bits).sum(dim=1, keepdim=True)  # [N, 1]
        without = (index - bits * kept).expand(len(table), -1, -1)  # [blocks, N, S]
        whole = table.gather(2, index.expand(len(table), -1, -1))  # [blocks, N, 1]
        return BlockScores(whole.squeeze(2), whole - table.gather(2, without), 1)

    return measure


def test_one_block_shows_nothing() -> None:
    alive = torch.ones(1, 2, dtype=torch.bool)
    kept, _ = decide_seeds(by_subset(torch.tensor([[[0.0, 50.0, 50.0, 100.0]]])), alive, torch.tensor([2]))
    assert not kept.any()


def decided_slowly(scores: Tensor, seeds: int) -> set[int]:
    """The stated test for one network, step by step.  # scores [blocks, 2 ** seeds]"""
    level, full, left = LEVEL / (2 * seeds - 1), 2**seeds - 1, set(range(seeds))

    def bound(gains: Tensor) -> float:
        test = stats.ttest_1samp(gains.numpy(), 0.0, alternative="greater")
        return float(test.confidence_interval(1 - level).low)

    while left:
        here = sum(2**s for s in left)
        bounds = {
            s: max(bound(scores[:, now] - scores[:, here - 2**s]) for now in (here, full)) for s in left
        }
        worst = min(left, key=lambda s: bounds[s])
        if bounds[worst] > 0:
            break
        left.discard(worst)
    lost = bound(scores[:, full] - scores[:, sum(2**s for s in left)]) if len(left) < seeds else 0.0
    assert lost <= 0, "what was taken out is shown to be missed"
    return left


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 3), st.floats(0, 3))
def test_seeds_are_decided_by_the_stated_test(seed: int, seeds: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    effect = size * torch.randn(1, 6, 2**seeds, generator=draw)
    table = (effect + torch.randn(20, 6, 2**seeds, generator=draw)).double()
    alive = torch.ones(6, seeds, dtype=torch.bool)
    kept, _ = decide_seeds(by_subset(table), alive, alive.sum(dim=1))
    for n in range(6):
        assert set(kept[n].nonzero().flatten().tolist()) == decided_slowly(table[:, n], seeds)


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_chance_keeps_a_seed_in_one_network_of_a_hundred_at_most(seeds: int) -> None:
    draw = torch.Generator().manual_seed(seeds)
    table = torch.randn(20, 4000, 2**seeds, generator=draw)
    alive = torch.ones(4000, seeds, dtype=torch.bool)
    kept, _ = decide_seeds(by_subset(table), alive, alive.sum(dim=1))
    assert kept.any(dim=1).float().mean() < LEVEL + 3 * (LEVEL / 4000) ** 0.5


def noise(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=draw), torch.randint(0, 3, (samples,), generator=draw)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.long)])
def test_on_labels_of_pure_noise_nothing_stays(seeds: range) -> None:
    germinated = stayed = 0
    for seed in seeds:
        torch.manual_seed(seed)
        grown = esper.grow(
            models.small_mlp(),
            train=noise(200, seed),
            val=noise(200, 100 + seed),
            controller="heuristic",
            epochs=12,
            batch_size=50,
            lr=1e-2,
            seed=seed,
            lifecycle=QUICK,
            progress=False,
        )
        germinated += int(grown.record.germinated.sum())
        stayed += int((grown.record.final_slots.stage == Stage.FOSSILIZED).sum())
    assert germinated >= len(seeds)
    assert stayed == 0


def test_deciding_is_charged_for_every_sample_that_it_scores() -> None:
    """Each block is a measurement, which reads at most `validation_samples`."""
    spec = worlds.make_spec(members=(0, 1))
    charges = {}
    for most, read in ((8, 4 * 8), (10_000, 500)):
        population = spec.population.model_copy(update={"validation_samples": most})
        environment = GrowthEnvironment(replace(spec, population=population))
        environment.reset(0)
        scores = environment.bodies.score_blocks(environment.slots, 4)
        assert scores.samples == read
        before, everyone = environment.flops, torch.ones(2, dtype=torch.bool)
        environment.charge_validation(environment.slots, everyone, scores.samples)
        charges[most] = environment.flops - before
    torch.testing.assert_close(charges[8] * 500 / 32, charges[10_000])


def test_what_helps_stays_at_full_strength_and_the_count_adds_up() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, 5, generator=draw)
    y = ((x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] * x[:, 3] > 0).long()) % 3  # needs hidden units
    torch.manual_seed(0)  # the first weights of the host
    grown = esper.grow(
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        train=(x[:400], y[:400]),
        val=(x[400:], y[400:]),
        controller=Scheduled(steps=(0,)),
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


@pytest.mark.parametrize("clock", ["steps", "compute"])
def test_a_member_whose_last_epoch_is_its_best_pays_once(clock: Literal["steps", "compute"]) -> None:
    episode = EpisodeConfig(steps=12, clock=clock)
    environment = worlds.make_environment(members=range(8), episode=episode, best_epoch=True, seed=2)
    played, selection = Episode(environment, Schedule.parse("mlp@0.01"), 0), FinalSelection(environment)
    trained = torch.zeros(8, dtype=torch.long)
    while not environment.done:
        result = played.step()
        selection.update(result)
        trained += result.active
    assert torch.equal(selection.last_epoch, trained)
    last_is_best, before = selection.epoch == trained, environment.flops.clone()
    assert len(last_is_best.unique()) == 2, "members of both kinds"
    with mock.patch.object(environment, "charge_validation", wraps=environment.charge_validation) as charged:
        selection.finish()
    # [N] the validations that a member paid for: of one seed three to decide it, and one of what is left
    times = torch.stack([call.args[1] for call in charged.call_args_list]).sum(0)
    assert times[last_is_best].max() <= 5
    assert clock == "compute" or times[~last_is_best].max() > 8
    assert torch.equal(environment.flops > before, times > 0)
    played.refresh_last()
    record = played.record()
    assert record.num_steps == int(trained.max()), "nobody trained while seeds were decided"
    assert record.active.sum(axis=0).tolist() == trained.tolist()
