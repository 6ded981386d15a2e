"""A living model goes back to what it was: weights, seeds and moments.

That it goes on in another process as well is held by the resumed scenes of tests/golden.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.growing.data import make_loaders
from esper.growing.live import LivePopulation
from esper.growing.settings import check_settings
from esper.lifecycle.actions import Blueprint, Style
from esper.lifecycle.slot_states import SlotStates
from esper.lifecycle.stages import Stage
from esper.population.data import Clock
from tests.growing import models

CPU = torch.device("cpu")
X, Y = models.images(32)
TABLE = models.table(32)


def states_of(live: LivePopulation, *stages: tuple[Stage, Blueprint, float]) -> SlotStates:
    """Slots in these stages, with these blueprints and strengths."""
    stage, blueprint, alpha = zip(*stages, strict=True)
    return SlotStates.empty(1, live.num_slots).replace(
        stage=torch.tensor([stage]),
        blueprint=torch.tensor([blueprint]),
        alpha=torch.tensor([alpha]),
        style=torch.full((1, live.num_slots), int(Style.LINEAR_ADD)),
    )


def train(live: LivePopulation, states: SlotStates, epoch: int) -> None:
    torch.manual_seed(epoch)
    live.run_training(states, Clock(0, epoch, 8))


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_going_back_restores_moments_with_weights_so_that_training_repeats_to_the_bit() -> None:
    torch.manual_seed(0)
    chosen = check_settings({"lr": 1e-2})
    loaders = make_loaders([(X, Y)], [(X, Y)], chosen)
    live = LivePopulation(models.small_cnn(), loaders, chosen, CPU, ["3", "7"])
    states = states_of(
        live, (Stage.TRAINING, Blueprint.CONV_LIGHT, 0.0), (Stage.BLENDING, Blueprint.NORM, 0.5)
    )
    live.germinate(states.stage > Stage.DORMANT, states.blueprint)
    train(live, states, 0)
    saved = live.snapshot()
    train(live, states, 1)
    wanted = {name: value.clone() for name, value in live.tensors().items()}
    live.prune(torch.tensor([[True, True]]))
    live.restore(saved)
    assert_same(live.tensors(), saved)
    train(live, states, 1)
    assert_same(live.tensors(), wanted)


def grown_mlp() -> tuple[LivePopulation, SlotStates]:
    """A perceptron that learns with a repeated and a widened layer."""
    torch.manual_seed(0)
    model = models.small_mlp().double()
    chosen = check_settings({"lr": 1e-2})
    data = [(TABLE[0].double(), TABLE[1])]
    live = LivePopulation(model, make_loaders(data, data, chosen), chosen, CPU)
    return live, states_of(
        live, (Stage.HOLDING, Blueprint.WIDEN_HALF, 1.0), (Stage.BLENDING, Blueprint.CLONE, 0.5)
    )


def fold(live: LivePopulation, *slots: int) -> SlotStates:
    """Make seeds part of the model; what the slots are then."""
    where = torch.tensor([[k in slots for k in range(live.num_slots)]])
    live.fold(where, torch.zeros(1, live.num_slots, dtype=torch.long))
    return SlotStates.empty(1, live.num_slots)


def test_a_model_whose_layers_have_grown_goes_back_and_on_to_the_same_bits() -> None:
    live, states = grown_mlp()
    live.germinate(states.stage > Stage.DORMANT, states.blueprint)
    train(live, states, 0)
    early = live.snapshot()
    states = fold(live, 0, 1)
    train(live, states, 1)
    late = live.snapshot()
    train(live, states, 2)
    wanted = {name: value.clone() for name, value in live.tensors().items()}
    live.restore(early)
    assert_same(live.tensors(), early)
    assert not live.live.folds
    live.restore(late)
    assert_same(live.tensors(), late)
    train(live, states, 2)
    assert_same(live.tensors(), wanted)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(["plant 0", "plant 1", "prune 0", "fold 0", "fold 1", "train"]), max_size=8),
    st.randoms(use_true_random=False),
)
def test_any_snapshot_comes_back_whatever_was_planted_and_folded_since(done: list[str], order: Any) -> None:
    live, states = grown_mlp()
    x, taken = TABLE[0].double(), list[tuple[dict[str, Tensor], Tensor]]()

    def take() -> None:
        live.model.eval()
        with torch.no_grad():
            taken.append(({name: value.clone() for name, value in live.tensors().items()}, live.model(x)))
        live.model.train()

    take()
    for action, _, k in (words.partition(" ") for words in done):
        slot = int(k or 0)
        where = torch.tensor([[slot == 0, slot == 1]])
        empty = live.slots[slot].seed is None
        if action == "train":
            train(live, SlotStates.empty(1, 2), 0)
        elif action == "plant" and empty and bool(live.growable()[0, slot, states.blueprint[0, slot]]):
            live.germinate(where, states.blueprint)
        elif action == "prune":
            live.prune(where)
        elif action == "fold" and not empty:
            live.fold(where, torch.zeros(1, 2, dtype=torch.long))
        take()
    order.shuffle(taken)
    for saved, outputs in taken:
        live.restore(saved)
        assert_same(live.tensors(), saved)
        live.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(live.model(x), outputs, rtol=1e-12, atol=1e-12)
        live.model.train()


def test_a_fold_keeps_outputs_moments_and_groups() -> None:
    live, states = grown_mlp()
    live.germinate(states.stage > Stage.DORMANT, states.blueprint)
    train(live, states, 0)
    live.sync_slots(states)
    for slot in live.slots:
        slot.alpha = 1.0
    model, rule = live.model.eval(), live.optimizer.inner
    x = TABLE[0].double()
    said, weight = model(x), model[0].weight
    seed = live.slots[0].seed
    assert seed is not None
    beside = seed.side[-1].weight
    before = [rule.state[p]["exp_avg"].clone() for p in (weight, beside)]
    fold(live, 0, 1)
    torch.testing.assert_close(model(x), said, rtol=1e-12, atol=1e-12)
    assert [tuple(p.shape) for p in model.parameters()][:2] == [(9, 5), (9,)]
    held = [p for group in rule.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    torch.testing.assert_close(rule.state[model[0].weight]["exp_avg"], torch.cat(before), rtol=0, atol=0)
    decayed = {id(p) for group in rule.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim > 1}
    train(live, SlotStates.empty(1, live.num_slots), 1)
