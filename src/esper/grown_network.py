"""The network that a member became, on disk: for torch, for people, and for programs.

network.pt2           a torch.export archive, its standardisation of the inputs included: torch alone runs it
network.safetensors   its tensors, for a model of one's own
network.json          what grew where and what it reached, for the report (`SavedNetwork`)
network.md            the same for people, and how to load it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from esper.comparing import ControllerRun
from esper.growing.exporting import save_archive, save_network
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.stages import Stage
from esper.population.describe import describe_growth
from esper.population.extract import extract
from esper.runs.files import disk_errors
from esper.runs.schema import SavedNetwork, SavedSlot
from esper.simic.environment import GrowthEnvironment

_LOADING = (
    "    import torch",
    '    model = torch.export.load("network.pt2").module()   # needs torch alone',
    "    logits = model(inputs)                              # [batch, ...]",
)


@dataclass(frozen=True)
class GrownMember:
    """One member at the end of an episode."""

    row: int  # in its population
    network: nn.Sequential  # of inputs that are standardised already
    environment: GrowthEnvironment
    run: ControllerRun
    ungrown: ControllerRun | None = None  # the same members without growth

    @staticmethod
    def best(
        environment: GrowthEnvironment, run: ControllerRun, ungrown: ControllerRun | None = None
    ) -> GrownMember:
        """The member with the best validation accuracy; the environment still holds the episode's end."""
        row = int(np.argmax(np.nan_to_num(run.record.accuracy[-1], nan=-1.0)))
        network = extract(environment.population, environment.slots, row)
        return GrownMember(row, network, environment, run, ungrown)

    @property
    def parameters(self) -> int:
        """How many the network has."""
        return sum(p.numel() for p in self.network.parameters())

    def record(self) -> SavedNetwork:
        """The network in numbers."""
        record, task = self.run.record, self.environment.spec.task
        return SavedNetwork(
            task=task.name,
            host=str(task.host),
            controller=self.run.name,
            member=int(record.members[self.row]),
            members=record.num_members,
            steps=record.num_steps,
            host_parameters=record.host_parameters,
            parameters=self.parameters,
            validation_accuracy=float(record.accuracy[-1, self.row]),
            test_accuracy=float(self.run.test.accuracy[self.row]),
            ungrown_test_accuracy=float(self.ungrown.test.accuracy[self.row]) if self.ungrown else np.nan,
            slots=[self._slot(s) for s in range(len(record.slot_ids))],
            changes=describe_growth(self.environment.population, self.environment.slots, self.row),
        )

    def _slot(self, s: int) -> SavedSlot:
        slots, name = self.run.record.final_slots, self.run.record.slot_ids[s]
        blueprint, stage = int(slots.blueprint[self.row, s]), Stage(int(slots.stage[self.row, s])).name
        if blueprint < 0:
            return SavedSlot(name, stage)
        return SavedSlot(
            slot=name,
            stage=stage,
            blueprint=Blueprint(blueprint).name,
            style=Style(int(slots.style[self.row, s])).name,
            alpha=float(slots.alpha[self.row, s]),
            contribution=float(self.run.record.contribution[-1, self.row, s]),
        )

    def describe(self) -> str:
        """The network in words, as Markdown."""
        task = self.environment.spec.task
        about = (
            f"Input: {list(task.input_shape)} per sample, as the data set has it: network.pt2 standardises "
            f"it, the tensors alone do not. Output: {task.num_classes} logits."
        )
        network = f"```\n{self.network}\n```\n"
        return "\n".join([*_summary(self.record()), "", about, "", *_LOADING, "", network])

    def save(self, path: Path) -> None:
        """Write the four files into a folder."""
        task = self.environment.spec.task
        raw = task.train.inputs[:2]
        whole = self.network
        if task.standardize is not None:
            raw = raw * task.standardize.deviation + task.standardize.mean
            whole = nn.Sequential(task.standardize, self.network)
        with disk_errors("write", path / "network.pt2"):
            save_archive(whole, raw, path / "network.pt2")
        save_network(path, self.network, self.record(), self.describe())


def _summary(network: SavedNetwork) -> list[str]:
    rows = {
        "host": f"{network.host}, {network.host_parameters:,} parameters",
        "grown": f"{network.parameters:,} parameters",
        "validation accuracy": f"{network.validation_accuracy:.2%}",
        "test accuracy": f"{network.test_accuracy:.2%}",
        "test accuracy without growth": f"{network.ungrown_test_accuracy:.2%}",
    }
    return [
        f"# A network grown on {network.task}",
        "",
        f"Member {network.member} of {network.members}, the best on the validation split, grown by the "
        f"controller {network.controller} in {network.steps} decision steps.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items() if "nan" not in value),
        "",
        "| slot | holds | stage | alpha | style | contribution, points |",
        "|---|---|---|---|---|---|",
        *(_slot_row(slot) for slot in network.slots),
        "",
        f"What grew: {'; '.join(network.changes) or 'nothing'}. A slot is empty again once its seed is part "
        "of the host.",
    ]


def _slot_row(slot: SavedSlot) -> str:
    if slot.blueprint is None:
        return f"| {slot.slot} | nothing | {slot.stage} | | | |"
    worth = f"{slot.contribution:+.2f}" if np.isfinite(slot.contribution) else "not measured"
    return f"| {slot.slot} | {slot.blueprint} | {slot.stage} | {slot.alpha:.2f} | {slot.style} | {worth} |"
