"""The learner never waits for its device behind anyone's back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from tests.rollouts import Scene, play, step_of

# What would make a GPU wait: reading a number, and shapes that depend on values.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::item",
}


class Waits(TorchDispatchMode):
    """Collects the operations that would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split(".")[0]
        indexed_by_mask = name in {"aten::index", "aten::index_put_"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or indexed_by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def make_agent(**config: object) -> PPOAgent:
    torch.manual_seed(0)
    return PPOAgent(TamiyoNet(TamiyoNetConfig(width=16)), PPOConfig.model_validate(config))


def test_acting_and_storing_read_nothing_back() -> None:
    agent, scene = make_agent(), Scene.random(6, 3, steps=4)
    buffer = play(agent, scene)
    with Waits() as waits:
        play(agent, scene, buffer)
    assert waits.found == []


def test_an_update_reads_nothing_back_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the loop may not be left early, and everything comes back in one read."""
    agent, scene = make_agent(target_kl=1e-5, learning_rate=0.01), Scene.random(6, 3, steps=4)
    buffer = play(agent, scene)
    monkeypatch.setattr(agent, "_may_read", False)
    reads: list[int] = []

    def read_back(values: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        reads.append(len(values))
        return {name: value.flatten().double().numpy().tolist() for name, value in values.items()}

    monkeypatch.setattr("esper.simic.agent.ppo.read_back", read_back)
    with Waits() as waits:
        metrics = agent.update(buffer)
    assert waits.found == []
    assert len(reads) == 1
    assert metrics.epochs_done < agent.config.epochs, "it stopped early"


def play_ragged(agent: PPOAgent, scene: Scene, buffer: TamiyoRolloutBuffer) -> None:
    """Store a rollout in which every other member sits out the second step."""
    state = agent.initial_state(scene.members)
    no = torch.zeros(scene.members, dtype=torch.bool, device=agent.device)
    odd = torch.arange(scene.members, device=agent.device) % 2 == 1
    buffer.reset()
    for t in range(scene.steps):
        step, state = step_of(agent, scene, t, state, no)
        buffer.add(step, odd if t == 1 else ~no)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Raise inside wherever the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_rollout_and_an_update_pass_where_every_wait_is_an_error() -> None:
    agent = PPOAgent(TamiyoNet(), PPOConfig(target_kl=1e-4), "cuda")  # so small that the early stop acts too
    scene = Scene.random(16, 3, 8, "cuda")
    buffer: TamiyoRolloutBuffer = play(agent, scene)
    agent.update(buffer)  # compiles kernels and builds tables
    play_ragged(agent, scene, buffer)
    agent.update(buffer)
    with waits_are_errors():
        play(agent, scene, buffer)
        even = agent.update(buffer)
        play_ragged(agent, scene, buffer)
        ragged = agent.update(buffer)
    assert [even.steps_learned, ragged.steps_learned] == [16 * 8, 16 * 8 - 8]
    with pytest.raises(RuntimeError, match="synchroniz"), waits_are_errors():
        torch.ones(3, device="cuda").sum().item()
