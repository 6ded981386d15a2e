"""What is kept of every arm: plain records, rounded, small enough to commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.comparing import EVALUATION_EPISODE
from esper.lifecycle.actions import NUM_BLUEPRINTS, Op
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.simic.environment import GrowthEnvironment
from esper.simic.rewards import potential
from esper.simic.rollout import Doubles, EpisodeRecord, Floats, evaluate_test, play
from esper.tamiyo.controller import Controller
from esper.telemetry.files import write_atomically
from studies.setting import REWARD

FEW_NUMBERS = 1024  # curves of single members are kept up to this many numbers


@dataclass(frozen=True)
class Growth:
    """What a controller did with its members over T steps."""

    op_shares: list[list[float]]  # [T][ops] executed
    germinated: list[float]  # [T] seeds a member and step
    placed: list[list[int]]  # [S][blueprints] seeds at the end, over all members
    hold_lengths: list[int]  # [T + 1] how many seeds were held for so many steps in a row
    rollbacks: float  # of the governor, a member

    @property
    def seeds_planted(self) -> float:
        """Germinations of a member in an episode."""
        return sum(self.germinated)


@dataclass(frozen=True)
class Arm:
    """N networks by one way of getting them."""

    name: str
    test_accuracy: list[float]  # [N]
    validation_accuracy: list[float]  # [N] at the end
    parameters: list[int]  # [N]
    potential: list[float]  # [N] Φ with the test accuracy, against the task's own host
    flops: list[float]  # [N] of the whole training
    batches: list[int]  # [K] minibatches by each point of the curve
    curve: list[float]  # [K] mean validation accuracy
    spent: list[float]  # [K] mean FLOPs
    curves: list[list[float]] = field(default_factory=list)  # [N][K] where they are few
    growth: Growth | None = None
    program: str = ""  # by which it was found


@dataclass(frozen=True)
class Calibration:
    """How the rate of random germination was matched, on members that are not judged."""

    rate: float
    wanted: float  # germinations a member of the trained controllers
    expected: float  # of random germination at that rate
    rates: list[float]
    germinations: list[float]  # at each of the rates


@dataclass(frozen=True)
class Evaluation:
    """All arms on one task."""

    task: str
    host: str
    host_parameters: int
    members: int
    steps: int
    batches: int  # in a step
    calibration: Calibration | None = None
    arms: list[Arm] = field(default_factory=list)

    def __getitem__(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def __contains__(self, name: str) -> bool:
        return any(arm.name == name for arm in self.arms)

    def path(self, folder: Path) -> Path:
        return folder / f"evaluation-{self.task}.json"

    def continued(self, folder: Path) -> Evaluation:
        """What other programs found before under the same settings, if a file of the folder tells."""
        path = self.path(folder)
        if not path.exists():
            return self
        before = Evaluation.read(path)
        same = replace(before, calibration=self.calibration, arms=self.arms) == self
        return before if same else self

    def without(self, program: str) -> Evaluation:
        return replace(self, arms=[arm for arm in self.arms if arm.program != program])

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder)
        write_atomically(path, (json.dumps(asdict(self), separators=(",", ":")) + "\n").encode())
        return path

    @staticmethod
    def read(path: Path) -> Evaluation:
        raw = json.loads(path.read_text())
        calibration = raw.pop("calibration")
        arms = [
            Arm(**{**a, "growth": Growth(**a["growth"]) if a["growth"] else None}) for a in raw.pop("arms")
        ]
        return Evaluation(**raw, calibration=Calibration(**calibration) if calibration else None, arms=arms)


# ---- from an episode to a record -------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """An episode, the networks that it ended with on the test split, and what it had spent by each step."""

    record: EpisodeRecord
    test: Floats  # [N]
    spent: Doubles  # [T + 1, N] FLOPs
    batches: int  # in a step


def play_and_test(
    environment: GrowthEnvironment, controller: Controller, initial_slots: SlotStates | None = None
) -> Played:
    """One episode; then the test split is opened, once."""
    record = play(environment, controller, EVALUATION_EPISODE, initial_slots)
    test = evaluate_test(environment).accuracy
    return Played(record, test, record.spent, environment.spec.population.batches_per_epoch)


def arm_of(name: str, played: Played, host_parameters: int, span: slice = slice(None)) -> Arm:
    """Some members of an episode as an arm; Φ is against `host_parameters`, those of the task's own host."""
    record = played.record
    parameters, test = record.parameters[-1, span], played.test[span]
    accuracy, spent = record.accuracy[:, span], played.spent[:, span]
    few = accuracy.size <= FEW_NUMBERS
    return Arm(
        name=name,
        test_accuracy=rounded(test),
        validation_accuracy=rounded(accuracy[-1]),
        parameters=parameters.tolist(),
        potential=worth(test, parameters, host_parameters),
        flops=significant(spent[-1]),
        batches=[t * played.batches for t in range(len(accuracy))],
        curve=rounded(accuracy.mean(axis=1)),
        spent=significant(spent.mean(axis=1)),
        curves=[rounded(member) for member in accuracy.T] if few else [],
        growth=growth_of(record, span),
    )


def growth_of(record: EpisodeRecord, span: slice) -> Growth:
    germinated = record.germinated[:, span]
    ops = record.executed_op[:, span]
    blueprints = record.final_slots.blueprint[span].numpy()
    return Growth(
        op_shares=[rounded([float((step == op).mean()) for op in Op]) for step in ops],
        germinated=rounded(germinated.sum(axis=2).mean(axis=1)),
        placed=[np.bincount(slot[slot >= 0], minlength=NUM_BLUEPRINTS).tolist() for slot in blueprints.T],
        hold_lengths=run_lengths(record.ticked_stage[:, span] == Stage.HOLDING),
        rollbacks=round(float(record.panicked[:, span].sum(axis=0).mean()), 4),
    )


def run_lengths(held: NDArray[np.bool_]) -> list[int]:
    """How many unbroken runs of True have each length, 0 to T.  # [T, N, S] → [T + 1]"""
    counts = np.zeros(len(held) + 1, dtype=np.int64)
    length = np.zeros(held.shape[1:], dtype=np.int64)
    for now in [*held, np.zeros_like(held[0])]:
        ended = length[~now & (length > 0)]
        counts += np.bincount(ended, minlength=len(counts))
        length = np.where(now, length + 1, 0)
    return counts.tolist()


def worth(accuracy: NDArray[Any], parameters: NDArray[Any], host_parameters: int) -> list[float]:
    """Φ of every member.  # [N], [N] → [N]"""
    ratio = torch.as_tensor(np.asarray(parameters, dtype=np.float64) / host_parameters)
    return rounded(potential(torch.as_tensor(np.asarray(accuracy, dtype=np.float64)), ratio, REWARD).numpy())


def rounded(values: NDArray[Any] | Sequence[float], digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in values]


def significant(values: NDArray[Any]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
