"""A world of simulated bodies: what the learner does with the same rules, heads and rewards, in seconds.

    python -m studies.simulated --agents main:4 --out runs/simulated
    python -m studies.simulated --agents readers_average:4 --out runs/simulated --append

Nothing is trained but the controllers. A host gains accuracy along a curve; a seed adds what its blueprint is
worth on the mean, more or less by much, the more it has been trained and the louder it is heard. Sizes and
prices are those of real networks. One agent's round takes two seconds on a CPU, so that settings of the
learner can be compared over several trainings; whether the real world agrees is for the real world to say.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.lifecycle.actions import Blueprint
from esper.lifecycle.legality import holds_seed
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock, MemberData
from esper.population.forms import NO_FORM
from esper.population.gradients import SeedGradients
from esper.population.metrics import TrainMetrics, ValidationMetrics
from esper.population.population import Population
from esper.simic.config import GovernorConfig
from esper.simic.environment import GrowthEnvironment
from esper.simic.trainer import Trainer
from studies import training, training_log
from studies.command_line import positive, run
from studies.distribution import FAMILIES
from studies.setting import Setting, ungrown

WORTH = {  # accuracy that a seed adds when it is fully trained and heard, on the mean over members
    Blueprint.CONV_HEAVY: 0.018,
    Blueprint.CONV_LIGHT: 0.010,
    Blueprint.DEPTHWISE: 0.009,
    Blueprint.CONV_SMALL: 0.009,
    Blueprint.BOTTLENECK: 0.008,
    Blueprint.ATTENTION: 0.006,
    Blueprint.NORM: 0.005,
}
SPREAD = 0.06  # deviation of what a single seed turns out to be worth
EPOCHS = 6.0  # in which a seed learns 63 % of what it can
NOISE = 0.006  # deviation of a validation
MEASURED = 0.6  # deviation of a contribution that is measured, in points
WORLD_SEED = 1000
LONGEST = 256  # steps of an episode


class SimulatedPopulation(Population):
    """Bodies that are made up; what they cost is real."""

    def begin_episode(self, episode: int) -> None:
        ids = self.members.cpu()
        world = torch.Generator().manual_seed(WORLD_SEED + episode)
        everyone = int(ids.max()) + 1  # members with the same id have the same luck but for their seeds
        self.top = (0.45 + 0.25 * torch.rand(everyone, generator=world))[ids]
        self.pace = (3.0 + 3.0 * torch.rand(everyone, generator=world))[ids]
        self.need = (0.3 + 1.4 * torch.rand(everyone, generator=world))[ids].unsqueeze(1)  # for any seed
        self.noise = (NOISE * torch.randn(LONGEST, everyone, generator=world))[:, ids]
        self.dice = torch.Generator().manual_seed(WORLD_SEED * 77 + episode)
        self.age = torch.zeros(self.num_members, self.num_slots)
        self.worth = torch.zeros(self.num_members, self.num_slots)
        self.epoch = 0
        self.forms.fill_(NO_FORM)
        self.finished.fill_(False)
        self.idle = False

    def germinate(self, born: Tensor, blueprint: Tensor) -> None:
        super().germinate(born, blueprint)
        table = torch.zeros(len(Blueprint))
        table[[int(b) for b in WORTH]] = torch.tensor(list(WORTH.values()))
        luck = SPREAD * torch.randn(self.worth.shape, generator=self.dice)
        self.worth = torch.where(born, self.need * table[blueprint.clamp(min=0)] + luck, self.worth)
        self.age = self.age.masked_fill(born, 0.0)

    def prune(self, ended: Tensor) -> None:
        super().prune(ended)
        self.worth, self.age = self.worth.masked_fill(ended, 0.0), self.age.masked_fill(ended, 0.0)

    def train_epoch(self, slots: SlotStates, data: MemberData, clock: Clock) -> TrainMetrics:
        self.epoch = clock.epoch + 1
        trained = holds_seed(slots) & (slots.stage != Stage.GERMINATED)
        self.age = self.age + trained
        loss = _loss(self._accuracy(slots))
        isolated = slots.stage == Stage.TRAINING
        calm, none = _where(trained, torch.ones_like(self.age)), _where(trained, torch.zeros_like(self.age))
        return TrainMetrics(
            loss=loss,
            shadow_loss=_where(isolated, loss.unsqueeze(1).expand_as(self.age)),
            host_gradient_norm=torch.ones_like(loss),
            seeds=SeedGradients(norm=calm, health=calm, vanishing=none, exploding=none, ratio=calm),
        )

    def validate(
        self, slots: SlotStates, data: MemberData, ablate: bool = True, unfinished: bool = False
    ) -> ValidationMetrics:
        accuracy, gain = self._accuracy(slots), self._gain()
        error = MEASURED * torch.randn(gain.shape, generator=self.dice)
        return ValidationMetrics(
            loss=_loss(accuracy),
            accuracy=accuracy,
            contribution=_where(holds_seed(slots) & (slots.alpha > 0), 100 * slots.alpha * gain + error),
            shadow_gain=_where(slots.stage == Stage.TRAINING, 60 * gain + error),
            interaction=torch.full_like(gain, math.nan),
        )

    def _gain(self) -> Tensor:
        """What each seed adds at full strength by now.  # [N, S]"""
        return (1 - torch.exp(-self.age / EPOCHS)) * self.worth

    def _accuracy(self, slots: SlotStates) -> Tensor:
        """# [N]"""
        host = self.top * (1 - torch.exp(-self.epoch / self.pace)) + self.noise[self.epoch]
        return (host + (slots.alpha * self._gain()).sum(1)).clamp(0.01, 0.99)


class SimulatedWorld(GrowthEnvironment):
    population_type = SimulatedPopulation


def _where(known: Tensor, values: Tensor) -> Tensor:
    """NaN is unmeasured."""
    return torch.where(known, values, math.nan)


def _loss(accuracy: Tensor) -> Tensor:
    """Falls as the accuracy rises; nothing more is asked of it."""
    return 2.3 * (1 - accuracy)


def make_trainer(names: Sequence[str], members: int, rounds: int = 1) -> Trainer:
    """Agents of the study on simulated signals."""
    setting = Setting(device="cpu")
    world = training.world_of(FAMILIES[0], setting, members)
    calm = replace(ungrown(world), governor=GovernorConfig(enabled=False))
    return Trainer([calm], training.make_learners(names, setting), rounds, SimulatedWorld)


def simulate(args: argparse.Namespace) -> None:
    """Train agents in the simulated world; one line of the log for each agent and round."""
    trainer = make_trainer(training.agent_names(args.agents), args.members, args.rounds)
    log = training.Log(args.out, goes_on=args.append)
    for number, rounds in enumerate(trainer.run()):
        rows, seconds = training.log_rows(rounds), trainer.seconds
        log.add(rows, {"round": number, "family": "simulated", "seconds": round(seconds, 1)})
        left = seconds / (number + 1) * (args.rounds - number - 1)
        log.say(f"round {number:3d} {training.summary(rows)}  {seconds:.0f} s, {left:.0f} to go")
    print(training_log.kinds_table(training_log.read(args.out / training_log.LOG)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", nargs="+", default=["main:4"], help="NAME or NAME:COUNT of seeds")
    parser.add_argument("--members", type=positive, default=192, help="of every agent")
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("runs/simulated"))
    parser.add_argument("--append", action="store_true", help="keep the agents of the log that is there")
    args = parser.parse_args()
    simulate(args)


if __name__ == "__main__":
    run(main)
