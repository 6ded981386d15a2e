"""Bad input is answered in one sentence: what was given, and what to give instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.utils.errors import UserError
from tests.growing import models

X, Y = models.table(24)
LOADER = DataLoader(TensorDataset(X, Y), 8)
BROKEN = torch.where(torch.arange(120).view(24, 5) == 7, torch.nan, X)
TEXT = models.text(24)[1]
FOREIGN = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Dry:
    """A loader that ends for good after it was read a few times."""

    def __init__(self, times: int):
        self.times = times

    def __iter__(self) -> Iterator[Any]:
        self.times -= 1
        return iter([(X, Y)] if self.times >= 0 else [])


IMAGES = {"train": [models.images(9)], "val": [models.images(9)]}
HEURISTIC = {"controller": "heuristic"}
CASES: dict[str, dict[str, Any]] = {
    r"slots is the name '0'; give a list of names: \['0'\]": {"slots": "0"},
    "slot 'nope' is no submodule of Sequential; it has 0, 1, 2": {"slots": ["nope"]},
    "Linear has no submodule after which something could grow": {"model": nn.Linear(5, 3)},
    "model cannot be made .*; give an nn.Module, or a function without arguments": {"model": nn.Linear},
    "epochs is 2.5; give a whole number": {"epochs": 2.5},
    "step is a int; give a function": {"step": 3},
    "step raises ZeroDivisionError .* for the first batch of val": {"step": lambda model, batch: 1 / 0},
    "step gives a Tensor; it must return two things": {"step": loss_of},
    r"step gives a loss of shape \[8, 3\]; take its mean": {
        "step": lambda model, batch: (model(batch[0]), 0)
    },
    "the score of step is 'good'; it must be one number": {"step": lambda m, b: (loss_of(m, b), "good")},
    "depends on no trained weight": {"step": lambda m, b: (loss_of(m, b).detach(), 0.5)},
    "the metric has the shape": {"metric": lambda outputs, targets: outputs},
    "train yields nothing": {"train": []},
    "train has no samples": {"train": (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))},
    "train is None; give": {"train": None, "val": None},
    "val is missing and train cannot be divided": {"val": None},
    r"does not take the batches of train": {"train": [(X[:, :4], Y)]},
    "the targets run from 2 to 4, but the model has 3 outputs": {"train": [(X, Y % 3 + 2)]},
    "from 0 to 2; number the classes from 0, and mark targets that count for nothing with -100": {
        "train": [(X, Y % 3 - 1)]
    },
    "there is no setting 'epoch'; did you mean 'epochs'?": {"epoch": 3},
    "train is a int; give a DataLoader": {"train": 5},
    "the model is an int; give an nn.Module, or a function": {"model": 7},
    "model is a OptimizedModule, made by torch.compile, which takes no hooks": {
        "model": torch.compile(models.small_mlp(3), backend="eager")
    },
    "the loss of Sequential on the first batch of train is nan": {"train": [(X * torch.nan, Y)]},
    "make_optimizer gives None; it must return": {"make_optimizer": lambda groups: None},
    r"make_optimizer raised an error \(.* takes 0 positional": {"make_optimizer": lambda: None},
    r"make_optimizer raised an error \(ZeroDivisionError: .*bad_input.py": {
        "make_optimizer": lambda groups: 1 / 0
    },
    "optimizer is 'adam'; it should be 'adamw' or 'sgd' .* by make_optimizer": {"optimizer": "adam"},
    "optimizer is <class .*; it should be 'adamw' or 'sgd'": {"optimizer": torch.optim.Adam},
    "'MLPP' is no blueprint; name some of": {"blueprints": ["MLPP"]},
    "slots name '1' twice": {"slots": ["1", 1]},
    "loss is the class CrossEntropyLoss; give an instance of it": {"loss": nn.CrossEntropyLoss},
    "lr is inf; it should be a finite number": {"lr": math.inf},
    "train is a Tensor; give": {"train": X},
    "batch_size is 4, and the loaders that were given make their own batches": {"batch_size": 4},
    "baseline is 'no'; give True or False": {"baseline": "no"},
    r"make_optimizer is SGD \(.*; it should be callable": {"make_optimizer": FOREIGN},
    "holds none of the 6 parameters of the model": {"make_optimizer": lambda groups: FOREIGN},
    "device is 'gpu'; allowed are auto, cpu, cuda": {"device": "gpu"},
    "validation_samples is 5, and of a DataLoader no part can be drawn": {"validation_samples": 5},
    "slots is empty": {"slots": []},
    r"slot after '8', which runs 1 times .* of shape \[9, 4, 1, 1\]": {
        "model": models.small_cnn(),
        "slots": ["8"],
        **IMAGES,
    },
    "train is a .* that is read only once": {"train": iter([(X, Y)])},
    "train had batches before and yields none in this epoch": {"train": Dry(3)},
    "val had batches before and yields none in this epoch": {"val": Dry(4)},
    "give one output for each class, or loss=": {"val": [(X, TEXT)]},
    "the targets run from 0 to 2, but the model has 2 outputs": {"model": models.small_mlp(2)},
    "in a mlp allowed are NORM, LORA": {"blueprints": ["CONV_LIGHT"], **HEURISTIC},
    r"controller is 'gardener'; allowed are tamiyo, .*, into \(esper.grow\), an object": {
        "controller": "gardener"
    },
    "controller is 'INTO'; did you mean 'into'": {"controller": "INTO"},
    "controller is ''; allowed are tamiyo": {"controller": ""},
    "lacks begin and decide; allowed are tamiyo, .*, into": {"controller": object()},
    "no setting 'learning_rate'; allowed are loss": {"learning_rate": 1.0},
    "validation_batch has no effect in esper.grow; allowed are loss": {"validation_batch": 8},
    "lr is -1.0; it should be greater than 0": {"lr": -1.0},
    "give one output for each target": {"val": [(X, X[:, 0])]},
    "it must return one: take the mean": {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")},
    "give metric= as well, a function": {"val": [(X, X[:, :2])], "loss": F.mse_loss},
    r"the batches of val hold torch.float64 and the weights of Sequential are torch.float32, .*; convert the "
    r"batches with .to\(torch.float32\), or the model": {"val": [(X.double(), Y)]},
    "NaN or infinite in 1 of 24 samples; fill in or drop": {"train": (BROKEN, Y)},
    "24 inputs and 5 targets; give one for each": {"train": (X, Y[:5])},
    "give numbers: encode": {"train": (np.array([["a"], ["b"]]), np.array([0, 1]))},
    r"(give|or) step=": {"train": [X], "val": [X]},
    r"a batch is a tuple; .* step=": {"train": [(X,)], "val": [(X,)]},
    r"gives no loss for them; .* step=|does not take": {"val": [{"image": X, "answer": Y}]},
}


@pytest.mark.parametrize("message", CASES)
def test_a_mistake_is_told_in_one_sentence(message: str) -> None:
    given = {"model": models.small_mlp(), "train": LOADER, "val": LOADER, "epochs": 1, **CASES[message]}
    with pytest.raises(UserError, match=message) as caught:
        esper.grow(progress=False, **given)
    assert "\n" not in str(caught.value)


class Endless:
    """Yields batches for ever, as a stream does."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield X[:8], Y[:8]


