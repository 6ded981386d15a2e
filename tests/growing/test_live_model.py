"""Blocks and layers of a user's model grow: at alpha 0 outputs stay equal, and folds do not change them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.growing.criterion import Criterion
from esper.growing.live_model import LiveModel
from esper.growing.settings import check_settings
from esper.growing.slots import find_slots
from esper.growing.surgery import widening
from esper.growing.surgery.probe import GrowthProbe
from esper.lifecycle.actions import GROWTH_BLUEPRINTS, Blueprint
from tests.growing import models

CPU = torch.device("cpu")
PICTURES, LABELS = models.images(6)


class Flattened(nn.Module):
    """A convolution whose channels become columns, groups that are normalized, a layer that reads its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.mix = nn.Conv2d(4, 4, 3, padding=1)
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.PReLU())
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + torch.tanh(self.mix(x))
        return self.head(self.deep(x).flatten(1))


class Step(nn.Module):
    """A block with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Blocks(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Step() for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Depthwise(nn.Module):
    """A depthwise convolution, names for the entries of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(1, 6, 1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.project = nn.Conv2d(6, 3, 1)
        self.tail = nn.Sequential()
        self.tail.add_module("first", nn.Conv2d(3, 3, 1))
        self.tail.add_module("second", nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.norm(self.expand(x))))
        return self.tail(self.project(x)).mean((2, 3))


