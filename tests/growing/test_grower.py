"""People who keep their own loop: one step after every epoch."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.growing.live_model import LiveSlot
from esper.lifecycle.stages import Stage
from esper.tamiyo.schedule import Schedule
from esper.utils.errors import UserError
from tests.controllers import Scheduled
from tests.growing import models
from tests.growing.models import QUICK

X, Y = models.images()


def made(model: nn.Module, epochs: int = 12, **settings: Any) -> tuple[esper.Grower, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    controller = Scheduled(steps=(1,))
    chosen = {"controller": controller, "batch_size": 16, "lifecycle": QUICK} | settings
    grower = esper.Grower(model, optimizer, (X[:45], Y[:45]), (X[45:], Y[45:]), epochs=epochs, **chosen)
    return grower, optimizer


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for index in torch.arange(45).split(15):
        optimizer.zero_grad()
        F.cross_entropy(model(X[index]), Y[index]).backward()
        optimizer.step()


def slot_of(grower: esper.Grower) -> LiveSlot:
    return grower._environment.bodies.slots[0]


@pytest.mark.usefixtures("everything_stays")
def test_a_loop_of_ones_own_grows_the_model() -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    names = set(model.state_dict())
    grower, optimizer = made(model)
    before = len(optimizer.param_groups[0]["params"])
    told = []
    for epoch in range(12):
        train_epoch(model, optimizer)
        with torch.set_grad_enabled(epoch % 2 == 0):  # as in the hook of a trainer that runs after validation
            told.append(grower.step())
    assert told[0] == "planted CONV_LIGHT after 3"
    assert told[-1] == "the end"
    assert len(optimizer.param_groups[0]["params"]) > before  # the user's optimizer trains the seed
    plain = grower.finish()
    assert not any(type(part).__module__.startswith("esper") for part in plain.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert set(plain.state_dict()) - names  # something grew
    assert names <= set(plain.state_dict())
    torch.testing.assert_close(plain.state_dict()["0.weight"], model[0].weight)
    with pytest.raises(UserError, match="the 12 epochs are over"):
        grower.step()


def test_a_seed_in_isolation_is_not_heard_and_moves_nothing_but_itself() -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    grower, optimizer = made(model)
    while Stage(int(grower._environment.applied.slots.stage[0, 0])) is not Stage.TRAINING:
        train_epoch(model, optimizer)
        grower.step()
    seed = {n: t.clone() for n, t in slot_of(grower).state_dict().items()}
    host = {n: t.clone() for n, t in model.state_dict().items()}
    outputs = model.eval()(X)
    grower.step()  # trains the seed, alone
    assert all(torch.equal(host[name], value) for name, value in model.state_dict().items())
    with slot_of(grower).at_alpha(0.0):
        torch.testing.assert_close(model.eval()(X), outputs, rtol=0, atol=0)
    after = slot_of(grower).state_dict()
    assert any(not torch.equal(seed[name], after[name]) for name in seed)


def test_a_pruned_seed_leaves_the_optimizer_as_it_was() -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    grower, optimizer = made(model)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    for _ in range(6):
        train_epoch(model, optimizer)
        grower.step()
    assert len(optimizer.param_groups[0]["params"]) > len(before)
    grower._environment.bodies.prune(torch.tensor([[True, False]]))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before
    assert len(optimizer.state) <= len(before)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"loss": 1.0}, "metrics name loss; allowed are val_loss, val_accuracy"),
        ({"val_loss": float("nan")}, "val_loss is nan: training has broken"),
    ],
)
def test_the_metrics_of_the_loop_are_what_the_controller_sees_and_bad_ones_are_refused(
    metrics: dict[str, float], sentence: str
) -> None:
    grower, _ = made(models.small_cnn())
    with pytest.raises(UserError, match=sentence):
        grower.step(metrics)
    grower.step({"val_loss": 0.25, "val_accuracy": 0.75})
    seen = grower._environment.observe()
    assert (float(seen.val_loss), float(seen.val_accuracy)) == (0.25, 0.75)


def grow_with_a_stop(stop: int | None, optimizer_first: bool = True) -> dict[str, Tensor]:
    """Nine epochs of a loop with shuffling, dropout and a schedule; `stop`: the epoch after which to begin
    anew from what was saved."""

    def begin() -> tuple[nn.Module, esper.Grower, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = models.small_cnn()
        thick = [p for p in model.parameters() if p.ndim > 1]
        thin = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": thin, "weight_decay": 0.0}, {"params": thick}], lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        chosen = {"controller": Scheduled(steps=(0, 4)), "batch_size": 16}
        grower = esper.Grower(
            model, optimizer, (X[:45], Y[:45]), (X[45:], Y[45:]), epochs=9, lifecycle=QUICK, **chosen
        )
        return model, grower, optimizer, schedule

    model, grower, optimizer, schedule = begin()
    for epoch in range(9):
        for index in torch.randperm(45).split(15):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(X[index]), Y[index]).backward()
            optimizer.step()
        schedule.step()
        grower.step()
        if epoch == stop:
            file = io.BytesIO()
            torch.save([optimizer.state_dict(), schedule.state_dict(), grower.state_dict()], file)
            torch.manual_seed(99)
            model, grower, optimizer, schedule = begin()
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            parts = [(optimizer, saved[0]), (schedule, saved[1]), (grower, saved[2])]
            for part, state in parts if optimizer_first else reversed(parts):
                part.load_state_dict(state)
    assert [{p.ndim > 1 for p in group["params"]} for group in optimizer.param_groups] == [{False}, {True}]
    trained = {f"optimizer.{k}": p for k, p in enumerate(optimizer.param_groups[1]["params"])}
    return {**trained, **grower.finish().state_dict()}


@pytest.mark.usefixtures("everything_stays")
def test_a_loop_that_was_stopped_at_any_epoch_goes_on_to_the_same_bits() -> None:
    whole = grow_with_a_stop(None)
    assert any("grown" in name for name in whole)
    # A seed that is trained alone, one that is blended in, and one beside a second.
    for stop, optimizer_first in ((1, True), (2, False), (5, True)):
        again = grow_with_a_stop(stop, optimizer_first)
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], value) for name, value in whole.items()), stop


def test_the_saved_optimizer_has_the_same_form_whatever_grows() -> None:
    model = models.small_cnn()
    grower, optimizer = made(model)
    bare = torch.optim.SGD(models.small_cnn().parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        train_epoch(model, optimizer)
        grower.step()
    assert grower.seed_parameters
    bare.load_state_dict(optimizer.state_dict())
    assert len(bare.state) == len(list(model.parameters()))
    grower.close()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        bare.load_state_dict(optimizer.state_dict())


def test_a_state_of_something_else_is_told() -> None:
    grower, _ = made(models.small_cnn())
    with pytest.raises(UserError, match="give what Grower"):
        grower.load_state_dict({})
    other, _ = made(models.Residual())
    with pytest.raises(ValueError, match="the saved model"):
        grower.load_state_dict(other.state_dict())


@pytest.mark.usefixtures("everything_stays")
def test_blocks_and_layers_of_the_model_grow_in_a_loop_of_ones_own_and_join_their_groups() -> None:
    x, y = models.table(40)
    model = models.small_mlp()
    thick, flat = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    optimizer = torch.optim.AdamW([{"params": thick}, {"params": flat, "weight_decay": 0.0}], lr=1e-2)
    recipe = Schedule([(0.1, "widen_half", [0]), (0.3, "clone", [1])])
    grower = esper.Grower(model, optimizer, (x, y), (x, y), controller=recipe, epochs=8, batch_size=20)
    for _ in range(8):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        grower.step({"val_loss": 1.0, "val_accuracy": 0.5})
    assert [{p.ndim for p in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6 + 3 + 2  # widened, repeated
    plain = grower.finish()
    assert [tuple(p.shape) for p in plain.parameters() if p.ndim > 1] == [(9, 5), (6, 9), (6, 6), (3, 6)]
    torch.testing.assert_close(model[0].weight, plain[0].weight[:6])  # the given model keeps its shape
