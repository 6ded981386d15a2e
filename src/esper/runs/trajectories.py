"""Trajectories: the slots and actions of every member over the steps of a round, one file per round kept.

    trajectories/000012.safetensors    round 12; its header, under `trajectories`, is one JSON object

A growth has one file, 0; a comparison one for each controller, in their order from 1 on, with its name.

The tensors are those of `COLUMNS`, for T steps, N members and S slots; rows of T + 1 begin before the first
step. The header names the round, the slots, the host's parts and what the numbers of stages, ops, blueprints
and rates mean, so that a reader needs no table of its own. A round of 2,048 members with 3 slots and 24
steps takes 1.5 MB, and no more than `kept` rounds stay: the newest, and older ones ever more sparsely.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from esper.runs.files import disk_errors, file_in, write_atomically
from esper.runs.schema import json_values

NO_BLUEPRINT = 255  # the slot is empty
UNMEASURED = -32768  # a contribution that nothing has measured
# name → (type, axes). Axes: T steps, U = T + 1, N members, S slots, B blueprints.
COLUMNS: dict[str, tuple[str, str]] = {
    "members": ("i4", "N"),  # global ids
    "returns": ("f4", "N"),
    "stage": ("u1", "TNS"),  # right after the action of the step
    "alpha": ("u1", "TNS"),  # 255 is 1
    "blueprint": ("u1", "TNS"),
    "contribution": ("i2", "TNS"),  # hundredths of a point, as known to the decision
    "op": ("u1", "TN"),  # as asked for
    "op_slot": ("u2", "TN"),
    "succeeded": ("u1", "TN"),
    "rolled_back": ("u1", "TN"),  # the governor took the member back in this step
    "accuracy": ("f4", "UN"),  # of validation
    "parameters": ("f4", "UN"),
    "spent": ("f4", "UN"),  # training FLOPs since the episode began
    "seed_parameters": ("i4", "SB"),
    # where controllers set learning rates
    "rate": ("f4", "UN"),  # times that of the recipe
    "rate_choice": ("u1", "TN"),  # as carried out
}


@dataclass(frozen=True)
class HostPart:
    """A part of the host: the layers up to a joint, or the head."""

    name: str
    layers: Sequence[str]  # one short line for each
    parameters: int
    shape: Sequence[int]  # of what one sample is after it; empty where that is not known
    units: int = 0  # hidden units of a block that can be widened, 0 for any other part


@dataclass(frozen=True)
class Trajectories:
    """All members in one round. `columns` holds the names of `COLUMNS`, each in its type and shape."""

    round: int
    slots: Sequence[str]  # [S]; slot s sits after part s
    parts: Sequence[HostPart]  # [S + 1], the head last
    stage_names: Mapping[int, str]
    op_names: Mapping[int, str]
    blueprint_names: Mapping[int, str]
    columns: Mapping[str, NDArray[Any]]
    rate_names: Mapping[int, str] = field(default_factory=dict)
    title: str = ""  # what the viewer should know it by, where that is not the round: the controller

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
        header = {"format": 1} | {
            f.name: json_values(getattr(self, f.name)) for f in fields(self) if f.name != "columns"
        }
        columns = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        return bytes(save(columns, {"trajectories": json.dumps(header)}))


def kept_rounds(latest: int, kept: int) -> set[int]:
    """Return which rounds up to `latest` stay on disk: the newest half of `kept`, and even steps before.

    What is dropped once is never wanted again, so a run that was stopped ends with the same files.
    """
    newest = -(-kept // 2)
    older, stride = latest - newest, 1
    while older // stride > kept - newest:
        stride *= 2
    return set(range(max(older, 0) + 1, latest + 1)) | set(range(stride, older + 1, stride)) | {latest}


class TrajectoryFolder:
    """The trajectories of one run: a file for each round that is kept."""

    def __init__(self, run: Path) -> None:
        self.path = run / "trajectories"

    def write(self, trajectories: Trajectories, kept: int = 1) -> None:
        """Add a round and drop those that it makes superfluous."""
        with disk_errors("create", self.path):
            self.path.mkdir(exist_ok=True)
        write_atomically(self.file(trajectories.round), trajectories.to_bytes())
        self._drop(set(self.rounds()) - kept_rounds(trajectories.round, kept))

    def rounds(self) -> list[int]:
        """Return the rounds that are on disk, in order."""
        if not self.path.is_dir():
            return []
        return sorted(int(f.stem) for f in self.path.glob("*.safetensors") if f.stem.isdecimal())

    def read_bytes(self, round: int) -> bytes:
        """Return the file of one round, as it is. Raises `UserError` where there is none, or a link."""
        path = file_in(self.path.parent, f"{self.path.name}/{self.file(round).name}")
        with disk_errors("read", path):
            return path.read_bytes()

    def truncate_after(self, last_round: int) -> None:
        """Remove the rounds after `last_round`."""
        self._drop(round for round in self.rounds() if round > last_round)

    def _drop(self, rounds: Iterable[int]) -> None:
        for round in rounds:
            with disk_errors("remove", self.file(round)):
                self.file(round).unlink(missing_ok=True)

    def file(self, round: int) -> Path:
        """Return the path of the file of a round."""
        return self.path / f"{round:06d}.safetensors"
