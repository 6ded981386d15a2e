"""The guide to growing beyond a model runs: the Python of docs/grow_your_own.md, on small models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.watch.facts import state
from tests.growing import models

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/grow_your_own.md").read_text(encoding="utf-8"), re.S
)


def block_with(words: str) -> str:
    """The one block that says so."""
    (found,) = [block for block in BLOCKS if words in block]
    return found


def run(code: str, **names: Any) -> dict[str, Any]:
    """Execute a block with few epochs; what it defines."""
    few = re.sub(r"(epochs=|range\()\d+", r"\g<1>3", code)
    everything: dict[str, Any] = {"esper": esper, "F": F, **names}
    exec(compile(few, "grow_your_own.md", "exec"), everything)
    return everything


def table_loaders() -> dict[str, Any]:
    train, val = TensorDataset(*models.table()), TensorDataset(*models.table(30, 1))
    return {"loader": DataLoader(train, 15), "val_loader": DataLoader(val, 15)}


def test_arrays() -> None:
    x, y = torch.randn(60, 16), torch.randint(26, (60,))
    made = run(block_with("grown.history"), x=x, y=y, x_val=x[:30], y_val=y[:30])
    assert not made["grown"].model.training
    run(block_with("save_archive"), grown=made["grown"], x=x)
    assert Path("grown.pt2").exists()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_report")
def test_a_folder_and_a_baseline() -> None:
    names = dict(zip(("x", "y", "x_val", "y_val"), (*models.table(), *models.table(30)), strict=True))
    for code in (block_with("out="), block_with("baseline=")):
        run(code, model=models.small_mlp(), **names)
    assert state(Path("runs/mine")) == "finished"


class Answers(models.TwoInputs):
    """Reads a picture and a question."""

    def forward(self, image: Tensor, question: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image, question)["logits"]


def test_a_step_of_ones_own() -> None:
    batches = [
        {"image": torch.randn(8, 5), "question": torch.randn(8, 3), "answer": torch.randint(3, (8,))}
        for _ in range(3)
    ]
    made = run(block_with("def step"), model=Answers(), loader=batches, val_loader=batches)
    assert made["grown"].model(torch.randn(2, 5), torch.randn(2, 3)).shape == (2, 3)


def test_units_doubled_twice_by_a_schedule() -> None:
    torch.manual_seed(0)
    code = block_with("folds=2").replace("folds=2)", "folds=2, epochs=12)")
    made = run(code, model=models.small_mlp(), **table_loaders())
    assert "wide" in made["grown"].diff()
