"""An update in parts: the same bits whoever computes which, and the update of the whole but for rounding."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.simic.agent.ppo import UpdateMetrics
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.utils.gather import Gather
from tests.shards import on_processes
from tests.simic.scenes import collect, make_agent

Learned = tuple[dict[str, Tensor], UpdateMetrics]


def ragged(buffer: TamiyoRolloutBuffer) -> TamiyoRolloutBuffer:
    """The same rollout with rows of several lengths, and some steps in which there was nothing to choose."""
    steps = buffer.get_batched_sequences().steps
    for row in range(buffer.num_members):
        buffer.step_counts[row] = 1 + row % buffer.horizon
        steps.terminated[row, row % buffer.horizon] = True
    steps.forced[::2, 0] = True
    return buffer


def learn(gather: Gather | None, members: int = 9, **config: object) -> Learned:
    """An update from a rollout that is the same for everyone."""
    agent = make_agent(learning_rate=0.01, epochs=2, **config)
    metrics = agent.update(ragged(collect(agent, members, steps=3).buffer), gather=gather)
    return {name: value.clone() for name, value in agent.state_dict().items()}, metrics


def assert_same(one: Learned, other: Learned) -> None:
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert str(asdict(one[1])) == str(asdict(other[1]))  # NaN for a head that was not read


@settings(max_examples=5, deadline=None)
@given(
    size=st.integers(2, 4),
    parts=st.integers(2, 5),
    members=st.integers(1, 11),
    minibatches=st.integers(1, 3),
    readers=st.sampled_from(["readers", "steps"]),
    target_kl=st.sampled_from([None, 1e-4, 0.05]),
)
def test_the_number_of_processes_changes_no_bit_of_an_update_in_parts(
    size: int, parts: int, members: int, minibatches: int, readers: str, target_kl: float | None
) -> None:
    """Also where it does not divide the parts, and where there are fewer rows than parts."""
    config = {
        "virtual_shards": parts,
        "minibatches": minibatches,
        "head_average": readers,
        "target_kl": target_kl,
    }
    alone = learn(None, members, **config)
    for process in on_processes(size, lambda gather: learn(gather, members, **config)):
        assert_same(process, alone)
    whole = learn(None, members, **{**config, "virtual_shards": 1})
    assert whole[1].stopped_early == alone[1].stopped_early
    assert whole[1].kl == pytest.approx(alone[1].kl, rel=1e-3, abs=1e-6)
    for name, value in whole[0].items():
        torch.testing.assert_close(alone[0][name], value, atol=2e-4, rtol=1e-3)


def test_a_choice_that_is_not_legal_is_told_in_every_process() -> None:
    """Only one part meets it."""

    def work(gather: Gather) -> tuple[str, bool]:
        agent = make_agent(virtual_shards=2, minibatches=1, normalize_values=False)
        before = [p.detach().clone() for p in agent.policy.parameters()]
        buffer = collect(agent, members=4, steps=3).buffer
        buffer.get_batched_sequences().steps.masks.legal[3, 1, 0] = False
        with pytest.raises(ValueError, match="member") as refused:
            agent.update(buffer, gather=gather)
        after = agent.policy.parameters()
        return str(refused.value), all(map(torch.equal, before, after))

    told = on_processes(2, work)
    assert told[0] == told[1]
    assert "member 3" in told[0][0]
    assert told[0][1], "no step is taken once that is known"
