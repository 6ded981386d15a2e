"""Tasks travel as plain tensors and come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.foundation.errors import UserError
from esper.tasks import load_task
from studies.held_out import export_tasks, held_out_task


@pytest.mark.parametrize("name", ["spirals", "text"])
def test_a_task_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    export_tasks([name], tmp_path)
    back, task = held_out_task(name, tmp_path), load_task(name)
    for ours, theirs in ((back.train, task.train), (back.validation, task.validation)):
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.targets, theirs.targets)
    assert (back.topology, back.input_shape, back.num_classes) == (
        task.topology,
        task.input_shape,
        task.num_classes,
    )
    assert back.host == task.host


def test_a_missing_file_is_told_with_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="export letter"):
        held_out_task("letter", tmp_path)