@pytest.mark.parametrize("side", ["train", "val"])
def test_a_loader_that_never_ends_is_refused_at_once(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.growing.data.LONGEST", 0.2)
    data = {"train": LOADER, "val": LOADER} | {side: Endless()}
    setting = {"train": "batches_per_epoch", "val": "validation_samples"}[side]
    with pytest.raises(UserError, match=f"{side} is a Endless without a length .*; say with {setting} how"):
        esper.grow(models.small_mlp(), progress=False, **data)
    esper.grow(models.small_mlp(), epochs=1, progress=False, **data, **{setting: 8})  # bounded


def test_a_score_that_is_nan_before_any_training_is_refused_and_a_later_one_is_warned_of() -> None:
    with pytest.raises(UserError, match="the metric gives a score of nan on the validation data"):
        esper.grow(models.small_mlp(), LOADER, LOADER, metric=lambda outputs, targets: torch.nan)
    trained: list[bool] = []

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        trained.extend([True] if model.training else [])
        return loss_of(model, batch), math.nan if trained else 0.5

    with pytest.warns(UserWarning, match="step gives a score of nan"):
        esper.grow(models.small_mlp(), LOADER, LOADER, step=step, epochs=1, progress=False)


class Raising(nn.Module):
    """Raises in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.small_mlp()

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("boom")


def boom(*given: Any) -> Tensor:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("given", "who"),
    [({"model": Raising()}, "Raising"), ({"loss": boom}, "loss"), ({"step": boom}, "step")],
    ids=["model", "loss", "step"],
)
def test_an_exception_of_the_users_own_is_told_with_its_place(given: dict[str, Any], who: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    raised = [number for number, line in enumerate(lines, 1) if line == '        raise RuntimeError("boom")']
    line = raised[0] if who == "Raising" else raised[0] + 4
    place = rf"{re.escape(__file__)}, line {line} \(boom\)"
    with pytest.raises(UserError, match=rf"{who} raises RuntimeError at {place}"):
        esper.grow(**{"model": models.small_mlp(), "train": LOADER, "val": LOADER, "progress": False} | given)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: torch.jit.script(models.small_mlp()),
            "model is a RecursiveScriptModule, which takes no hooks",
        ),
        (
            lambda: nn.Sequential(torch.jit.trace(models.small_mlp(), X)),
            "the submodule 0 is a TopLevelTraced",
        ),
        (lambda: models.small_mlp().to("meta"), r"0\.weight of Sequential is on the meta device"),
        (lambda: nn.DataParallel(models.small_mlp()), "model is a DataParallel, wrapped for several"),
        (
            lambda: nn.parallel.DistributedDataParallel(models.small_mlp()),
            "model is a DistributedDataParallel, wrapped for several",
        ),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_a_model_that_cannot_grow_is_refused(make: Any, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        esper.grow(make(), LOADER, LOADER, progress=False)
    assert "\n" not in str(caught.value)


def test_several_processes_are_refused_before_anything_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes train together"):
        esper.grow(models.small_mlp(), LOADER, LOADER, progress=False)


class Breaking(nn.Sequential):
    """Gives NaN whenever it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out * torch.nan if self.training else out


@pytest.mark.parametrize("controller", ["static", None])
def test_a_training_that_always_breaks_is_an_error(controller: str | None) -> None:
    model = Breaking(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(UserError, match="training broke in each of its 3 epochs: the loss was not finite"):
        esper.grow(model, train=LOADER, val=LOADER, controller=controller, epochs=3, progress=False)
