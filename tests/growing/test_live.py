"""Any one model grows as it is: its own class, its own loader, no edit."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import esper
from esper.growing.result import Grown
from esper.lifecycle.actions import Actions
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import Schedule
from esper.utils.errors import UserError
from tests.controllers import Scheduled
from tests.growing import models

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))
X, Y = models.images()
TEXT = (models.text(48)[0], models.text(48)[0][:, -1] % 3)
MASKS = torch.where(torch.arange(8).view(1, 8, 1) < 1, -100, (X[:, 0] > 0.5).long())
PAIRS = [
    (models.table(12, k)[0], models.table(12, k)[0][:, :3] * 2, models.table(12, k)[1]) for k in range(5)
]


def grow(model: Any, train: Any, val: Any = None, **settings: Any) -> Grown:
    chosen = {
        "controller": Scheduled(steps=(0,)),
        "epochs": 9,
        "lr": 1e-2,
        "lifecycle": QUICK,
        "progress": False,
    } | settings
    if not isinstance(train, list | DataLoader):
        chosen.setdefault("batch_size", 16)
    return esper.grow(model, train=train, val=val, **chosen)


ZOO: list[tuple[Callable[[], nn.Module], Any]] = [
    (models.small_cnn, (X, Y)),
    (models.Residual, (X, Y)),
    (models.LanguageModel, models.text(48)),
    (models.Branching, models.table()),
    (models.FunctionalDropout, models.table()),
    (models.Tied, models.text(48)),
    (models.Recurrent, TEXT),
    (models.UNet, (X, MASKS)),
    (models.TwoInputs, PAIRS),
]
EXPORTED = (models.Residual, models.LanguageModel, models.UNet)


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize(("make", "data"), ZOO, ids=[make.__name__ for make, _ in ZOO])
def test_a_model_grows_trains_comes_back_as_its_own_class_and_exports(
    make: Callable[[], nn.Module], data: Any
) -> None:
    torch.manual_seed(0)
    model = make()
    before = copy.deepcopy(model.state_dict())
    grown = grow(model, data, data)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert grown.added, grown.report()
    assert type(grown.model) is type(model)
    assert set(before) <= set(grown.model.state_dict())
    own = sum(p.numel() for p in grown.model.parameters())
    assert own == grown.record.parameters[-1, 0]
    grown.model.get_submodule(grown.added[0].module)
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    inputs = data[0][:-1] if isinstance(data, list) else (data[0][:4],)
    outputs = grown.model(*inputs)
    for again in (copy.deepcopy(grown.model), saved_and_loaded(grown.model)):
        torch.testing.assert_close(again(*inputs), outputs, rtol=0, atol=0)
    assert not [part for part in grown.model.modules() if type(part).__module__.startswith("esper")]
    if make in EXPORTED:
        batch = {0: torch.export.Dim("batch", min=1)}
        program = torch.export.export(grown.model, (data[0][:4],), dynamic_shapes=(batch,))
        told, wanted = program.module()(data[0][:7]), grown.model(data[0][:7])
        torch.testing.assert_close(told, wanted, rtol=1e-4, atol=1e-5)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.usefixtures("everything_stays")
def test_the_model_that_comes_back_scores_what_was_reported() -> None:
    grown = grow(models.Residual(), (X, Y), (X[:37], Y[:37]))
    measured = (grown.model(X[:37]).argmax(1) == Y[:37]).float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(measured, abs=1e-6)
    assert F.cross_entropy(grown.model(X[:37]), Y[:37]).item() == pytest.approx(
        grown.record.loss[-1, 0], rel=1e-4
    )


def test_the_same_seed_gives_the_same_network_and_leaves_the_callers_randomness() -> None:
    torch.manual_seed(3)
    model, state = models.small_cnn(), torch.get_rng_state()
    first, second = (grow(model, (X, Y), seed=5).model.state_dict() for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_while_nothing_grows_it_is_a_plain_loop() -> None:
    """To the bit, but for the clipping, which never acts here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = models.table(48)
    batches = [(x[k : k + 16], y[k : k + 16]) for k in range(0, 48, 16)]
    settings = {"schedule": "constant", "clip_norm": 1e9, "weight_decay": 0.0, "epochs": 3}
    grown = grow(model, batches, batches, controller="static", **settings)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(grown.epoch):
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(twin(inputs), targets).backward()
            optimizer.step()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(grown.model.state_dict()[name], value, rtol=0, atol=1e-6)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Another picture at every look, and a count of looks."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = X[index] + 0.1 * torch.randn(1, 8, 8)
        if index == 0:
            self.seen.append(picture)
        return picture, Y[index]


