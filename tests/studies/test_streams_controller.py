"""The controller of streams: its rewards add up to the score, its estimates match plain loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.headroom import analysis
from studies.streams import __main__ as streams
from studies.streams import controller as controllers
from studies.streams.controller import BASE, FEATURES, Controller, Player, advantages, subtract_others
from studies.streams.data import Bank
from studies.streams.networks import Seen
from studies.streams.policies import CHANGES, EVERY, Controlled


@pytest.fixture
def bank() -> Bank:
    """Four streams with a network each."""
    return Bank(36, range(4), 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(2, 5))
def test_advantages_and_baselines_match_plain_loops(seed: int, decisions: int, copies: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, decisions, copies, 3, generator=draw, dtype=torch.float64)
    found, others = advantages(rewards, values), subtract_others(rewards)
    for t in range(decisions):
        total = torch.zeros_like(rewards[0])
        for k in range(t, decisions):
            following = values[k + 1] if k + 1 < decisions else 0.0
            total += controllers.TRACE ** (k - t) * (rewards[k] + following - values[k])
        assert torch.allclose(found[t], total)
        for copy in range(copies):
            rest = torch.stack([rewards[t, k] for k in range(copies) if k != copy]).mean(0)
            assert torch.allclose(others[t, copy], rewards[t, copy] - rest)


def test_without_a_promise_it_is_the_rule_and_its_rewards_are_the_score(bank: Bank) -> None:
    still = Player(Controller(), margin=1e9)
    score = streams.run_rule(bank, BASE, still)
    assert torch.equal(score, streams.run_rule(bank, BASE))
    rewards = controllers.play(bank, Player(Controller(), margin=1e9), 2)
    assert rewards.shape == (5, 2, bank.rows)
    first = score.mean(2) - rewards.sum(0)[:1]  # of the minibatches before the first decision
    assert bool((first > 0).all())
    assert bool((first < 50 * EVERY / bank.length).all())
    assert torch.equal(rewards[:, 0], rewards[:, 1])


def test_a_share_of_the_decisions_is_drawn() -> None:
    draw, given = torch.Generator().manual_seed(0), np.zeros((4000, FEATURES))
    player = Player(Controller(), 1e9, draw, 0.25)
    actions = player(given)
    features, kept, drawn = player.kept[0]
    assert features.shape == (4000, FEATURES)
    assert float(drawn.float().mean()) == pytest.approx(0.25, abs=0.03)
    assert not actions[~drawn.numpy()].any()
    assert set(kept[drawn].tolist()) == set(range(len(CHANGES)))


def test_one_decision_may_change_rate_fall_and_layer(bank: Bank) -> None:
    last = len(CHANGES) - 1
    forced = torch.full((bank.rows,), EVERY), torch.full((bank.rows,), last)
    policy, seen = Controlled(bank, torch.tensor([BASE]), forced=forced), Seen(*torch.ones(2, bank.rows, 36))
    rates, responses = zip(*(policy(step, seen) for step in range(EVERY + 1)), strict=True)
    factor, _, response = CHANGES[last].tolist()
    assert responses[-1].tolist() == [response] * bank.rows
    falls = 1 - 1 / (bank.length - EVERY)
    assert float(rates[-1][0]) == pytest.approx(min(0.16, factor * BASE[2]) * falls)


def test_the_critic_is_told_the_shifts() -> None:
    bank = next(b for b in (Bank(36, (seed,), 1) for seed in range(40)) if len(b.streams[0].shifts) == 2)
    told = controllers.describe_shifts(bank, torch.randn(5, 3, 1, FEATURES))
    assert told.shape == (5, 3, 1, 2 * FEATURES + 4)
    places = [at for at, _, _ in bank.streams[0].shifts]
    for decision in range(5):
        step = EVERY * (decision + 1)
        begun = max(at for at in (0, *places) if at <= step)
        ends = min(at for at in (*places, 36) if at > step)
        age, left, later, new = told[decision, 0, 0, -4:].tolist()
        assert (age, left) == pytest.approx((np.log1p(step - begun), np.log1p(ends - step)))
        assert later == sum(at > step for at in places)
        assert new == (step - begun < EVERY)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the study small."""
    scale = streams.Scale(judged=5, twins=2, rounds=1, tries=2, sweeps=1)
    grids = ((0.2, 0.4), (48,), (0.04,), (4,), (0, 2), (1e-6,))
    for module, values in (
        (streams, {"LENGTHS": (30, 36), "FIXED": ((0.02, 1.0), (0.04, 0.5)), "FREE_RATES": (0.04,)}),
        (streams, {"RULE_GRIDS": grids}),
        (controllers, {"LENGTHS": (30, 36), "RULE_GRIDS": grids, "ROWS": 32, "COPIES": 4, "STEPS": 3}),
        (controllers, {"UPDATES": 3, "KEPT": 2, "TUNED": 8, "Scale": lambda: scale}),
        (analysis, {"MODELS": {"tree": analysis.MODELS["tree"]}}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small")
def test_training_repeats_itself_and_moves_the_weights() -> None:
    one, other = controllers.train_controller(3), controllers.train_controller(3)
    fresh = Controller().state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
        assert not torch.equal(value, fresh[name])


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_the_whole_study_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, weights = tmp_path / "streams.jsonl", tmp_path / "controller.pt"
    controllers.main(["--out", str(out), "--weights", str(weights)])
    printed = capsys.readouterr().out
    first, *records = [json.loads(line) for line in out.read_text().splitlines()]
    assert set(first["tuned"][streams.LENGTH_RULE]) == {"30", "36"}
    assert [record["length"] for record in records] == [30] * 5 + [36] * 5
    wanted = {controllers.CONTROLLER, streams.LENGTH_RULE, streams.HINDSIGHT, *streams.SHOWN}
    assert all(set(record["arms"]) >= wanted for record in records)
    assert f"{controllers.CONTROLLER} − {streams.RULE}" in printed
    controllers.main(["--read", str(out)])
    assert capsys.readouterr().out == printed
    controllers.main(["--out", str(out), "--weights", str(weights)])  # reads the weights
    assert capsys.readouterr().out == printed
