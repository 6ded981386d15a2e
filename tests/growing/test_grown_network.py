"""What `esper grow` writes is one network: the same in its description, its tensors and its results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from esper.builders import make_environment
from esper.comparing import run_controller
from esper.config import load_config
from esper.grown_network import GrownMember
from esper.lifecycle.stages import Stage
from esper.tamiyo.scripted import RandomLegal
from tests.tiny import TINY


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_exported_network_is_the_reported_one(rate: float, tmp_path: Path) -> None:
    config = load_config(overrides=[*TINY, "task=spirals", "episode.steps=9"])
    environment = make_environment(config, best_epoch=True)
    run = run_controller(environment, "random", RandomLegal(rate))
    grown = GrownMember.best(environment, run)
    grown.save(tmp_path)
    row, slots = grown.row, run.record.final_slots
    assert set(slots.stage.flatten().tolist()) <= {int(Stage.DORMANT), int(Stage.FOSSILIZED)}
    assert bool((slots.stage == Stage.FOSSILIZED).any()) == (rate > 0)
    parameters = run.result().parameters[row]
    assert (
        parameters
        == grown.parameters
        == sum(t.numel() for t in load_file(tmp_path / "network.safetensors").values())
    )
    assert f"| grown | {int(parameters):,} parameters |" in (tmp_path / "network.md").read_text()
    changes = grown.record().changes
    assert bool(changes) == (rate > 0)
    assert all(line in (tmp_path / "network.md").read_text() for line in changes)
    split = environment.spec.task.test()
    model, standardize = (
        torch.export.load(str(tmp_path / "network.pt2")).module(),
        environment.spec.task.standardize,
    )
    assert standardize is not None
    raw = split.inputs * standardize.deviation + standardize.mean
    found = (model(raw).argmax(-1) == split.targets).float().mean().item()
    assert found == pytest.approx(run.result().test_accuracy[row], abs=1e-6)
