"""The result is a plain module: no class of esper in it, and equal outputs after export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.growing.live import CAUSAL_SEEDS
from esper.growing.result import save_archive
from esper.growing.surgery.insertion import trace_graft
from esper.lifecycle.actions import selectable_blueprints
from esper.population.blueprints import BlendGate, build_blueprint
from esper.population.extract import AddGraft, GateGraft, MultiplyGraft
from esper.utils.errors import UserError
from tests.growing import models
from tests.growing.models import QUICK, classes_of

SHAPES = {"cnn": (5, 8, 6, 6), "mlp": (5, 8), "transformer": (5, 6, 8)}
KINDS = [
    (topology, blueprint)
    for topology in SHAPES
    for blueprint in sorted(selectable_blueprints(topology))
    if topology != "transformer" or blueprint not in CAUSAL_SEEDS
]


def randomized(module: nn.Module) -> nn.Module:
    """Give all parameters random weights: those of a new seed are 0 in its last layer."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


@pytest.mark.parametrize(("topology", "blueprint"), KINDS, ids=lambda v: getattr(v, "name", v))
def test_every_graft_has_a_plain_form_with_the_same_output(topology: str, blueprint: int) -> None:
    torch.manual_seed(0)
    dims = 2 if topology == "cnn" else 0
    seed = randomized(build_blueprint(blueprint, topology, 8, dims))
    gate = randomized(BlendGate(8, dims))
    for graft in (AddGraft(seed, 0.7), MultiplyGraft(seed, 1.0), GateGraft(seed, 0.5, gate)):
        plain = trace_graft(graft)
        assert not any(name.startswith("esper") for name in classes_of(plain))
        for batch in (5, 2):
            h = torch.randn(batch, *SHAPES[topology][1:])
            torch.testing.assert_close(plain(h), graft(h), rtol=1e-4, atol=1e-5)
    if topology == "transformer":
        longer = torch.randn(2, 9, 8)
        torch.testing.assert_close(plain(longer), graft(longer), rtol=1e-4, atol=1e-5)


class NoEsper:
    """Finds no module of this project, as where it is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.split(".")[0] in ("esper", "tests"):
            raise ImportError(f"{name} is not installed here")


@pytest.mark.usefixtures("everything_stays")
def test_an_archive_is_read_where_esper_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = models.images(16)
    torch.manual_seed(0)
    settings = {"controller": "schedule:norm@0.1", "epochs": 3, "lifecycle": QUICK, "progress": False}
    grown = esper.grow(models.small_cnn(), (x, y), **settings)
    assert grown.added
    archive = save_archive(grown.model, x[:4], tmp_path / "grown.pt2")
    for name in [name for name in sys.modules if name.split(".")[0] in ("esper", "tests")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NoEsper(), *sys.meta_path])
    read = torch.export.load(archive).module()
    # of another batch size than the sample's
    torch.testing.assert_close(read(x[:7]), grown.model(x[:7]), rtol=1e-5, atol=1e-6)
    assert not any(name.split(".")[0] == "esper" for name in sys.modules)


def test_one_sample_is_not_enough_to_leave_the_batch_free() -> None:
    with pytest.raises(UserError, match="2 inputs or more"):
        save_archive(models.small_mlp(), models.table(6)[0][:1], "nowhere.pt2")
