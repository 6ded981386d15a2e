"""The live engine on other devices and in half precision: the same growth, and a plain model on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import esper
from esper.tamiyo.schedule import Schedule
from tests.growing import models


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("model", "batch", "slots"),
    [
        (models.small_mlp, models.table(8), None),
        (models.Attending, models.text(8), ["attention"]),
    ],
    ids=["units", "heads"],
)
def test_a_model_grows_in_bfloat16_with_added_up_gradients(
    model: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], slots: list[str] | None, device: str
) -> None:
    torch.manual_seed(0)
    grown = esper.grow(
        model(),
        train=[batch] * 4,
        val=[batch],
        slots=slots,
        controller=Schedule([(0.1, "widen_half", "all")]),
        epochs=4,
        folds=1,
        device=device,
        precision="bfloat16",
        accumulate=2,
        progress=False,
    )
    assert grown.folded, grown.report()
    assert {p.device.type for p in grown.model.parameters()} == {"cpu"}
    assert {p.dtype for p in grown.model.parameters()} == {torch.float32}
    outputs = grown.model(batch[0])
    loss = nn.functional.cross_entropy(outputs.movedim(-1, 1) if slots else outputs, batch[1])
    assert loss.item() == pytest.approx(float(grown.record.loss[-1, 0]), rel=0.02)
    assert grown.history[-1].train_loss < grown.history[0].train_loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_after_a_training_that_broke_the_optimizer_goes_on(device: str, fused: bool) -> None:
    """In the third of five epochs the loss is NaN; a fused optimizer counts its steps on the device."""
    trained = 0

    def step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
        nonlocal trained
        trained += model.training
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (torch.nan if model.training and 4 < trained <= 6 else 1), float(-loss.detach())

    batch = models.table(24)
    torch.manual_seed(0)
    grown = esper.grow(
        models.small_mlp(),
        train=[batch] * 2,
        val=[batch],
        step=step,
        controller="static",
        epochs=5,
        lr=1e-2,
        device=device,
        make_optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=fused or None),
        progress=False,
    )
    losses = [epoch.val_loss for epoch in grown.history]
    assert "training broke 1 times" in grown.report()
    assert losses[2] == losses[1]  # what was good before
    assert losses[4] < losses[3] < losses[1] < losses[0]


class Dispatched(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_dispatches_a_few_operations_more_than_a_plain_one_and_reads_nothing_back() -> None:
    batch, layers = models.table(8), [nn.Linear(5, 5) for _ in range(8)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(5, 3))
    settings = {"controller": "static", "epochs": 1, "progress": False}
    recipe = {"optimizer": "sgd", "schedule": "constant", "weight_decay": 0.0}

    def live(steps: int) -> None:
        esper.grow(model, train=[batch] * steps, val=[batch], **settings, **recipe)

    def plain(steps: int) -> None:
        rule = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for _ in range(steps):
            rule.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            rule.step()

    of_a_step = []
    for train in (live, plain):
        counts = []
        for steps in (3, 7):
            with Dispatched() as seen:
                train(steps)
            counts.append(seen.counts)
        of_a_step.append(counts[1] - counts[0])  # of four steps
    more = of_a_step[0] - of_a_step[1]
    assert sum(of_a_step[1].values()) > 4 * 60
    assert sum(more.values()) <= 4 * 25, more
    assert of_a_step[0]["aten._local_scalar_dense.default"] <= 4  # the rate, which is on the CPU


@pytest.mark.gpu
def test_what_a_large_model_on_a_gpu_could_go_back_to_is_kept_in_main_memory() -> None:
    seen: list[int] = []
    wide = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4))
    batch = (torch.randn(64, 16), torch.randint(0, 4, (64,)))
    settings = {"controller": "static", "device": "cuda", "progress": False}
    nn.Linear(16, 16, device="cuda")(torch.ones(4, 16, device="cuda")).sum().backward()
    others = torch.cuda.memory_allocated()  # among them what products work in, both ways
    torch.cuda.reset_peak_memory_stats()  # what else this process once took is there for snapshots too
    esper.grow(
        wide,
        train=[batch] * 2,
        val=[batch],
        epochs=3,
        on_epoch=lambda numbers: seen.append(torch.cuda.memory_allocated()),
        **settings,
    )
    trained = 4 * sum(p.numel() * p.element_size() for p in wide.parameters())  # gradients and two moments
    assert max(seen) - others < 1.1 * trained
