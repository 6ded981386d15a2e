"""`esper.grow`: any model is trained as it is, and grows; loss and score are those of its data."""

from __future__ import annotations

import copy
import io
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, r2_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import esper
from esper.growing.result import Grown
from esper.lifecycle.actions import Actions, Blueprint
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.schedule import Schedule
from esper.tamiyo.scripted import RandomLegal
from esper.utils.devices import cpu_threads
from esper.utils.errors import UserError
from tests.controllers import Scheduled
from tests.growing import models
from tests.growing.models import QUICK, rising_score
from tests.operations import operations_of
from tests.waiting import MINUTE

X, Y = models.images()
ROWS, CLASSES = models.table(48)
TEXT = (models.text(48)[0], models.text(48)[0][:, -1] % 3)
MASKS = torch.where(torch.arange(8).view(1, 8, 1) < 1, -100, (X[:, 0] > 0.5).long())
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def grow(model: Any, train: Any, val: Any = None, **settings: Any) -> Grown:
    chosen = {"controller": Scheduled(steps=(0,)), "epochs": 7, "lr": 1e-2, "lifecycle": QUICK} | settings
    if not isinstance(train, list | DataLoader):
        chosen.setdefault("batch_size", 16)
    return esper.grow(model, train=train, val=val, progress=False, **chosen)


static = partial(grow, controller="static", epochs=3)


# ---- a model grows ---------------------------------------------------------------------------------------

