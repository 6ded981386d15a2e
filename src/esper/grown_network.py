"""Write the network that a member grew into to disk.

network.pt2 is a torch.export archive, which standardizes its inputs: torch alone runs it. The other files are
those of `save_network`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from esper.comparing import ControllerRun
from esper.growing.result import save_archive, save_network
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.stages import Stage
from esper.population.extract import describe_growth, extract
from esper.runs.files import disk_errors
from esper.runs.schema import SavedNetwork, SavedSlot
from esper.simic.environment import GrowthEnvironment

_LOADING = """\
    import torch
    model = torch.export.load("network.pt2").module()   # needs torch alone
    logits = model(inputs)                              # [batch, ...]
"""


@dataclass(frozen=True)
class GrownMember:
    """One member at the end of an episode."""

    row: int  # in its population
    network: nn.Sequential  # of inputs that are standardized already
    environment: GrowthEnvironment
    run: ControllerRun
    ungrown: ControllerRun | None = None  # the same members without growth

    @staticmethod
    def best(
        environment: GrowthEnvironment, run: ControllerRun, ungrown: ControllerRun | None = None
    ) -> GrownMember:
        """Take the member with the best validation accuracy; the environment must hold the episode's end."""
        # NaN of a diverged member would win argmax.
        row = int(np.argmax(np.nan_to_num(run.record.accuracy[-1], nan=-1.0)))
        network = extract(environment.population, environment.slots, row)
        return GrownMember(row, network, environment, run, ungrown)

    @property
    def parameters(self) -> int:
        """Count the parameters of the network."""
        return sum(p.numel() for p in self.network.parameters())

    def record(self) -> SavedNetwork:
        """Return what network.json holds."""
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
        """Describe the network and how to load it, as Markdown."""
        task, network = self.environment.spec.task, self.record()
        rows = {
            "host": f"{network.host}, {network.host_parameters:,} parameters",
            "grown": f"{network.parameters:,} parameters",
            "validation accuracy": f"{network.validation_accuracy:.2%}",
            "test accuracy": f"{network.test_accuracy:.2%}",
            "test accuracy without growth": f"{network.ungrown_test_accuracy:.2%}",
        }
        table = [f"| {name} | {value} |" for name, value in rows.items() if "nan" not in value]
        return "\n".join(
            [
                f"# A network {'grown' if network.changes else 'trained'} on {network.task}\n",
                f"Member {network.member} of {network.members}, the best on the validation split, grown by "
                f"the controller {network.controller} in {network.steps} decision steps.\n",
                "| | |\n|---|---|",
                *table,
                f"\nWhat grew: {'; '.join(network.changes) or 'nothing'}.\n",
                f"Input: {list(task.input_shape)} per sample, as the data set has it: network.pt2 "
                "standardizes it, the tensors alone do not. "
                f"Output: {task.num_classes} logits.\n",
                _LOADING,
                f"```\n{self.network}\n```\n",
            ]
        )

    def save(self, path: Path) -> None:
        """Write the four files into a folder."""
        task = self.environment.spec.task
        raw = task.train.inputs[:2]
        whole = self.network
        if task.standardize is not None:
            # The archive takes inputs as the data set has them, so the sample goes back to that scale.
            raw = raw * task.standardize.deviation + task.standardize.mean
            whole = nn.Sequential(task.standardize, self.network)
        with disk_errors("write", path / "network.pt2"):
            save_archive(whole, raw, path / "network.pt2")
        save_network(path, self.network, self.record(), self.describe())
