"""The learning rate as a decision: in the environment, in the policy, and in a run that is stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.builders import agent_schema, make_agent, make_learner
from esper.config import load_config
from esper.controllers import conditions_of, load_controller
from esper.lifecycle.actions import Actions, Head, Rate
from esper.population.population import Population
from esper.simic.config import EpisodeConfig
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import LearnedController
from esper.simic.rollout import play
from esper.simic.trainer import Trainer
from esper.tamiyo.config import differences
from esper.tamiyo.controller import EpisodeInfo
from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, RATE_COLUMNS, batch_obs_to_features
from esper.tamiyo.scripted import Static
from tests.cpu_graphs import graphs_on_cpu
from tests.simic.worlds import SMALL, make_environment, make_residual, make_spec

FLAT = SMALL.model_copy(update={"schedule": "flat", "decay": 0.5})
KEEP, DOUBLE, HALVE, DECAY = Rate


def rate_environment(
    members: Sequence[int] = (0, 1, 2), steps: int = 6, span: float = 1.0, rates: bool = True, **more: object
) -> GrowthEnvironment:
    episode = EpisodeConfig(steps=steps, clock="steps", rates=rates, rate_span=span)
    return make_environment(members, steps, episode=episode, **more)


def setting(environment: GrowthEnvironment, *choices: Rate) -> Actions:
    """Wait, and set the rate of each member, or of all alike."""
    each = choices * environment.num_members if len(choices) == 1 else choices
    waits = Actions.wait(environment.num_members)
    return Actions(waits.choices, torch.tensor([int(choice) for choice in each]))


def weights(environment: GrowthEnvironment) -> torch.Tensor:
    return environment.population.hosts.weights.clone()


def test_whoever_keeps_the_rate_trains_as_without_the_option() -> None:
    found = []
    for rates in (False, True):
        environment = rate_environment(rates=rates)
        record = play(environment, Static(), 3)
        found.append((weights(environment), record.accuracy, record.reward))
    (plain, *seen), (kept, *other) = found
    assert torch.equal(plain, kept)
    assert all((a == b).all() for a, b in zip(seen, other, strict=True))


def test_without_the_option_nothing_but_keep_is_legal_and_nothing_else_happens() -> None:
    plain, asked = rate_environment(rates=False), rate_environment(rates=False)
    for environment in (plain, asked):
        environment.reset(0)
    assert plain.masks().rate is None
    assert plain.observe().training is None
    assert not any(name.startswith("state.rates") for name in plain.state_dict())
    plain.step(Actions.wait(3))
    asked.step(setting(asked, DOUBLE))
    assert torch.equal(weights(plain), weights(asked))


def test_a_doubled_rate_is_that_of_a_recipe_with_twice_the_rate() -> None:
    doubled, given_twice = rate_environment(), rate_environment(rates=False, rate_scale=(2.0, 1.0, 0.5))
    for environment in (doubled, given_twice):
        environment.reset(0)
    doubled.step(setting(doubled, DOUBLE, KEEP, HALVE))
    given_twice.step(Actions.wait(3))
    assert torch.equal(weights(doubled), weights(given_twice))


def test_a_rate_falls_to_zero_from_where_its_decay_begins() -> None:
    environment = rate_environment(steps=10, population=FLAT)
    environment.reset(0)
    environment.step(setting(environment, KEEP))
    environment.step(setting(environment, DECAY, KEEP, KEEP))
    assert environment.masks().rate is not None
    assert environment.masks().rate[0].tolist() == [True, False, False, False]  # type: ignore[index]
    assert environment.masks().rate[1].tolist() == [True, True, True, True]  # type: ignore[index]
    done = torch.tensor([[0.1, 0.4, 0.5, 0.7, 0.9]]).T.expand(-1, 3)
    shares = environment.population._scaled_rates(done)
    torch.testing.assert_close(shares[:, 0], torch.tensor([0.9, 0.6, 0.5, 0.3, 0.1]) / 0.9)
    torch.testing.assert_close(shares[:, 1], torch.tensor([1.0, 1.0, 1.0, 0.6, 0.2]))  # the recipe's own


def test_first_rates_are_drawn_over_the_span_for_each_member_and_episode() -> None:
    environment = rate_environment(range(64), span=100.0)
    drawn = []
    for episode in range(2):
        environment.reset(episode)
        assert environment.state.rates is not None
        drawn.append(environment.state.rates.scale)
    scales = torch.cat(drawn)
    assert ((scales >= 0.1) & (scales <= 10.0)).all()
    assert len(set(scales.tolist())) == 128
    quarters = torch.histc(scales.log10(), 4, -1.0, 1.0)
    assert (quarters > 16).all(), "log-uniform: 32 of 128 in each"
    alone = rate_environment([7], span=100.0)
    alone.reset(1)
    assert alone.state.rates is not None
    assert alone.state.rates.scale[0] == drawn[1][7], "whoever else is there"


def test_a_rollback_takes_the_rate_back_too() -> None:
    environment = rate_environment()
    environment.reset(0)
    environment.step(setting(environment, KEEP))
    environment.population.hosts.weights[1] = math.nan
    result = environment.step(setting(environment, DOUBLE))
    assert result.panicked.tolist() == [False, True, False]
    assert environment.state.rates is not None
    assert environment.state.rates.scale.tolist() == [2.0, 1.0, 2.0]
    environment.step(setting(environment, KEEP))
    assert environment.population.rate_scale.tolist() == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("when", [1, 3])
def test_a_state_in_the_middle_of_an_episode_goes_on_to_the_same_bits(when: int) -> None:
    orders = [(DOUBLE, KEEP, HALVE), (KEEP, DECAY, HALVE), (DOUBLE, KEEP, DECAY), (KEEP, KEEP, KEEP)]
    whole, stopped, resumed = (rate_environment(steps=4, span=9.0, population=FLAT) for _ in range(3))
    for environment in (whole, stopped):
        environment.reset(2)
    for t, order in enumerate(orders):
        if t == when:
            resumed.load_state_dict(stopped.state_dict())
        whole.step(setting(whole, *order))
        later = stopped if t < when else resumed
        later.step(setting(later, *order))
    assert torch.equal(weights(whole), weights(resumed))
    assert whole.state.rates is not None
    assert resumed.state.rates is not None
    assert torch.equal(whole.state.rates.scale, resumed.state.rates.scale)
    assert torch.equal(whole.state.rates.decay_at, resumed.state.rates.decay_at)
    ours, theirs = (batch_obs_to_features(one.observe(), rates=True)[0] for one in (whole, resumed))
    assert torch.equal(ours, theirs)


# ---- the policy ------------------------------------------------------------------------------------------

CONFIG = (
    "episode.rates=true",
    "episode.rate_span=100",
    "policy.width=16",
    "ppo.minibatches=2",
    "learner.imitate=2",
    "learner.plans=2",
)


def learned(**more: bool) -> LearnedController:
    agent = make_agent(load_config(overrides=CONFIG), torch.device("cpu"))
    torch.manual_seed(3)
    torch.nn.init.normal_(agent.policy.rate_head.weight)  # away from uniform
    return LearnedController(agent, **more)


@pytest.mark.parametrize("clock", ["steps", "compute"])
def test_replayed_steps_with_rates_are_the_steps(clock: str) -> None:
    found = []
    for replayed in (False, True):
        with (
            graphs_on_cpu(),
            patch.object(Population, "replays", new_callable=PropertyMock, return_value=replayed),
        ):
            episode = EpisodeConfig(steps=7, clock=clock, rates=True, rate_span=20.0)  # type: ignore[arg-type]
            environment = GrowthEnvironment(replace(make_residual(range(5)).spec, episode=episode))
            record = play(environment, learned(), 1)
            assert environment.state.rates is not None
            found.append((weights(environment), environment.state.rates.scale, record.choices))
    for one, other in zip(*found, strict=True):
        assert (one == other).all()
    first = environment._initial_rates().scale
    assert (found[0][1] != first).any(), "the policy did change rates"


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(1, 5))
def test_a_policy_only_samples_legal_rates(seed: int, steps: int) -> None:
    environment = rate_environment(range(6), steps=steps, span=1e4)
    environment.reset(seed)
    controller = learned()
    controller.begin(EpisodeInfo(environment.members, environment.num_slots, seed, environment.device))
    for t in range(steps):
        masks = environment.masks()
        actions = controller.decide(environment.observe(), masks, t)
        assert actions.rate is not None
        assert masks.rate is not None
        assert masks.rate.gather(1, actions.rate.unsqueeze(1)).all()
        environment.step(actions)


def test_the_features_of_the_rate_follow_the_base_and_only_where_they_are_asked_for() -> None:
    environment = rate_environment(span=100.0)
    environment.reset(0)
    environment.step(setting(environment, DOUBLE, HALVE, DECAY))
    seen = environment.observe()
    plain, more = batch_obs_to_features(seen)[0], batch_obs_to_features(seen, rates=True)[0]
    end = BASE_FEATURE_SIZE + len(RATE_COLUMNS)
    assert torch.equal(torch.cat((more[:, :BASE_FEATURE_SIZE], more[:, end:]), dim=1), plain)
    columns = {c.name: more[:, BASE_FEATURE_SIZE + k] for k, c in enumerate(RATE_COLUMNS)}
    training, rates = seen.training, environment.state.rates
    assert training is not None
    assert rates is not None
    for n in range(3):  # one by one, with plain numbers
        loss, value = float(training.loss[n]), float(seen.val_loss[n])
        expected = {
            "rate": math.log(float(rates.scale[n])) / math.log(128.0),
            "rate_falls": float(n == 2),
            "training_loss": math.log(loss / math.log(2)) / 4,
            "gap": math.log(value / loss) / 4,
            "loss_over_chance": math.log(value / math.log(2)) / 4,
            "passes": math.log1p(32 / 1000) / math.log1p(1000),
            "samples": math.log1p(1000) / math.log1p(1e6),
            "updates": math.log1p(12) / math.log1p(1e6),
            "classes": math.log(2) / 7,
        }
        for name, value in expected.items():
            assert float(columns[name][n]) == pytest.approx(value, abs=1e-5), name
        assert columns["training_slope"][n] == -2.0, "no epoch before the first"
    unknown = batch_obs_to_features(rate_environment(rates=False).reset(0), rates=True)[0]
    assert (unknown[:, BASE_FEATURE_SIZE:end] < -0.9).all(), "its own sentinel"


def trainer(*overrides: str, members: int = 4, shards: int = 1) -> Trainer:
    config = load_config(overrides=[*CONFIG, *overrides])
    episode = config.episode.model_copy(update={"steps": 4, "clock": "steps"})
    spec = replace(make_spec(range(members), 4), episode=episode)
    return Trainer([spec], [make_learner(config, torch.device("cpu"))], rounds=4, shards=shards)


def test_a_training_with_rates_goes_on_to_the_same_bits() -> None:
    whole = trainer()
    rounds = [found["agent"] for found in whole.run()]
    assert "rate" in rounds[0].update.head_entropy
    assert [found.record.members.tolist() for found in rounds] == [[0, 1, 0, 1]] * 2 + [[0, 1, 2, 3]] * 2
    first = trainer()
    for done in (1, 2, 3):
        first.play_round()
        second = trainer()
        second.load_state_dict(first.state_dict())
        for _ in second.run():
            pass
        found = second.state_dict()
        for name, value in whole.state_dict().items():
            if name != "seconds":
                assert torch.equal(value, found[name]), f"{name} after {done} rounds"


def test_plans_are_weighed_by_what_they_earn_on_the_same_member() -> None:
    found = trainer("learner.temperature=0.05", members=8, shards=2)
    found.play_round()
    buffer = found.learners["agent"].buffer  # of both shards, one below the other
    rewards = buffer.get_batched_sequences().steps.reward.sum(1).tolist()
    for shard in range(2):
        for k in range(2):
            rows = [4 * shard + k, 4 * shard + 2 + k]  # two plans of one member
            powers = [math.exp(rewards[row] / 0.05) for row in rows]
            for row, power in zip(rows, powers, strict=True):
                assert float(buffer.weights[row]) == pytest.approx(2 * power / sum(powers), rel=1e-3)
    assert not torch.equal(buffer.weights, torch.ones(8))
    uneven = trainer("learner.plans=3")
    assert uneven.play_round()["agent"].record.members.tolist() == [0, 0, 0, 0]


def test_an_old_controller_keeps_its_layout_and_its_conditions() -> None:
    shipped = load_controller("tamiyo")
    assert isinstance(shipped, LearnedController)
    assert not shipped.agent.policy.rates
    assert shipped.agent.policy.head_names == tuple(head.name.lower() for head in Head)
    assert agent_schema() != agent_schema(rates=True)
    plain = conditions_of([make_spec()])
    own = conditions_of([rate_environment(span=100.0).spec])
    assert own.learning_rate == pytest.approx((SMALL.host_lr / 10, SMALL.host_lr * 10))
    assert any("episode.rates" in phrase for phrase in differences(plain, own))
    environment = rate_environment(span=100.0)
    shipped.agent.policy.eval()
    assert play(environment, shipped, 0).num_steps == 6, "it grows and keeps the rates"
    assert environment.state.rates is not None
    assert torch.equal(environment.state.rates.scale, environment._initial_rates().scale)


def test_a_span_without_the_option_is_refused() -> None:
    with pytest.raises(ValueError, match="set rates to true"):
        EpisodeConfig(rate_span=10.0)
