"""The network that a member became, on disk: for torch, for people, and for whoever reads the film.

network.pt2           a torch.export archive: torch alone runs it
network.safetensors   its tensors, for a model of one's own
network.md            what grew where, what it reached, and how to load it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import save as save_tensors
from torch import nn

from esper.comparing import ControllerRun
from esper.growing.exporting import save_archive
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.stages import Stage
from esper.population.extract import extract
from esper.simic.environment import GrowthEnvironment
from esper.telemetry.files import disk_errors, write_atomically


@dataclass(frozen=True)
class GrownMember:
    """One member at the end of an episode."""

    row: int  # in its population
    network: nn.Sequential
    environment: GrowthEnvironment
    run: ControllerRun

    @staticmethod
    def best(environment: GrowthEnvironment, run: ControllerRun) -> GrownMember:
        """The member with the best validation accuracy; the environment still holds the episode's end."""
        row = int(np.argmax(np.nan_to_num(run.record.accuracy[-1], nan=-1.0)))
        return GrownMember(row, extract(environment.population, environment.slots, row), environment, run)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())

    def describe(self) -> str:
        """The network in words, as Markdown."""
        record, task = self.run.record, self.environment.spec.task
        options = ", ".join(f"{name}={value}" for name, value in task.host.options.items())
        return "\n".join(
            [
                f"# A network grown on {task.name}",
                "",
                f"Member {int(record.members[self.row])} of {record.num_members}, the best on the validation "
                f"split, grown by the controller {self.run.name} in {record.num_steps} decision steps.",
                "",
                "| | |",
                "|---|---|",
                f"| host | {task.host.preset}({options}), {record.host_parameters:,} parameters |",
                f"| grown | {self.parameters:,} parameters |",
                f"| validation accuracy | {record.accuracy[-1, self.row]:.2%} |",
                f"| test accuracy | {self.run.test.accuracy[self.row]:.2%} |",
                "",
                "| slot | holds | stage | alpha | style | contribution, points |",
                "|---|---|---|---|---|---|",
                *(self._slot(s) for s in range(len(record.slot_ids))),
                "",
                f"Input: {list(task.input_shape)} per sample, standardised as the task does it; output: "
                f"{task.num_classes} logits.",
                "",
                "    import torch",
                '    model = torch.export.load("network.pt2").module()   # needs torch alone',
                "    logits = model(inputs)                              # [batch, ...]",
                "",
                "```",
                str(self.network),
                "```",
                "",
            ]
        )

    def _slot(self, s: int) -> str:
        slots, name = self.run.record.final_slots, self.run.record.slot_ids[s]
        blueprint = int(slots.blueprint[self.row, s])
        stage = Stage(int(slots.stage[self.row, s])).name
        if blueprint < 0:
            return f"| {name} | nothing | {stage} | | | |"
        worth = float(self.run.record.contribution[-1, self.row, s])
        told = f"{worth:+.2f}" if np.isfinite(worth) else "not measured"
        style = Style(int(slots.style[self.row, s])).name
        return (
            f"| {name} | {Blueprint(blueprint).name} | {stage} | {float(slots.alpha[self.row, s]):.2f} "
            f"| {style} | {told} |"
        )

    def save(self, folder: Path) -> None:
        """Write the three files."""
        sample = self.environment.spec.task.train.inputs[:2]
        with disk_errors("write", folder / "network.pt2"):
            save_archive(self.network, sample, folder / "network.pt2")
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.network.state_dict().items()}
        write_atomically(folder / "network.safetensors", save_tensors(tensors, {"format": "pt"}))
        write_atomically(folder / "network.md", self.describe().encode())