TABLE, TEXT = models.table(6), models.text(6)
ZOO: list[tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = [
    (models.small_cnn, (PICTURES, LABELS)),
    (models.small_mlp, TABLE),
    (models.Residual, (PICTURES, LABELS)),
    (models.UNet, (PICTURES, (PICTURES[:, 0] > 0.5).long())),
    (models.TwoInputs, (TABLE[0], TABLE[0][:, :3], TABLE[1])),
    (models.LanguageModel, TEXT),
    (Flattened, (PICTURES, LABELS)),
    (Blocks, TABLE),
    (Depthwise, (PICTURES, LABELS)),
    (models.GPT, TEXT),
]


def attach(model: nn.Module, batch: Any, slots: list[str] | None = None) -> LiveModel:
    criterion = Criterion(check_settings({}))
    specs = find_slots(model, lambda: criterion(model, batch), slots)
    return LiveModel(model, specs, GrowthProbe(model, criterion, batch))


def in_float64(make: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> tuple[nn.Module, Any]:
    """Return a model in float64 whose norms have seen a batch, and the batch."""
    torch.manual_seed(0)
    model = make().double()
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    model.train()
    model(*batch[:-1])
    return model.eval(), batch


def outputs_of(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        output = model(*batch[:-1])
    found = output["logits"] if isinstance(output, dict) else output
    assert isinstance(found, Tensor)
    return found


def plant_seeds(live: LiveModel, draws: list[tuple[int, int]], strength: float) -> list[int]:
    """Plant seeds wherever they fit, with random weights; return the slots that have one."""
    planted = []
    for number, choice in draws:
        k = number % len(live.slots)
        fits = [b for b in sorted(GROWTH_BLUEPRINTS) if live.can_grow(k, b)]
        if live.slots[k].seed is None and fits:
            live.plant(k, fits[choice % len(fits)], CPU, number)
            live.slots[k].alpha = strength
            seed = live.slots[k].seed
            assert seed is not None
            for parameter in seed.parameters():
                nn.init.normal_(parameter, std=0.5)
            planted.append(k)
    return planted


@given(
    st.integers(0, len(ZOO) - 1),
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([0.3, 1.0]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=15)
def test_seeds_fold_into_plain_layers_that_say_the_same_and_folds_can_be_taken_back(
    which: int, draws: list[tuple[int, int]], strength: float, order: Any
) -> None:
    model, batch = in_float64(*ZOO[which])
    before, names = outputs_of(model, batch), list(model.state_dict())
    live = attach(model, batch)
    planted = plant_seeds(live, draws, 0.0)
    assert torch.equal(outputs_of(model, batch), before)  # at alpha 0, to the bit
    for k in planted:
        live.slots[k].alpha = strength
    grown = outputs_of(model, batch)
    plain = live.plain_model() if strength == 1.0 else None
    torch.testing.assert_close(outputs_of(model, batch), grown, rtol=0, atol=0)
    order.shuffle(planted)
    if strength == 1.0:
        assert plain is not None
        torch.testing.assert_close(outputs_of(plain, batch), grown, rtol=1e-9, atol=1e-9)
        assert not any(type(part).__module__.startswith("esper") for part in plain.modules())
        for k in planted:
            live.fold(k)
            torch.testing.assert_close(outputs_of(model, batch), grown, rtol=1e-9, atol=1e-9)
        live.reset()
    else:
        for k in planted:
            live.clear(k)
    live.detach()
    assert torch.equal(outputs_of(model, batch), before)
    assert list(model.state_dict()) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_fits_where() -> None:
    """Units that attention mixes are not offered, nor those of a recurrent layer."""

    def offers(make: Callable[[], nn.Module], batch: Any) -> dict[str, str]:
        live = attach(make(), batch)
        return {
            name: " ".join(b.name for b in sorted(GROWTH_BLUEPRINTS) if live.can_grow(k, b))
            for k, name in enumerate(live.names)
        }

    every = "CLONE WIDEN_HALF WIDEN_FULL"
    assert offers(models.small_mlp, TABLE) == {"1": "WIDEN_HALF WIDEN_FULL", "3": every}
    assert offers(models.LanguageModel, TEXT) == {"blocks.0": "CLONE", "blocks.1": "CLONE"}
    assert offers(Blocks, TABLE) == {"blocks.0": every, "blocks.1": every}
    assert offers(models.Recurrent, (TEXT[0], TABLE[1])) == {"tokens": "", "lstm": ""}


def test_a_slot_whose_activations_another_one_widens_stays_empty_meanwhile() -> None:
    model, batch = in_float64(models.small_cnn, (PICTURES, LABELS))
    live = attach(model, batch, ["2", "3"])
    live.plant(0, Blueprint.WIDEN_HALF, CPU, 0)
    assert live.is_widened_elsewhere(1)
    live.slots[0].alpha = 1.0
    assert live.fold(0).description == "0 4 → 6 wide"
    assert live.specs[1].shape[0] == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_copy_folds_without_a_change_lists_follow_and_one_step_makes_it_differ(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = Blocks().to(dtype), (TABLE[0].to(dtype), TABLE[1])
    live = attach(model, batch)
    live.plant(0, Blueprint.CLONE, CPU, 0)
    live.slots[0].alpha = 1.0
    before = outputs_of(model, batch)
    live.fold(0)
    assert torch.equal(outputs_of(model, batch), before)
    assert len(model.blocks) == 3
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    rule.step()
    assert not torch.equal(model.blocks[0].inner.weight, model.blocks[1].inner.weight)
    assert [(fold.description, fold.parameters) for fold in live.folds] == [("blocks.0 repeated", 49)]


def test_frozen_and_shared_layers_keep_their_width() -> None:
    frozen = models.small_mlp()
    frozen[0].requires_grad_(False)
    assert not attach(frozen, TABLE).can_grow(0, Blueprint.WIDEN_FULL)
    tied = models.small_mlp()
    tied[2].weight = tied[0].weight = nn.Parameter(torch.randn(6, 6))
    assert not attach(tied, (torch.randn(6, 6), TABLE[1])).can_grow(0, Blueprint.WIDEN_FULL)


@pytest.mark.parametrize("failing", ["before", "in the middle"])
def test_a_fold_that_fails_takes_nothing_back_but_itself(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = in_float64(models.small_mlp, TABLE)
    live = attach(model, batch)
    for k in (0, 1):
        live.plant(k, Blueprint.WIDEN_FULL, CPU, k)
        live.slots[k].alpha = 1.0
        if k == 0:
            live.fold(0)
    before, names = outputs_of(model, batch), [(n, p.shape) for n, p in model.named_parameters()]
    module, name = (LiveModel, "_describe_seed") if failing == "before" else (widening, "_widen_parameter")
    original, calls = getattr(module, name), list[None]()

    def broken(*args: Any) -> Any:
        calls.append(None)
        if failing == "before" or len(calls) > 1:
            raise RuntimeError("a fold that fails")
        return original(*args)

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(RuntimeError, match="a fold that fails"):
        live.plain_model()
    assert len(live.folds) == 1
    assert [(n, p.shape) for n, p in model.named_parameters()] == names
    assert torch.equal(outputs_of(model, batch), before)  # the hooks are attached again


@pytest.mark.parametrize(
    ("make", "added"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)), ("0 to 1 repeated", 30)),
        (lambda: nn.Sequential(models.small_mlp(5), nn.Linear(5, 3)), ("0 repeated", 99 + 2 * 7)),
    ],
)
def test_what_is_repeated_is_named(make: Callable[[], nn.Module], added: tuple[str, int]) -> None:
    model, batch = in_float64(make, TABLE)
    live = attach(model, batch, ["0.4"] if added[0] == "0 repeated" else None)
    live.plant(0, Blueprint.CLONE, CPU, 0)
    live.slots[0].alpha = 1.0
    assert live.describe_growth()[0] == added
    fold = live.fold(0)
    assert (fold.description, fold.parameters) == added


def test_the_parameters_of_neighbours_that_widen_add_up() -> None:
    model, batch = in_float64(models.small_mlp, TABLE)
    live = attach(model, batch)
    for k in (0, 1):
        live.plant(k, Blueprint.WIDEN_FULL, CPU, k)
        live.slots[k].alpha = 1.0
    added = sum(size for _, size in live.describe_growth().values())
    plain = live.plain_model()
    assert sum(p.numel() for p in plain.parameters()) == live.host_parameters + added
    live.fold(1)
    folded = live.folds[0].parameters
    assert folded + sum(size for _, size in live.describe_growth().values()) == added


# ---- trial passes ------------------------------------------------------------------------------------------


def test_trial_passes_run_without_autocast() -> None:
    class Probed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.seen = models.small_mlp(), set[bool]()

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add(torch.is_autocast_enabled("cpu"))
            return self.body(x)

    model = Probed()
    live = attach(model, TABLE)
    with torch.autocast("cpu", torch.bfloat16):
        model.seen = set()
        live.changed = True
        offers = live.options
        live.plant(0, Blueprint.WIDEN_FULL, CPU, 0)
    assert model.seen == {False}
    assert Blueprint.CLONE in offers[1].parameters


def test_a_block_that_is_put_into_its_list_and_never_runs_is_not_offered() -> None:
    """Its outputs say nothing: it begins as the identity."""

    class Fixed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[1](self.blocks[0](x)))

    model = Fixed()
    for block in model.blocks:
        nn.init.zeros_(block.outer.weight)
        nn.init.zeros_(block.outer.bias)
    live = attach(model, TABLE)
    assert not live.can_grow(0, Blueprint.CLONE)
    assert live.refusals(Blueprint.CLONE) == [
        "after blocks.0, its list takes no more entries (the model then leaves one out)"
    ]


def test_what_a_model_raises_in_a_trial_is_the_reason() -> None:
    class Strict(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if not bool((x == TABLE[0][: len(x)]).all()):
                raise ValueError("these are not the inputs I know")
            return super().forward(x)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList([Strict(5, 5)]), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[0](x))

    (reason,) = attach(Two(), TABLE, ["blocks.0"]).refusals(Blueprint.CLONE)
    assert reason == "after blocks.0, it cannot be called on its own output (these are not the inputs I know)"


@pytest.mark.gpu
@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpt_offers_its_blocks_on_a_gpu_whatever_precision_is_set(setting: str, dtype: torch.dtype) -> None:
    device, before = torch.device("cuda"), torch.get_float32_matmul_precision()
    torch.manual_seed(0)
    model = models.GPT(width=256, depth=4, heads=4).to(device, dtype)
    tokens = torch.randint(0, 64, (4, 33), device=device)
    try:
        torch.set_float32_matmul_precision(setting)
        live = attach(model, (tokens[:, :-1], tokens[:, 1:]))
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)
    for k in range(len(live.slots)):
        assert {*live.options[k].parameters} == GROWTH_BLUEPRINTS, live.options[k].refused


def test_the_search_for_slots_keeps_no_activation_alive() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    made: list[weakref.ref[Tensor]] = []
    for layer in model:
        layer.register_forward_hook(lambda _module, _inputs, output: made.append(weakref.ref(output)))
    alive: list[int] = []

    def run() -> None:
        output = model(torch.ones(3, 8))
        alive.append(sum(activation() is not None for activation in made))
        assert output.shape == (3, 2)

    slots = find_slots(model, run)
    assert [slot.shape for slot in slots] == [(8,)] * 4
    assert alive == [1]  # what the model gives
