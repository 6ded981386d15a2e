"""The controllers that a study trains: Tamiyo as she is, and with one thing taken away.

A variant differs in what its agent sees, keeps, reads or is paid, never in the world, so that all
of them learn side by side in one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
from torch import Tensor

from esper.lifecycle.actions import Op
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.learned import Consequence, LearnedController, LearningController
from esper.tamiyo.controllers import Scene
from esper.tamiyo.policy.network import TamiyoInputs, TamiyoNet, TamiyoNetConfig
from esper.tamiyo.policy.observation import Observation


class EveryHead(TamiyoNet):
    """Chooses and judges all heads at every step, whatever the op reads."""

    def reads(self, op: Tensor) -> Tensor:
        return torch.ones(*op.shape, len(self.head_names), dtype=torch.bool, device=op.device)


@dataclass(frozen=True)
class Variant:
    """How an agent differs from Tamiyo as she is."""

    network: type[TamiyoNet] = TamiyoNet
    remembers: bool = True  # else the recurrent state is cleared before every step, in the update too
    sees_shadow_gain: bool = True  # else it reads as unmeasured
    paid_at_once: bool = True  # else all that a step earned is paid at the last one
    beyond_twin: bool = True  # else what the ungrown twin earned is paid too
    patient: bool = True  # else the first policy takes all legal ops alike
    ppo: Mapping[str, float | str] = field(default_factory=dict)  # settings of the learner that differ

    def agent(self, seed: int, ppo: PPOConfig, policy: TamiyoNetConfig, device: str) -> PPOAgent:
        """A fresh agent whose weights follow from the seed alone."""
        torch.manual_seed(seed)
        network = self.network(policy)
        if self.patient:
            be_patient(network)
        return PPOAgent(network, ppo.model_copy(update=dict(self.ppo)), device, seed=seed)


PATIENCE = {Op.ADVANCE: 2.0, Op.FOSSILIZE: 1.0, Op.SET_ALPHA_TARGET: -1.0, Op.PRUNE: -2.0}


def be_patient(network: TamiyoNet) -> None:
    """Let a fresh policy raise what it plants, by the bias of its op head.

    Under a policy that takes all legal ops alike most seeds are pruned before they were ever heard, so that
    planting only costs: such an agent learns to plant nothing before it can learn to raise anything.
    """
    with torch.no_grad():
        for op, bias in PATIENCE.items():
            network.op_head.bias[op] = bias


MAIN = "main"
VARIANTS = {
    MAIN: Variant(),
    "no_memory": Variant(remembers=False),
    "no_shadow_gain": Variant(sees_shadow_gain=False),
    "sparse_reward": Variant(paid_at_once=False),
    "no_causal_masks": Variant(network=EveryHead),
    "no_patience": Variant(patient=False),
    "no_twin": Variant(beyond_twin=False),
    "readers_average": Variant(ppo={"head_average": "readers"}),
}

# Settings of the learner to choose from: `--agents main probe_slow probe_fast ...` compares them in one run.
PROBES = {
    "probe_slow": Variant(ppo={"learning_rate": 1.5e-3}),
    "probe_fast": Variant(ppo={"learning_rate": 6e-3}),
    "probe_readers_fast": Variant(ppo={"head_average": "readers", "learning_rate": 6e-3}),
    "probe_far": Variant(ppo={"target_kl": 0.3, "epochs": 16}),
    "probe_curious": Variant(ppo={"entropy_start": 0.03, "entropy_end": 0.01}),
    "probe_short": Variant(ppo={"lam": 0.95}),
}


class Player(LearnedController):
    """An agent that acts in the way of its variant."""

    def __init__(self, agent: PPOAgent, variant: Variant):
        super().__init__(agent)
        self.variant = variant

    def see(self, observation: Observation) -> TamiyoInputs:
        if not self.variant.sees_shadow_gain:
            evidence = observation.evidence
            unmeasured = torch.full_like(evidence.shadow_gain, float("nan"))
            observation = replace(observation, evidence=replace(evidence, shadow_gain=unmeasured))
        return super().see(observation)

    def forgets(self, step: int) -> bool:
        return not self.variant.remembers or super().forgets(step)


class Pupil(Player, LearningController):
    """An agent that also learns in the way of its variant.

    It samples by numbers of its own: two pupils with the same members do not choose by the same dice.
    """

    def __init__(self, name: str, agent: PPOAgent, variant: Variant, steps: int):
        LearningController.__init__(self, agent, steps)
        self.variant = variant
        self.name = name

    def begin(self, scene: Scene) -> None:
        super().begin(replace(scene, seed=crc32(f"{self.name} {scene.seed}".encode())))
        self._owed = torch.zeros_like(scene.members, dtype=torch.float32)

    def pay(self, consequence: Consequence, step: int) -> Tensor:
        """# [N]; deferred pay grows by 1 / γ a step, so that the return stays what it is."""
        reward = super().pay(consequence, step)
        if self.variant.paid_at_once:
            return reward
        self._owed = self._owed / self.agent.config.gamma + reward
        return self._owed if step == self.steps - 1 else torch.zeros_like(reward)
