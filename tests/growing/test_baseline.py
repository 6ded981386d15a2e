"""What a growth is measured against: the same model without growth, at the FLOPs that growth spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import esper
from esper.growing.result import Grown
from esper.runs.run_folder import RunFolder
from tests.growing import models
from tests.growing.models import QUICK

SETTINGS = {"lr": 1e-2, "lifecycle": QUICK, "batch_size": 16, "progress": False}


class Counted(Dataset[tuple[Tensor, Tensor]]):
    """A table that remembers in which order it was read."""

    def __init__(self) -> None:
        self.table, self.order = models.table(48), list[int]()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.order.append(index)
        return self.table[0][index], self.table[1][index]


def grow(model: nn.Module, train: Any, **settings: Any) -> Grown:
    chosen = {"controller": "heuristic", "epochs": 12} | SETTINGS | settings
    return esper.grow(model, train=train, **chosen)


def test_a_baseline_is_the_model_without_growth_at_the_same_flops() -> None:
    torch.manual_seed(0)
    model = models.small_mlp()
    grown = grow(model, models.table(), baseline=True)
    assert grown.baseline is not None
    epochs = grown.baseline.record.num_steps
    assert epochs > grown.record.num_steps, "growth has a price"
    alone = grow(model, models.table(), controller="static", epochs=epochs)
    assert torch.equal(
        torch.as_tensor(alone.record.accuracy), torch.as_tensor(grown.baseline.record.accuracy)
    )
    spent, own = grown.record.flops.mean(), grown.baseline.record.flops.mean()
    assert abs(own - spent) <= 0.5 * own / epochs + 1, "equal to half an epoch"
    assert f"same training FLOPs, in {epochs} epochs; growth against it: " in grown.report()
    above, below = grown.plot().axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["grown", "static"]
    assert below.lines[0].get_xdata()[-1] == grown.record.spent[-1, 0]


def test_a_baseline_reads_the_data_in_the_same_order() -> None:
    data, val = Counted(), models.table(30, seed=1)
    own = torch.Generator().manual_seed(4)
    loader = DataLoader(data, 16, shuffle=True, generator=own)
    grown = grow(models.small_mlp(), loader, val=val, baseline=True)
    assert grown.baseline is not None
    read = data.order[-48 * grown.baseline.record.num_steps :]
    first = data.order[16 : 16 + 48 * 12]  # after the batch that was looked at
    assert read[: 48 * 12] == first


def test_a_folder_holds_the_baseline_and_goes_on_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, out = models.small_mlp(), tmp_path / "run"
    grown = grow(model, models.table(), baseline=True, out=out)
    growth = RunFolder.read(out).growth()
    assert growth is not None
    assert [curve.name for curve in growth.curves] == ["grown", "static"]
    assert growth.verdicts == grown.verdicts()
    assert "static" in (out / "report.html").read_text(encoding="utf-8"), "the page shows both"
    again = grow(model, models.table(), baseline=True, out=out, resume=True)
    assert again.verdicts() == grown.verdicts()
