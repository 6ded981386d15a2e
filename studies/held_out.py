"""The real tasks that controllers are judged on, and their way to a machine without their packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from esper.foundation.errors import UserError
from esper.tasks import load_task
from esper.tasks.task import HostSpec, Split, Task, TestSplit

HELD_OUT = (
    "mnist1d",
    "mnist1d_shuffled",
    "digits",
    "mnist5000",
    "letter",
    "penbased",
    "optdigits",
    "spirals",
    "text",
)
PARTS = ("train", "validation", "test")


def held_out_task(name: str, folder: Path | None = None) -> Task:
    """A real task, from the registry or from a file that was made where its package is installed."""
    if folder is None:
        return load_task(name)
    path = folder / f"{name}.pt"
    if not path.is_file():
        raise UserError(f"{path} does not exist; write it with: python -m studies.growth export {name}")
    saved = torch.load(path, weights_only=True)
    splits = {part: Split(_wide(saved[f"{part}_x"]), _wide(saved[f"{part}_y"])) for part in PARTS}
    return Task(
        name=name,
        topology=saved["topology"],
        input_shape=tuple(saved["input_shape"]),
        num_classes=saved["num_classes"],
        train=splits["train"],
        validation=splits["validation"],
        held_out=TestSplit(splits["test"]),
        host=HostSpec(saved["preset"], saved["options"]),
    )


def export_tasks(names: Sequence[str], folder: Path) -> None:
    """Write tasks as plain tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        task = load_task(name)
        splits = dict(zip(PARTS, (task.train, task.validation, task.test()), strict=True))
        saved: dict[str, Any] = {f"{part}_x": _narrow(split.inputs) for part, split in splits.items()}
        saved |= {f"{part}_y": _narrow(split.targets) for part, split in splits.items()}
        saved |= {"topology": task.topology, "input_shape": list(task.input_shape)}
        saved |= {"num_classes": task.num_classes, "preset": task.host.preset}
        path = folder / f"{name}.pt"
        torch.save(saved | {"options": dict(task.host.options)}, path)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _narrow(values: torch.Tensor) -> torch.Tensor:
    """Labels and tokens take two bytes in a file."""
    return (values.short() if values.dtype == torch.long else values).contiguous()


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.is_floating_point() else values.long()