ZOO: list[tuple[Callable[[], nn.Module], Any]] = [
    (models.small_cnn, (X, Y)),
    (models.Residual, (X, Y)),
    (models.LanguageModel, models.text(48)),
    (models.Tied, models.text(48)),
]  # more of them grow and fold in test_zoo.py


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
    assert sum(p.numel() for p in grown.model.parameters()) == grown.record.parameters[-1, 0]
    grown.model.get_submodule(grown.added[0].module)
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    outputs = grown.model(data[0][:4])
    file = io.BytesIO()
    torch.save(grown.model, file)
    file.seek(0)
    for again in (copy.deepcopy(grown.model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(again(data[0][:4]), outputs, rtol=0, atol=0)
    assert not [part for part in grown.model.modules() if type(part).__module__.startswith("esper")]
    if make is models.Residual:  # others are exported in test_zoo.py
        batch = {0: torch.export.Dim("batch", min=1)}
        program = torch.export.export(grown.model, (data[0][:4],), dynamic_shapes=(batch,))
        found, wanted = program.module()(data[0][:7]), grown.model(data[0][:7])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("everything_stays")
def test_the_report_tells_what_the_model_that_comes_back_does() -> None:
    torch.manual_seed(0)
    grown = grow(models.small_cnn(), (X, Y), (X[:37], Y[:37]), controller=Scheduled(steps=(0, 4)))
    outputs, report, item = grown.model(X[:37]), grown.report(), grown.added[0]
    measured = (outputs.argmax(1) == Y[:37]).float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(measured, abs=1e-6)
    assert F.cross_entropy(outputs, Y[:37]).item() == pytest.approx(grown.record.loss[-1, 0], rel=1e-4)
    assert f"+ after {item.slot}: {item.blueprint} ({item.module}), {item.parameters:,} parameters" in report
    assert np.isfinite(item.contribution)
    assert "validation accuracy" in report
    assert "planted CONV_LIGHT after 3" in report
    statistics = grown.model.state_dict()
    assert int(statistics["1.num_batches_tracked"]) == grown.epoch * 4, "those of training"


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("whole", [False, True])
def test_frozen_parts_stay_frozen_and_a_model_that_is_frozen_as_a_whole_grows(whole: bool) -> None:
    model = models.Recurrent().requires_grad_(not whole)
    model.tokens.requires_grad_(False)
    warned = pytest.warns(UserWarning, match="all parameters of Recurrent are frozen")
    with warned if whole else nullcontext():
        grown = grow(model, TEXT, TEXT, controller="schedule:norm@0.1", epochs=12)
    assert grown.added
    after, before = grown.model.state_dict(), model.state_dict()
    same = {name for name, value in before.items() if torch.equal(after[name], value)}
    assert same == (set(before) if whole else {"tokens.weight"})
    assert grown.record.loss[-1, 0] < grown.record.loss[0, 0]


@pytest.mark.parametrize("folds", [0, 1])
@pytest.mark.usefixtures("everything_stays")
def test_blocks_are_repeated_and_layers_widened_by_a_recipe_and_the_report_says_so(folds: int) -> None:
    recipe = "schedule:clone@0.1+widen_half@0.3"
    settings = {"controller": recipe, "epochs": 12, "folds": folds, "step": rising_score()}
    grown = grow(models.small_mlp(), models.table(), models.table(), **settings)
    ending = ", for good" if folds else " ("
    lines = grown.diff().splitlines()
    assert lines[0] == "  99 parameters as given"
    for start in (f"+ 0 6 → 9 wide{ending}", f"+ 2 to 3 repeated{ending}"):
        assert any(line.startswith(start) for line in lines), grown.report()
    sizes = [int(n) for line in lines for n in re.findall(r"([\d,]+) parameters", line)]
    assert sum(sizes[:-1]) == sizes[-1], grown.report()
    assert folds or all(line.endswith("points if it is removed") for line in lines[1:-1])
    assert lines[-1] == f"= {sum(p.numel() for p in grown.model.parameters())} parameters"
    assert next(e.decision for e in grown.history if e.decision != "waited") == "planted CLONE after 3"
    assert f"{2 + folds} planted, {2 + folds} kept" in grown.report()  # a slot that is free again grows again
    assert grown.model[0].out_features == grown.model[2].in_features == 9
    assert len(grown.model) == 7
    assert grown.record.flops[0] > 0


@pytest.mark.parametrize(
    "controller", ["schedule:widen_full@0.1+lora@0.4", RandomLegal(germination_rate=1.0)]
)
def test_only_blueprints_that_are_allowed_grow(controller: Any) -> None:
    limits = {"blueprints": ["LORA"], "epochs": 12, "progress": False}
    grown = esper.grow(models.small_mlp(), train=models.table(), controller=controller, **limits)
    planted = grown.record.seen_blueprint
    assert set(planted[planted >= 0].tolist()) == {int(Blueprint.LORA)}


def test_a_schedule_that_no_slot_can_follow_is_refused_and_one_that_some_can_is_remarked_on() -> None:
    strided = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    takes = r"asks for CLONE, which no slot of this model takes: after 2, no weights .* keep .* WIDEN_FULL"
    with pytest.raises(UserError, match=takes):
        grow(strided, (X, Y), controller="schedule:clone@0.1")
    grown = grow(strided, (X, Y), controller="schedule:clone@0.1+widen_full@0.2", epochs=4)
    assert "planted WIDEN_FULL after" in grown.report()
    assert "CLONE was asked for, which no slot of this model takes" in grown.report()


def test_new_layers_are_charged_for_as_long_as_they_are_there() -> None:
    seen: list[float] = []

    class Watching(Schedule):
        def decide(self, observation: Observation, masks: ActionMasks, step: int) -> list[Actions]:
            seen.append(float(observation.step_cost))
            return super().decide(observation, masks, step)

    recipe = Watching.parse("widen_full@0.2")
    grown = grow(models.small_mlp(), models.table(), controller=recipe, epochs=6, folds=1)
    assert len(grown.folded) == 2
    wider = sum(p.numel() for p in grown.model.parameters() if p.ndim > 1)
    given = sum(p.numel() for p in models.small_mlp().parameters() if p.ndim > 1)
    assert seen[0] == 1.0
    assert seen[-1] == pytest.approx(wider / given)  # a product for each weight


@pytest.mark.parametrize("last_is_best", [True, False])
def test_the_report_says_of_every_seed_that_it_was_taken_out_at_the_end(last_is_best: bool) -> None:
    step = rising_score(1 if last_is_best else -1)
    recipe = {"controller": "schedule:norm@0.1", "epochs": 12, "slots": ["1"], "step": step}
    report = grow(models.small_mlp(), models.table(), **recipe).report()
    assert "planted NORM after 1" in report
    assert "nothing was added" in report
    ending = "took out the NORM after 1, which was not shown to help"
    if not last_is_best:
        ending = "left out the NORM after 1, not there in epoch 1"
    assert report.splitlines()[-1] == f"at the end: {ending}"


class Scaled(nn.Module):
    """A model without products: torch counts no operation of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bend = nn.Parameter(torch.ones(3)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(x[:, :3] * self.scale)


def test_a_model_without_counted_operations_grows_and_has_a_baseline() -> None:
    recipe = {"controller": "schedule:mlp@0.1", "slots": ["bend"], "epochs": 3, "baseline": True}
    grown = grow(Scaled(), models.table(), **recipe)
    assert grown.baseline is not None
    assert grown.baseline.record.num_steps > 3  # seeds cost operations
    assert grown.record.flops[0] > 0


@pytest.mark.parametrize("chosen", [None, "a number", "OMP_NUM_THREADS", "threads"])
def test_a_small_model_takes_one_thread_unless_the_user_chose(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return F.cross_entropy(outputs, targets)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen == "OMP_NUM_THREADS":
        monkeypatch.setenv(chosen, "2")
    set_to = 61 if chosen == "a number" else torch.get_num_interop_threads()  # torch's own number
    with cpu_threads(set_to):
        options = {"threads": 3} if chosen == "threads" else {}
        esper.grow(models.small_mlp(), models.table(), loss=loss, epochs=1, progress=False, **options)
        assert torch.get_num_threads() == set_to
    assert seen == {{None: 1, "threads": 3}.get(chosen, set_to)}


# ---- a baseline ------------------------------------------------------------------------------------------

compared = partial(grow, controller="heuristic", epochs=12)


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """A table that remembers in which order it was read."""

    def __init__(self) -> None:
        self.table, self.order = models.table(48), list[int]()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.order.append(index)
        return self.table[0][index], self.table[1][index]


def test_a_baseline_is_the_model_without_growth_at_the_same_flops() -> None:
    torch.manual_seed(0)
    model = models.small_mlp()
    grown = compared(model, models.table(), baseline=True)
    assert grown.baseline is not None
    for shown in (repr(grown), str(grown.baseline), repr(grown.record), repr(grown.history[0])):
        assert len(shown) < 200, shown
        assert "\n" not in shown, shown
    assert "<Grown: Sequential of " in repr(grown)
    epochs = grown.baseline.record.num_steps
    assert epochs > grown.record.num_steps, "growth has a price"
    alone = compared(model, models.table(), controller="static", epochs=epochs)
    assert torch.equal(
        torch.as_tensor(alone.record.accuracy), torch.as_tensor(grown.baseline.record.accuracy)
    )
    spent, own = grown.record.flops.mean(), grown.baseline.record.flops.mean()
    assert abs(own - spent) <= 0.5 * own / epochs + 1, "equal to half an epoch"
    more = own / spent - 1
    cost = "the same" if abs(more) < 0.015 else f"{100 * abs(more):.0f} % {'more' if more > 0 else 'fewer'}"
    assert f" at {cost} training FLOPs, in {epochs} epochs; growth against it: " in grown.report()
    assert [curve.name for curve in grown.curves()] == ["grown", "static"]
    assert grown.curves()[0].flops[-1] == grown.record.spent[-1, 0]


def test_a_baseline_reads_the_data_in_the_same_order() -> None:
    data, val = Counted(), models.table(30, seed=1)
    own = torch.Generator().manual_seed(4)
    loader = DataLoader(data, 16, shuffle=True, generator=own)
    grown = compared(models.small_mlp(), loader, val=val, baseline=True)
    assert grown.baseline is not None
    read = data.order[-48 * grown.baseline.record.num_steps :]
    first = data.order[16 : 16 + 48 * 12]  # after the batch that was looked at
    assert read[: 48 * 12] == first


# ---- who decides -----------------------------------------------------------------------------------------


class Waits:
    """Begins and decides, and has nothing else."""

    def begin(self, scene: Any) -> None:
        self.actions = Actions.wait(scene.num_members, scene.device)

    def decide(self, observation: Any, masks: Any, step: int) -> Actions:
        return self.actions


def test_a_controller_of_ones_own_needs_to_begin_and_to_decide_alone() -> None:
    grown = grow(models.small_mlp(), models.table(), controller=Waits(), epochs=1)
    assert grown.diff().endswith("nothing was added")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "it trains plainly: growing into a model needs 100 optimizer steps"),
        ({"controller": "tamiyo"}, "tamiyo does not act here, because it was trained on hosts of esper"),
        ({"controller": "schedule"}, "schedule does not act here"),
    ],
)
def test_where_growth_is_not_known_to_pay_nothing_grows_and_it_is_said(
    asked: dict[str, Any], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, chosen = models.table(), {**asked, "epochs": 2}
    grown = esper.grow(models.small_mlp(), data, baseline=True, **chosen)
    assert grown.diff().endswith("nothing was added")
    assert grown.model.state_dict().keys() == models.small_mlp().state_dict().keys()
    (line,) = [line for line in grown.report().splitlines() if reason in line]
    assert line in capfd.readouterr().err, "beside the bar as well"
    assert grown.baseline is not None
    assert grown.baseline.record is grown.record, "nothing is trained twice"
    if asked.get("controller") == "tamiyo":
        forced = esper.grow(models.small_mlp(), data, force=True, progress=False, **chosen)
        assert reason not in forced.report()


def test_import_is_quick_and_late() -> None:
    code = "import sys, esper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=MINUTE)
    with pytest.raises(AttributeError, match="no attribute 'shrink'; it has"):
        esper.shrink  # noqa: B018


# ---- training --------------------------------------------------------------------------------------------


def test_while_nothing_grows_it_is_a_plain_loop() -> None:
    """To the bit, but for the clipping, which never acts here."""
    torch.manual_seed(0)
    model, (x, y) = models.small_mlp(), models.table(48)
    batches = [(x[k : k + 16], y[k : k + 16]) for k in range(0, 48, 16)]
    settings = {"schedule": "constant", "clip_norm": 1e9, "weight_decay": 0.0}
    grown = static(model, batches, batches, **settings)
    halves = [(x[k : k + 8], y[k : k + 8]) for k in range(0, 48, 8)]
    added = static(model, halves, batches, accumulate=2, **settings)  # gradients of two batches for a step
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(grown.epoch):
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(twin(inputs), targets).backward()
            optimizer.step()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(grown.model.state_dict()[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(added.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_gradients_are_clipped_to_the_norm_that_is_given() -> None:
    model, batches = models.small_mlp(), [models.table(16)]
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 1.0}
    moved = static(model, batches, batches, epochs=1, clip_norm=1e-3, **settings).model
    steps = [after - before for after, before in zip(moved.parameters(), model.parameters(), strict=True)]
    assert torch.cat([step.flatten() for step in steps]).norm().item() == pytest.approx(1e-3, rel=1e-3)


class Watched(torch.optim.SGD):
    """Keeps the rates of every step."""

    rates: list[list[float]]

    def step(self, closure: Any = None) -> None:
        self.rates.append([group["lr"] for group in self.param_groups])
        super().step(closure)


def watched(lr: float) -> tuple[type[Watched], Callable[..., Watched]]:
    kind = type("Watched", (Watched,), {"rates": []})
    return kind, partial(kind, lr=lr)


def test_the_rates_of_seeds_follow_the_schedule_in_proportion() -> None:
    kind, make = watched(0.4)
    settings = {"make_optimizer": make, "schedule": "flat", "warmup": 0.0, "decay": 1.0, "lr": 0.1}
    grow(models.small_cnn(), [(X, Y)], [(X, Y)], **settings, epochs=9)
    assert [row[0] for row in kind.rates] == pytest.approx([0.4 * (1 - k / 9) for k in range(9)])
    assert len(kind.rates[-1]) > len(kind.rates[0])  # seeds came
    assert kind.rates[-1][-1] == pytest.approx(0.1 / 9)


def test_rates_follow_the_schedule_that_was_asked_for_and_the_last_incomplete_step_is_taken() -> None:
    kind, make = watched(1.0)
    settings = {"schedule": "flat", "warmup": 0.0, "decay": 0.5, "make_optimizer": make, "epochs": 4}
    batches = [models.table(8, k) for k in range(3)]
    static(models.small_mlp(), batches, batches, **settings)
    assert [row[0] for row in kind.rates] == pytest.approx([1.0] * 6 + [1 - k / 6 for k in range(6)])
    kind.rates.clear()
    static(models.small_mlp(), batches, batches, accumulate=2, **settings)
    assert len(kind.rates) == 8
    with pytest.warns(UserWarning, match="decay is for schedule='flat'"):
        static(models.small_mlp(), batches, batches, epochs=1, decay=0.2)


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
    grown = []
    for kind in (ThreeBetas, torch.optim.AdamW):
        torch.manual_seed(0)
        recipe = {"controller": "schedule:widen_full@0.1", "epochs": 6, "folds": 1, "step": rising_score()}
        rule = partial(kind, lr=1e-2)
        grown.append(grow(models.small_mlp(), models.table(), make_optimizer=rule, **recipe))
    assert all(run.folded for run in grown)
    assert [e.train_loss for e in grown[0].history] == [e.train_loss for e in grown[1].history]


def test_the_weights_of_the_best_epoch_come_back() -> None:
    scores, seen, epoch = [0.1, 0.3, 0.9, 0.2, 0.4], dict[int, Tensor](), 0

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        nonlocal epoch
        epoch += model.training
        seen[epoch] = model[0].weight.detach().clone()
        return F.cross_entropy(model(batch[0]), batch[1]), scores[epoch]

    numbers: list[dict[str, Any]] = []
    watch = {"on_epoch": numbers.append}
    grown = static(models.small_cnn(), [(X, Y)], [(X, Y)], step=step, epochs=4, **watch)
    assert [(line["epoch"], pytest.approx(line["score"])) for line in numbers] == list(enumerate(scores))[1:]
    assert grown.epoch == 2
    assert torch.equal(grown.model[0].weight, seen[2])  # as validated after the second epoch
    assert not torch.equal(seen[2], seen[4])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_after_a_training_that_broke_the_optimizer_goes_on(device: str, fused: bool) -> None:
    """In the third of five epochs the loss is NaN; a fused optimizer counts its steps on the device."""
    trained = 0

    def step(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        nonlocal trained
        trained += model.training
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * (torch.nan if model.training and 4 < trained <= 6 else 1), float(-loss.detach())

    batch = models.table(24)
    torch.manual_seed(0)
    make = partial(torch.optim.AdamW, lr=1e-2, fused=fused or None)
    settings = {"step": step, "epochs": 5, "device": device, "make_optimizer": make}
    grown = static(models.small_mlp(), [batch] * 2, [batch], **settings)
    losses = [epoch.val_loss for epoch in grown.history]
    assert "training broke 1 times" in grown.report()
    assert grown.record.panicked[:, 0].tolist() == [False, False, True, False, False]
    assert losses[2] == losses[1]  # what was good before
    assert losses[4] < losses[3] < losses[1] < losses[0]


# ---- data, loss and score --------------------------------------------------------------------------------


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


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


def test_augmentation_is_drawn_anew_in_every_epoch_and_streams_are_read_in_the_loaders_batches() -> None:
    data = Augmented()
    static(models.small_cnn(), data, (X, Y))
    assert len(data.seen) == 4  # once to look at, then once in each epoch
    assert not torch.equal(data.seen[1], data.seen[2])
    grown = static(models.small_cnn(), DataLoader(Stream(), 8), DataLoader(Stream(), 8), epochs=9)
    assert grown.history[-1].train_loss < grown.history[0].train_loss
    assert int(grown.model.state_dict()["1.num_batches_tracked"]) == grown.epoch * 8  # of 60 samples


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = models.small_mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.body(x), labels)}


def test_a_model_with_a_loss_of_its_own_takes_dictionaries() -> None:
    x, y = models.table()
    batches = [{"x": x[:30], "labels": y[:30]}, {"x": x[30:], "labels": y[30:]}]
    grown = static(OwnLoss(), batches, batches, epochs=20)
    assert grown.record.loss[-1, 0] < grown.record.loss[0, 0]
    assert grown.report().startswith("validation e^−loss ")


ONE_HOT = F.one_hot(CLASSES, 3).float()
NUMBERS = torch.stack([ROWS[:, 0] + 5, 10 * ROWS[:, 1], ROWS[:, 2] ** 2], 1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.squeeze(1), targets.float())


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.exp(-F.l1_loss(outputs, targets))


def grow_table(targets: Tensor, outputs: int = 3, **settings: Any) -> Grown:
    torch.manual_seed(0)
    return static(models.small_mlp(outputs), (ROWS, targets), (ROWS, targets), batch_size=10, **settings)


@pytest.mark.parametrize(
    ("targets", "settings", "name", "loss"),
    [
        (CLASSES, {}, "accuracy", F.cross_entropy),
        (ONE_HOT, {}, "accuracy", F.cross_entropy),
        (NUMBERS, {}, "R²", F.mse_loss),
        (NUMBERS[:, 0], {"outputs": 1}, "R²", squared),
        (NUMBERS, {"loss": F.l1_loss, "metric": closeness}, "closeness", F.l1_loss),
        (ONE_HOT, {"loss": F.l1_loss, "metric": closeness}, "closeness", F.l1_loss),
    ],
)
def test_targets_decide_on_loss_and_score(
    targets: Tensor, settings: dict[str, Any], name: str, loss: Callable[..., Tensor]
) -> None:
    grown = grow_table(targets, **settings)
    outputs = grown.model(ROWS).detach()
    assert grown.score_name == name
    assert f"validation {name} " in grown.report()
    guessed = targets is not CLASSES and "loss" not in settings
    assert ("the targets are" in grown.report()) == guessed
    assert float(grown.record.loss[-1, 0]) == pytest.approx(loss(outputs, targets).item(), rel=1e-4)
    wanted = None
    if name == "R²":
        columns = targets.view(len(ROWS), -1)
        wanted = max(-1.0, r2_score(columns, outputs, multioutput="variance_weighted"))
    elif name == "accuracy":
        classes = targets if targets is CLASSES else targets.argmax(1)
        wanted = (outputs.argmax(1) == classes).float().mean().item()
    assert wanted is None or float(grown.record.accuracy[-1, 0]) == pytest.approx(wanted, abs=1e-5)


def test_targets_that_do_not_count_weigh_nothing_whatever_the_batches() -> None:
    """Loss and score are those over all of val at once; a batch in which nothing counts is none."""
    masks = MASKS.clone()
    masks[20:40, :, 2:] = -100
    masks[40:50] = -100
    batches = [(X[k : k + 10], masks[k : k + 10]) for k in range(0, 60, 10)]
    grown = static(models.UNet(), batches, batches, epochs=2)
    outputs, known = grown.model(X), masks != -100
    hits = (outputs.argmax(1) == masks)[known].float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(hits, abs=1e-6)
    assert grown.record.loss[-1, 0] == pytest.approx(F.cross_entropy(outputs, masks).item(), rel=1e-4)


def test_a_metric_that_does_not_average_is_measured_over_all_samples() -> None:
    def f1(outputs: Tensor, targets: Tensor) -> float:
        return float(f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro", zero_division=0))

    x, y = models.table(90)
    settings = {"metric": f1, "loss": F.multi_margin_loss, "batch_size": 7}
    grown = static(models.small_mlp(), (x[:40], y[:40]), (x[40:], y[40:]), **settings)
    assert grown.score_name == "f1"
    assert grown.record.accuracy[-1, 0] == pytest.approx(f1(grown.model(x[40:]), y[40:]), abs=1e-6)


def test_class_sorted_validation_is_seen_whole_and_a_stated_part_is_drawn_from_all_of_it() -> None:
    x, y = models.table(2300)
    order, seen = y.argsort(), list[Tensor]()
    grown = static(models.small_mlp(), (x[:200], y[:200]), (x[order], y[order]), epochs=1)
    measured = (grown.model(x).argmax(1) == y).float().mean().item()
    assert grown.record.accuracy[-1, 0] == pytest.approx(measured, abs=1e-5)

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        seen.extend([] if model.training else [batch[1]])
        return F.cross_entropy(model(batch[0]), batch[1]), 0.5

    part = {"validation_samples": 30, "batch_size": 40, "device": torch.device("cpu"), "step": step}
    static(models.small_mlp(), (x[:200], y[:200]), (x[order], y[order]), epochs=1, **part)
    assert len(seen[-1]) == 30
    assert set(seen[-1].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("own", FLOATS[:3])
def test_tensors_are_converted_to_the_dtype_of_the_model(own: torch.dtype, given: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.update((outputs.dtype, targets.dtype))
        return F.mse_loss(outputs, targets)

    settings = {"epochs": 1, "loss": loss, "metric": closeness}
    grown = static(models.small_mlp().to(own), (ROWS.to(given), NUMBERS.to(given)), **settings)
    assert seen == {p.dtype for p in grown.model.parameters()} == {own}


# ---- dtypes, modes and devices ---------------------------------------------------------------------------

SCHEDULES = ["schedule:mlp@0.1", "schedule:norm@0.1", "schedule:clone@0.1", "schedule:widen_full@0.1"]


def normed(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, outputs))


def grow_in(dtype: torch.dtype, model: nn.Module, **settings: Any) -> Grown:
    batches = [(ROWS[k:32:2].to(dtype), CLASSES[k:32:2]) for k in range(2)]
    return grow(model, batches, batches, **{"epochs": 5, "step": rising_score()} | settings)


def norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


@pytest.mark.usefixtures("everything_stays")
@pytest.mark.parametrize("controller", SCHEDULES)
@pytest.mark.parametrize(
    ("dtype", "device", "frozen"),
    [
        (torch.float32, "cpu", False),
        (torch.float32, "cpu", True),
        (torch.float64, "cpu", True),
        (torch.bfloat16, "cpu", False),
        pytest.param(torch.float16, "cuda", False, marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, "cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_what_grows_has_the_dtype_and_the_mode_of_what_it_is_added_to(
    dtype: torch.dtype, device: str, controller: str, frozen: bool
) -> None:
    model = normed().to(dtype)
    for norm in norms(model) if frozen else []:
        norm.eval()
    grown = grow_in(dtype, model, controller=controller, folds=1, device=device)
    assert grown.added or grown.folded, grown.report()
    assert {p.dtype for p in grown.model.parameters()} == {dtype}
    steps = {int(norm.num_batches_tracked) for norm in norms(grown.model)}
    assert steps == {0} if frozen else 0 not in steps, steps  # of a copied or wider norm too
    loss = F.cross_entropy(grown.model(ROWS[:32].to(dtype)).double(), CLASSES[:32]).item()
    tolerance = 0.05 if torch.finfo(dtype).bits == 16 else 1e-4
    assert loss == pytest.approx(float(grown.record.loss[-1, 0]), rel=tolerance)


def test_a_model_in_eval_mode_is_trained_in_train_mode() -> None:
    """As from_pretrained gives it."""
    grown = grow_in(torch.float32, normed().eval(), controller="static", epochs=1)
    assert {int(norm.num_batches_tracked) for norm in norms(grown.model)} == {2}


def test_a_float16_model_learns_with_the_optimizer_that_is_made_here() -> None:
    """Adam's usual epsilon is 0 in float16."""
    grown = grow_in(torch.float16, normed().half(), controller="static")
    losses = [epoch.train_loss for epoch in grown.history]
    assert losses == sorted(losses, reverse=True), losses  # which no NaN is


class AsHalf(nn.Module):
    """A head in float32 behind a body in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = normed(6).to(dtype), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).float())


@pytest.mark.usefixtures("everything_stays")
def test_a_seed_in_a_model_of_two_dtypes_has_that_of_its_slot() -> None:
    settings = {"controller": "schedule:mlp@0.1", "slots": ["body.5"]}
    grown = grow_in(torch.bfloat16, AsHalf(torch.bfloat16), **settings)
    assert grown.added
    assert {p.dtype for p in grown.model.body.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in grown.model.head.parameters()} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_grows_in_autocast_with_added_up_gradients(device: str) -> None:
    torch.manual_seed(0)
    batch = models.table(8)
    recipe = {"controller": "schedule:widen_half@0.1", "lifecycle": None}
    settings = {"epochs": 4, "folds": 1, "device": device, "precision": "bfloat16", "accumulate": 2}
    grown = grow(models.small_mlp(), [batch] * 4, [batch], lr=3e-3, **recipe, **settings)
    assert grown.folded, grown.report()
    assert {(p.device.type, p.dtype) for p in grown.model.parameters()} == {("cpu", torch.float32)}
    loss = F.cross_entropy(grown.model(batch[0]), batch[1])
    assert loss.item() == pytest.approx(float(grown.record.loss[-1, 0]), rel=0.02)
    assert grown.history[-1].train_loss < grown.history[0].train_loss


def test_a_step_dispatches_a_few_operations_more_than_a_plain_one_and_reads_nothing_back() -> None:
    batch, layers = models.table(8), [nn.Linear(5, 5) for _ in range(8)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(5, 3))
    recipe = {"optimizer": "sgd", "schedule": "constant", "weight_decay": 0.0, "epochs": 1}

    def live(steps: int) -> None:
        static(model, [batch] * steps, [batch], **recipe)

    def plain(steps: int) -> None:
        rule = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for _ in range(steps):
            rule.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            rule.step()

    def of_four_steps(train: Callable[[int], None]) -> Counter[str]:
        first = operations_of(partial(train, 3))  # with what is made once
        return operations_of(partial(train, 7)) - first

    ours, usual = of_four_steps(live), of_four_steps(plain)
    assert usual.total() > 4 * 60
    assert (ours - usual).total() <= 4 * 25, ours - usual
    assert ours["aten._local_scalar_dense.default"] <= 4  # the rate, which is on the CPU


@pytest.mark.gpu
def test_snapshots_of_a_large_model_on_a_gpu_are_kept_in_main_memory() -> None:
    seen: list[int] = []
    wide = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4))
    batch = (torch.randn(64, 16), torch.randint(0, 4, (64,)))
    nn.Linear(16, 16, device="cuda")(torch.ones(4, 16, device="cuda")).sum().backward()
    others = torch.cuda.memory_allocated()  # among them what products work in, both ways
    torch.cuda.reset_peak_memory_stats()  # what else this process once took is there for snapshots too
    watch = {"on_epoch": lambda numbers: seen.append(torch.cuda.memory_allocated())}
    static(wide, [batch] * 2, [batch], device="cuda", **watch)
    trained = 4 * sum(p.numel() * p.element_size() for p in wide.parameters())  # gradients and two moments
    assert max(seen) - others < 1.1 * trained
