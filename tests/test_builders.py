"""From settings to what runs: tasks of one's own, several in turn, and a controller as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from esper import builders
from esper.builders import agent_schema, load_tasks, make_agent, make_environment, make_specs
from esper.config import load_config
from esper.controllers import load_learned
from esper.lifecycle.actions import Blueprint, Head
from esper.runs.checkpoints import save_checkpoint
from esper.tamiyo.policy import features
from esper.tamiyo.policy.network import TamiyoNet
from esper.tasks import Task, load_task
from esper.utils.devices import cpu_threads
from esper.utils.errors import UserError
from studies.growth.variants import permuted_labels
from tests.tiny import TINY


def mine(seed: int) -> Task:
    """A task of one's own."""
    return load_task("spirals", seed)


def several(seed: int) -> list[Task]:
    """Tasks of one shape, for members to share."""
    return [permuted_labels(load_task("spirals"), seed + k) for k in range(3)]


def test_a_function_of_ones_own_makes_the_task() -> None:
    config = load_config(overrides=[*TINY, "task=tests.test_builders:mine", "task_seed=3", "host.width=5"])
    (spec,) = make_specs(config)
    assert torch.equal(spec.task.train.inputs, load_task("spirals", 3).train.inputs)
    assert spec.task.host.options["width"] == 5
    assert spec.variants == ()


def test_several_tasks_of_one_shape_are_dealt_and_several_names_take_turns() -> None:
    config = load_config(overrides=[*TINY, "task=spirals + tests.test_builders:several"])
    one, other = make_specs(config)
    assert one.task.name == "spirals"
    assert len(other.variants) == 3
    with pytest.raises(UserError, match="several take turns in 'esper train' alone"):
        make_environment(config)


def test_a_module_beside_the_caller_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_caller.py").write_text("from tests.test_builders import mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))  # restored afterwards
    assert load_tasks("beside_the_caller:mine")[0].name == "spirals"


def test_a_controller_from_before_a_blueprint_or_a_column_is_refused_by_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = agent_schema()
    with monkeypatch.context() as before:
        older = [b for b in Blueprint if b < Blueprint.CLONE]
        before.setitem(builders.HEAD_CHOICES, Head.BLUEPRINT, older)  # type: ignore[arg-type]
        fewer_blueprints = agent_schema()
    with monkeypatch.context() as before:
        before.setattr(features, "COLUMNS", features.COLUMNS[:-1])
        fewer_columns = agent_schema()
    assert len({now, fewer_blueprints, fewer_columns, agent_schema(rates=True)}) == 4
    save_checkpoint(tmp_path / "old", {"x": torch.ones(1)}, {}, fewer_blueprints)
    allowed = f"'{now}' or '{agent_schema(rates=True)}'"
    said = f"was made for schema '{fewer_blueprints}', and this run has {allowed}: what a controller sees"
    with pytest.raises(UserError, match=said):
        load_learned(tmp_path / "old")


def test_the_first_weights_do_not_depend_on_the_threads_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of orthogonal weights would; what is seen here is under how many they are drawn."""
    used, make_policy = [], builders.make_policy

    def make(*settings: Any) -> TamiyoNet:
        used.append(torch.get_num_threads())
        return make_policy(*settings)

    monkeypatch.setattr(builders, "make_policy", make)
    with cpu_threads(2):
        make_agent(load_config(overrides=[*TINY, "threads=1"]))
    assert used == [1]


def test_the_first_weights_follow_from_the_seed_and_patience_is_reached_by_set() -> None:
    plain, patient = (
        make_agent(load_config(overrides=[*TINY, f"learner.patience={p}"])).policy.state_dict()
        for p in (0, 1)
    )
    assert [name for name in plain if not torch.equal(plain[name], patient[name])] == ["op_head.bias"]
