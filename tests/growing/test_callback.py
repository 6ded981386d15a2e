"""People who keep their own loop: one step after every epoch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import esper
from esper.foundation.errors import UserError
from esper.lifecycle.config import GateConfig, LifecycleConfig
from esper.lifecycle.stages import Stage
from esper.tamiyo.scripted import Scheduled
from tests.growing import models
from tests.growing.models import classes_of

QUICK = LifecycleConfig(gates=GateConfig(training_epochs=1, min_health=0.0))
X, Y = models.images()


def made(
    model: torch.nn.Module, epochs: int = 12, **settings: object
) -> tuple[esper.Grower, torch.optim.Optimizer]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    controller = Scheduled(steps=(1,), gates=QUICK.gates)
    chosen = {"controller": controller, "batch_size": 16, "lifecycle": QUICK} | settings
    return esper.Grower(
        model, optimiser, (X[:45], Y[:45]), (X[45:], Y[45:]), epochs=epochs, **chosen
    ), optimiser


def train_epoch(grower: esper.Grower, optimiser: torch.optim.Optimizer) -> None:
    grower.model.train()
    for index in torch.arange(45).split(15):
        optimiser.zero_grad()
        F.cross_entropy(grower.model(X[index]), Y[index]).backward()
        optimiser.step()


def test_a_loop_of_ones_own_grows_the_model() -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    grower, optimiser = made(model)
    before = len(optimiser.param_groups[0]["params"])
    told = []
    for _ in range(12):
        train_epoch(grower, optimiser)
        told.append(grower.step({"val_loss": 1.0, "val_accuracy": 0.5}))
    assert told[1] == "planted CONV_LIGHT after 3"
    assert int(grower.states.stage[0, 0]) in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
    assert len(optimiser.param_groups[0]["params"]) > before  # the user's optimiser trains the seed
    plain = grower.finish()
    grower.model.eval()
    torch.testing.assert_close(plain(X), grower.model(X), rtol=1e-5, atol=1e-6)
    assert not any(name.startswith("esper") for name in classes_of(plain))
    torch.testing.assert_close(
        plain.state_dict()["0.weight"], model[0].weight
    )  # the user's own layers learned


def test_a_seed_in_isolation_is_not_heard_and_moves_nothing_but_itself() -> None:
    torch.manual_seed(0)
    model = models.small_cnn()
    grower, optimiser = made(model)
    for _ in range(3):
        train_epoch(grower, optimiser)
        grower.step()
    assert int(grower.states.stage[0, 0]) == Stage.TRAINING
    seed = {n: t.clone() for n, t in grower._live.slots[0].state_dict().items()}
    host = {n: t.clone() for n, t in model.state_dict().items()}
    grower.model.eval()
    torch.testing.assert_close(grower.model(X), model.eval()(X), rtol=0, atol=0)
    grower.step()  # trains the seed, alone
    assert all(torch.equal(host[name], value) for name, value in model.state_dict().items())
    after = grower._live.slots[0].state_dict()
    assert any(not torch.equal(seed[name], after[name]) for name in seed)


def test_a_pruned_seed_leaves_the_optimiser_as_it_was() -> None:
    torch.manual_seed(0)
    grower, optimiser = made(models.small_cnn())
    before = [id(p) for p in optimiser.param_groups[0]["params"]]
    for _ in range(6):
        train_epoch(grower, optimiser)
        grower.step()
    assert len(optimiser.param_groups[0]["params"]) > len(before)
    grower._live.update(grower.states, [False, False], [True, False])
    # the slot still counts as heard here, so its emptied module hands nothing over
    assert [id(p) for p in optimiser.param_groups[0]["params"]] == before
    assert len(optimiser.state) <= len(before)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"loss": 1.0}, "metrics name loss; allowed are val_loss, val_accuracy"),
        ({"val_loss": float("nan")}, "val_loss is nan: training has broken"),
    ],
)
def test_bad_metrics_are_told(metrics: dict[str, float], sentence: str) -> None:
    grower, _ = made(models.small_cnn())
    with pytest.raises(UserError, match=sentence):
        grower.step(metrics)


def test_a_budget_holds_here_too() -> None:
    with pytest.raises(UserError, match="smallest seed"):
        made(models.small_cnn(), budget=3)


@pytest.mark.parametrize("setting", ["members", "device", "schedule", "clip_norm", "batches_per_epoch"])
def test_a_setting_that_a_loop_of_ones_own_decides_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"no setting '{setting}' here; allowed are objective"):
        made(models.small_cnn(), **{setting: 2})


def test_the_seed_decides_what_grows_and_the_callers_randomness_is_left() -> None:
    def weights(before: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = models.small_cnn().eval()
        grower, _ = made(model)
        torch.manual_seed(before)
        for _ in range(4):
            grower.step()
        return grower._live.slots[0].state_dict(), torch.get_rng_state()

    (first, state), (second, _) = weights(1), weights(2)
    assert first
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_a_metric_that_raises_leaves_every_strength_as_it_was() -> None:
    grower, _ = made(models.small_cnn())
    slot = grower._live.slots[0]
    slot.plant(1, torch.device("cpu"))
    slot.strength = 0.5
    with pytest.raises(ZeroDivisionError), slot.at(0.0):
        raise ZeroDivisionError
    assert slot.strength == 0.5


def test_at_the_end_every_seed_is_at_full_strength_or_gone() -> None:
    grower, optimiser = made(models.small_cnn())
    own = len(optimiser.param_groups[0]["params"])
    for _ in range(5):
        grower.step()
    assert int(grower.states.stage[0, 0]) == Stage.BLENDING
    plain = grower.finish()
    strengths = {float(slot.strength) for slot in grower._live.slots}
    assert strengths <= {0.0, 1.0}
    grower.model.eval()
    torch.testing.assert_close(plain(X), grower.model(X), rtol=1e-5, atol=1e-6)
    if strengths == {0.0}:
        assert len(optimiser.param_groups[0]["params"]) == own
