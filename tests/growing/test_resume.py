"""A growth that is saved between two epochs goes on to the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from esper.growing.api import GrowRun, Growth
from esper.growing.data import GeneratorStates, seeded_generators
from esper.growing.result import Grown
from esper.growing.settings import check_settings
from esper.utils.launch import StopRequest
from tests.controllers import Scheduled
from tests.growing import models
from tests.growing.models import QUICK

CPU = torch.device("cpu")
EPOCHS = 6


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are shifted anew whenever they are read, by all three global generators."""

    def __init__(self) -> None:
        self.images, self.labels = models.images(48)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + 0.1 * torch.randn(())  # noqa: NPY002
        return self.images[index] + 0.1 * noise, self.labels[index]


def live() -> tuple[nn.Module, Any, dict[str, Any]]:
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(Augmented(), 16, shuffle=True, generator=own)
    return models.small_cnn(), loader, {"patience": 7}


def deeper() -> tuple[nn.Module, Any, dict[str, Any]]:
    return models.small_mlp(), models.table(48), {"folds": 2}


def begun(make: Callable[[], tuple[nn.Module, Any, dict[str, Any]]], controller: Any) -> GrowRun:
    torch.manual_seed(0)
    model, train, settings = make()
    settings |= {"lr": 1e-2, "lifecycle": QUICK, "progress": False}
    val = models.table(30, seed=1) if make is deeper else models.images(30, seed=1)
    chosen = check_settings(settings)
    growth = Growth(model, train, val, chosen, CPU, EPOCHS, controller=controller, force=True)
    return GrowRun(growth, StopRequest())


def bits(grown: Grown) -> dict[str, Tensor]:
    arrays = {f"record.{n}": torch.as_tensor(v) for n, v in vars(grown.record).items() if hasattr(v, "dtype")}
    weights = grown.model.state_dict().values()
    return arrays | {f"weights.{i}": value for i, value in enumerate(weights)}


@pytest.mark.parametrize(
    ("make", "name"),
    [(live, "tamiyo"), (live, "scheduled"), (deeper, "schedule")],
)
def test_it_goes_on_to_the_same_bits_from_every_epoch(
    make: Callable[[], tuple[nn.Module, Any, dict[str, Any]]], name: str
) -> None:
    def controller() -> Any:
        growing = "schedule:clone@0.1+widen_half@0.4"
        by_name = {"scheduled": Scheduled(steps=(0, 3)), "schedule": growing}
        return by_name.get(name, name)

    saved: list[dict[str, Tensor]] = []
    with seeded_generators(5, CPU):
        whole = begun(make, controller())
        while not whole.done:
            whole.run_epoch()
            saved.append({n: v.clone() for n, v in whole.state_dict().items()})
        wanted = bits(whole.finish())
    assert wanted["record.germinated"].any() or name == "tamiyo"
    for epoch in (1, 4, len(saved)):
        with seeded_generators(5, CPU):
            again = begun(make, controller())
            again.load_state_dict(saved[epoch - 1])
            assert again.epochs_done == epoch
            found = bits(again.run())
        assert set(found) == set(wanted)
        different = [n for n in wanted if not torch.equal(found[n].nan_to_num(7), wanted[n].nan_to_num(7))]
        assert not different, f"after epoch {epoch}: {different}"


def test_the_state_of_another_model_is_refused() -> None:
    run = begun(live, "static")
    other = begun(lambda: (models.small_cnn(6), *live()[1:]), "static")
    run.run_epoch()
    with pytest.raises(ValueError, match="the saved model"):
        other.load_state_dict(run.state_dict())


def test_all_generators_go_on_where_they_stood_and_those_of_the_caller_are_left_alone() -> None:
    own = torch.Generator()
    loader = DataLoader(Augmented(), 16, shuffle=True, generator=own)

    def draw() -> list[float]:
        drawn = [random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]  # noqa: NPY002
        return [*drawn, float(torch.rand((), generator=own))]

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with seeded_generators(1, CPU):
        draw()
        randomness = GeneratorStates(CPU, [loader])
        state = randomness.state_dict()
        first = [draw(), draw()]
        randomness.load_state_dict(state)
        assert [draw(), draw()] == first
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])