def test_augmentation_is_drawn_anew_in_every_epoch_and_nothing_is_read_twice() -> None:
    data = Augmented()
    grow(models.small_cnn(), data, (X, Y), controller="static", epochs=3)
    assert len(data.seen) == 4  # once to look at, then once in each epoch
    assert not torch.equal(data.seen[1], data.seen[2])


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


def test_data_without_a_length_are_streamed() -> None:
    grown = grow(models.small_cnn(), DataLoader(Stream(), 8), DataLoader(Stream(), 8), controller="static")
    assert grown.history[-1].train_loss < grown.history[0].train_loss


def test_a_step_of_ones_own_takes_any_batch() -> None:
    batches = [{"picture": X[k : k + 20], "label": Y[k : k + 20]} for k in range(0, 60, 20)]

    def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch["picture"])
        hits = (outputs.argmax(1) == batch["label"]).float().mean()
        return F.cross_entropy(outputs, batch["label"]), hits

    grown = grow(models.small_cnn(), batches, batches, step=step, controller="static")
    assert grown.record.accuracy[-1, 0] > 0.5


def test_a_model_with_a_loss_of_its_own_takes_dictionaries() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = models.small_mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x, y = models.table()
    batches = [{"x": x[:30], "labels": y[:30]}, {"x": x[30:], "labels": y[30:]}]
    grown = grow(Own(), batches, batches, controller="static", epochs=20)
    assert grown.record.loss[-1, 0] < grown.record.loss[0, 0]


def test_gradients_of_several_batches_make_one_step() -> None:
    x, y = models.table(48)
    small = [(x[k : k + 8], y[k : k + 8]) for k in range(0, 48, 8)]
    large = [(x[k : k + 16], y[k : k + 16]) for k in range(0, 48, 16)]
    torch.manual_seed(0)
    model = models.small_mlp()
    settings = {"controller": "static", "epochs": 1, "schedule": "constant", "clip_norm": 1e9}
    added = grow(model, small, small, accumulate=2, **settings).model.state_dict()
    whole = grow(model, large, large, **settings).model.state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(added[name], value, rtol=1e-4, atol=1e-5)


def test_the_last_incomplete_step_is_taken_too() -> None:
    x, y = models.table(24)
    batches = [(x[k : k + 8], y[k : k + 8]) for k in range(0, 24, 8)]
    counts: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            counts.append(1)
            super().step(closure)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Counting(groups, lr=0.01)

    grow(
        models.small_mlp(), batches, batches, controller="static", epochs=2, accumulate=2, make_optimizer=make
    )
    assert len(counts) == 4


def test_an_optimizer_of_ones_own_moves_model_and_seeds() -> None:
    made: list[torch.optim.Optimizer] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True))
        return made[0]

    before = models.small_cnn()
    grown = grow(before, (X, Y), make_optimizer=make)
    assert len(made) == 1
    assert not torch.equal(grown.model.state_dict()["0.weight"], before[0].weight)


