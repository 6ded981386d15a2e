"""The number of processes that share rounds changes no bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.simic.config import EpisodeConfig, RewardConfig
from esper.simic.learner import Learner
from esper.simic.rollout import EpisodeRecord, play
from esper.simic.trainer import Trainer
from esper.tamiyo.controller import Blocks
from esper.tamiyo.scripted import RandomLegal, Static
from esper.utils.errors import UserError
from esper.utils.gather import Gather
from tests.shards import on_processes
from tests.simic.worlds import make_agent, make_environment, make_spec

Bits = tuple[dict[str, torch.Tensor], list[EpisodeRecord]]


def run(gather: Gather | None, shards: int = 3, rounds: int = 2) -> Bits:
    """Four members in three shards, two learners, one of them with its twins."""
    learners = [
        Learner("one", make_agent(minibatches=2), 3, reward=RewardConfig(control_variate=True)),
        Learner("other", make_agent(seed=3, epochs=2), 3),
    ]
    trainer = Trainer([make_spec(range(4), 3)], learners, rounds, shards=shards, gather=gather)
    records = [told.record for each in trainer.run() for told in each.values()]
    state = {name: value for name, value in trainer.state_dict().items() if name != "seconds"}
    return state, records


def assert_same(one: Bits, other: Bits) -> None:
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    for a, b in zip(one[1], other[1], strict=True):
        assert_same_record(a, b)


def assert_same_record(one: EpisodeRecord, other: EpisodeRecord, atol: float = 0.0) -> None:
    for name, value in vars(one).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, vars(other)[name], rtol=0, atol=atol, err_msg=name)
    for name, value in one.final_slots.tensors().items():
        assert torch.equal(value, other.final_slots.tensors()[name]), name


def test_the_number_of_processes_changes_no_bit() -> None:
    """Two do not divide three shards, nor three shards four members."""
    alone = run(None)
    for process in on_processes(2, run):
        assert_same(process, alone)


def test_shards_together_are_the_whole() -> None:
    """Against one environment of all members: the same decisions, and rewards to what kernels differ by."""
    whole, sharded = run(None, shards=1, rounds=1), run(None, shards=2, rounds=1)
    for a, b in zip(whole[1], sharded[1], strict=True):
        np.testing.assert_array_equal(a.members, b.members)
        np.testing.assert_array_equal(a.choices, b.choices)
        np.testing.assert_allclose(a.reward, b.reward, atol=1e-5)
        np.testing.assert_allclose(a.potential, b.potential, atol=1e-5)
    for name, value in whole[0].items():
        torch.testing.assert_close(value, sharded[0][name], atol=1e-4, rtol=1e-3)


def test_who_ends_early_rests_beside_who_goes_on() -> None:
    """Played apart and joined, or played together: what grows spends its budget in fewer steps."""
    episode = EpisodeConfig(steps=8, clock="compute")
    controllers = {"static": Static(), "random": RandomLegal(1.0)}
    together = play(make_environment((0, 1, 2) * 2, episode=episode), Blocks(controllers), 1)
    apart = [play(make_environment((0, 1, 2), episode=episode), each, 1) for each in controllers.values()]
    assert apart[0].num_steps == 8 > apart[1].num_steps
    joined = apart[0].concatenate([each.tensors() for each in apart])
    assert_same_record(joined, together, atol=1e-4)  # kernels may differ between three rows and six


def test_a_process_that_learned_something_else_is_found() -> None:
    def work(gather: Gather) -> str:
        learner = Learner("agent", make_agent(), 3)
        trainer = Trainer([make_spec(range(4), 3)], [learner], 2, shards=2, gather=gather)
        trainer.play_round()
        if gather.rank == 1:
            with torch.no_grad():
                next(learner.agent.policy.parameters()).view(-1)[0] += 1e-6
        with pytest.raises(UserError) as refused:
            trainer.play_round()
        return str(refused.value)

    told = on_processes(2, work)
    assert told[0] == told[1]
    assert told[0].startswith("after round 1 the processes have different weights")


def test_a_head_without_a_choice_is_told_with_its_row_in_every_process() -> None:
    """Only one shard meets it; all must raise, or the others would wait for that one."""

    def work(gather: Gather) -> str:
        learner = Learner("agent", make_agent(), 2)
        trainer = Trainer([make_spec(range(4), 2)], [learner], 1, shards=2, gather=gather)
        decide = learner.decide

        def nothing_legal(observation, masks, step):  # type: ignore[no-untyped-def]
            (ids,) = {tuple(trainer.environment.members.tolist())}
            if 3 in ids and step == 1:
                op = masks.op.clone()
                op[1] = False
                masks = replace(masks, op=op)
            return decide(observation, masks, step)

        learner.decide = nothing_legal  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="member") as refused:
            trainer.play_round()
        return str(refused.value)

    told = on_processes(2, work)
    assert told[0] == told[1]
    assert "member 3" in told[0]


def test_an_error_says_which_members_in_which_round_at_which_step() -> None:
    trainer = Trainer([make_spec(range(4), 3)], [Learner("agent", make_agent(), 3)], 1, shards=2)

    def fail(*_: object) -> None:
        raise ValueError("no more")

    trainer.record_steps = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no more") as failed:
        trainer.play_round()
    assert failed.value.__notes__ == ["members 0 to 1, round 1, step 2"]
