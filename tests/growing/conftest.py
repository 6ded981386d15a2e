"""What the tests of growing share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from esper.growing import live
from esper.simic import ending
from esper.simic.bodies import BlockScores


@pytest.fixture
def everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every living seed is kept at the end, so that a tiny run on easy data has something to show."""

    def keep(
        measure: Callable[[Tensor], BlockScores], alive: Tensor, planted: Tensor
    ) -> tuple[Tensor, Tensor]:
        return alive, measure(alive).worth.mean(dim=0)

    monkeypatch.setattr(ending, "decide_seeds", keep)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and archives take longer than the growth."""
    monkeypatch.setattr("esper.growing.folder.save_archive", lambda *_: None)
    monkeypatch.setattr("esper.watch.report.write_report", lambda folder: folder.report_path)


@pytest.fixture
def late_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow late enough that it saves an epoch of six."""
    monkeypatch.setattr(live, "GROW_AT", 0.2)


@pytest.fixture
def few_steps(late_growth: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow into models in fewer steps than are worth it, where the number of steps is not the claim."""
    monkeypatch.setattr(live, "FEWEST_STEPS", 20)