def test_a_scheduler_of_ones_own_moves_all_rates_in_proportion() -> None:
    rates: list[list[float]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            rates.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    settings = {"make_optimizer": lambda groups: Watched(groups, lr=0.4), "make_scheduler": make, "lr": 0.1}
    grow(models.small_cnn(), [(X, Y)], [(X, Y)], epochs=9, **settings)
    assert [row[0] for row in rates] == pytest.approx([0.4 * 0.5 ** (k // 2) for k in range(9)])
    assert len(rates[-1]) > len(rates[0])  # seeds came
    assert rates[-1][-1] == pytest.approx(0.1 * 0.5**4)
    with pytest.raises(UserError, match="make_scheduler gives a NoneType"):
        grow(models.small_cnn(), (X, Y), make_scheduler=lambda optimizer: None)


def test_it_ends_early_when_nothing_gets_better_or_the_time_is_up() -> None:
    told: list[dict[str, Any]] = []
    frozen = models.small_cnn().requires_grad_(False)
    frozen[10].requires_grad_(True)
    settings = {"controller": "static", "epochs": 50, "lr": 1e-12, "on_epoch": told.append}
    assert len(grow(frozen, (X, Y), patience=3, **settings).history) == 4
    assert [line["epoch"] for line in told] == [1, 2, 3, 4]
    start = time.monotonic()
    assert len(grow(models.small_cnn(), (X, Y), time_limit=1e-6, **settings).history) == 1
    assert time.monotonic() - start < 30


def test_ctrl_c_returns_what_has_grown_so_far() -> None:
    uses_metrics = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal uses_metrics
        uses_metrics += 1
        if uses_metrics == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return F.cross_entropy(outputs, targets)

    grown = grow(models.small_mlp(), models.table(), loss=loss, epochs=90)
    assert 0 < len(grown.history) < 90
    assert "it ended before its 90 epochs were over" in grown.report()
    assert isinstance(grown.model(models.table()[0]), Tensor)


def test_frozen_parts_stay_frozen() -> None:
    model = models.small_mlp()
    model[0].requires_grad_(False)
    grown = grow(model, models.table())
    assert torch.equal(grown.model.state_dict()["0.weight"], model[0].weight)
    assert not torch.equal(grown.model.state_dict()["2.weight"], model[2].weight)


@pytest.mark.usefixtures("everything_stays")
def test_a_model_that_is_frozen_as_a_whole_grows_and_stays_as_it_is() -> None:
    model = models.Recurrent().requires_grad_(False)
    grown = grow(model, TEXT, TEXT, controller="habit", epochs=12)
    assert grown.added
    after = grown.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
    assert grown.record.loss[-1, 0] < grown.record.loss[0, 0]


def test_targets_that_do_not_count_weigh_nothing_whatever_the_batches() -> None:
    """Loss and score are those over all of val at once; a batch in which nothing counts is none."""
    masks = MASKS.clone()
    masks[20:40, :, 2:] = -100
    masks[40:50] = -100
    batches = [(X[k : k + 10], masks[k : k + 10]) for k in range(0, 60, 10)]
    grown = grow(models.UNet(), batches, batches, controller="static", epochs=2)
    outputs, known = grown.model(X), masks != -100
    hits = (outputs.argmax(1) == masks)[known].float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(hits, abs=1e-6)
    whole = F.cross_entropy(outputs, masks).item()
    assert grown.record.loss[-1, 0] == pytest.approx(whole, rel=1e-4)


def test_gradients_are_clipped_to_the_norm_that_is_given() -> None:
    model = models.small_mlp()
    batches = [models.table(16)]
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 1.0}
    moved = grow(model, batches, batches, controller="static", epochs=1, clip_norm=1e-3, **settings).model
    steps = [after - before for after, before in zip(moved.parameters(), model.parameters(), strict=True)]
    assert torch.cat([step.flatten() for step in steps]).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_weights_of_the_best_epoch_come_back() -> None:
    scores, seen, epoch = [0.1, 0.3, 0.9, 0.2, 0.4], dict[int, Tensor](), 0

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        nonlocal epoch
        epoch += model.training
        seen[epoch] = model[0].weight.detach().clone()
        return F.cross_entropy(model(batch[0]), batch[1]), scores[epoch]

    grown = grow(models.small_cnn(), [(X, Y)], [(X, Y)], step=step, controller="static", epochs=4)
    assert grown.epoch == 2
    assert torch.equal(grown.model[0].weight, seen[2])  # as validated after the second epoch
    assert not torch.equal(seen[2], seen[4])


def test_bfloat16_trains() -> None:
    grown = grow(models.small_cnn(), (X, Y), precision="bfloat16")
    assert grown.history[-1].train_loss < grown.history[0].train_loss


def test_a_loss_that_is_not_finite_goes_back_to_the_last_good_epoch() -> None:
    calls = 0

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += model.training
        loss = F.cross_entropy(model(batch[0]), batch[1])
        broken = model.training and calls == 4
        return loss * (float("nan") if broken else 1.0), torch.tensor(0.5)

    grown = grow(models.small_cnn(), [(X, Y)], [(X, Y)], step=step, controller="static", epochs=6)
    assert grown.record.panicked[:, 0].tolist() == [False, False, False, True, False, False]
    assert all(value.isfinite().all() for value in grown.model.state_dict().values())


class Dry:
    """A loader that ends for good after it was read a few times."""

    def __init__(self, times: int):
        self.times = times

    def __iter__(self) -> Iterator[Any]:
        self.times -= 1
        return iter([(X, Y)] if self.times >= 0 else [])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"slots": ["nowhere"]}, "slot 'nowhere' is no submodule of Sequential; it has 0, 1"),
        ({"slots": ["8"]}, "slot after '8', which gives shape"),
        ({"slots": []}, "slots is empty"),
        ({"train": [], "val": (X, Y)}, "train yields nothing"),
        ({"train": [(X, Y)]}, "val is missing and train cannot be divided"),
        ({"train": iter([(X, Y)]), "val": (X, Y)}, "read only once"),
        ({"train": Dry(4), "val": (X, Y)}, "train had batches before and yields none in this epoch"),
        ({"train": (X, Y), "val": Dry(4)}, "val had batches before and yields none in this epoch"),
        ({"loss": lambda out, y: out.mean() * float("nan"), "metric": max}, "is nan before any training"),
        ({"train": (X[:, :, :1], Y)}, "does not take the batches of val"),
        ({"train": (X, Y + 5)}, "the targets run from 5 to 7, but the model has 3 outputs"),
        ({"train": (X, models.text(60)[1])}, "end the model with one output for each class"),
        ({"step": lambda model, batch: model(batch[0]).mean()}, "it must return two things"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    given = {"train": (X, Y), "val": None} | change
    with pytest.raises(UserError, match=sentence) as told:
        grow(models.small_cnn(), **given)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("controller", ["tamiyo", "heuristic", "habit", "random"])
def test_every_controller_grows_a_living_model(controller: str) -> None:
    grown = grow(models.Recurrent(), TEXT, controller=controller, epochs=4, force=True)
    assert len(grown.history) == 4
    assert grown.record.flops[0] > 0


def test_a_budget_holds_here_too() -> None:
    grown = grow(models.small_cnn(), (X, Y), controller="random", budget=60, epochs=14)
    assert grown.record.parameters.max() <= grown.host_parameters + 60


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("folds", [0, 1])
def test_blocks_are_repeated_and_layers_widened_by_a_recipe_and_the_report_says_so(folds: int) -> None:
    recipe = "schedule:clone@0.1+widen_half@0.3"
    settings = {"controller": recipe, "epochs": 12, "folds": folds, "step": rising_score()}
    grown = grow(models.small_mlp(), models.table(), models.table(), **settings)
    ending = ", for good" if folds else " ("
    lines = grown.diff().splitlines()
    assert lines[0] == "  99 parameters as given"
    for told in (f"+ 0 6 → 9 wide{ending}", f"+ 2 to 3 repeated{ending}"):
        assert any(line.startswith(told) for line in lines), grown.report()
    sizes = [int(n) for line in lines for n in re.findall(r"([\d,]+) parameters", line)]
    assert sum(sizes[:-1]) == sizes[-1], grown.report()
    assert folds or all(line.endswith("points if it is removed") for line in lines[1:-1])
    assert lines[-1] == f"= {sum(p.numel() for p in grown.model.parameters())} parameters"
    assert next(e.decision for e in grown.history if e.decision != "waited") == "planted CLONE after 3"
    assert f"{2 + folds} planted, {2 + folds} kept" in grown.report()  # a slot that is free again grows again
    assert grown.model[0].out_features == grown.model[2].in_features == 9
    assert len(grown.model) == 7
    assert grown.record.flops[0] > 0


def test_a_schedule_that_no_slot_can_follow_is_refused_and_one_that_some_can_is_remarked_on() -> None:
    strided = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    takes = r"asks for CLONE, which no slot of this model takes: after 2, no weights .* keep .* WIDEN_FULL"
    with pytest.raises(UserError, match=takes):
        grow(strided, (X, Y), controller="schedule:clone@0.1")
    recipe = "schedule:clone@0.1+widen_full@0.2"
    grown = grow(strided, (X, Y), controller=recipe, epochs=4)
    assert "planted WIDEN_FULL after" in grown.report()
    assert "CLONE was asked for, which no slot of this model takes" in grown.report()


def test_new_layers_are_charged_for_as_long_as_they_are_there() -> None:
    seen: list[float] = []

    class Watching(Schedule):
        def decide(self, observation: Observation, masks: ActionMasks, step: int) -> list[Actions]:
            seen.append(float(observation.step_cost))
            return super().decide(observation, masks, step)

    recipe = Watching([(0.2, "widen_full", "all")])
    grown = grow(models.small_mlp(), models.table(), controller=recipe, epochs=6, folds=1)
    assert len(grown.folded) == 2
    wider = sum(p.numel() for p in grown.model.parameters() if p.ndim > 1)
    given = sum(p.numel() for p in models.small_mlp().parameters() if p.ndim > 1)
    assert seen[0] == 1.0
    assert seen[-1] == pytest.approx(wider / given)  # a product for each weight


@pytest.mark.parametrize("last_is_best", [True, False])
def test_the_report_says_of_every_seed_that_it_was_taken_out_at_the_end(last_is_best: bool) -> None:
    scores = count() if last_is_best else count(0, -1)

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        return F.cross_entropy(model(batch[0]), batch[1]), next(scores) / 1e6

    recipe = {"controller": "schedule:norm@0.1", "epochs": 12, "slots": ["1"], "step": step}
    report = grow(models.small_mlp(), models.table(), **recipe).report()
    assert "planted NORM after 1" in report
    assert "nothing was added" in report
    ending = "took out the NORM after 1, which was not shown to help"
    if not last_is_best:
        ending = "left out the NORM after 1, which epoch 1 did not have"
    assert report.splitlines()[-1] == f"at the end: {ending}"
    assert "worth" not in report


class ThreeBetas(torch.optim.AdamW):
    """Betas as those of Adan or AdEMAMix."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, lr)
        for group in self.param_groups:
            group["betas"] = (*group["betas"], 0.99)

    def step(self, closure: Any = None) -> None:
        before = [group["betas"] for group in self.param_groups]
        for group in self.param_groups:
            group["betas"] = group["betas"][:2]
        super().step(closure)
        for group, betas in zip(self.param_groups, before, strict=True):
            group["betas"] = betas


def test_an_optimizer_with_three_betas_goes_on_after_a_fold_as_one_with_two() -> None:
    kinds = (ThreeBetas, torch.optim.AdamW)
    grown = []
    for kind in kinds:
        torch.manual_seed(0)
        recipe = {"controller": "schedule:widen_full@0.1", "epochs": 6, "folds": 1, "step": rising_score()}
        make = partial(kind, lr=1e-2)
        grown.append(grow(models.small_mlp(), models.table(), make_optimizer=make, **recipe))
    assert all(run.folded for run in grown)
    assert [e.train_loss for e in grown[0].history] == [e.train_loss for e in grown[1].history]


class Scaled(nn.Module):
    """A model without products: torch counts no operation of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.bend = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(x[:, :3] * self.scale)


def test_a_model_without_counted_operations_grows_and_has_a_baseline() -> None:
    recipe = {"controller": "schedule:mlp@0.1", "slots": ["bend"], "epochs": 3, "baseline": True}
    grown = grow(Scaled(), models.table(), **recipe)
    assert grown.baseline is not None
    assert grown.baseline.record.num_steps > 3  # seeds cost operations
    assert grown.record.flops[0] > 0


def rising_score() -> Callable[..., tuple[Tensor, float]]:
    """A step whose score only rises, so that the last epoch is the best."""
    scores = count()
    return lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1]), next(scores) / 1e6)
