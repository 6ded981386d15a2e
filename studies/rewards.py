"""A small exam of rewards for a controller of the learning rate: which teaches most, and which can be farmed?

    python -m studies.rewards --trainings 3 --out FILE      some minutes for each training on an idle core
    python -m studies.rewards --read FILE                   the tables

potential   what the validation accuracy Φ gained in each step, Φ(t + 1) − Φ(t)
terminal    all that was gained, Φ(end) − Φ(0), paid in the last step
escrow      in each step what rises for good: m(t + 1) − m(t), where m(t) is the least Φ from t to the end

Every training begins with one supervised start, the imitation of the preset `demo`; from there PPO goes on
for as many rounds with each reward, on the same tasks, networks and random numbers. Controllers are judged
on fresh tasks. A farmer, who spoils a network that has begun to learn and lets it recover, shows what each
reward pays for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.builders import LEARNER, make_learner, make_specs
from esper.config import RunConfig
from esper.lifecycle.actions import Actions, Rate
from esper.runs.console import interval
from esper.simic.environment import GrowthEnvironment
from esper.simic.learner import LearnedController, Learner
from esper.simic.rollout import play
from esper.simic.trainer import Trainer
from esper.tamiyo.controller import Controller, EpisodeInfo
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.scripted import Static
from esper.utils.statistics import mean_interval
from studies import command_line
from studies.rates import FRESH, at_rate, spec_of, test_accuracy

KINDS = ("potential", "terminal", "escrow")
ROUNDS = 8  # of PPO with each reward
START = "supervised start"
BEST_SCALE = 8.0  # of the recipe's rate, as `studies.rates` tuned it
SPOILS = 0.2  # share of the budget from which on a farmer is paid, and spoils


def pay(gains: Tensor, steps: Tensor, kind: str) -> Tensor:
    """Pay what each step gained in another way; after its `steps` a row gains nothing.

    gains [N, T], steps [N] → [N, T]
    """
    if kind == "potential":
        return gains
    level = torch.cat((torch.zeros_like(gains[:, :1]), gains.cumsum(1)), dim=1)  # [N, T + 1], from 0
    if kind == "terminal":
        return torch.zeros_like(gains).scatter(1, steps.unsqueeze(1) - 1, level[:, -1:])
    least = level.flip(1).cummin(1).values.flip(1)  # from here to the end
    return least.diff(dim=1)


class ExamLearner(Learner):
    """A learner that is paid in one of the ways once it no longer imitates."""

    kind = KINDS[0]

    def finish_episode(self) -> None:
        super().finish_episode()
        if not self.imitates:
            rewards = self.buffer.get_batched_sequences().steps.reward  # a view of the buffer
            rewards.copy_(pay(rewards, self.buffer.step_counts, self.kind))


class Farmer(Controller):
    """Spoils the network by ever higher rates from SPOILS to where the rate falls, which lets it recover."""

    uses_metrics = False

    def begin(self, info: EpisodeInfo) -> None:
        self._waits = Actions.wait(info.num_members).choices

    def decide(self, observation: Observation, masks: ActionMasks, step: int) -> Actions:
        assert observation.training is not None
        assert masks.rate is not None
        wanted = torch.where(observation.progress >= SPOILS, int(Rate.DOUBLE), int(Rate.KEEP))
        return Actions(self._waits, wanted * masks.rate.gather(1, wanted.unsqueeze(1)).squeeze(1))


def farmed(config: RunConfig) -> dict[str, dict[str, float]]:
    """Return what each reward pays, on the mean, to networks left alone and to a farmer, from SPOILS on.

    All have the rate that is best for such tasks at first, so that a higher one can only spoil.
    """
    found = {}
    for name, controller in {"left alone": Static(), "farmer": Farmer()}.items():
        record = play(GrowthEnvironment(at_rate(spec_of(config, FRESH), BEST_SCALE)), controller, 0)
        gains = torch.from_numpy(record.reward[round(SPOILS * len(record.reward)) :]).T  # [N, T]
        steps = torch.full((len(gains),), gains.shape[1])
        found[name] = {kind: round(float(pay(gains, steps, kind).sum(1).mean()), 4) for kind in KINDS}
    return found


def examine(config: RunConfig, training: int) -> dict[str, Any]:
    """Train from one supervised start with each reward, and judge all of them on the same fresh tasks."""
    own = config.model_copy(
        update={"seed": training, "task_seed": training, "rounds": config.learner.imitate + ROUNDS}
    )
    start: dict[str, Tensor] = {}
    accuracy: dict[str, list[float]] = {}
    fresh = spec_of(config, FRESH + training)
    for kind in KINDS:
        plain = make_learner(own, torch.device("cpu"))
        learner = ExamLearner(LEARNER, plain.agent, plain.steps, own.learner, own.reward)
        learner.kind = kind
        trainer = Trainer(make_specs(own, torch.device("cpu")), [learner], own.rounds)
        if start:
            trainer.load_state_dict(start)
        for _ in trainer.run():
            if trainer.rounds_done == own.learner.imitate:
                start = {name: value.clone() for name, value in trainer.state_dict().items()}
                accuracy |= judged(fresh, START, learner)
        accuracy |= judged(fresh, kind, learner)
    return {"training": training, "accuracy": accuracy}


def judged(spec: Any, name: str, learner: Learner) -> dict[str, list[float]]:
    """Return the test accuracy of the likeliest and of sampled choices."""
    agent = learner.agent
    found = test_accuracy(spec, {name: LearnedController(agent, deterministic=True)})
    return found | test_accuracy(spec, {f"{name}, sampled": LearnedController(agent)})


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables: what PPO adds to the supervised start, and what a farmer earns."""
    paid, records = found[0]["paid"], found[1:]
    lines = [
        "| reward | likeliest choices, minus the start | sampled choices, minus the start |",
        "|---|---:|---:|",
    ]
    for kind in KINDS:
        cells = []
        for end in ("", ", sampled"):
            # The unit is a training: its tasks share a policy.
            gains = [
                float(np.subtract(r["accuracy"][kind + end], r["accuracy"][START + end]).mean())
                for r in records
            ]
            cells.append(interval(*mean_interval(gains), "+.2f"))
        lines.append(f"| {kind} | {cells[0]} | {cells[1]} |")
    lines += ["", "| paid for an episode | " + " | ".join(KINDS) + " |", "|---|" + "---:|" * len(KINDS)]
    lines += [
        f"| {name} | " + " | ".join(f"{sums[kind]:+.3f}" for kind in KINDS) + " |"
        for name, sums in paid.items()
    ]
    return "\n".join(lines)


def judge(config: RunConfig, trainings: int) -> Iterator[dict[str, Any]]:
    """Pay a farmer, then examine the rewards in so many trainings."""
    yield {"paid": farmed(config)}
    for training in range(trainings):
        yield examine(config, training)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and judge, or print the tables of a file."""
    command_line.run_trainings(arguments, __doc__, 3, judge, report)


if __name__ == "__main__":
    command_line.run(main)
