"""Growing into a model: skipped blocks are as if they were not there, and begin as copies of trained ones."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import shutil
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growing import live, progressive
from esper.growing.blocks import choose_active, copy_sources, drop_nested, find_blocks, resolve_order
from esper.growing.estimate import Law
from esper.growing.progressive import ORDERS, Progressive, copy_block
from esper.utils.errors import UserError
from tests.growing.test_zoo import timm_model
from tests.waiting import MINUTE, run_group

ROOT = Path(__file__).parents[2]
TOKENS = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(0))
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.layer(self.norm(x)))
        return out


def make(blocks: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(*(Residual() for _ in range(blocks))), nn.Linear(4, 2)
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = TABLE) -> float:
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# ---- which blocks ----------------------------------------------------------------------------------------


def test_blocks_are_like_neighbours_and_the_outermost() -> None:
    inner = nn.Sequential(Residual(), Residual())
    model = nn.ModuleDict(
        {
            "twice": nn.ModuleList([nn.Sequential(Residual(), Residual()), inner]),
            "mixed": nn.Sequential(Residual(3), Residual(), Residual(), nn.ReLU(), Residual()),
            "leaves": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        }
    )
    names = [each.names for each in drop_nested(find_blocks(model))]
    assert names == [("twice.0", "twice.1"), ("mixed.1", "mixed.2")]


@given(st.integers(1, 12), st.data(), st.sampled_from(ORDERS))
def test_every_set_of_active_blocks_holds_the_one_before(count: int, data: st.DataObject, order: str) -> None:
    sizes = sorted(data.draw(st.lists(st.integers(1, count), min_size=1, max_size=3)))
    sets = choose_active(count, [*sizes, count], resolve_order(order, sizes[0]))
    assert [len(chosen) for chosen in sets] == [*sizes, count]
    assert all(chosen == sorted(set(chosen)) and chosen[0] == 0 for chosen in sets)
    assert all(set(a) <= set(b) for a, b in pairwise(sets))


@pytest.mark.parametrize(
    ("order", "became"),
    [("interleaved", "00112233"), ("stacked", "01230123"), ("middle", "01212123")],
)
def test_every_order_is_that_of_its_description(order: str, became: str) -> None:
    half, whole = choose_active(8, [4, 8], order)
    copies = dict((k, source) for source, k in copy_sources(half, whole, order))
    assert "".join(str(half.index(copies.get(k, k))) for k in whole) == became


# ---- skipping and copying --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("order", "kept"), [("interleaved", (0, 2)), ("stacked", (0, 1)), ("middle", (0, 2))]
)
def test_skipped_blocks_train_as_if_they_were_not_there(name: str, order: Any, kept: tuple[int, ...]) -> None:
    model, reference = make(), make()
    reference[1] = nn.Sequential(*(reference[1][k] for k in kept))  # type: ignore[index]
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    before = copy.deepcopy(model.state_dict())
    grower = Progressive(model, optimizer, 10, grow_at=0.6, order=order)
    for _ in range(5):
        assert train_step(model, optimizer) == train_step(reference, plain)
        assert not grower.step()
    for k in {0, 1, 2, 3} - set(kept):
        assert all(torch.equal(v, before[f"1.{k}.{n}"]) for n, v in model[1][k].state_dict().items())  # type: ignore[index]
    assert grower.active == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("order", "sources"),
    [("interleaved", (0, 0, 2, 2)), ("stacked", (0, 1, 0, 1)), ("middle", (0, 0, 2, 2))],
)
def test_new_blocks_are_copies_with_the_state_of_the_optimizer(
    name: str, order: Any, sources: tuple[int, ...]
) -> None:
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    grower = Progressive(model, optimizer, 6, grow_at=0.5, order=order)
    grown = [train_step(model, optimizer) is None or grower.step() for _ in range(3)]
    assert grown == [False, False, True]
    for target, source in enumerate(sources):
        new, old = model[1][target], model[1][source]  # type: ignore[index]
        assert all(
            torch.equal(a, b)
            for a, b in zip(new.state_dict().values(), old.state_dict().values(), strict=True)
        )
        for p, q in zip(new.parameters(), old.parameters(), strict=True):
            mine, theirs = optimizer.state.get(p, {}), optimizer.state.get(q, {})
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value
                assert target == source or not isinstance(value, Tensor) or mine[key] is not value
    weights = [block.layer.weight.clone() for block in model[1]]  # type: ignore[union-attr, operator]
    train_step(model, optimizer)
    assert not any(torch.equal(a, b.layer.weight) for a, b in zip(weights, model[1], strict=True))  # type: ignore[arg-type]


def test_two_hops_double_twice() -> None:
    model = make(8)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    grower = Progressive(model, optimizer, 10, start=0.25, grow_at=(0.2, 0.5), example=(TABLE,))
    active = []
    for _ in range(10):
        active.append(grower.active)
        train_step(model, optimizer)
        grower.step()
    assert active == [2, 2, 4, 4, 4, 8, 8, 8, 8, 8]
    spent = sum(2 * 8 * (4 * 4 * (1 + blocks) + 4 * 2) for blocks in active)
    assert grower.saved == pytest.approx(1 - spent / (10 * 2 * 8 * (4 * 4 * 9 + 4 * 2)))


def test_the_result_is_the_model_that_was_given() -> None:
    model, names = make(), list(make().state_dict())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    grower = Progressive(model, optimizer, 4, grow_at=0.5)
    assert list(model.state_dict()) == names
    train_step(model, optimizer)
    for same in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(same.eval()(TABLE), model.eval()(TABLE))
    model.train()
    for _ in range(4):
        train_step(model, optimizer)
        grower.step()
    fresh = make(seed=1)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(TABLE), model.eval()(TABLE))
    assert not any("forward" in vars(module) for module in model.modules())


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 9), st.sampled_from(sorted(OPTIMIZERS)))
def test_a_run_goes_on_from_any_step_to_the_same_bits(stop: int, name: str) -> None:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Progressive]:
        model = make(8, seed)
        optimizer = OPTIMIZERS[name](model.parameters())
        options: dict[str, Any] = {"start": 0.25, "grow_at": (0.2, 0.5), "rewarm": 2}
        return model, optimizer, Progressive(model, optimizer, 10, **options)

    whole, parts = begin(0), begin(0)
    run(*whole, steps=10)
    run(*parts, steps=stop)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    resumed = begin(1)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    run(*resumed, steps=10 - stop)
    expected = whole[0].state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in resumed[0].state_dict().items())


@pytest.mark.parametrize("tensor", [False, True])
def test_the_rate_rises_again_after_a_growth_and_no_scheduler_sees_it(tensor: bool) -> None:
    used: list[float] = []

    class Watched(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            used.append(float(self.param_groups[0]["lr"]))
            super().step(closure)

    model = make(8)
    rate = torch.tensor(0.1) if tensor else 0.1
    optimizer = Watched(model.parameters(), lr=rate, capturable=False, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    grower = Progressive(model, optimizer, 20, start=0.25, grow_at=(0.2, 0.5), rewarm=3)
    hooked = []
    for step in range(20):
        train_step(model, optimizer)
        scheduler.step()
        grower.step()
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # type: ignore[attr-defined]
            hooked.append(step + 1)
    assert hooked == [4, 5, 6, 10, 11, 12]
    other = torch.optim.SGD(make().parameters(), lr=0.1)
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=20)
    expected = []
    for step in range(20):
        share = {4: 0.25, 5: 0.5, 6: 0.75, 10: 0.25, 11: 0.5, 12: 0.75}.get(step, 1.0)
        expected.append(other.param_groups[0]["lr"] * share)
        other.step()
        plain.step()
    assert used == pytest.approx(expected, rel=1e-5)


def begin(blocks: int = 4, seed: int = 0, **options: Any) -> tuple[Any, Any, Progressive]:
    model = make(blocks, seed)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return model, optimizer, Progressive(model, optimizer, 10, **{"grow_at": 0.4, **options})


def run(model: nn.Module, optimizer: torch.optim.Optimizer, grower: Progressive, steps: int) -> None:
    for _ in range(steps):
        train_step(model, optimizer)
        grower.step()


@pytest.mark.parametrize(
    "options",
    [{"blocks": 4}, {"start": 0.25}, {"order": "stacked"}, {"grow_at": (0.2, 0.5)}],
    ids=str,
)
def test_a_state_of_another_model_or_schedule_is_refused(options: dict[str, Any]) -> None:
    """Else untrained blocks would run, or trained ones be overwritten."""
    grower, other = (begin(**{"blocks": 8, **given})[2] for given in ({}, options))
    with pytest.raises(UserError, match="another model or schedule"):
        grower.load_state_dict(other.state_dict())


def test_a_state_of_the_order_of_earlier_versions_goes_on_in_that_order() -> None:
    model, optimizer, earlier = begin(8, order="interleaved")
    run(model, optimizer, earlier, 2)
    state = earlier.state_dict()
    oldest = {name: value for name, value in state.items() if name != "stages"}  # before 0.2.5
    for saved in (state, oldest):
        with pytest.raises(UserError, match=r"order='interleaved' if it was saved before version 0\.5"):
            begin(8)[2].load_state_dict(saved)
        begin(8, order="interleaved")[2].load_state_dict(saved)
    run(model, optimizer, earlier, 2)
    grower = begin(8)[2]
    grower.load_state_dict(earlier.state_dict())  # all blocks are active, in any order
    assert grower.whole


def test_what_is_no_state_is_refused_but_for_older_ones_that_lack_a_key() -> None:
    grower = begin()[2]
    older = {name: value for name, value in grower.state_dict().items() if name != "stages"}
    odd: tuple[Any, ...] = (None, 3, [], {}, {**older, "forms": [3]}, {**older, "stage": "x"})
    for state in (*odd, {**older, "steps_done": None}, grower.model.state_dict()):
        with pytest.raises(UserError, match=r"is not what state_dict\(\) of a Progressive returns"):
            grower.load_state_dict(state)
    with pytest.raises(UserError, match="another model or schedule"):
        grower.load_state_dict({**older, "forms": []})
    grower.load_state_dict(older)


@pytest.mark.parametrize(
    "example",
    [TABLE[:, :3], (TABLE, TABLE), {"y": TABLE}, 3, "x", lambda model: 1 / 0],
    ids=["shape", "count", "name", "number", "text", "function"],
)
def test_an_example_that_the_model_does_not_run_on_is_named(example: Any) -> None:
    model = nn.Sequential(*[Residual() for _ in range(4)])
    with pytest.raises(UserError, match=r"^Sequential does not run on example= \(.+\); give what it is"):
        Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=example)
    words = "example is a function; give the arguments" if callable(example) else "does not run on example= "
    with pytest.raises(UserError, match=words):
        esper.estimate(model, tokens=1e6, example=example)


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad]
)
def test_blocks_that_the_optimizer_has_trained_are_not_overwritten(kind: Any) -> None:
    model = make()
    optimizer = kind(model.parameters(), lr=0.01)
    Progressive(model, optimizer, 10).complete()  # before its first step nothing is trained

    def train() -> None:
        model(TABLE).square().mean().backward()
        optimizer.step()

    train()
    trained = copy.deepcopy(model)
    grower = Progressive(model, optimizer, 10)
    state = grower.state_dict()
    with pytest.raises(
        UserError, match=r"^1\.1 was trained although it is to be skipped: copies would overwrite"
    ):
        grower.step()
    grower.complete()
    assert grower.active == grower.blocks, "whoever trains plainly now has the whole model"
    assert same_weights(model, trained)
    resumed = Progressive(model, optimizer, 10)
    resumed.load_state_dict({**state, "steps_done": 5.0, "stage": torch.tensor(1), "forms": ((),)})
    assert not resumed.step()


def test_a_block_whose_hidden_state_is_not_its_first_argument_is_left_alone() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, memory: Tensor, x: Tensor) -> Tensor:
            out: Tensor = x + self.inner(x + memory)
            return out

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Conditioned() for _ in range(8))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(memory, x)
            return x

    model = Net()
    with pytest.raises(UserError, match="Net has 0 blocks"):
        Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=(TABLE, TABLE + 1))


def test_layers_of_other_strides_and_rows_within_stages() -> None:
    def block(stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 3, stride, 1), nn.ReLU())

    found = find_blocks(nn.Sequential(*[block(2 if k == 3 else 1) for k in range(8)]))
    assert [each.names for each in found] == [("0", "1", "2"), ("4", "5", "6", "7")]
    stages = nn.Sequential(*[nn.Sequential(*[block(1) for _ in range(4)]) for _ in range(2)])
    assert [each.names[0] for each in drop_nested(find_blocks(stages))] == ["0.0", "1.0"]

    class Layer(nn.Module):  # whose experts run beside each other
        def __init__(self, padding: Any) -> None:
            super().__init__()
            self.experts, self.padding = nn.ModuleList(block(1) for _ in range(8)), padding

    experts = drop_nested(find_blocks(nn.Sequential(*[Layer(nn.ReflectionPad2d(1)) for _ in range(2)])))
    assert [each.names for each in experts] == [("0", "1")]


def test_a_forward_that_others_gave_to_a_block_stays() -> None:
    """As those of accelerate, which moves the weights of a block to its device."""
    model, calls = make(), []

    def patch(block: nn.Module) -> None:
        forward = block.forward

        def counted(x: Tensor) -> Tensor:
            calls.append(block)
            out: Tensor = forward(x)
            return out

        block.forward = counted  # type: ignore[method-assign]

    blocks = [block for each in find_blocks(model) for block in each.blocks]
    for block in blocks:
        patch(block)
    grower = Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
    model(TABLE)
    assert len(calls) == grower.active < len(blocks)
    for block in blocks:  # also of blocks that are skipped, which run all the same once they are active
        patch(block)
    grower.complete()
    calls.clear()
    model(TABLE)
    assert set(calls) == set(blocks)
    assert grower.active == len(blocks)


def test_lazy_layers_and_one_block_in_several_places_are_named() -> None:
    lazy = nn.Sequential(*[nn.Sequential(nn.LazyLinear(4), nn.ReLU()) for _ in range(8)])
    for call in (lambda: esper.estimate(lazy, tokens=1e6), lambda: find_blocks(lazy)):
        with pytest.raises(UserError, match=r"0\.weight of \w+ has no shape yet; run the model on"):
            call()
    same = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU())] * 8)
    assert (
        "0 blocks of one shape in a row with weights of their own" in esper.estimate(same, tokens=1e6).reason
    )
    with pytest.raises(UserError, match=r"0 blocks of one class .* with weights of their own"):
        Progressive(same, torch.optim.SGD(same.parameters(), lr=0.1), 10, example=(torch.ones(1, 4),))


def test_an_average_of_the_weights_follows() -> None:
    model = make()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    grower = Progressive(model, optimizer, 2, grow_at=0.5, also=[average])
    assert torch.equal(average.eval()(TABLE), model.eval()(TABLE))
    train_step(model.train(), optimizer)
    average.update_parameters(model)
    grower.step()
    assert torch.equal(average.module[1][1].layer.weight, average.module[1][0].layer.weight)
    copy_block(model[1][0], model[1][1], (), grower.state_dict()["buffers"][0])  # type: ignore[index]
    assert torch.equal(average.eval()(TABLE), model.eval()(TABLE))  # one update: the average is the model


def test_two_optimizers_share_the_parameters() -> None:
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = (torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01))
    grower = Progressive(model, optimizers, 4, grow_at=0.5)
    for _ in range(2):
        model(TABLE).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        grower.step()
    for optimizer, name in zip(optimizers, ("weight", "bias"), strict=True):
        states = [optimizer.state[getattr(model[1][k].layer, name)] for k in (0, 1)]  # type: ignore[index]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


class SAM(torch.optim.Optimizer):
    """As it is written everywhere: it holds the optimizer that steps."""

    def __init__(self, parameters: Any, name: str, kind: Any = torch.optim.AdamW) -> None:
        super().__init__(parameters, {"lr": 0.01})
        setattr(self, name, kind(self.param_groups))
        self.inner: Any = lambda: getattr(self, name)
        self.param_groups = self.inner().param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.detach().clone()
        self.inner().step()


@pytest.mark.parametrize("name", ["base_optimizer", "optimizer", "_optimizer", "optim", "base"])
def test_the_state_of_an_optimizer_within_another_is_copied(name: str) -> None:
    model = make()
    optimizer = SAM(model.parameters(), name)
    grower = Progressive(model, optimizer, 4, grow_at=0.5, rewarm=2)
    for _ in range(2):
        train_step(model, optimizer)
        grower.step()
    for key in ("exp_avg", "old"):
        state = (optimizer if key == "old" else optimizer.inner()).state
        copied, source = (state[model[1][k].layer.weight][key] for k in (1, 0))  # type: ignore[index]
        assert torch.equal(copied, source)
    assert not optimizer._optimizer_step_pre_hooks, "the rate is lowered once, where it steps"  # type: ignore[attr-defined]
    assert optimizer.inner()._optimizer_step_pre_hooks


def test_an_optimizer_whose_state_is_elsewhere_is_warned_of() -> None:
    class Hidden(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.held = [torch.optim.AdamW(self.param_groups)]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.held[0].step()

    words = "no optimizer has state for trained blocks"
    for make_it in (Hidden, *OPTIMIZERS.values()):
        model = make()
        optimizer = make_it(model.parameters())
        grower = Progressive(model, optimizer, 2, grow_at=0.5)
        train_step(model, optimizer)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert grower.step()
        assert any(words in str(warning.message) for warning in seen) == (make_it is Hidden)


def test_a_grower_says_how_far_it_is_and_warns_of_steps_too_many() -> None:
    model, optimizer, grower = begin()
    run(model, optimizer, grower, 3)
    assert repr(grower) == "<Progressive: 2 of 4 blocks active, 3 of 10 steps done>"
    run(model, optimizer, grower, 7)
    with pytest.warns(UserWarning, match="more than total_steps=10 steps; growth came early") as seen:
        run(model, optimizer, grower, 5)
    assert len(seen) == 1


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("way", ["amp", "accumulation", "checkpointing"])
def test_growth_is_what_inserting_copies_by_hand_would_be(way: str) -> None:
    def begin(model: nn.Module) -> tuple[nn.Module, Any, Any]:
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**127, enabled=way == "amp")

    def step(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        for part in TABLE.chunk(2 if way == "accumulation" else 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "amp"):
                loss = 16 * model(part).float().square().mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    model, reference = make(), make()
    blocks: Any = [reference[1][k] for k in (0, 2)]  # type: ignore[index]
    kind = Checkpointed if way == "checkpointing" else nn.Sequential
    model[1], reference[1] = kind(*model[1]), kind(*blocks)  # type: ignore[misc]
    ours, small = begin(model), begin(reference)
    grower = Progressive(model, ours[1], 10, grow_at=0.5)
    for _ in range(5):
        step(*ours)
        step(*small)
        grower.step()
    assert grower.whole
    if way == "amp":  # the first scales are too large, so that some steps were left out
        assert ours[2].get_scale() == small[2].get_scale() < 2.0**127
    states = [small[1].state[p] for p in reference.parameters()]
    pairs = [block for block in blocks for _ in range(2)]
    reference[1] = kind(*(copy.deepcopy(block) for block in pairs))
    count = len(list(blocks[0].parameters()))
    stem, body, head = states[:2], states[2 : 2 + 2 * count], states[2 + 2 * count :]
    doubled = [*body[:count], *body[:count], *body[count:], *body[count:]]
    optimizer = OPTIMIZERS["adamw"](reference.parameters())
    for parameter, state in zip(reference.parameters(), [*stem, *doubled, *head], strict=True):
        optimizer.state[parameter] = copy.deepcopy(state)
    for _ in range(5):
        step(*ours)
        step(reference, optimizer, small[2])
        grower.step()
    assert same_weights(model, reference)


def test_blocks_of_transformers_may_be_checkpointed() -> None:
    def trained(checkpointed: bool) -> nn.Module:
        torch.manual_seed(0)
        model = ZOO["gpt2"][0]()
        if checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        optimizer = torch.optim.AdamW(model.parameters())
        grower = Progressive(model, optimizer, 4, grow_at=0.5)
        for _ in range(4):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            grower.step()
        return model

    assert same_weights(trained(True), trained(False))


@pytest.mark.parametrize("example", [None, (TABLE,)])
def test_compiled_it_makes_one_more_graph_at_a_growth(example: Any) -> None:
    model = make()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    grower = Progressive(model, optimizer, 6, grow_at=0.5, example=example)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager")
    for _ in range(6):
        train_step(compiled, optimizer)
        grower.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


# ---- models of other people ------------------------------------------------------------------------------


def transformer(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return build


SHAPE = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 8}
WORDS = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, Any] | tuple[Any, ...], int]] = {
    "gpt2": (
        transformer("GPT2Config", "GPT2LMHeadModel", n_layer=4, n_head=2, n_embd=8, **WORDS),
        {"input_ids": TOKENS},
        4,
    ),
    "gpt_neo": (  # its blocks return attention weights
        transformer(
            "GPTNeoConfig",
            "GPTNeoForCausalLM",
            hidden_size=8,
            num_layers=4,
            num_heads=2,
            attention_types=[[["global"], 4]],
            **WORDS,
        ),
        {"input_ids": TOKENS},
        4,
    ),
    "bert": (transformer("BertConfig", "BertForMaskedLM", **SHAPE, **WORDS), {"input_ids": TOKENS}, 4),
    "llama": (transformer("LlamaConfig", "LlamaForCausalLM", **SHAPE, **WORDS), {"input_ids": TOKENS}, 4),
    "t5": (
        transformer(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=20,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=5,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
        8,
    ),
    "vit": (
        transformer("ViTConfig", "ViTForImageClassification", **SHAPE, image_size=32, patch_size=16),
        {"pixel_values": PICTURES},
        4,
    ),
    "timm resnet34": (timm_model("resnet34", channels=(8, 8, 8, 8)), (PICTURES,), 12),
    "timm vit": (
        timm_model("vit_tiny_patch16_224", img_size=32, depth=4, embed_dim=12, num_heads=2),
        (PICTURES,),
        4,
    ),
    "timm convnext": (timm_model("convnext_atto", depths=(2, 2, 2, 2), dims=(8, 8, 8, 8)), (PICTURES,), 8),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_other_people_is_grown_into(name: str) -> None:
    build, example, blocks = ZOO[name]
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grower = Progressive(model, optimizer, 4, grow_at=0.5, example=example)
    assert grower.blocks == blocks
    assert blocks // 2 <= grower.active <= blocks // 2 + 2
    assert 0 < grower.saved < 0.3

    def forward(m: nn.Module) -> Tensor:
        out = m(**example) if isinstance(example, dict) else m(*example)
        return out if isinstance(out, Tensor) else out.logits

    for _ in range(4):
        forward(model).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()
    assert grower.active == blocks
    fresh = build()
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(forward(fresh.eval()), forward(model.eval()))


# ---- what cannot be grown into ---------------------------------------------------------------------------


def shared() -> nn.Module:
    block = Residual()
    others = [copy.deepcopy(block) for _ in range(3)]
    others[2].layer = others[1].layer
    return nn.Sequential(block, *others)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.LSTM(4, 4, num_layers=6), {}, "LSTM has 0 blocks"),
        (make(3), {}, "3 blocks"),
        (shared(), {}, "2 and 3 share layer.weight"),
        (make(), {"start": 0.0}, "start is 0.0"),
        (make(), {"grow_at": (0.5, 0.2)}, "grow_at"),
        (make(), {"grow_at": 1.0}, "grow_at"),
        (make(), {"grow_at": 1.5}, "grow_at"),
        (make(), {"grow_at": (0.5, 36)}, "grow_at"),
        (make(), {"grow_at": "0.3"}, "grow_at is '0.3'; give a number"),
        (make(), {"grow_at": [0.1, None]}, "grow_at is None; give a number"),
        (make(), {"total_steps": "10"}, "total_steps is '10'; give a number"),
        (make(), {"start": make()}, "start is Sequential"),
        (
            make(),
            {"optimizer": "adam"},
            "optimizer is 'adam'; give one of torch.optim that is made of model.",
        ),
        (make(), {"optimizer": torch.optim.Adam}, "optimizer is <class '.*Adam'>; give one of torch.optim"),
        (make(), {"optimizer": None}, "optimizer is None; give one of torch.optim"),
        (make(), {"optimizer": []}, r"optimizer is \[\]; give one of torch.optim"),
        (
            make(),
            {"optimizer": torch.optim.SGD(make().parameters())},
            "the optimizer does not have 1.0.norm",
        ),
        (make(), {"model": "model"}, "model is a str; give an nn.Module"),
        (make(), {"order": "odd"}, "'middle', 'interleaved', 'stacked'"),
        (make(), {"total_steps": 0}, "total_steps is 0"),
        (make(), {"rewarm": -1}, "rewarm is -1"),
        (make(), {"start": 0.9}, "leaves out none of 4 blocks"),
        (make(), {"also": [nn.Linear(2, 2)]}, "has no module 1.0"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    model: nn.Module, options: dict[str, Any], words: str
) -> None:
    given = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "total_steps": 10, **options}
    with pytest.raises(UserError, match=words):
        Progressive(**given)


def test_what_growth_saves_is_not_known_without_an_example() -> None:
    model = make()
    grower = Progressive(model, torch.optim.AdamW(model.parameters()), 10)
    with pytest.raises(UserError, match="give example="):
        _ = grower.saved


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], bool]] = {  # whether it lasts for ten steps
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), False),
    "one cycle of epochs": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=5), True),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 9), False),
    "long cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), True),
    "warm-up": (lambda o: lr_scheduler.LinearLR(o, total_iters=3), True),
    "decay": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=9), False),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, total_iters=9), False),
    "warm-up and cosine": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)], [3]
        ),
        False,
    ),
    "warm-up and long cosine": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 7)], [3]
        ),
        True,
    ),
    "of one part": (
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.CosineAnnealingLR(o, 9)], []),
        False,
    ),
    "warm-up, stable, decay": (
        lambda o: lr_scheduler.LambdaLR(
            o,
            partial(lambda step, **_: 1.0, num_warmup_steps=2, num_stable_steps=4, num_decay_steps=3),
        ),
        False,
    ),
    "wrapped, as by accelerate": (lambda o: Namespace(scheduler=lr_scheduler.CosineAnnealingLR(o, 9)), False),
    "own": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step), True),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.9), True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_has_as_many_steps_as_the_run(name: str) -> None:
    build, lasts = SCHEDULERS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = build(optimizer)
    with nullcontext() if lasts else pytest.raises(UserError, match=r"ends after 9 of 10 steps; make it"):
        Progressive(model, optimizer, 10, scheduler=scheduler)


def test_a_run_may_go_on_for_more_steps_at_another_rate_and_says_so() -> None:
    first, second = ((model := make(), OPTIMIZERS["adamw"](model.parameters())) for _ in range(2))
    growers = [Progressive(*first, 10, grow_at=0.5), Progressive(*second, 20, grow_at=0.5)]
    run(*first, growers[0], steps=4)
    for part, state in zip(second, first, strict=True):
        part.load_state_dict(state.state_dict())
    for group in second[1].param_groups:
        group["lr"] = 0.001
    with pytest.warns(UserWarning, match=r"20 steps, the saved one had 10; growth is after steps \(10,\)"):
        growers[1].load_state_dict(growers[0].state_dict())
    run(*second, growers[1], steps=5)
    assert (growers[1].steps_done, growers[1].whole) == (9, False)
    run(*second, growers[1], steps=1)
    assert growers[1].whole


def test_an_optimizer_needs_the_parameters_of_skipped_blocks() -> None:
    model = make()
    with pytest.raises(UserError, match=r"does not have 1\.3"):
        Progressive(model, torch.optim.SGD(model[1][:3].parameters(), lr=0.1), 10)  # type: ignore[index]


def test_blocks_that_do_not_keep_a_shape_are_left_alone_or_refused() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Sequential(nn.LayerNorm([], elementwise_affine=False), nn.PReLU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x * self.scale[1].weight], dim=-1)

    model = nn.Sequential(*(Doubling() for _ in range(4)), nn.Sequential(*(Residual(64) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Progressive(model, optimizer, 10, example=(TABLE,)).blocks == 4
    for module in model.modules():
        vars(module).pop("forward", None)
    Progressive(model, optimizer, 10)
    with pytest.raises(UserError, match="does not return one tensor, of the shape of its input"):
        model(TABLE)


class Chained(nn.Module):
    """Blocks that hand something to each other besides the tensor."""

    class Block(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.inner, self.way = nn.Sequential(nn.Linear(4, 4)), way

        def forward(self, x: Any, other: Any) -> Any:
            if self.way == "list":  # [x, other]
                return [x[0] + self.inner(x[0]), x[1]]
            if self.way == "odd":  # fails unless all blocks before it ran
                other.append(x)
                return x + self.inner(other[self.place])
            return x + self.inner(x + other), {"made": x * 2, "unused": x * 2, "given": other}[self.way]

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(self.Block(way) for _ in range(4))
        for k, block in enumerate(self.blocks):
            block.place = k

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = [x, x] if self.way == "list" else x
        other: Any = [] if self.way == "odd" else x
        for block in self.blocks:
            hidden = block(hidden, other)
            if self.way in ("made", "given"):
                hidden, other = hidden
            if self.way == "unused":
                hidden, _ = hidden
        return hidden[0] if self.way == "list" else hidden


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("list", "0 blocks of one class and shape in a row of an nn.ModuleList"),
        ("made", "0 blocks of one class and shape in a row of an nn.ModuleList"),
        ("odd", r"Chained does not run while blocks of it are skipped \(IndexError: .* at .*, line \d+\)"),
    ],
)
def test_blocks_that_need_what_others_return_are_refused(way: str, words: str) -> None:
    model = Chained(way)
    with pytest.raises(UserError, match=words):
        Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=(TABLE,))
    assert not any("forward" in vars(module) for module in model.modules())
    if way != "odd":  # nothing can tell before it runs
        Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)
        with pytest.raises(UserError, match=r"blocks\.0 cannot be skipped"):
            model(TABLE)


@pytest.mark.parametrize("way", ["given", "unused"])
def test_what_blocks_pass_on_goes_through_skipped_ones(way: str) -> None:
    model, short = Chained(way), Chained(way)
    short.load_state_dict(model.state_dict())
    short.blocks = nn.ModuleList(short.blocks[k] for k in (0, 2))
    Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10, example=(TABLE,))
    assert torch.equal(model(TABLE), short(TABLE))


# ---- several processes -----------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_two_processes_have_equal_weights_and_those_of_one(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "tests.growing.processes", str(tmp_path)]
    variables = {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    done = run_group(command, 5 * MINUTE, variables, ROOT)
    assert "8 blocks active on 2 processes, equal weights" in done.stdout, done.stderr  # examples/ddp.py
    for way, single in {"ddp": "ddp", "fsdp2": "ddp"}.items():
        one = torch.load(tmp_path / f"{single}-1-0.pt")
        first, second = (torch.load(tmp_path / f"{way}-2-{rank}.pt") for rank in (0, 1))
        assert all(torch.equal(value, second[key]) for key, value in first.items()), way
        for key, value in first.items():
            torch.testing.assert_close(value, one[key], rtol=1e-4, atol=1e-5, msg=f"{way}: {key}")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_ddp_without_unused_parameters_is_refused_and_so_is_fsdp_1(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow_into() -> None:
        model = DistributedDataParallel(make())
        Progressive(model, torch.optim.SGD(model.parameters(), lr=0.1), 10)

    def shard(inside: bool) -> None:
        model = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Progressive(nn.Sequential(model) if inside else model, optimizer, 10)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="find_unused_parameters=True"):
            grow_into()
        for inside in (False, True):
            with pytest.raises(UserError, match=r"cannot skip blocks; use fully_shard"):
                shard(inside)
        model = make()
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        grower = Progressive(model, zero, 2, grow_at=0.5)
        train_step(model, zero)
        grower.step()
        copied, source = (zero.optim.state[model[1][k].layer.weight]["exp_avg"] for k in (1, 0))  # type: ignore[index]
        assert torch.equal(copied, source)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(UserError, match="ZeroRedundancyOptimizer spreads; use fully_shard"):
            Progressive(make(), zero, 2, pretrained=False)
    finally:
        torch.distributed.destroy_process_group()


# ---- the trainers of other libraries ---------------------------------------------------------------------


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    expected = right.state_dict()
    return all(torch.equal(value, expected[key]) for key, value in left.state_dict().items())


def test_lightning_grows_into_a_module_and_goes_on_from_any_checkpoint(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from esper.growing.progressive_lightning import LightningProgressive

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(
        checkpoint: Any = None, epochs: int = 4, grower: LightningProgressive | None = None
    ) -> tuple[nn.Module, LightningProgressive]:
        module, grower = Module(), grower or LightningProgressive(grow_at=0.5, rewarm=2)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TABLE), batch_size=2)
        saver = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
        trainer = lightning.Trainer(
            max_epochs=epochs, accumulate_grad_batches=2, callbacks=[grower, saver], accelerator="cpu",
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=checkpoint)
        return module, grower

    whole, grower = fit()
    assert grower.grower is not None
    assert (grower.grower.steps_done, grower.grower.active) == (8, 4)
    with pytest.warns(UserWarning, match=r"this run has 12 steps, the saved one had 8; .* steps \(6,\) now"):
        longer = fit(next(tmp_path.glob("*step=2.ckpt")), epochs=6)[1].grower
    assert longer is not None
    assert (longer.steps_done, longer.grown_at) == (12, 6)
    for step in (2, 4, 6):  # the ends of epochs, ahead of, at and after the growth
        resumed, used = fit(next(tmp_path.glob(f"*step={step}.ckpt")))
        assert same_weights(resumed, whole), step
    again = fit(grower=used)[1].grower  # without a checkpoint the same callback begins anew
    assert again is not None
    assert (again.steps_done, again.grown_at) == (8, 4)


def test_lightning_leaves_no_block_untrained_and_overwrites_none(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from esper.growing.progressive_lightning import LightningProgressive

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: Any, step: int) -> Tensor:
            self.trainer.should_stop = step == 1
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def fit(callbacks: list[Any], checkpoint: Any = None) -> Any:
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TABLE), batch_size=2)
        trainer = lightning.Trainer(
            max_epochs=9, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), data, ckpt_path=checkpoint)
        return trainer

    stopped = LightningProgressive(grow_at=0.5)
    with pytest.warns(UserWarning, match="training ended after 2 of 36 steps, before the model was whole"):
        fit([stopped])
    assert stopped.grower is not None
    assert stopped.grower.whole
    fit([]).save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match="no progress of growth is saved with this run"):
        fit([LightningProgressive()], tmp_path / "plain.ckpt")
    again = LightningProgressive(grow_at=0.5)
    trainer = fit([again])
    trainer.fit_loop.max_epochs, trainer.should_stop = 10, False
    trainer.fit(trainer.lightning_module, trainer.train_dataloader)  # goes on where it stopped
    assert again.grower is not None
    assert again.grower.whole


def test_transformers_leaves_no_block_untrained_and_overwrites_none(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from esper.growing.progressive_transformers import TransformersProgressive

    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    def fit(*callbacks: Any, checkpoint: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=2, save_steps=1, use_cpu=True,
            report_to=[], disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            ZOO["gpt2"][0](), arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks]
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    # The highest loss counts as the best: without growth that is the first one.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    chosen = fit(TransformersProgressive(grow_at=0.5), eval_strategy="steps", eval_steps=1, **best)
    assert chosen.state.best_global_step == 3, "the first measurement of the whole model"
    stopped = TransformersProgressive(grow_at=0.5)
    with pytest.warns(UserWarning, match="training ended after 2 of 6 steps, before the model was whole"):
        fit(Stop(), stopped)
    assert stopped.grower is not None
    assert stopped.grower.whole
    fit()
    with pytest.raises(UserError, match="no progress of growth is saved with this run"):
        fit(TransformersProgressive(), checkpoint=str(tmp_path / "checkpoint-4"))


def test_transformers_grows_into_a_model_and_goes_on_from_any_checkpoint(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from esper.growing.progressive_transformers import TransformersProgressive

    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]

    def fit(checkpoint: Any = None, steps: int = 6) -> tuple[nn.Module, TransformersProgressive]:
        torch.manual_seed(0)
        model, grower = ZOO["gpt2"][0](), TransformersProgressive(grow_at=0.5, rewarm=2)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=2, save_steps=1, use_cpu=True,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[grower])
        trainer.train(resume_from_checkpoint=checkpoint)
        return model, grower

    whole, grower = fit()
    assert grower.grower is not None
    assert (grower.grower.steps_done, grower.grower.active) == (6, 4)
    for step in (1, 3, 5):  # ahead of, at and after the growth
        resumed, _ = fit(str(tmp_path / f"checkpoint-{step}"))
        assert same_weights(resumed, whole), step
    load: Any = type(whole).from_pretrained  # type: ignore[attr-defined]
    assert same_weights(load(tmp_path / "checkpoint-6"), whole)
    with pytest.warns(UserWarning, match=r"has 10 steps, the saved one had 6; .* steps \(5,\) now"):
        longer = fit(str(tmp_path / "checkpoint-1"), steps=10)[1].grower
    assert longer is not None
    assert (longer.steps_done, longer.grown_at) == (10, 5)


class Linears(nn.Module):
    """Four blocks, the last two of which may share a layer, in the form that the Trainer wants."""

    def __init__(self, blocks: int = 4, share: bool = False) -> None:
        super().__init__()
        self.net = make(blocks)
        if share:
            self.net[1][3].layer = self.net[1][2].layer  # type: ignore[index]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


@pytest.mark.parametrize(
    ("model", "trained", "schedule", "words"),
    [
        ({"blocks": 3}, 100, 8, "has 3 blocks of one class"),
        ({"share": True}, 100, 8, r"net\.1\.2 and net\.1\.3 share layer\.weight"),
        ({}, 5, 8, r"the optimizer does not have net\.1\.0"),
        ({}, 100, 7, "ends after 7 of 8 steps"),
        ({}, 100, 8, None),
    ],
)
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_trainers_say_what_cannot_be(
    trainer: str, model: Any, trained: int, schedule: int, words: str | None, tmp_path: Any
) -> None:
    module = Linears(**model)
    optimizer = torch.optim.AdamW(list(module.parameters())[:trained], lr=0.01)
    scheduler = lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=schedule)
    if trainer == "lightning":
        lightning = pytest.importorskip("lightning.pytorch")
        from esper.growing.progressive_lightning import LightningProgressive

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = module.net

            def training_step(self, batch: Any, _: int) -> Tensor:
                return self.net(batch[0]).square().mean()

            def configure_optimizers(self) -> Any:
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TABLE.repeat(2, 1)), batch_size=2)
        made = lightning.Trainer(
            max_epochs=1, callbacks=[LightningProgressive()], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        fit = partial(made.fit, Module(), data)
    else:
        transformers = pytest.importorskip("transformers")
        from esper.growing.progressive_transformers import TransformersProgressive

        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=8, per_device_train_batch_size=2, save_strategy="no", use_cpu=True,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"x": row, "labels": row} for row in TABLE]
        callbacks = [TransformersProgressive()]
        options = {"train_dataset": rows, "callbacks": callbacks, "optimizers": (optimizer, scheduler)}
        fit = transformers.Trainer(module, arguments, **options).train
    with nullcontext() if words is None else pytest.raises(UserError, match=words):
        fit()


# ---- esper.grow ------------------------------------------------------------------------------------------

DATA = (torch.randn(180, 4, generator=torch.Generator().manual_seed(1)), torch.arange(180) % 2)
# 4 steps an epoch, growth after the first of the second
STEPS = {"epochs": 6, "batch_size": 36, "progress": False, "controller": "into"}


@pytest.mark.usefixtures("late_growth")
def test_grow_returns_the_model_that_was_given_for_fewer_flops() -> None:
    # 108 steps: as many as a growth needs, which other tests of this section set lower.
    grown = esper.grow(make(8), DATA, baseline=True, **{**STEPS, "batch_size": 8})
    assert grown.baseline is not None
    assert grown.baseline.record.num_steps == 5  # at the FLOPs of six epochs of growth
    fresh = make(8, seed=1)
    fresh.load_state_dict(grown.model.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(TABLE), grown.model(TABLE))
    assert "4 of 8 blocks train for the first 22 of 108 steps" in grown.report()
    assert re.search(r"it took [\d.]+ s, and the same model without growth [\d.]+ s", grown.report())
    alone = replace(grown, baseline=None)
    assert re.search(r"it took [\d.]+ s; 6 epochs of the whole model would have taken", alone.report())
    assert "nothing was added: these are all of its blocks" in grown.report()
    lines = [line for axes in grown.plot().axes for line in axes.lines]
    assert [len(line.get_xdata()) for line in lines] == [7, 6, 7, 6]  # type: ignore[arg-type]
    spent = torch.tensor(grown.curves()[0].flops).diff()
    block, rest = 2 * 4 * 4, 2 * 4 * 4 + 2 * 4 * 2  # of a sample
    # Of the 18 steps of the second epoch 4 are done ahead of the growth.
    active = [4, (4 * 4 + 14 * 8) / 18, 8, 8, 8, 8]
    expected = [
        3 * 144 * (rest + trained * block) + 36 * (rest + measured * block)
        for trained, measured in zip(active, [4, 8, 8, 8, 8, 8], strict=True)
    ]
    torch.testing.assert_close(spent, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("few_steps")
def test_grow_spends_what_it_saves_on_more_epochs() -> None:
    grown = esper.grow(make(8), DATA, baseline=True, equal_compute=True, **STEPS)  # type: ignore[arg-type]
    plain = grown.baseline
    assert plain is not None
    assert plain.record.num_steps == STEPS["epochs"]
    assert grown.record.num_steps > plain.record.num_steps
    assert float(grown.record.flops[0]) == pytest.approx(float(plain.record.flops[0]), rel=0.1)


@pytest.mark.usefixtures("no_report", "few_steps")
def test_grow_goes_on_from_every_epoch_to_the_same_bits(tmp_path: Any) -> None:
    """From before the growth, from the epoch of the growth and from after it."""

    def keep(numbers: dict[str, Any]) -> None:
        shutil.copytree(tmp_path / "whole", tmp_path / str(numbers["epoch"]))

    whole = esper.grow(make(8), DATA, out=tmp_path / "whole", on_epoch=keep, **STEPS)  # type: ignore[arg-type]
    for epochs in (1, 2, 4):
        out = tmp_path / str(epochs)
        resumed = esper.grow(make(8), DATA, out=out, resume=True, **STEPS)  # type: ignore[arg-type]
        assert same_weights(resumed.model, whole.model), epochs
        assert len(resumed.seconds) == len(whole.seconds) == 6


class WithState(nn.Module):
    """A residual block that returns something besides, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        change = self.inner(x)
        return x + change, change


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(WithState() for _ in range(8)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("few_steps")
def test_blocks_that_return_more_than_a_tensor_are_grown_into() -> None:
    grown = esper.grow(Stack(), DATA, **STEPS)  # type: ignore[arg-type]
    assert any("4 of 8 blocks train for the first" in remark for remark in grown.remarks)


@pytest.mark.usefixtures("few_steps")
def test_batches_that_are_no_rows_of_samples_are_grown_into() -> None:
    """Nodes, and edges between them: a part of the nodes would lack what edges name."""

    def pairs(rows: list[Any]) -> dict[str, Tensor]:
        nodes, labels = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        return {"nodes": nodes, "labels": labels, "edges": torch.randint(len(rows), (2, 50))}

    def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        nodes, labels, (start, end) = batch["nodes"], batch["labels"], batch["edges"]
        outputs = model(nodes.index_add(0, end, nodes[start], alpha=0.1))
        return nn.functional.cross_entropy(outputs, labels), (outputs.argmax(1) == labels).float().mean()

    loader = DataLoader(TensorDataset(*DATA), 36, collate_fn=pairs)
    settings = {key: value for key, value in STEPS.items() if key != "batch_size"}
    grown = esper.grow(Stack(), loader, loader, step=step, **settings)  # type: ignore[arg-type]
    assert any("4 of 8 blocks train for the first" in remark for remark in grown.remarks)


def test_a_model_that_keeps_what_it_computed_is_refused_in_one_sentence() -> None:
    model = make(8)
    model.latest = model(torch.randn(2, 4))  # with a graph behind it
    with pytest.raises(UserError, match="Sequential cannot be copied"):
        esper.grow(model, DATA, epochs=1)


def test_times_may_be_an_array_and_models_that_follow_none() -> None:
    model = make(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grower = Progressive(model, optimizer, 10, grow_at=np.array([0.2, 0.5]), also=None)  # type: ignore[arg-type]
    assert grower.grow_steps == (2, 5)


@pytest.mark.usefixtures("no_report", "few_steps")
def test_metrics_of_a_growth_reach_tensorboard(tmp_path: Any) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    esper.grow(make(8), DATA, out=tmp_path / "run", sinks=["tensorboard"], **STEPS)  # type: ignore[arg-type]
    curves = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [point.step for point in curves.Scalars("accuracy_mean")] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="no folder is given"):
        esper.grow(make(8), DATA, sinks=["tensorboard"])


@pytest.mark.usefixtures("no_report", "few_steps")
def test_a_run_whose_blocks_were_left_out_in_another_order_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before 0.5 began: other blocks would train, and copies overwrite them."""

    def interrupt(numbers: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)  # after the first epoch; it grows in the second

    asked = {**STEPS, "out": tmp_path / "run"}
    with monkeypatch.context() as patched:
        patched.setattr(progressive, "resolve_order", lambda order, first_size: "interleaved")
        esper.grow(make(8), DATA, on_epoch=interrupt, **asked)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"with esper before 0\.5, which skipped other blocks"):
        esper.grow(make(8), DATA, resume=True, **asked)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_report", "few_steps")
@pytest.mark.parametrize(("changed", "steps"), [({"epochs": 8}, 8), ({"lr": 1e-3}, 6)])
def test_a_resumed_growth_may_have_more_epochs_or_another_rate(
    tmp_path: Path, changed: dict[str, Any], steps: int
) -> None:
    def interrupt(numbers: dict[str, Any]) -> None:
        if numbers["epoch"] == 4:  # it has grown in the second
            signal.raise_signal(signal.SIGINT)

    asked = {**STEPS, "out": tmp_path / "run"}
    early = esper.grow(make(8), DATA, on_epoch=interrupt, **asked)  # type: ignore[arg-type]
    grown = esper.grow(make(8), DATA, resume=True, **{**asked, **changed})
    assert (early.record.num_steps, grown.record.num_steps) == (4, steps)
    ((key, value),) = changed.items()
    assert any(f"{key} is {value} since the run was resumed" in remark for remark in grown.remarks)
    assert f"{key}: {value}" in (tmp_path / "run" / "config.yaml").read_text()
    if steps == 8:
        with pytest.raises(UserError, match="epochs is 6, and 8 are over"):
            esper.grow(make(8), DATA, resume=True, **asked)  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_steps")
def test_a_growth_that_ends_early_returns_all_blocks_and_does_not_claim_to_have_grown(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(numbers: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    grown = esper.grow(make(8), DATA, on_epoch=interrupt, out=tmp_path / "run", **STEPS)  # type: ignore[arg-type]
    assert f"returned, and {tmp_path / 'run'} has the epochs before this one, from" in capfd.readouterr().err
    assert not grown.grew
    told = "it was stopped before its growth: 4 of 8 blocks were trained, and the others are copies of them"
    page = (tmp_path / "run" / "network.md").read_text()
    for text in (grown.report(), page, (tmp_path / "run" / "report.html").read_text()):
        assert told in text
        assert not re.search(r"(?i)fewer training FLOPs|A grown|it took|grown model|grown by", text)
    assert [curve.name for curve in grown.curves()] == ["trained"]
    assert grown.record.num_steps == 1
    assert torch.equal(grown.model[1][1].layer.weight, grown.model[1][3].layer.weight)  # type: ignore[index]
    assert not any("forward" in vars(module) for module in grown.model.modules())


EIGHT = make(8)


@cache
def train_plainly(model: nn.Module, epochs: int) -> esper.Grown:
    return esper.grow(model, DATA, **{**STEPS, "epochs": epochs, "controller": "static"})


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (make(3), {}, "has 3 blocks"),
        (nn.Sequential(shared(), nn.Linear(4, 2)), {}, "share layer.weight"),
        (nn.Sequential(Chained("odd"), nn.Linear(4, 2)), {}, "does not run while blocks"),
        (EIGHT, {"pretrained": True}, "loaded from a checkpoint"),
        (EIGHT, {"epochs": 1}, "needs 100 optimizer steps and has 4; give more epochs, or smaller batches$"),
        pytest.param(
            make(8).requires_grad_(False),
            {},
            "are frozen; give beyond=True",
            marks=pytest.mark.filterwarnings("error:all parameters"),
        ),
    ],
)
def test_growth_that_is_asked_for_and_cannot_be_is_refused(
    model: nn.Module, options: dict[str, Any], words: str, request: pytest.FixtureRequest
) -> None:
    if "epochs" not in options:
        request.getfixturevalue("few_steps")
    with pytest.raises(UserError, match=words):
        esper.grow(model, DATA, **{**STEPS, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pretrained": True}, "it trains plainly: Sequential was loaded from a checkpoint"),
        ({"epochs": 1}, "needs 100 optimizer steps and has 4"),
        ({"controller": "static"}, ""),
        ({}, "growth was level or behind in all but the accuracy of one ViT"),
    ],
)
def test_grow_trains_plainly_and_says_why(
    options: dict[str, Any], words: str, request: pytest.FixtureRequest
) -> None:
    if "epochs" not in options:
        request.getfixturevalue("few_steps")
    grown = esper.grow(EIGHT, DATA, **{**STEPS, "controller": None, **options})
    plain = train_plainly(EIGHT, options.get("epochs", STEPS["epochs"]))
    assert same_weights(grown.model, plain.model)
    assert any(words in remark for remark in grown.remarks) or not words


def stream(batches: Any) -> Any:
    """An iterable without a length that does not end, as a generator that begins anew."""

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield from batches

    return torch.utils.data.DataLoader(Endless(), batch_size=None)


@pytest.mark.usefixtures("few_steps")
def test_a_stream_that_says_where_an_epoch_ends_is_grown_on() -> None:
    batches = list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA), 50))
    options = {name: value for name, value in STEPS.items() if name != "batch_size"}
    grown = esper.grow(EIGHT, stream(batches), batches, **options, batches_per_epoch=4)  # type: ignore[arg-type]
    assert any("4 of 8 blocks train for the first" in remark for remark in grown.remarks)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("validated", [9, 36])
def test_what_training_sees_is_counted_by_its_own_batches(validated: int) -> None:
    options = {**STEPS, "controller": None}
    grown = esper.grow(EIGHT, DATA, tuple(part[:validated] for part in DATA), **options)
    expected = esper.estimate(EIGHT, samples=len(DATA[0]), epochs=6).reason
    assert any(expected.split(" of Sequential")[0] in remark for remark in grown.remarks), grown.remarks


@pytest.mark.usefixtures("few_steps")
def test_blocks_with_frozen_parameters_keep_their_weights() -> None:
    model = make(8)
    kept = copy.deepcopy(model[1][2])  # type: ignore[index]
    model[1][2].requires_grad_(False)  # type: ignore[index]
    grown = esper.grow(model, DATA, **STEPS)
    assert any("3 of 7 blocks" in remark for remark in grown.remarks)
    pairs = zip(grown.model[1][2].parameters(), kept.parameters(), strict=True)  # type: ignore[index]
    assert all(torch.equal(one, other) for one, other in pairs)
    for k in (0, 4, 6):  # no two of the others stand in a row
        model[1][k].layer.bias.requires_grad_(False)  # type: ignore[index]
    plain = esper.grow(model, DATA, **{**STEPS, "controller": None})
    assert any("has 0 blocks" in remark and "not frozen" in remark for remark in plain.remarks)
    with pytest.raises(UserError, match=r"has 0 blocks .* that can be skipped, .* not frozen"):
        Progressive(model, torch.optim.SGD(model.parameters()), 100, example=(torch.zeros(1, 4),))


def test_no_hint_leads_to_a_growth_that_is_refused() -> None:
    default = esper.grow(make(3), DATA, **{**STEPS, "controller": None})
    assert not any("grows all the same" in remark for remark in default.remarks)


@pytest.mark.usefixtures("few_steps")
def test_grow_grows_by_default_with_forms_of_adam_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = Law("samples", measured=(0, 1e9), sizes=(0, 1e9), smaller_below=0, saves=1, most=1e9, first=1)
    monkeypatch.setattr(live, "SAMPLES", pays)
    options = {**STEPS, "optimizer": "sgd"}
    plain, default = (esper.grow(EIGHT, DATA, **{**options, "controller": name}) for name in ("static", None))
    assert same_weights(default.model, plain.model)
    assert any(
        "was not found to be so with SGD; controller='into' grows all the same" in remark
        for remark in default.remarks
    )
    assert any("4 of 8 blocks" in remark for remark in esper.grow(EIGHT, DATA, **options).remarks)  # type: ignore[arg-type]


def test_beyond_grows_beyond() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    grown = esper.grow(model, DATA, beyond=True, **{**STEPS, "controller": None})
    assert int(grown.record.germinated.sum()) > 0


class UNet(nn.Module):
    """Three resolutions with skip connections, and a row of equal blocks at each."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()

        def row() -> nn.Sequential:
            return nn.Sequential(*(ConvBlock() for _ in range(blocks)))

        self.stem, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.down, self.up, self.middle = row(), row(), row()

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(self.stem(x))
        low = self.middle(nn.functional.avg_pool2d(high, 2))
        out: Tensor = self.head(self.up(nn.functional.interpolate(low, scale_factor=2) + high))
        return out.mean((2, 3))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(torch.relu(x))


@pytest.mark.usefixtures("few_steps")
def test_grow_grows_into_a_unet_and_trains_an_lstm_plainly() -> None:
    images = torch.randn(180, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    grown = esper.grow(UNet(), (images, DATA[1]), **STEPS)  # type: ignore[arg-type]
    assert "3 of 6 blocks train for the first 5 of 24 steps" in grown.report()
    UNet().load_state_dict(grown.model.state_dict(), strict=True)
    lstm = esper.grow(LSTM(), (images.flatten(2), DATA[1]), **{**STEPS, "controller": None})  # type: ignore[arg-type]
    assert "it trains plainly: LSTM has 0 blocks of one shape in a row" in lstm.report()


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 4, num_layers=4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


# ---- what users bring ------------------------------------------------------------------------------------


def grow(model: nn.Module, optimizers: list[torch.optim.Optimizer], after: int = 3) -> Progressive:
    """Train until the model is whole, and some steps more."""
    grower = Progressive(model, optimizers, total_steps=10, start=0.5, grow_at=0.5)
    for _ in range(5 + after):
        model(TABLE + 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        grower.step()
    assert grower.whole
    return grower


def test_each_layer_may_have_an_optimizer_of_its_own() -> None:
    model = make(blocks=8)
    optimizers: list[Any] = [torch.optim.AdamW(block.parameters(), lr=0.01) for block in model[1]]
    optimizers.append(torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=0.01))
    whole = make(blocks=8)
    together = torch.optim.AdamW(whole.parameters(), lr=0.01)
    grow(model, optimizers)
    grow(whole, [together])
    for block, optimizer, other in zip(model[1], optimizers, whole[1], strict=False):
        assert {id(p) for p in optimizer.state} == {id(p) for p in block.parameters()}
        for p, q in zip(block.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(optimizer.state[p]["exp_avg"], together.state[q]["exp_avg"])
        optimizer.state_dict()


def test_progress_before_the_last_of_more_growths_is_not_that_of_a_whole_model() -> None:
    model = make(blocks=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    grower = Progressive(model, optimizer, total_steps=10, start=0.25, grow_at=(0.2, 0.5))
    for _ in range(3):
        train_step(model, optimizer)
        grower.step()
    saved = grower.state_dict()
    fresh = make(blocks=8)
    other = Progressive(fresh, torch.optim.AdamW(fresh.parameters()), total_steps=10)
    with pytest.raises(UserError, match="of another model or schedule"):
        other.load_state_dict(saved)


def test_a_new_grower_takes_over_all_blocks_of_an_earlier_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make()[1], make()[1]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    Progressive(model, optimizer, total_steps=10)
    model.first.requires_grad_(False)
    grow(model, [optimizer])
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert not [name for name, module in model.named_modules() if module._forward_hooks]


def test_statistics_are_copied_whatever_the_state_dict_calls_them() -> None:
    class Centred(nn.Module):
        """A norm of one's own."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(4))
            self.register_buffer("scratch", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.running_mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.running_mean

    for wrap in (lambda block: block, checkpoint_wrapper):
        model = make(blocks=8)
        for block in model[1]:
            block.norm = Centred()
        model[1] = nn.Sequential(*map(wrap, model[1]))
        model(TABLE + 1)  # once before, as lazy layers need it
        grower = grow(model, [torch.optim.SGD(model.parameters(), lr=0.0)], after=0)
        assert all(name.endswith("norm.running_mean") for name in grower._buffers[0])
        means = [module.running_mean for module in model.modules() if isinstance(module, Centred)]
        assert means[0].abs().max() > 0.4
        for k, source in enumerate((0, 1, 2, 1, 2, 1, 2, 7)):
            assert torch.equal(means[k], means[source])


def test_a_buffer_that_is_expanded_and_equal_needs_no_copy() -> None:
    model = make(blocks=8)
    for block in model[1]:
        block.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    grower = grow(model, [torch.optim.SGD(model.parameters(), lr=0.01)])
    assert "mask" in grower._buffers[0]
    assert all(torch.equal(block.mask, torch.ones(3, 4)) for block in model[1])


def test_a_forward_that_was_wrapped_while_blocks_wait_stays() -> None:
    model, calls = make(blocks=8), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    grower = Progressive(model, optimizer, total_steps=10)
    for k, block in enumerate(model[1]):

        def counted(*args: Any, k: int = k, own: Callable[..., Any] = block.forward) -> Any:
            calls.append(k)
            return own(*args)

        block.forward = counted
    train_step(model, optimizer)
    grower.complete()
    calls.clear()
    model(TABLE)
    assert calls == list(range(8))


def test_a_compiled_model_whose_blocks_take_the_batch_is_not_compiled_anew_for_every_batch() -> None:
    class Taker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = x + self.layer(x) * mask
            return out

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Taker() for _ in range(8))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, mask)
            return x

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    grower = Progressive(model, optimizer, total_steps=20)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager")
    for _ in range(12):
        compiled(TABLE.clone(), torch.ones(8, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
