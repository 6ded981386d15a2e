"""Shipping a policy: the file decides as the run does, is small, and names the conditions of its training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.config import load_config
from esper.controllers import RATES, find_checkpoint, load_learned
from esper.runs.checkpoints import load_checkpoint
from esper.training import TrainingRun
from esper.utils.errors import UserError
from studies import ship
from tests.studies.test_rates import SMALL

LARGEST = 300_000  # bytes of a file in the package


def test_a_shipped_policy_is_that_of_the_run_in_half_precision(tmp_path: Path) -> None:
    run = TrainingRun.start(load_config(preset="demo", overrides=SMALL), tmp_path / "run")
    with run.folder:
        run.run()
    ship.main([str(tmp_path / "run"), "mine", "--to", str(tmp_path)])
    path = tmp_path / "mine.safetensors"
    whole, shipped = load_learned(find_checkpoint(str(tmp_path / "run"))), load_learned(path)
    assert shipped.conditions == whole.conditions
    assert shipped.agent.policy.rates
    for name, weights in whole.agent.policy.state_dict().items():
        found = shipped.agent.policy.state_dict()[name]
        assert found.dtype == torch.float32
        assert torch.equal(found, weights.half().float())
    kept = load_checkpoint(path).tensors
    assert all(".policy." in name or ".value_normalizer." in name for name in kept)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        ship.main([str(tmp_path / "nowhere"), "mine"])


def test_the_controller_of_the_rate_in_the_package_is_small() -> None:
    path = find_checkpoint(RATES)
    assert path.stat().st_size < LARGEST
    conditions = load_learned(path).conditions
    assert conditions is not None
    assert conditions.rates
    assert conditions.learning_rate == pytest.approx((0.001, 0.1))
